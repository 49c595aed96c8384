"""What every writer has in common: the numbers of a record by name, and the end of `fit`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.training import metrics
from tests.training.metrics.records import RECORDS

BATCHES = itertools.repeat({"x": np.ones((4, 2), np.float32)})


class Remembers:
    """A writer that remembers the steps it was given, and how the training ended."""

    def __init__(self, problem=None):
        self.steps, self.ends, self.problem = [], [], problem

    def __call__(self, record):
        self.steps.append(record.step)
        if self.problem is not None:
            raise self.problem

    def finish(self, error):
        self.ends.append(error)


class Breaks(Remembers):
    def finish(self, error):
        raise OSError("the disk is full")


def new_run():
    return js.TrainState(jnp.int32(0), {"w": jnp.float32(0)}, (), (), jax.random.key(0))


def step(run, batch):
    run = run._replace(step=run.step + 1)
    return run, {"loss": run.step.astype(jnp.float32)}


def test_flat_puts_all_numbers_side_by_side():
    assert metrics.flat(RECORDS[1])["eval/loss"] == 2.5
    assert metrics.flat(RECORDS[0]) == {
        "step": 1, "seconds": 0.5, "loss": 5.371376037597656, "grad_norm": 1.5, "tokens_per_second": 4096.0,
    }  # fmt: skip


def test_fit_tells_writers_its_end_and_asks_nothing_of_plain_functions():
    writer, records = Remembers(), []
    js.fit(new_run(), step, BATCHES, steps=2, callbacks=[writer, records.append])
    assert writer.steps == [1, 2] and writer.ends == [None] and len(records) == 2


@pytest.mark.parametrize("error", [RuntimeError("of the user's code"), KeyboardInterrupt()])
def test_fit_tells_writers_by_which_error_it_ends(error):
    first, second = Remembers(), Remembers(error)
    with pytest.raises(type(error)):
        js.fit(new_run(), step, BATCHES, steps=2, callbacks=[first, second])
    assert first.ends == second.ends == [error]


def test_a_writer_that_fails_to_close_hides_no_other_error():
    with pytest.raises(RuntimeError, match="first") as caught:
        js.fit(new_run(), step, BATCHES, steps=2, callbacks=[Breaks(), Remembers(RuntimeError("first"))])
    assert caught.value.__notes__ == ["a callback could not be closed either: the disk is full"]
    with pytest.raises(OSError, match="the disk is full"):
        js.fit(new_run(), step, BATCHES, steps=2, callbacks=[Breaks()])
