"""Memory of a deep model whose blocks run in a Python loop, extrapolated from shallow ones."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.checks.programs.live import LiveArray
from jaxshard.plan.compiled.depth import extrapolate
from jaxshard.plan.compiled.verdict import Verdict
from tests.engines.programs import tpu

WIDTH, TX, MESH = 128, optax.adam(0.1), {"data": 4}
BATCH = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)


def at_depth(depth, extra=0):
    def init(key):
        return {f"w{number}": jnp.ones((WIDTH, WIDTH)) for number in range(depth)} | {
            "head": jnp.ones((WIDTH + extra,))
        }

    def loss(params, batch, key):
        x = batch
        for number in range(depth):
            x = jnp.tanh(x @ params[f"w{number}"])
        return js.Mean((x * params["head"][:WIDTH]).sum(), len(x))

    layout = js.layout(js.fsdp(), js.plan.planned_mesh("v5e:2x2", **MESH), init, TX)
    return js.make_step(loss, TX, layout, engine=js.explicit())


def ask(step):
    """A compiler that assigns 10 bytes to each matrix, in two kinds of arrays, and 7 to the rest."""
    matrices = len(step.layout.shapes.params) - 1
    kept = LiveArray(6 * matrices, "kept activations", "f32", (16, WIDTH), matrices, "tanh", "model.py:3")
    stored = LiveArray(4 * matrices, "parameters", "f32", (32, WIDTH), matrices, "w", "")
    head = LiveArray(7, "logits", "f32", (WIDTH,), 1, "mul", "model.py:4")
    return Verdict(
        mesh=MESH, chip=js.plan.chip("TPU v5e"), judged_by="compiler", live_bytes=10 * matrices + 7,
        allocated_bytes=11 * matrices + 7, argument_bytes=4 * matrices, arrays=(kept, stored, head), usable_bytes=2**33,
        refusal="REFUSED" if matrices > 100 else "", topology="v5e:2x2", step=step, batch=BATCH, text="program",
        compile_seconds=1.0,
    )  # fmt: skip


def test_memory_is_continued_linearly_by_array():
    found = extrapolate(ask, at_depth(48), at_depth)
    exact = ask(at_depth(48))
    same = exact.memory() | {"judged_by": "extrapolated"}
    assert found.memory() == same and found.fits is True
    assert found.by_role == exact.by_role and found.compile_seconds == 2.0
    assert "extrapolated from the compiler's figures for 2 and 4 blocks" in str(found)
    assert found.as_dict()["allocated_bytes"] == 11 * 48 + 7 and found.collectives == ()


def test_a_shallow_step_is_compiled_itself():
    assert extrapolate(ask, at_depth(32), at_depth) is None


def test_another_model_is_refused_with_the_numbers():
    with pytest.raises(
        ValueError, match=r"at_depth\(2\) has 32,896 parameters .* no whole number of blocks .* 655,489 "
    ):
        extrapolate(ask, at_depth(40, extra=1), at_depth)


@pytest.mark.slow
@tpu
def test_the_extrapolated_memory_is_the_compilers():
    step = at_depth(36)
    found = js.plan.compile_for(step, BATCH, "v5e:2x2", at_depth=at_depth)
    exact = js.plan.compile_for(step, BATCH, "v5e:2x2")
    assert (found.judged_by, exact.judged_by) == ("extrapolated", "compiler")
    assert found.live_bytes == pytest.approx(exact.live_bytes, rel=0.01)
    assert found.argument_bytes == exact.argument_bytes
    both = [
        js.plan.predict(step.layout, step.loss_fn, BATCH, step.engine, tx=TX, at_depth=one) for one in (at_depth, None)
    ]
    assert [one.live_bytes for one in both] == [found.live_bytes, exact.live_bytes]
    assert dataclasses.asdict(both[0])["judged_by"] == "extrapolated"
