"""Sums in one order: the same bits however many processes the devices are spread over, and the collectives of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core.ordered_sums import all_sum, pairwise_sum
from tests.distributed.launched import printed_together
from tests.engines.programs import setups
from tests.toys import TOYS, assert_equal_runs, gpt_toy, nnx_toy, one_device, quick_compile, recording_step, trained

pytestmark = pytest.mark.fast_cases(3)

ORDERED = js.explicit(reduction="ordered")


# The sums themselves.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_pairs_are_added_in_the_order_that_is_documented(count):
    rng = np.random.default_rng(count)
    parts = list((rng.normal(size=(count, 5)) * 10.0 ** rng.integers(-6, 6, (count, 5))).astype(np.float32))
    expected = list(parts)
    while len(expected) > 1:
        half = len(expected) // 2
        expected = [a + b for a, b in zip(expected[:half], expected[half : 2 * half])] + expected[2 * half :]
    np.testing.assert_array_equal(jax.jit(pairwise_sum)(jnp.stack(parts)), expected[0])


def test_narrow_numbers_are_added_in_f32():
    parts = jnp.concatenate([jnp.full((1,), 256, jnp.bfloat16), jnp.ones((7,), jnp.bfloat16)])
    assert float(pairwise_sum(parts)) == 264  # 256 + 1 is 256 in bf16
    assert pairwise_sum(parts).dtype == jnp.bfloat16


def on_devices(fn, x, out, **axes):
    """What `fn` makes on each device of its own part of x, [devices, ...]."""
    mesh = js.make_mesh(**axes)
    body = jax.shard_map(lambda x: fn(x[0]), mesh=mesh, in_specs=P(tuple(axes)), out_specs=out, check_vma=False)
    return np.asarray(jax.jit(body)(x))


@pytest.mark.parametrize(("shape", "dtype"), [((5, 7), np.float32), ((), np.int32)])
def test_all_sum_is_the_pairwise_sum_everywhere(shape, dtype):
    x = (np.random.default_rng(0).normal(size=(8, *shape)) * 100).astype(dtype)
    expected = pairwise_sum(jnp.asarray(x)) if dtype == np.float32 else x.sum(0)
    for axes in ({"data": 8}, {"replica": 2, "data": 4}):
        found = on_devices(lambda x, axes=axes: all_sum(x, tuple(axes))[None], x, P(tuple(axes)), **axes)
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


# Steps: equal to one device, and nothing is reduced by the compiler.


@pytest.mark.parametrize(
    ("toy", "strategy", "options"),
    [
        ("nnx", "hsdp", {"microbatches": 2}),
        ("linen", "zero2", {}),
        ("gpt", "fsdp", {}),
        ("gpt", "hsdp", {"scatter": "end", "microbatches": 2}),
        ("linen", "ddp", {}),
        ("nnx", "zero1", {}),
    ],
)
@pytest.mark.fast_cases(1)
def test_ordered_steps_equal_one_device(toy, strategy, options):
    """Loss to 1e-6, gradients to 1e-5, of five steps that are clipped; nothing is reduced by the hardware."""
    axes, strategy = setups(0)[strategy]
    toy = TOYS[toy]()
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(toy.rate))
    with quick_compile():
        step = recording_step(toy, strategy, js.make_mesh(**axes), js.explicit(reduction="ordered", **options), tx)
        trace = trained(step, toy)
        check_audit(js.audit(step, toy.batch))
    assert_equal_runs(trace, one_device(toy, tx))
    assert min(float(metrics["grad_norm"]) for metrics in trace.metrics) > 0.05
    assert step.update_view.endswith("which are ordered")


def check_audit(found):
    assert not found.surprises and not found.missing, str(found)
    assert not any(one.kind in ("all-reduce", "reduce-scatter") for one in found.found)


@pytest.mark.slow
def test_evaluation_in_one_order_equals_the_usual_one():
    toy = nnx_toy()
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), toy.init_fn, optax.sgd(0.1))
    run = js.init(toy.init_fn, optax.sgd(0.1), layout, 0)

    def eval_fn(params, batch):
        loss = toy.loss_fn(params, batch, None)
        return {"loss": loss, "rows": js.Sum(batch["weights"].sum()), "largest": js.Max(batch["x"].max())}

    short = jax.tree.map(lambda x: x[:5], toy.batch)
    usual = js.evaluate(js.make_eval_step(eval_fn, layout), run, [toy.batch, short])
    ordered = js.evaluate(js.make_eval_step(eval_fn, layout, engine=ORDERED), run, [toy.batch, short])
    assert ordered == pytest.approx(usual, rel=1e-6)


# What is refused.


def scaled(total):
    """A transform that divides by what `total` makes of the gradients."""

    def update(grads, state, params=None):
        size = total(grads)
        return jax.tree.map(lambda g: g / size, grads), state

    return optax.GradientTransformation(lambda params: (), update)


def is_ordered(total, params):
    """Whether a step takes the sums of a transform in one order, and does not refuse it."""
    tx = scaled(total)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), lambda key: params, tx)
    try:
        js.make_step(lambda params, batch, key: js.Mean(0.0, 1.0), tx, layout, engine=ORDERED)
    except ValueError as error:
        assert "is not elementwise" in str(error)
        return False
    return True


@pytest.mark.parametrize(
    ("total", "allowed"),
    [
        (lambda g: g["s"] ** 2 + g["t"] ** 2 + jnp.sum(g["w"] ** 2) + 1, True),
        (lambda g: jnp.sum(g["w"] ** 2) + g["t"] ** 2 + g["s"] ** 2 + 1, True),
        (lambda g: g["s"] ** 2 + g["t"] ** 2 + 1, False),
        (lambda g: g["s"] ** 2 + jnp.sum(g["w"] ** 2) + 1, False),
        (lambda g: g["s"] * g["t"] + jnp.sum(g["w"] ** 2) + 1, False),
        (lambda g: jnp.sum(g["w"] ** 2, axis=0)[0] + 1, False),
    ],
)
def test_scalars_are_a_part_of_the_sum_over_all_parameters(total, allowed):
    """Of all, in any order, and of nothing less; their products are no sums."""
    assert is_ordered(total, {"w": jnp.ones((4, 3)), "s": jnp.ones(()), "t": jnp.ones(())}) == allowed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_that_is_rounded_is_a_sum(dtype):
    """As a global norm over parameters in bf16 rounds it; rounded to an integer it is none."""
    for rounded, allowed in ((dtype, True), ("int32", False)):

        def total(g, to=rounded):
            return jnp.sum(g["w"] ** 2).astype(to).astype("float32") + jnp.sum(g["v"] ** 2).astype("float32") + 1

        assert is_ordered(total, {"w": jnp.ones((4, 3)), "v": jnp.ones((2,), dtype)}) == allowed


def test_what_the_compiler_would_order_is_refused_by_name():
    toy = gpt_toy(vocab=64)
    tensor = js.compose(js.zero2(), js.tensor())
    layout = js.layout(tensor, js.make_mesh(data=4, tensor=2), toy.init_fn, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"orders the sums over the axes \['data'\], but .*over \['tensor'\]"):
        js.make_step(toy.loss_fn, optax.sgd(0.1), layout, engine=ORDERED)
    for word in ("fixed", "checked"):
        with pytest.raises(ValueError, match=f"must be 'native' or 'ordered', got '{word}'; js.parity compares"):
            js.explicit(reduction=word)
    for engine in (js.auto, js.pipelined):
        with pytest.raises(TypeError, match="reduction"):
            engine(reduction="ordered")


@pytest.mark.parametrize(
    ("tx", "why"),
    [
        (optax.lamb(1e-3), "but this one is not elementwise"),
        (optax.apply_if_finite(optax.adam(1e-3), 3), "inside a branch|not elementwise"),
    ],
    ids=["lamb", "branch"],
)
def test_optimizers_that_mix_elements_in_other_ways_are_refused(tx, why):
    toy = nnx_toy()
    layout = js.layout(js.zero2(min_size=0), js.make_mesh(data=8), toy.init_fn, tx)
    with pytest.raises(ValueError, match=why):
        js.make_step(toy.loss_fn, tx, layout, engine=ORDERED)


# Processes.

PROGRAM = "import runpy; runpy.run_module('tests.engines.ordered_program', run_name='__main__')"


def lines_of(processes: int, toy: str, reduction: str, *names: str) -> list[str]:
    """A line per strategy and device with all numbers in hexadecimal, put together from those of the processes."""
    outputs = printed_together(PROGRAM, toy, reduction, *names, count=processes)
    lines = sorted(line for output in outputs for line in output.splitlines() if line.startswith(names))
    assert len(lines) == 8 * len(names)
    return lines


@pytest.mark.slow
def test_every_strategy_has_the_same_bits_in_any_number_of_processes():
    names = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    one, two, four = (lines_of(count, "nnx", "ordered", *names) for count in (1, 2, 4))
    assert one == two == four


@pytest.mark.slow
def test_blocks_have_the_same_bits_in_any_number_of_processes():
    assert lines_of(1, "gpt", "ordered", "fsdp") == lines_of(4, "gpt", "ordered", "fsdp")


@pytest.mark.slow
def test_native_sums_differ_between_processes():
    """Else the test above could not fail."""
    assert lines_of(1, "nnx", "native", "zero2") != lines_of(2, "nnx", "native", "zero2")
