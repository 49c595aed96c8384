"""What moves over tensor axes, read from the traced step, against literals, and against the TPU's compiler."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js


def step_of(mesh, strategy, **sizes):
    model = js.models.make("llama-1m", depth=2, heads=4, kv_heads=4, **sizes)
    tx, engine = optax.adam(1e-3), js.explicit(remat="everything")
    layout = js.layout(strategy, mesh, model.init, tx)
    batch = {"tokens": jax.ShapeDtypeStruct((8, sizes["seq"] + 1), jnp.int32)}
    prediction = js.plan.predict(layout, model.loss, batch, engine, tx=tx, estimate=True)
    assert prediction.flops == sum(one.flops for one in prediction.products)
    (one,) = (one for one in prediction.collectives if one.what == "activations")
    return one, js.make_step(model.loss, tx, layout, engine=engine), batch


@pytest.mark.slow
def test_sums_over_a_tensor_axis():
    mesh = js.make_mesh(data=2, tensor=4)
    one, _, _ = step_of(mesh, js.compose(js.ddp(), js.tensor()), width=128, hidden=512, vocab=512, seq=64)
    # In each block one after attention and one after the MLP, forward and backward; for the embedding's rows, and the
    # head's gradient: f32[4, 64, 128]. Of the logits their sum and that of the target, f32[256]. 18 norms and scalars.
    arrays = 2 * 4 + 2
    assert (one.kind, one.axes) == ("all-reduce", ("tensor",))
    assert one.array_bytes == arrays * 4 * 64 * 128 * 4 + 2 * 256 * 4 + 18 * 4
