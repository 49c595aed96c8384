"""Predictions of a step: their parts, tables and JSON, and what is refused."""

import json

import jax
import jax.numpy as jnp
import optax

import jaxshard as js
from jaxshard.plan.prediction import ROLES


def predict_small(**axes: int) -> js.plan.Prediction:
    mesh = js.make_mesh(**axes)
    model = js.models.make("gpt-1m", seq=32)
    tx = optax.adamw(1e-3)
    layout = js.layout(js.fsdp(), mesh, model.init, tx)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 33), jnp.int32)}
    return js.plan.predict(layout, model.loss, batch, js.explicit(), tx=tx)


def test_a_prediction_prints_and_becomes_json():
    prediction = predict_small(data=8)
    assert list(prediction.peak.by_role) == list(ROLES)
    assert prediction.peak.total == sum(prediction.peak.by_role.values())
    assert "parameters" in str(prediction) and "optimizer state" in prediction._repr_html_()
    found = json.loads(json.dumps(prediction.as_dict()))
    assert found["fits"] is None and found["hbm_bytes"] is None  # a CPU is no chip of the table
    assert found["predicted_peak_bytes"] == prediction.peak.total
