"""Training steps whose gradients and weights travel in 8 bits: collectives as literals, errors, feedback, refusals."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import gpt_toy, linen_toy, nnx_toy

INT8, FEEDBACK = js.wire.int8(), js.explicit(reduce_dtype=js.wire.int8(feedback=True), scatter="end")
WHOLE = 4 * 28_064
"""Bytes of the parameters of `gpt_toy` in f32."""


def step_of(strategy, engine, toy=None, tx=None, **axes):
    toy, tx, mesh = toy or gpt_toy(), tx or optax.sgd(0.1), js.make_mesh(**axes)
    layout = js.layout(strategy, mesh, toy.init_fn, tx)
    return layout, js.make_step(toy.loss_fn, tx, layout, engine=engine), js.init(toy.init_fn, tx, layout, 0)


def traffic(audit):
    """(kind, axis, dtype) -> bytes, of arrays."""
    found = {}
    for one in js.plan.arrays_only(audit.found):
        key = (one.kind, "+".join(one.axes), one.dtype)
        found[key] = found.get(key, 0) + one.bytes
    return found


LITERALS = {
    # Of each weight of a block: one gather forward and one backward of kernels and two of biases, one all-to-all.
    "fsdp": (
        js.fsdp(min_size=0),
        {"data": 8},
        js.explicit(reduce_dtype=INT8, gather_dtype=js.wire.fp8()),
        {
            ("all-to-all", "data", "s8"): WHOLE // 4,
            ("all-to-all", "data", "f32"): 1_120,
            ("all-gather", "data", "u8"): 52_768,
            ("all-gather", "data", "f32"): 1_696,
        },
    ),
    # Across replicas a quarter: out and back, each with its scales.
    "hsdp": (
        js.hsdp(min_size=0),
        {"replica": 2, "data": 4},
        js.explicit(reduce_dtype=INT8),
        {
            ("all-to-all", "data", "s8"): WHOLE // 4,
            ("all-to-all", "data", "f32"): 736,
            ("all-to-all", "replica", "s8"): WHOLE // 16,
            ("all-to-all", "replica", "f32"): 280,
            ("all-gather", "replica", "s8"): WHOLE // 16,
            ("all-gather", "replica", "f32"): 280,
            ("all-gather", "data", "f32"): 4 * 52_768,
        },
    ),
    "ddp": (
        js.ddp(),
        {"data": 8},
        js.explicit(reduce_dtype=js.wire.fp8()),
        {
            ("all-to-all", "data", "u8"): WHOLE // 4,
            ("all-to-all", "data", "f32"): 1_120,
            ("all-gather", "data", "u8"): WHOLE // 4,
            ("all-gather", "data", "f32"): 1_120,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LITERALS)
def test_a_step_moves_what_is_promised(name):
    strategy, axes, engine, expected = LITERALS[name]
    _, step, _ = step_of(strategy, engine, **axes)
    audit = js.audit(step, gpt_toy().batch)
    assert audit.ok and not audit.missing and audit.promised_bytes == audit.found_bytes
    assert traffic(audit) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "axes", "engine"),
    [
        (
            js.compose(js.fsdp(min_size=0), js.tensor()),
            {"data": 4, "tensor": 2},
            js.explicit(reduce_dtype=INT8, gather_dtype=INT8),
        ),
        (
            js.compose(js.fsdp(min_size=0), js.tensor()),
            {"data": 4, "tensor": 2},
            js.explicit(reduce_dtype=js.wire.int8(feedback=True), scatter="end"),
        ),
        (
            js.compose(js.fsdp(min_size=0), js.pipeline("pipe")),
            {"data": 2, "pipe": 2},
            js.pipelined(microbatches=4, reduce_dtype=INT8, gather_dtype=INT8),
        ),
    ],
    ids=["tensor", "tensor, feedback", "pipeline"],
)
def test_beside_other_axes_the_promise_is_kept_and_the_loss_is_near(strategy, axes, engine):
    toy = gpt_toy(vocab=48, depth=4)
    mesh = js.make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)
    layout, tx = js.layout(strategy, mesh, toy.init_fn, optax.sgd(0.1)), optax.sgd(0.1)
    step, run = js.make_step(toy.loss_fn, tx, layout, engine=engine), js.init(toy.init_fn, tx, layout, 0)
    audit = js.audit(step, toy.batch)
    assert audit.ok, str(audit)
    exact = js.make_step(toy.loss_fn, tx, layout, engine=type(engine)(microbatches=engine.microbatches))
    _, expected = exact(js.clone(run), toy.batch)
    run, metrics = step(run, toy.batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-3)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=2e-2)


# Feedback.


def gradients(engine, steps, toy, axes):
    """The gradient that each step applied, in model order, of a run whose parameters stay where they are."""
    tx = optax.chain(optax.scale(0.0), optax.trace(1.0))  # the trace of zeros: nothing moves
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(**axes), toy.init_fn, tx)
    step, run = js.make_step(toy.loss_fn, tx, layout, engine=engine), js.init(toy.init_fn, tx, layout, 0)
    compute = js.value_and_grad(toy.loss_fn, layout, engine)
    found = []
    for _ in range(steps):
        found.append(jax.tree.map(np.asarray, compute(run._replace(step=jnp.zeros_like(run.step)), toy.batch)[1]))
        run, _ = step(run, toy.batch)
    return found, run


@pytest.mark.slow
def test_with_feedback_the_gradients_of_all_steps_add_up_to_the_exact_ones():
    """Without it the same error is made in every step; with it the sum is off by that of the last step alone."""
    toy, steps, axes = nnx_toy(), 6, {"data": 8}
    (exact,), _ = gradients(js.explicit(), 1, toy, axes)
    found, run = gradients(FEEDBACK, steps, toy, axes)
    (rounded,), _ = gradients(js.explicit(reduce_dtype=INT8), 1, toy, axes)

    def far(tree):
        return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), tree, exact)))

    once, mean = far(rounded), jax.tree.map(lambda *x: sum(x) / steps, *found)
    assert once > 1e-5
    assert far(mean) < 1.5 * once / steps
    # What is missing of the sum is in the residuals of all devices.
    missing = jax.tree.leaves(jax.tree.map(lambda x, y: steps * x - sum(y), exact, jax.tree.map(lambda *y: y, *found)))
    kept = [np.asarray(x).sum(0) for x in jax.tree.leaves(run.residuals)]
    assert max(np.abs(x).max() for x in kept) == pytest.approx(max(np.abs(x).max() for x in missing), rel=1e-2)


@pytest.mark.slow
def test_residuals_are_born_in_the_first_step_and_one_for_each_device():
    toy = nnx_toy()
    _, step, run = step_of(js.fsdp(min_size=0), FEEDBACK, toy, data=8)
    assert run.residuals == ()
    run, _ = step(run, toy.batch)
    weight = run.residuals["first"]["kernel"]
    assert weight.shape == (8, 13, 40) and weight.dtype == jnp.float32
    assert weight.sharding.shard_shape(weight.shape) == (1, 13, 40)
    # Nothing is rounded of seven numbers, one for each device.
    assert not np.asarray(run.residuals["last"]["bias"]).any()
    run, _ = step(run, toy.batch)
    assert int(run.step) == 2


@pytest.mark.slow
def test_a_bad_step_leaves_the_residuals_as_they_were():
    toy = linen_toy()
    _, step, run = step_of(js.fsdp(min_size=0), FEEDBACK, toy, data=8)
    run, _ = step(run, toy.batch)
    before = jax.tree.map(np.asarray, run.residuals)
    run, metrics = step(run, toy.batch | {"x": np.full_like(toy.batch["x"], np.nan)})
    assert metrics["bad"]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, run.residuals))


@pytest.mark.slow
def test_inside_a_program_residuals_are_made_before():
    toy = linen_toy()
    _, step, run = step_of(js.fsdp(min_size=0), FEEDBACK, toy, data=8)
    with pytest.raises(ValueError, match=r"run = step.with_residuals\(run\)"):
        jax.jit(step).lower(run, toy.batch)
    batches = jax.tree.map(lambda x: np.stack([x, x]), toy.batch)
    after, _ = jax.jit(lambda run, batches: jax.lax.scan(step, run, batches))(step.with_residuals(run), batches)
    assert int(after.step) == 2


def test_residuals_are_not_dropped_without_a_word_and_others_are_refused_by_name():
    toy = linen_toy()
    layout, step, run = step_of(js.fsdp(min_size=0), FEEDBACK, toy, data=8)
    run = step.with_residuals(run)
    other = js.make_step(toy.loss_fn, optax.sgd(0.1), layout, engine=js.explicit())
    with pytest.raises(ValueError, match=r"run._replace\(residuals=\(\)\)"):
        other(run, toy.batch)
    for engine in (js.auto(), js.explicit()):
        with pytest.raises(ValueError, match=r"run._replace\(residuals=\(\)\)"):
            js.value_and_grad(toy.loss_fn, layout, engine)(run, toy.batch)
    fewer = run._replace(residuals=run.residuals | {"Dense_2": dict.fromkeys(run.residuals["Dense_2"])})
    for use in (step, js.value_and_grad(toy.loss_fn, layout, FEEDBACK), jax.jit(step).lower):
        with pytest.raises(ValueError, match=r"residuals=\(\)\)\n  - Dense_2/bias: missing, expected float32\[8, 8\]"):
            use(fewer, toy.batch)


# Formats of one's own.


@dataclass(frozen=True)
class Nibbles(js.wire.Format):
    """Blocks of 4-bit integers, two in a byte, with an f32 scale each."""

    block: int = 32
    feedback: bool = False

    def encode(self, x):
        blocks = jnp.pad(x, (0, -x.size % self.block)).reshape(-1, self.block)
        scales = jnp.max(jnp.abs(blocks), axis=1) / 7
        numbers = jnp.round(blocks / jnp.where(scales > 0, scales, 1)[:, None]).reshape(-1, 2)
        low, high = (jnp.nan_to_num(numbers) + 8).astype(jnp.uint8).T
        return {"numbers": low | high << 4, "scales": scales}

    def decode(self, sent, size):
        numbers = jnp.stack([sent["numbers"] & 15, sent["numbers"] >> 4], axis=1).astype(jnp.float32) - 8
        return (numbers.reshape(-1, self.block) * sent["scales"][:, None]).reshape(-1)[:size]


@dataclass(frozen=True)
class Padded(Nibbles):
    """A format that forgets to cut off the padding."""

    def decode(self, sent, size):
        return super().decode(sent, sent["scales"].size * self.block)


OWN = {
    "fsdp": (js.fsdp(min_size=0), js.explicit(reduce_dtype=Nibbles(), gather_dtype=Nibbles())),
    "zero2": (js.zero2(min_size=0), js.explicit(reduce_dtype=Nibbles(feedback=True), scatter="end")),
}
X, Y = (np.random.default_rng(seed).normal(size=(16, size)).astype(np.float32) for seed, size in enumerate((64, 9)))


def squares(params, batch, key):
    error = batch["x"] @ params["w"] - batch["y"]
    return js.Mean(jnp.sum(error**2), jnp.float32(error.size))


def start(key):
    return {"w": jnp.ones((64, 9))}


def arrives(wire, x):
    """What arrives of each of 8 parts of an array."""
    parts = [wire.decode(wire.encode(part.reshape(-1)), part.size).reshape(part.shape) for part in jnp.split(x, 8)]
    return jnp.concatenate(parts)


def emulated(engine, steps):
    """The weights after a training on one device that rounds what each of 8 devices would send."""
    w, residuals = start(None)["w"], [0.0] * 8
    for _ in range(steps):
        used, gradient = w if engine.gather_dtype is None else arrives(engine.gather_dtype, w), 0.0
        for device, (x, y) in enumerate(zip(np.split(X, 8), np.split(Y, 8), strict=True)):
            share = 2 / Y.size * x.T @ (x @ used - y) + residuals[device]
            sent = arrives(engine.reduce_dtype, share)
            gradient += sent
            residuals[device] = share - sent if engine.reduce_dtype.feedback else 0.0
        w -= 0.1 * gradient
    return w


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", OWN)
def test_a_format_of_ones_own_trains_as_on_one_device_and_moves_what_is_promised(name):
    strategy, engine = OWN[name]
    tx, batch = optax.sgd(0.1), {"x": X, "y": Y}
    layout = js.layout(strategy, js.make_mesh(data=8), start, tx)
    step, run = js.make_step(squares, tx, layout, engine=engine), js.init(start, tx, layout, 0)
    audit = js.audit(step, batch)
    assert audit.ok and audit.promised_bytes == audit.found_bytes
    # Of 8 parts of 72 numbers: three blocks each, of 16 bytes and a scale of 4.
    gathers = {("all-gather", "data", "u8"): 8 * 48, ("all-gather", "data", "f32"): 8 * 12}
    new_weights = {("all-gather", "data", "f32"): 64 * 9 * 4}
    sums = {("all-to-all", "data", "u8"): 8 * 48, ("all-to-all", "data", "f32"): 8 * 12}
    assert traffic(audit) == sums | (gathers if engine.gather_dtype else new_weights)
    for _ in range(3):
        run, _ = step(run, batch)
    np.testing.assert_allclose(js.logical(run, layout).params["w"], emulated(engine, 3), atol=1e-5)


# What is refused.


def test_a_format_that_loses_the_shape_is_refused_by_name():
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), start, optax.sgd(0.1))
    step = js.make_step(squares, optax.sgd(0.1), layout, engine=js.explicit(reduce_dtype=Padded()))
    words = r"Padded\(.* loses the shape or dtype: encode makes uint8\[48\], float32\[3\] of .* makes float32\[96\]"
    with pytest.raises(ValueError, match=words):
        js.audit(step, {"x": X, "y": Y})


def test_a_format_that_decodes_to_another_dtype_is_refused_by_name():
    class Bytes(js.wire.Format):
        def encode(self, x):
            return jnp.round(x).astype(jnp.int8)

        def decode(self, sent, size):
            return sent

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), start, optax.sgd(0.1))
    step = js.make_step(squares, optax.sgd(0.1), layout, engine=js.explicit(reduce_dtype=Bytes()))
    with pytest.raises(ValueError, match=r"Bytes\(\) loses the shape or dtype: .* decode makes int8\[72\] of these"):
        step.trace({"x": X, "y": Y})


def test_a_format_that_hides_numbers_that_are_not_finite_is_refused_by_name():
    class Quiet(js.wire.Format):
        def encode(self, x):
            return jnp.nan_to_num(x, posinf=1e30, neginf=-1e30).astype(jnp.bfloat16)

        def decode(self, sent, size):
            return sent.astype(jnp.float32)

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), start, optax.sgd(0.1))
    step = js.make_step(squares, optax.sgd(0.1), layout, engine=js.explicit(reduce_dtype=Quiet()))
    with pytest.raises(ValueError, match=r"Quiet\(\) decodes nan, inf, -inf as finite numbers"):
        step.trace({"x": X, "y": Y})


def test_a_format_that_has_no_hash_is_refused():
    class Mutable(Nibbles):
        __hash__ = None

    with pytest.raises(TypeError, match=r"@dataclass\(frozen=True\) before class Mutable"):
        js.explicit(reduce_dtype=Mutable())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: js.auto(reduce_dtype=INT8), ValueError, r"use js.explicit\(reduce_dtype=...\)"),
        (lambda: js.explicit(reduce_dtype=INT8, reduction="ordered"), ValueError, "leave one of them out"),
        (lambda: js.explicit(reduce_dtype=js.wire.int8(feedback=True)), ValueError, "scatter='end'"),
        (lambda: js.explicit(gather_dtype=js.wire.fp8(feedback=True)), ValueError, "give it to reduce_dtype"),
        (lambda: js.explicit(gather_dtype="int8"), TypeError, "gather_dtype must be a floating dtype"),
        (
            lambda: js.pipelined(microbatches=4, reduce_dtype=js.wire.int8(feedback=True)),
            ValueError,
            "leave feedback out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_an_engine_says_in_which_format_it_sends():
    engine = js.explicit(precision="bf16", reduce_dtype=INT8, gather_dtype=js.wire.fp8(block=64))
    assert engine.describe() == {
        "engine": "explicit", "microbatches": 1, "compute_dtype": "bfloat16", "reduce_dtype": "int8 in blocks of 256",
        "gather_dtype": "float8_e3m4 in blocks of 64", "remat": None, "reduction": "native",
    }  # fmt: skip
