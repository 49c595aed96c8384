"""Which errors of a prediction mean that a layout can't do something, and which are faults that must show."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.engine import check_engine
from jaxshard.plan.predict import predict
from jaxshard.plan.search import search as module
from jaxshard.plan.search.refusals import is_refusal

ROWS = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}


def init(key):
    return jax.random.normal(key, (8, 8))


def loss(params, batch, key):
    errors = (batch["x"] @ params) ** 2
    return js.Mean(errors.sum(), errors.size)


def scalar_loss(params, batch, key):
    return ((batch["x"] @ params) ** 2).mean()


def raised(fn):
    with pytest.raises(Exception) as info:
        fn()
    return info.value


def test_refusals_are_raised_by_checks():
    assert is_refusal(raised(lambda: js.explicit(microbatches=0)))
    assert not is_refusal(raised(lambda: None + 1))
    assert not is_refusal(raised(lambda: js.plan.promise(None, None, loss, ROWS)))  # found in the middle of our code
    assert not is_refusal(raised(lambda: check_engine("explicit")))  # no engine: of no candidate


def test_an_engine_refuses_a_loss_that_says_no_weight():
    mesh = js.plan.planned_mesh("v5e:2x2", data=4)
    tx = optax.sgd(0.1)
    layout = js.layout(js.ddp(), mesh, init, tx)
    for engine in (js.explicit(), js.auto(microbatches=2)):
        error = raised(lambda engine=engine: predict(layout, scalar_loss, ROWS, engine, tx=tx))
        assert isinstance(error, Unsuited) and is_refusal(error), engine


def test_a_fault_shows_and_leaves_the_others(monkeypatch):
    predict = module.predict

    def faulty(layout, *args, **options):
        return None + 1 if "replica" in layout.mesh.shape else predict(layout, *args, **options)

    monkeypatch.setattr(module, "predict", faulty)
    monkeypatch.setattr(module, "_WANTED", 6)
    with pytest.warns(UserWarning, match="left out; the first is hsdp on replica=.*TypeError"):
        ranking = js.plan.search(init, loss, optax.sgd(0.1), ROWS, "v5e:2x2", compile=0)
    assert ranking.best is not None and any(words.startswith("failed, TypeError") for words in ranking.refused)
