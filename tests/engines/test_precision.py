"""Mixed precision in one word, under every engine; `test_dtypes_of_gathers_and_scatters` has what travels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.core.jaxpr import all_equations

MAKERS = {
    "auto": js.auto,
    "explicit": js.explicit,
    "pipelined": lambda **options: js.pipelined(microbatches=2, **options),
}


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


def init(key):
    return {"embed": jnp.eye(8, 16), "block": 0.1 * jax.random.normal(key, (16, 24)), "head": jnp.eye(16, 3)}


def head(params, x, batch, key):
    return js.Mean(jnp.square(x @ params["head"]).sum(), batch["x"].size)


MODEL = js.Stacked(
    embed=lambda params, batch, key: batch["x"] @ params["embed"],
    block=lambda w, x, key: x + jnp.tanh(x @ w)[:, :16],
    head=head,
    num_blocks=3,
    init=init,
)


@pytest.mark.parametrize(
    ("engine", "in_bf16"),
    [
        pytest.param(js.auto(precision="bf16"), True, id="auto", marks=pytest.mark.slow),
        pytest.param(js.explicit(precision="bf16"), True, id="explicit"),
        pytest.param(js.explicit(precision="bf16", reduce_dtype=jnp.float32), False, id="f32"),
        pytest.param(js.explicit(precision="bf16", scatter="end"), False, id="end", marks=pytest.mark.slow),
        pytest.param(
            js.explicit(precision="bf16", reduce_dtype=js.wire.int8()), False, id="int8", marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_stacked_in_the_dtype_of_their_sum(engine, in_bf16):
    """The loop over blocks stacks their gradients: two bytes an element if they were added in bf16, and exactly."""
    tx = optax.sgd(0.1)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), MODEL.init, tx)
    step = js.make_step(MODEL.loss, tx, layout, engine=engine)
    program = step.trace({"x": np.ones((16, 8), np.float32)}).jaxpr
    shapes = {(3, 16, 24), (3, 16, 3)}  # global, and of one device
    loops = [eqn for eqn in all_equations(program) if eqn.primitive.name == "scan"]
    dtypes = {one.aval.dtype for eqn in loops for one in eqn.outvars if one.aval.shape in shapes}
    assert (jnp.dtype(jnp.bfloat16) in dtypes) == in_bf16
