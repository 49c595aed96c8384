"""What a pipelined step compiles to: the ticks of its table, its collectives as literals, one size for every m."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.hlo.found import Collective, collectives, split_scalars
from jaxshard.schedules.buffers import plan_buffers
from tests.engines.pipeline.pipes import FEATURES, WIDTH, Ring, residual_block, ring, small_gpt, stack_toy
from tests.engines.programs import Program
from tests.toys import Toy, quick_compile

pytestmark = pytest.mark.fast_cases(1)

SIZES = {"zero_bubble": Ring(4, 1), "interleaved": Ring(4, 2)}
MICROBATCHES, DEPTH = 8, 12
TX = optax.sgd(0.1)


@cache
def lowered(schedule: str) -> tuple[js.Layout, Any]:
    """12 blocks on four devices, the 96 rows of a batch in 8 micro-batches of 12."""
    toy = stack_toy(residual_block, DEPTH)
    layout = SIZES[schedule].layout(toy, TX)
    engine = js.pipelined(microbatches=MICROBATCHES, schedule=schedule)
    return layout, js.make_step(toy.loss_fn, TX, layout, engine=engine).lower(toy.batch)


@cache
def program(schedule: str) -> Program:
    layout, step = lowered(schedule)
    with quick_compile():
        return Program(layout, step.compile())


def table(schedule: str) -> js.schedules.Schedule:
    return js.schedules.named(schedule, SIZES[schedule].devices, MICROBATCHES, chunks=SIZES[schedule].chunks)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ticks", "each"), [("zero_bubble", 17, 3), ("interleaved", 29, 2)])
def test_the_outer_loop_has_the_ticks_of_the_table_and_the_others_the_blocks_of_a_stage(schedule, ticks, each):
    counts = Counter(re.findall(r'known_trip_count":\{"n":"(\d+)"', program(schedule).compiled.as_text()))
    assert table(schedule).ticks == ticks
    assert counts == {str(ticks): 1, str(each): 3 if schedule == "zero_bubble" else 2}


# Collectives.

ACTIVATION = 4 * 12 * WIDTH  # bytes of a micro-batch's
REST = 4 * (FEATURES * WIDTH + WIDTH + WIDTH * FEATURES)  # of the gradients of embedding and head


def over_pipe(found: tuple[Collective, ...]) -> Counter:
    """How many times a program does (kind, bytes, whether in a branch): what is in a branch once, for it is rare."""
    assert {one.axes for one in found} <= {("pipe",)}
    counts: Counter = Counter()
    for one in found:
        counts[one.kind, sum(one.sizes), one.conditional] += 1 if one.conditional else one.count
    return counts


@pytest.mark.parametrize(("schedule", "ticks"), [("zero_bubble", 17), ("interleaved", 29)])
def test_two_shifts_per_tick_and_one_sum_of_what_is_outside_the_blocks(schedule, ticks):
    """And per run of micro-batches, in branches, three permutes each: inputs to device 0, outputs from 3, both back."""
    compiled = program(schedule)
    arrays, scalars = split_scalars(collectives(compiled.compiled, compiled.mesh))
    assert over_pipe(arrays) == {
        ("collective-permute", ACTIVATION, False): 2 * ticks,
        ("collective-permute", ACTIVATION, True): 4 * 3,
        ("all-reduce", REST, False): 1,
    }
    shifts = {one.groups for one in arrays if one.kind == "collective-permute" and not one.conditional}
    assert shifts == {((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 3), (1, 0), (2, 1), (3, 2))}
    # The loss, and a sum of squares for each of two gradients of blocks; then what the update spoiled of those two.
    assert over_pipe(scalars) == {("all-reduce", 12, False): 1, ("all-reduce", 8, False): 1}


# What runs.


class Calls:
    """Blocks that count: F how often one runs forward, B and W how often the gradients of its input and weight run."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def block(self, params: Any, x: jax.Array, key: Any) -> jax.Array:
        hidden = self.forward(self.backward("B", x)) @ self.backward("W", params["w"])
        return x + jnp.tanh(hidden + params["b"])

    def forward(self, x: jax.Array) -> jax.Array:
        counted = jax.custom_vjp(lambda x: self.call("F", x))
        counted.defvjp(lambda x: (self.call("F", x), None), lambda _, dx: (dx,))
        return counted(x)

    def backward(self, kind: str, x: jax.Array) -> jax.Array:
        counted = jax.custom_vjp(lambda x: x)
        counted.defvjp(lambda x: (x, None), lambda _, dx: (self.call(kind, dx),))
        return counted(x)

    def call(self, kind: str, x: jax.Array) -> jax.Array:
        def count(x: jax.Array) -> np.ndarray:
            self.counts[kind] += 1
            return np.asarray(x)

        return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "p", "v", "m", "stash", "forwards"),
    [
        ("zero_bubble", 2, 2, 4, "layer", 2),
        ("zero_bubble", 4, 1, 6, "everything", 1),
        ("interleaved", 2, 2, 4, "everything", 1),
        ("gpipe", 2, 1, 4, "stage", 2),
    ],
)
def test_blocks_run_as_often_as_the_table_says(schedule, p, v, m, stash, forwards):
    """On every device in every tick in which one has the operation, idle ones included; nothing is kept or done twice.

    Nine blocks are ceil(9 / (p v)) per stage. Where not everything is stashed, a backward runs its forward again.
    """
    calls = Calls()
    toy = stack_toy(calls.block, 9)
    Ring(p, v).run(toy, js.pipelined(microbatches=m, schedule=schedule, stash=stash), steps=1)
    made = js.schedules.named(schedule, p, m, chunks=v)
    each = p * -(-9 // (p * v))
    ticks = {kind: len({op.tick for op in made.ops if op.kind == kind}) for kind in "FBW"}
    again = ticks["B"] * (forwards - 1)
    late = ticks["W"] if made.splits_backward else ticks["B"]
    assert calls.counts == {"F": each * (ticks["F"] + again), "B": each * ticks["B"], "W": each * late}


# Sizes.


def text_of(toy: Toy, schedule: str, microbatches: int) -> str:
    pipe = SIZES[schedule]
    engine = js.pipelined(microbatches=microbatches, schedule=schedule)
    return js.make_step(toy.loss_fn, TX, pipe.layout(toy), engine=engine).lower(toy.batch).as_text()


@pytest.mark.slow  # `test_the_outer_loop_has_the_ticks_of_the_table_and_the_others_the_blocks_of_a_stage` is fast
@pytest.mark.parametrize(
    ("schedule", "make", "growth"),
    [
        ("zero_bubble", partial(stack_toy, residual_block, 8), 1.15),
        ("zero_bubble", partial(small_gpt, 8), 1.05),
        ("interleaved", partial(small_gpt, 8), 1.05),
    ],
    ids=["zero_bubble", "zero_bubble transformer", "interleaved transformer"],
)
def test_the_program_is_as_long_for_64_micro_batches_as_for_8(schedule, make, growth):
    """As many lines; characters within 5 % for a transformer, for the table's numbers alone become more."""
    short, long = (text_of(make(rows=2 * m), schedule, m) for m in (8, 64))
    assert short.count("\n") == long.count("\n")
    assert len(short) < len(long) <= growth * len(short)


def temporaries(toy: Toy, microbatches: int, stash: str) -> int:
    layout = js.layout(js.pipeline(chunks=2), ring(4), toy.init_fn, TX)
    engine = js.pipelined(microbatches=microbatches, schedule="interleaved", stash=stash)
    compiled = js.make_step(toy.loss_fn, TX, layout, engine=engine).compile(toy.batch)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_temporaries_of_a_transformer_do_not_grow_with_micro_batches():
    """And are less where each block's input is kept than where everything is."""
    at = {
        (m, stash): temporaries(small_gpt(16, rows=4 * m, width=64), m, stash)
        for m, stash in [(8, "layer"), (32, "layer"), (8, "everything")]
    }
    assert at[32, "layer"] <= 1.05 * at[8, "layer"]
    assert at[8, "layer"] < 0.5 * at[8, "everything"]


# Buffers.


def buffer_types(layout: js.Layout, engine: Any, activation: tuple[int, ...], blocks: int) -> set[str]:
    """The types, as a lowered program writes them, of buffers of activations and of stacks of a chunk's."""
    sizes = plan_buffers(engine.table(layout)).sizes
    shapes = [(slots, *stack, *activation) for slots in sizes.values() for stack in [(), (blocks,)]]
    return {f"tensor<{'x'.join(map(str, shape))}xf32>" for shape in shapes}


@pytest.mark.parametrize("schedule", SIZES)
def test_conditionals_return_values_and_no_buffers(schedule):
    """A compiler copies a buffer whole, twice on TPU, where a branch writes a slot of it and the other returns it."""
    layout, step = lowered(schedule)
    text, engine = step.as_text(), js.pipelined(microbatches=MICROBATCHES, schedule=schedule)
    blocks = -(-DEPTH // (4 * SIZES[schedule].chunks))  # of a chunk, padding included
    buffers = buffer_types(layout, engine, (12, WIDTH), blocks)
    assert sum(buffer in text for buffer in buffers) >= 2  # they are called so
    returned = re.findall(r"\}\) : \(tensor<i32>\) -> (.*)", text)
    assert len(returned) >= 5  # embed, F, head, B, embed_grad
    assert not [types for types in returned for buffer in buffers if buffer in types]
