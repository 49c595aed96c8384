"""Optimizers that ask for more than gradients, against the loop that optax documents for them, on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxshard as js
from tests.toys import normal, tree_error

pytestmark = pytest.mark.usefixtures("compiled_quickly")

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 13)).astype(np.float32), "y": RNG.normal(size=(16, 3)).astype(np.float32)}
FSDP, ZERO2 = js.fsdp(min_size=0), js.zero2(min_size=0)
STEPS = 4


def init_fn(key):
    return {"w": normal(0, 13, 3), "b": jnp.zeros((3,))}


def loss_fn(params, batch, key):
    error = jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"])
    return js.Mean(error.sum(), error.size)


def one_device(tx: Any) -> tuple[list[float], Any]:
    """The documented loop; losses and parameters."""
    params = init_fn(jax.random.key(0))
    state, losses = tx.init(params), []

    def value_fn(params):
        return loss_fn(params, BATCH, None).value

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), state, value

    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses, params


def sharded(tx: Any, strategy: Any, engine: Any) -> tuple[list[float], Any]:
    layout = js.layout(strategy, js.make_mesh(data=8), init_fn, tx)
    run, step = js.init(init_fn, tx, layout, 0), js.make_step(loss_fn, tx, layout, engine=engine)
    losses = []
    for _ in range(STEPS):
        run, metrics = step(run, BATCH)
        losses.append(float(metrics["loss"]))
    assert step.guarded
    return losses, js.logical(run, layout).params


def _plateau() -> Any:
    return optax.chain(optax.sgd(0.6), contrib.reduce_on_plateau(factor=0.5, patience=1, atol=10.0))


def _backtracking() -> Any:
    return optax.chain(optax.sgd(4.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=15))


CASES = {
    "backtracking": (_backtracking, FSDP, js.auto()),
}
SLOW = {
    "polyak_sgd": (lambda: optax.polyak_sgd(1.0), FSDP, js.explicit(microbatches=2)),
    "reduce_on_plateau": (_plateau, ZERO2, js.auto()),
    "lbfgs": (optax.lbfgs, ZERO2, js.explicit()),
    "lbfgs-auto": (optax.lbfgs, FSDP, js.auto()),
    "lbfgs-micro": (optax.lbfgs, FSDP, js.explicit(microbatches=2)),
    "backtracking-explicit": (_backtracking, ZERO2, js.explicit()),
    "momo": (lambda: contrib.momo(0.5), ZERO2, js.explicit()),
    "momo_adam": (lambda: contrib.momo_adam(0.1), FSDP, js.explicit()),
    "MultiSteps": (lambda: optax.MultiSteps(optax.polyak_sgd(1.0), 2), FSDP, js.explicit()),
    "averaged": (lambda: js.optim.averaged(optax.polyak_sgd(1.0), 0.9), FSDP, js.auto()),
    "master": (lambda: js.optim.master(optax.lbfgs()), FSDP, js.explicit()),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_asks_for_the_loss_equals_one_device_within_1e_5(name):
    make, strategy, engine = (CASES | SLOW)[name]
    losses, params = sharded(make(), strategy, engine)
    expected, reference = one_device(make())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert tree_error(jax.device_get(params), jax.device_get(reference)) < 1e-5
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_parity_gives_both_sides_the_same_stand_in():
    report = js.parity(init_fn, loss_fn, optax.polyak_sgd(1.0), FSDP, js.make_mesh(data=8), BATCH)
    assert report.ok and any("asks for value, grad, value_fn" in note for note in report.notes)


def test_a_rate_that_falls_on_a_plateau_communicates_nothing():
    def collectives(tx):
        layout = js.layout(FSDP, js.make_mesh(data=8), init_fn, tx)
        step = js.make_step(loss_fn, tx, layout, engine=js.explicit())
        assert "stored view: the optimizer is elementwise" in step.update_view
        return sorted((c.kind, c.shapes, c.count) for c in js.collectives(step.compile(BATCH), layout.mesh))

    assert collectives(_plateau()) == collectives(optax.sgd(0.6))


def test_sums_in_one_order_are_not_promised_to_a_line_search():
    layout = js.layout(FSDP, js.make_mesh(data=8), init_fn, optax.lbfgs())
    with pytest.raises(ValueError, match=r"reduction='ordered' .* asks for value, grad, value_fn too; use .*native"):
        js.make_step(loss_fn, optax.lbfgs(), layout, engine=js.explicit(reduction="ordered"))


def test_lookahead_without_its_parameters_says_how_to_make_them():
    tx = optax.chain(optax.clip(1.0), optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5))
    layout = js.layout(FSDP, js.make_mesh(data=8), init_fn, tx)
    with pytest.raises(
        TypeError, match=r"the parameters are a dict: let init_fn return optax\.LookaheadParams\.init_syn"
    ):
        js.make_step(loss_fn, tx, layout)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", [js.auto(), js.explicit()])
def test_lookahead_takes_the_gradients_of_the_fast_parameters_within_1e_5(engine):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5)
    )

    def init_pair(key):
        return optax.LookaheadParams.init_synced(init_fn(key))

    def fast_loss(params, batch, key):
        return loss_fn(params.fast, batch, key)

    layout = js.layout(FSDP, js.make_mesh(data=8), init_pair, tx)
    run, step = js.init(init_pair, tx, layout, 0), js.make_step(fast_loss, tx, layout, engine=engine)
    params = init_pair(jax.random.key(0))
    state = tx.init(params)

    @jax.jit
    def plain(params, state):
        grads = jax.grad(lambda fast: loss_fn(fast, BATCH, None).value)(params.fast)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        run, _ = step(run, BATCH)
        params, state = plain(params, state)
    assert tree_error(jax.device_get(js.logical(run, layout).params), jax.device_get(params)) < 1e-5


def complex_init(key):
    return {"w": jax.lax.complex(*jax.random.normal(key, (2, 13, 3)))}


def test_complex_parameters_are_refused_with_the_split_that_works():
    message = r"w: complex64\[13, 3\]; train its two halves.*jax.lax.complex\(params\['re'\], params\['im'\]\)"
    with pytest.raises(TypeError, match=message):
        js.layout(FSDP, js.make_mesh(data=8), complex_init, optax.adam(0.1))
