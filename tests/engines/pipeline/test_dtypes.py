"""What travels and what is added up in a pipeline, of every dtype that a model may choose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.engines.pipeline.pipes import FEATURES, WIDTH, residual_block, rows_batch, squared_error

BATCH = rows_batch(16)


def model_of(head):
    def init(key):
        first, second, third = jax.random.split(key, 3)
        return {
            "embed": {"w": jax.random.normal(first, (FEATURES, WIDTH)) / 2},
            "block": {"w": jax.random.normal(second, (WIDTH, WIDTH)) / 4, "b": jnp.full(WIDTH, 0.01)},
            "head": {"w": jax.random.normal(third, (WIDTH, FEATURES)) / 2},
        }

    return js.Stacked(embed, residual_block, head, num_blocks=4, init=init)


def embed(params, batch, key):
    return batch["x"] @ params["embed"]["w"]


def head_real(params, x, batch, key):
    return squared_error(x @ params["head"]["w"], batch)


def head_with_metrics(params, x, batch, key):
    out = x @ params["head"]["w"]
    loss, weight = squared_error(out, batch), batch["weights"].astype(jnp.bfloat16).sum()
    metrics = {
        "rows": js.Sum(jnp.ones(len(out), jnp.bfloat16).sum()),
        "low": js.Max((-jnp.abs(out)).max().astype(jnp.bfloat16)),
        "any": js.Max((out > 0).any()),
        "most": js.Max(jnp.int32(len(out))),
    }
    return js.Loss(js.Mean(loss.totals[0], weight), metrics=metrics)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mesh axis 'tensor' splits nothing")
def test_narrow_and_boolean_metrics_beside_an_automatic_axis():
    """A manual sum in bf16 aborts the CPU compiler there, so that no failure would be seen: the run would end."""
    model, tx = model_of(head_with_metrics), optax.sgd(0.1)
    mesh, strategy = js.hybrid(data=2, tensor=2, pipe=2, split=js.ddp)
    layout = js.layout(strategy, mesh, model.init, tx)
    step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=4))
    run = js.init(model.init, tx, layout, 0)
    want = model.loss(js.logical(run, layout).params, BATCH, jax.random.key(0))
    evaluated = js.make_eval_step(model.evaluate, layout)(run, BATCH)
    _, metrics = step(run, BATCH)
    for found in (metrics, {name: metric.value for name, metric in evaluated.items()}):
        assert float(found["rows"]) == 16
        assert bool(found["any"]) is bool(want.metrics["any"].value)
        np.testing.assert_allclose(float(found["low"]), float(want.metrics["low"].value), rtol=1e-2)
        np.testing.assert_allclose(float(found["loss"]), float(want.value.value), rtol=1e-5)
    assert int(metrics["most"]) == 2  # rows of a micro-batch on a device


def test_a_scalar_head_is_refused_in_evaluation_too():
    model, tx = model_of(lambda *args: head_real(*args).value), optax.sgd(0.1)
    mesh, strategy = js.hybrid(data=4, pipe=2)
    layout = js.layout(strategy, mesh, model.init, tx)
    run = js.init(model.init, tx, layout, 0)
    with pytest.raises(
        TypeError, match=r"a pipeline needs a head that says its weight: return js\.Mean\(total, weight"
    ):
        js.make_eval_step(model.evaluate, layout)(run, BATCH)
