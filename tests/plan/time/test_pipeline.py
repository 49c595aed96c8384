"""The products of a pipeline's program: those of the model on fewer devices, longer by the bubble of its schedule."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js


def predicted(axes, strategy, engine):
    model = js.models.make("llama-1m", width=64, hidden=256, depth=8, heads=4, kv_heads=4, vocab=64, seq=32)
    tx, mesh = optax.sgd(0.1), js.make_mesh(**axes)
    layout = js.layout(strategy, mesh, model.init, tx)
    batch = {"tokens": jax.ShapeDtypeStruct((32, 33), jnp.int32)}
    return js.plan.predict(
        layout, model.loss, batch, engine, tx=tx, chip=js.plan.chip("NVIDIA H100 80GB HBM3"), estimate=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [
        # F = 1 and B = 3, with the forward pass again: 3 of 11 ticks of four devices on 8 micro-batches.
        ("one_f_one_b", 1, 3 / 11),
        ("gpipe", 1, 3 / 11),
        ("interleaved", 2, 3 / 19),
    ],
)
def test_events_of_the_tick_loop(schedule, chunks, bubble):
    strategy = js.compose(js.ddp(), js.pipeline(chunks=chunks))
    found = predicted({"data": 2, "pipe": 4}, strategy, js.pipelined(microbatches=8, schedule=schedule))
    whole = predicted({"data": 8}, js.ddp(), js.explicit(remat="nothing"))
    # Embedding and head, which have no bubble, are a small part. Tolerance 3 %.
    assert found.flops == pytest.approx(whole.flops / (1 - bubble), rel=0.03)
    assert found.time.bubble[0] == pytest.approx(bubble * sum(one.seconds[0] for one in found.products), rel=1e-6)
    assert found.time.compute[0] == pytest.approx(whole.time.compute[0], rel=0.03)
    # Two permutes in each tick, of f32[2, 32, 64] of one micro-batch, and those of runs of four micro-batches.
    (permutes,) = (one for one in found.collectives if one.kind == "collective-permute")
    assert permutes.axes == ("pipe",) and permutes.count > 2 * 17 and permutes.array_bytes % (2 * 32 * 64 * 4) == 0
