"""A step inside a program of the user's own: under jit, in a scan over steps, mapped over runs, differentiated."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import normal

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
STRATEGIES = {"ddp": js.ddp(), "zero2": js.zero2(min_size=0), "fsdp": js.fsdp(min_size=0)}
STEPS = 3


def init_fn(key):
    return {"w": normal(0, 13, 3), "b": jnp.zeros((3,))}


def loss_fn(params, batch, key):
    noise = 0.1 * jax.vmap(lambda k: jax.random.normal(k, (3,)))(js.row_keys(key, len(batch["x"])))
    error = jnp.square(jnp.tanh(batch["x"] @ params["w"] + params["b"] + noise))
    return js.Mean(error.sum(), error.size)


def batch_of(seed):
    return {"x": np.random.default_rng(seed).normal(size=(16, 13)).astype(np.float32)}


def batches():
    return jax.tree.map(lambda *x: np.stack(x), *map(batch_of, range(STEPS)))


def made(strategy, engine, tx=TX):
    layout = js.layout(strategy, js.make_mesh(data=8), init_fn, tx)
    return layout, js.init(init_fn, tx, layout, 0), js.make_step(loss_fn, tx, layout, engine=engine)


def one_device():
    """The plain loop: losses and parameters after `STEPS` steps."""

    @jax.jit
    def step(params, state, batch, key):
        loss, grads = jax.value_and_grad(lambda params: loss_fn(params, batch, key).value)(params)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init_fn(jax.random.key(0))
    state, key, losses = TX.init(params), jax.random.fold_in(jax.random.key(0), 1), []
    for number in range(STEPS):
        params, state, loss = step(params, state, batch_of(number), jax.random.fold_in(key, number))
        losses.append(float(loss))
    return losses, params


@cache
def scanned(strategy, engine):
    """A layout, its first run, a step, and a program of the user's that scans over steps."""
    layout, run, step = made(STRATEGIES[strategy], engine)
    scan = jax.jit(lambda run, batches: jax.lax.scan(step, run, batches), donate_argnums=0)
    return layout, run, step, scan.lower(run, batches()).compile()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "engine"),
    [("fsdp", js.explicit()), ("fsdp", js.auto(microbatches=2)), ("ddp", js.auto()), ("zero2", js.explicit())],
    ids=["fsdp-explicit", "fsdp-auto-2", "ddp-auto", "zero2-explicit"],
)
def test_a_scan_over_steps_equals_one_device_within_1e_6(strategy, engine):
    layout, start, step, scan = scanned(strategy, engine)
    lies = jax.tree.map(lambda x: x.sharding, start)
    run, metrics = scan(js.clone(start), batches())
    jax.block_until_ready(metrics)
    losses, params = one_device()
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), js.logical(run, layout).params, params
    )
    assert int(run.step) == STEPS and not metrics["bad"]
    assert all(
        jax.tree.leaves(jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim), run, lies))
    )
    run, _ = step(run, batch_of(STEPS))  # and the library's own program goes on with it
    assert int(run.step) == STEPS + 1


def test_a_scan_gathers_and_scatters_once_a_step():
    layout, _, _, scan = scanned("fsdp", js.explicit())
    assert {(c.kind, c.shapes, c.count) for c in js.collectives(scan, layout.mesh) if c.kind != "all-reduce"} == {
        ("all-gather", ((16, 3),), STEPS),
        ("all-gather", ((8,),), STEPS),
        ("reduce-scatter", ((16, 3),), STEPS),
        ("reduce-scatter", ((8,),), STEPS),
    }


@pytest.mark.slow
def test_jit_of_a_step_gives_the_bits_of_the_step_and_donates_what_it_is_told():
    _, run, step = made(STRATEGIES["zero2"], js.explicit())
    again = js.clone(run)
    jitted = jax.jit(step, donate_argnums=0)
    for number in range(2):
        run, _ = step(run, batch_of(number))
        before = again
        again, metrics = jitted(again, batch_of(number))
        jax.block_until_ready(metrics)
        assert before.params["w"].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, (run.params, run.opt_state), (again.params, again.opt_state))


@pytest.mark.slow
def test_steps_mapped_over_runs_and_differentiated_equal_one_device_within_1e_5():
    """Two starts at once, and the gradient of a loss after two steps with respect to the start."""
    layout, run, step = made(STRATEGIES["fsdp"], js.explicit(), optax.sgd(0.5))
    batch, keys = batch_of(0), [jax.random.fold_in(run.key, number) for number in range(3)]

    def sharded(params):
        after, _ = step(step(run._replace(params=params), batch)[0], batch)
        return step(after, batch)[1]["loss"]

    def plain(params):
        for key in keys[:2]:
            grads = jax.grad(lambda p, k=key: loss_fn(p, batch, k).value)(params)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        return loss_fn(params, batch, keys[2]).value

    start = init_fn(jax.random.key(0))
    grads = js.logical(run._replace(params=jax.jit(jax.grad(sharded))(run.params)), layout).params
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, jax.jit(jax.grad(plain))(start)
    )
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), run.params)
    starts = run._replace(params=stacked)
    axes = run._replace(params=0, **dict.fromkeys(("step", "opt_state", "state", "key")))
    _, metrics = jax.jit(jax.vmap(step, in_axes=(axes, None)))(starts, batch)
    expected = [loss_fn(jax.tree.map(lambda x, s=scale: s * x, start), batch, keys[0]).value for scale in (1, 2)]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_a_bad_step_in_a_scan_is_named():
    _, run, _, scan = scanned("fsdp", js.explicit())
    many = batches()
    many["x"][1, 0, 0] = np.nan
    _, metrics = scan(js.clone(run), many)
    assert metrics["bad"] and metrics["bad"].grads == ("b", "w")
    with pytest.raises(js.BadStep, match=r"loss \[0\.\d+, nan, 0\.\d+\], the gradients of all 2 parameters"):
        js.check_finite(metrics)


def test_evaluation_predictions_and_logical_views_inside_a_program():
    layout, run, _ = made(STRATEGIES["fsdp"], js.auto())
    evaluate = js.make_eval_step(lambda params, batch: {"loss": loss_fn(params, batch, jax.random.key(3))}, layout)
    predict = js.make_apply(lambda params, batch: batch["x"] @ params["w"], layout)

    def everything(run, batch):
        return evaluate(run, batch)["loss"].value, predict(run, batch), js.logical(run, layout).params

    inside, outside = jax.jit(everything)(run, batch_of(0)), everything(run, batch_of(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), inside, outside)


def test_what_does_not_fit_is_refused_as_outside():
    _, run, step = made(STRATEGIES["fsdp"], js.auto())
    with pytest.raises(ValueError, match=r"x has 12 rows, which the 8 devices"):
        jax.jit(step)(run, {"x": np.zeros((12, 13), np.float32)})
    with pytest.raises(ValueError, match=r"the run does not fit the layout"):
        jax.jit(step)(run._replace(params={"w": run.params["w"]}), batch_of(0))
