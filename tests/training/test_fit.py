"""The training loop, with a step of two lines, so that what is seen is the loop itself."""

import contextlib
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.training.goodput import Ledger
from jaxshard.training.records import Reader


def new_run(step=0):
    return js.TrainState(jnp.int32(step), {"w": jnp.float32(0)}, (), (), jax.random.key(0))


def step(run, batch):
    """Adds the batch's mean; the loss is the number of the step."""
    params = {"w": run.params["w"] + batch["x"].mean()}
    run = run._replace(step=run.step + 1, params=params)
    return run, {"loss": run.step.astype(jnp.float32), "grad_norm": jnp.float32(0.5)}


def ones(count=None):
    batch = {"x": np.ones((4, 2), np.float32), "scale": np.float32(1)}
    return itertools.repeat(batch) if count is None else itertools.repeat(batch, count)


class KeepsBest:
    """A callback that waits for evaluations, as js.Checkpointer(best="loss") does."""

    best = "loss"

    def __call__(self, number, run):
        pass

    def evaluated(self, number, run, evaluation):
        pass


def evaluations(losses):
    """An `evaluate` that returns these losses one after the other."""
    losses = iter(losses)
    return lambda run: {"loss": next(losses)}


def test_takes_steps_up_to_the_total_and_reports_each():
    history = []
    run = js.fit(new_run(), step, ones(), steps=5, callbacks=[history.append])
    assert int(run.step) == 5 and float(run.params["w"]) == 5
    assert [record.step for record in history] == [1, 2, 3, 4, 5]
    assert [record.metrics for record in history] == [{"loss": float(i), "grad_norm": 0.5} for i in range(1, 6)]
    assert all(record.evaluation is None and record.seconds > 0 for record in history)


def test_steps_are_the_total_of_the_run_and_no_batch_is_drawn_in_vain():
    batches = ones(10)
    run = js.fit(new_run(step=3), step, batches, steps=5)
    assert int(run.step) == 5 and len(list(batches)) == 8
    assert js.fit(run, step, iter(()), steps=5) is run
    assert js.fit(run, step, iter(()), steps=2) is run


def test_rates_count_rows_or_tokens_and_flops():
    history = []
    js.fit(new_run(), step, ones(), steps=2, callbacks=[history.append])
    js.fit(new_run(), step, ones(), steps=2, callbacks=[history.append], tokens=64, flops=3e9)
    rows, tokens = history[1], history[3]
    expected = {"rows_per_second": 4 / rows.seconds}
    assert 0 < rows.speed.pop("goodput") < 1 and rows.speed == expected
    # The chip behind a CPU device is not known, so there is no utilisation, and it does not tell its memory.
    assert 0 < tokens.speed.pop("goodput") < 1
    assert tokens.speed == {
        "tokens_per_second": 64 / tokens.seconds,
        "rows_per_second": 4 / tokens.seconds,
        "flops_per_second": 3e9 / tokens.seconds,
    }


def test_evaluates_every_so_often_and_at_the_end():
    seen, history = [], []

    def evaluate(run):
        seen.append(int(run.step))
        return {"loss": 1.0, "accuracy": float(run.params["w"])}

    js.fit(new_run(), step, ones(), steps=7, evaluate=evaluate, eval_every=3, callbacks=[history.append])
    assert seen == [3, 6, 7]
    found = {record.step: record.evaluation for record in history if record.evaluation}
    assert found == {number: {"loss": 1.0, "accuracy": float(number)} for number in (3, 6, 7)}
    js.fit(new_run(), step, ones(), steps=7, evaluate=evaluate)
    assert seen == [3, 6, 7, 7]


def test_stops_early_when_the_loss_is_stuck():
    """`tests/training/test_early_stopping.py` has when."""
    history = []
    run = js.fit(
        new_run(), step, ones(), steps=5, callbacks=[history.append],
        evaluate=evaluations([5, math.nan, 4, 4, 1]), eval_every=1, patience=1,
    )  # fmt: skip
    assert int(run.step) == 2 == len(history)


def test_on_run_sees_every_run_before_the_next_step_takes_it():
    seen = []
    js.fit(new_run(), step, ones(), steps=3, on_run=[lambda number, run: seen.append((number, int(run.step)))])
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_on_run_ends_the_training_after_a_common_step():
    history, batches = [], ones(10)
    run = js.fit(
        new_run(), step, batches, steps=7, evaluate=evaluations([1.0]), eval_every=4,
        callbacks=[history.append], on_run=[lambda number, run: number == 2, lambda number, run: "no bool"],
    )  # fmt: skip
    assert int(run.step) == 2 and [record.step for record in history] == [1, 2] and len(list(batches)) == 8


def test_a_callback_that_watches_steps_pauses_for_what_is_none():
    class Watch:
        def __init__(self):
            self.now, self.seen = "step", []

        def __call__(self, number, run):
            self.seen.append(self.now)

        @contextlib.contextmanager
        def paused(self):
            self.now = "paused"
            yield
            self.now = "step"

    watch = Watch()

    def watched(run, batch):
        watch.seen.append(watch.now)
        return step(run, batch)

    def evaluate(run):
        watch.seen.append(watch.now)
        return {"loss": 1.0}

    js.fit(new_run(), watched, ones(), steps=2, evaluate=evaluate, eval_every=1, on_run=[watch])
    assert watch.seen == ["step", "paused", "paused"] * 2


def test_batches_that_end_too_soon():
    history = []
    with pytest.raises(ValueError, match=r"no batch for step 1 of 5.*used up"):
        js.fit(new_run(), step, iter(()), steps=5)
    with pytest.warns(UserWarning, match=r"ended after step 3 of 5; repeat"):
        run = js.fit(new_run(), step, ones(3), steps=5, callbacks=[history.append])
    assert int(run.step) == 3 == len(history)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eval_every": 3}, "eval_every=3 needs evaluate="),
        ({"patience": 3}, "patience=3 needs evaluate="),
        ({"patience": 3, "evaluate": evaluations([1.0])}, "needs eval_every="),
        ({"stop": js.EarlyStopping(3)}, "judge evaluations; give evaluate=, too"),
        ({"stop": js.EarlyStopping(max_worse=1.0)}, "judge evaluations; give evaluate=, too"),
        ({"on_run": [KeepsBest()]}, "KeepsBest keeps the run with the best 'loss' of the evaluations; give evaluate="),
        (
            {"patience": 3, "eval_every": 1, "evaluate": evaluations([1.0]), "stop": js.EarlyStopping(3)},
            r"patience=3 beside stop=; write stop=js.EarlyStopping\(3, ...\) alone",
        ),
        ({"eval_every": 0, "evaluate": evaluations([1.0])}, "eval_every must be at least 1, got 0"),
        ({"patience": 0, "eval_every": 1, "evaluate": evaluations([1.0])}, "patience must be at least 1, got 0"),
        (
            {"patience": 1, "eval_every": 1, "evaluate": lambda run: {"accuracy": 1.0}},
            r"'loss' among the metrics, got \['accuracy'\]",
        ),
    ],
)
def test_evaluation_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        js.fit(new_run(), step, ones(), steps=2, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"evaluate": {"loss": 1.0}}, r"evaluate must be a function run -> \{name: number\}, got dict"),
        ({"stop": 3}, r"stop must be a function metrics -> bool, such as js.EarlyStopping\(3\), got int"),
    ],
)
def test_values_in_place_of_functions_are_refused_before_a_step(options, message):
    with pytest.raises(TypeError, match=message):
        js.fit(new_run(), step, ones(), steps=2, **options)


def test_a_profile_is_written_even_of_a_short_run(tmp_path):
    js.fit(new_run(), step, ones(), steps=2, profile=tmp_path)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_accelerators_are_read_one_step_late_and_tell_utilisation_and_memory():
    chip = SimpleNamespace(
        platform="tpu", device_kind="TPU v5 lite", num_cores=1, process_index=0,
        memory_stats=lambda: {"bytes_in_use": 1, "peak_bytes_in_use": 3},
    )  # fmt: skip
    reader = Reader([chip] * 4, Ledger(0), tokens=10)
    reader.flops = 1e12
    read = []
    for number in range(1, 4):
        reader.add(number, {"loss": jnp.float32(number)}, 4)
        read.append([record.step for record in reader.read(all=False)])
    last = reader.read(all=True)
    assert read == [[], [1], [2]] and [record.step for record in last] == [3]
    assert last[0].speed["mfu"] == pytest.approx(1e12 / last[0].seconds / (4 * 197e12))
    assert last[0].speed["memory_bytes"] == 3
