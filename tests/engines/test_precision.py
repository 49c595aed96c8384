"""Mixed precision in one word, under every engine: what stays f32, what is computed, gathered and reduced in bf16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

SMALL = {"vocab": 64, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 12}
MAKERS = {
    "auto": js.auto,
    "explicit": js.explicit,
    "pipelined": lambda **options: js.pipelined(microbatches=2, **options),
}


def step_of(name, **options):
    """A step of a small Llama over 8 devices, its first run and a batch."""
    axes = {"data": 4, "pipe": 2} if name == "pipelined" else {"data": 8}
    data = js.fsdp(min_size=0)
    strategy = js.compose(data, js.pipeline("pipe", chunks=1)) if name == "pipelined" else data
    model, tx = js.models.make("llama-1m", **SMALL), optax.adamw(1e-3)
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, tx)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 13), dtype=np.int32)
    step = js.make_step(model.loss, tx, layout, engine=MAKERS[name](**options))
    return step, js.init(model.init, tx, layout, 0), {"tokens": tokens}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_parameters_and_moments_stay_f32_and_the_loss_is_that_of_f32(name):
    """The loss is within 1 % of f32 and not equal to it; so is the norm of the gradient, within 5 %."""
    step, run, batch = step_of(name, precision="bf16")
    run, metrics = step(run, batch)
    floats = [x for x in jax.tree.leaves((run.params, run.opt_state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    exact = step_of(name)
    _, wanted = exact[0](*exact[1:])
    for key, tolerance in (("loss", 1e-2), ("grad_norm", 5e-2)):
        assert metrics[key] != wanted[key]
        np.testing.assert_allclose(metrics[key], wanted[key], rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_what_travels_in_a_pipeline(reduce_dtype):
    """Of the program before it is compiled (a CPU has no bf16 sums): gathers in bf16, and scatters as asked for."""
    step, _, batch = step_of("pipelined", precision="bf16", reduce_dtype=reduce_dtype)
    text = step.lower(batch).as_text()
    dtypes = {
        kind: set(re.findall(rf'stablehlo.{kind}"?.*?-> tensor<(?:\d+x)+(\w+)>', text, re.DOTALL))
        for kind in ("all_gather", "reduce_scatter")
    }
    assert dtypes == {"all_gather": {"bf16"}, "reduce_scatter": {"f32" if reduce_dtype else "bf16"}}


@pytest.mark.parametrize("name", MAKERS)
def test_other_dtypes_beside_it(name):
    make = MAKERS[name]
    assert make(precision="bf16") == make(compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    assert make(precision="bf16", compute_dtype="bfloat16") == make(precision="bf16")
    assert make(precision="bfloat16") == make(precision="bf16")
    engine = make(precision="bf16", reduce_dtype=jnp.float32)
    assert engine.describe()["compute_dtype"] == "bfloat16" and engine.describe()["reduce_dtype"] == "float32"
    with pytest.raises(ValueError, match="computes in bfloat16, but got compute_dtype=float16 as well; leave one of"):
        make(precision="bf16", compute_dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"precision must be 'bf16' or None.*, got 'fp8'"):
        make(precision="fp8")
    with pytest.raises(TypeError, match="compute_dtype must be a floating dtype"):
        make(precision="bf16", compute_dtype="nonsense")
