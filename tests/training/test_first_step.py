"""The check of a first step whose experts exchange rows by ragged all-to-alls: wrong gradients are found, by name.

CPUs have no ragged all-to-all. `tests/layers/moe/ragged.py` has what JAX documents of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.layers.moe.exchange import use_form
from tests.layers.moe.ragged import ragged_reference

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.adam(1e-3)
E, C, H = 4, 8, 16
STRATEGY = js.compose(js.fsdp("expert", min_size=0), js.expert())
ENGINES = {
    "explicit": js.explicit(),
    "auto": js.auto(microbatches=2),
    "explicit, bf16": js.explicit(microbatches=2, precision="bf16"),
}
CELLS = [pytest.param(engine, id=name) for name, engine in ENGINES.items()]


def init_fn(key):
    shapes = {"router": (C, E), "up": (E, C, H), "down": (E, H, C), "head": (C, C)}
    return {name: jax.random.normal(k, shapes[name]) / 3 for name, k in zip(shapes, jax.random.split(key, 4))}


def loss_fn(params, batch, key):
    def mlp(params, rows, dot):
        return dot(jax.nn.silu(dot(rows, params["up"])), params["down"])

    experts = {name: params[name] for name in ("up", "down")}
    y, _ = js.moe(batch["x"], batch["x"] @ params["router"], mlp, experts, k=2)
    error = jnp.square(y @ params["head"])
    return js.Mean(error.sum(), error.size)


def batch():
    return {"x": np.random.default_rng(0).normal(size=(8, 6, C)).astype(np.float32)}


def start(engine, strategy=STRATEGY, **options):
    layout = js.layout(strategy, js.make_mesh(jax.devices()[:2], expert=2), init_fn, TX)
    return js.init(init_fn, TX, layout, 0), js.make_step(loss_fn, TX, layout, engine=engine, **options)


@pytest.fixture
def exchange_by(monkeypatch):
    """Makes ragged exchanges run here. Those of single numbers, all in the backward pass, bring what `wrong` makes."""

    def patch(wrong=lambda x: x):
        def run(operand, *args, **kwargs):
            got = ragged_reference(operand, *args, **kwargs)
            return wrong(got) if operand.ndim == 1 else got

        monkeypatch.setattr(jax.lax, "ragged_all_to_all", run)

    return patch


@pytest.mark.slow
@pytest.mark.parametrize("engine", CELLS)
def test_right_exchanges_pass_and_steps_are_those_of_equal_counts(engine, exchange_by):
    exchange_by()
    run, step = start(engine)
    losses = []
    with use_form("ragged"):
        for _ in range(2):
            run, metrics = step(run, batch())
            losses.append(float(metrics["loss"]))
    run, step = start(engine)
    for loss in losses:
        run, metrics = step(run, batch())
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-2 if engine.compute_dtype else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", CELLS)
def test_wrong_rows_in_the_backward_pass_are_found_by_name(engine, exchange_by):
    exchange_by(lambda rows: jnp.roll(rows, 1, 0))
    run, step = start(engine)
    with use_form("ragged"), pytest.raises(RuntimeError, match="first step differs") as error:
        step(run, batch())
    headline, *lines = str(error.value).split("\n  - ")
    assert 'js.expert(exchange="equal")' in headline and "check_exchange=False" in headline
    found = {line.split(": gradient of norm")[0] for line in lines}
    assert {"down", "up"} <= found <= {"down", "router", "up"}  # neither loss nor head


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_found_and_the_check_may_be_left_out(exchange_by):
    exchange_by(lambda rows: rows * jnp.nan)
    run, step = start(js.explicit())
    with use_form("ragged"), pytest.raises(RuntimeError, match="down: gradient of norm nan, expected 0"):
        step(run, batch())
    run, step = start(js.explicit(), check_exchange=False)
    with use_form("ragged"):
        _, metrics = step(run, batch())
    assert metrics["bad"]
