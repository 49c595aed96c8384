"""A pipelined run equals one device: f32 losses within 1e-6 relative, gradients within 1e-5 (`tree_error`)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxshard as js
from tests.engines.pipeline.pipes import Ring, cast_weights, dropping_block, reference, small_gpt, stack_toy
from tests.schedules.test_buffers import delayed
from tests.toys import assert_equal_runs, loss_error, one_device, quick_compile, sharded, tree_error

STASHES = {
    "layer": "layer",
    "stage": "stage",
    "everything": "everything",
    "dots": "dots",
    "function": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Cell(NamedTuple):
    """A pipeline, and the number of its micro-batches; of 96 rows, two steps with dropout."""

    schedule: str
    devices: int
    chunks: int
    microbatches: int
    stash: str
    depth: int
    tied: bool

    def check(self) -> None:
        """In the slow tier, too, without optimizations of the code: there are many."""
        engine = js.pipelined(microbatches=self.microbatches, schedule=self.schedule, stash=STASHES[self.stash])
        options = {"block": dropping_block, "depth": self.depth} | ({"tied": True} if self.tied else {})
        with quick_compile():
            trace, layout = Ring(self.devices, self.chunks).run(stack_toy(**options), engine)
        assert_equal_runs(trace, reference(stack_toy, **options))
        # A block is on one device, and nowhere else.
        for placement in jax.tree.leaves(layout.params["blocks"]):
            assert placement.store[1] == "pipe"


def product():
    """9 blocks are padded, to stages without any block even; micro-batches may be fewer than devices in gpipe."""
    yield Cell("zero_bubble", 4, 2, 6, "layer", 9, False)
    yield Cell("gpipe", 4, 1, 3, "layer", 8, True)
    numbers = itertools.count()
    for p, (schedule, v) in itertools.product((2, 4, 8), [(s, v) for s in CHUNKS for v in CHUNKS[s]]):
        for m in (p, 2 * p, 4 * p, {2: 3, 4: 6, 8: 12}[p]):
            number = next(numbers)
            depth = p * v if number % 2 else p * v + 1 + number % 5
            yield Cell(schedule, p, v, m, list(STASHES)[number % len(STASHES)], depth, number % 3 == 0)


CHUNKS = {"gpipe": (1,), "one_f_one_b": (1,), "interleaved": (1, 2, 4), "zero_bubble": (1, 2, 4)}


@pytest.mark.slow  # `test_stages_split_over_data_equal_one_device` has a fast one
@pytest.mark.parametrize("cell", list(product()), ids=lambda cell: "-".join(map(str, cell)))
def test_every_schedule_equals_one_device(cell):
    cell.check()


@pytest.mark.slow
def test_dropout_does_something():
    dropped, whole = reference(stack_toy, block=dropping_block, depth=9), reference(stack_toy, depth=9)
    assert loss_error(dropped, whole) > 1e-3


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(schedule=delayed())
def test_any_table_that_can_run_equals_one_device(schedule):
    """Tables that nobody would write, of one device even; four rows per micro-batch."""
    rows, depth = 4 * schedule.microbatches, schedule.stages * schedule.chunks + schedule.microbatches % 2
    options = {"block": dropping_block, "depth": depth, "rows": rows}
    engine = js.pipelined(microbatches=schedule.microbatches, schedule=schedule)
    with quick_compile():
        trace, _ = Ring(schedule.stages, schedule.chunks).run(stack_toy(**options), engine)
        assert_equal_runs(trace, reference(stack_toy, **options))


# Beside other axes.

DATA = {"zero2": js.zero2(min_size=0), "zero1": js.zero1(min_size=0), "fsdp": js.fsdp(min_size=0)}


def composed(axes: dict[str, int], data: str | None, chunks: int) -> js.Strategy:
    parts = [js.pipeline(chunks=chunks)]
    parts += [js.tensor()] if "tensor" in axes else []
    return js.compose(*parts, *([DATA[data]] if data else []))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("scatter", ["end", "each"])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_stages_split_over_data_equal_one_device(data, scatter, schedule):
    """pipe=4, data=2: 9 blocks in 8 stages of 2, each array padded from 7 to 8."""
    axes = {"pipe": 4, "data": 2}
    engine = js.pipelined(microbatches=6, schedule=schedule, scatter=scatter)
    toy = stack_toy(dropping_block, 9)
    trace, layout = sharded(toy, composed(axes, data, 2), js.make_mesh(**axes), engine, steps=2)
    assert_equal_runs(trace, reference(stack_toy, block=dropping_block, depth=9))
    assert layout.sharded_fraction("opt") > 0.99


MESHES = {"pipe=2,data=2,tensor=2": {"pipe": 2, "data": 2, "tensor": 2}, "pipe=4,tensor=2": {"pipe": 4, "tensor": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "data", "scatter"),
    [("pipe=4,tensor=2", None, "end"), *itertools.product(["pipe=2,data=2,tensor=2"], DATA, ("end", "each"))],
)
@pytest.mark.parametrize(
    ("schedule", "stash", "tied"), [("interleaved", "dots", False), ("zero_bubble", "layer", True)]
)
def test_stages_split_over_tensor_equal_one_device(mesh, data, scatter, schedule, stash, tied):
    axes = MESHES[mesh]
    toy = small_gpt(5, dropout=0.1, tied=tied)
    engine = js.pipelined(microbatches=4, schedule=schedule, scatter=scatter, stash=stash)
    trace, _ = sharded(toy, composed(axes, data, 4 // axes["pipe"]), js.make_mesh(**axes), engine, steps=2)
    assert_equal_runs(trace, reference(small_gpt, 5, dropout=0.1, tied=tied))


# Lower precision.


@pytest.mark.slow  # tests/engines/test_parity.py has the fast ones
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_bf16_compute_is_as_near_to_f32_as_bf16_on_one_device(schedule):
    """Losses within 1e-3 of bf16 on one device; the gradient's error against f32 at most 1.5 times that of one device.

    Losses of micro-batches round otherwise than those of all rows, so the two gradients are not equal to each other.
    """
    toy, full = small_gpt(5), reference(small_gpt, 5)
    engine = js.pipelined(microbatches=4, schedule=schedule, compute_dtype=jnp.bfloat16)
    trace, _ = Ring(2, 2).run(toy, engine)
    control = one_device(cast_weights(toy), steps=2)
    assert loss_error(trace, control) < 1e-3
    assert 1e-4 < tree_error(trace.grads[0], full.grads[0]) <= 1.5 * tree_error(control.grads[0], full.grads[0])
    assert all(x.dtype == np.float32 for x in jax.tree.leaves((trace.params, trace.grads)))
