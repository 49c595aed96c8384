"""What a compiled step costs beyond one written by hand, in counts: copies, and arrays updated in place."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.hlo import hlo
from tests.checkpoint.runs import assert_same
from tests.toys import normal

COUNT, WIDTH = 3, 64
MATRIX = ("f32", (WIDTH // 8, WIDTH))  # a device's part of a parameter or moment
ENGINES = {"auto": js.auto, "explicit": js.explicit}


def init_fn(key):
    return {f"w{i}": normal(i, WIDTH, WIDTH) / 8 for i in range(COUNT)}


def loss_fn(params, batch, key):
    x = batch["x"]
    for i in range(COUNT):
        x = jnp.tanh(x @ params[f"w{i}"])
    return js.Mean(jnp.square(x).sum(), len(x))


def batch(bad=False):
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
    x[3] = np.nan if bad else x[3]
    return {"x": x}


@cache
def made(engine, guarded=True, tx=None):
    tx = tx or optax.adamw(1e-3)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx)
    return layout, js.make_step(loss_fn, tx, layout, engine=ENGINES[engine](), guarded=guarded)


def copies(compiled):
    """The number of instructions that copy a device's part of a parameter or moment."""
    module = hlo.parse(compiled.as_text())
    entry = module.computations[module.entry]
    return sum(entry[name].opcode == "copy" and hlo.arrays(entry[name].type) == (MATRIX,) for name in entry.lines)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_guard_copies_nothing_and_everything_donated_is_updated_in_place(engine):
    """One copy per parameter is left, on a CPU: the norm of the update reads the old one when the new one is written.

    The guard needs the old moments, too, but they are read for the last time where they are overwritten.
    """
    found = {}
    for guarded in (True, False):
        compiled = made(engine, guarded)[1].compile(batch())
        found[guarded] = copies(compiled)
        arrays = 3 * COUNT * WIDTH * WIDTH * 4 // 8  # parameters and both moments
        assert compiled.memory_analysis().alias_size_in_bytes >= arrays
    assert found[True] == found[False] <= COUNT


def chain_of_matrices(count=8):
    params = {str(i): jnp.full((WIDTH, WIDTH), 0.01 * (i + 1)) for i in range(count)}

    def loss(params, batch, key):
        x = batch["x"]
        for one in params.values():
            x = jnp.tanh(x @ one)
        return js.Mean((x**2).sum(), x.size)

    tx = optax.adam(1e-3)
    layout = js.layout(js.zero2(min_size=0), js.make_mesh(data=8), lambda _: params, tx)
    return js.make_step(loss, tx, layout, engine=js.explicit())


def test_gathered_parameters_do_not_wait_beside_the_old_ones():
    """The norm of the update reads each old parameter before the new one is gathered over it."""
    compiled = chain_of_matrices().compile({"x": jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)})
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * WIDTH * WIDTH * 4  # of eight


def odd_transform():
    """State that is a gradient, a number, one array at two places, an array that nobody changes, and a momentum."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        ones = jax.tree.map(jnp.ones_like, params)
        return {"grads": zeros, "number": jnp.float32(3), "one": zeros, "two": ones, "same": ones, "trace": zeros}

    def update(grads, state, params=None):
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, state["trace"], grads)
        sums = jax.tree.map(jnp.add, state["one"], trace)
        updates = jax.tree.map(lambda t, s: -0.1 * t - 0.01 * s, trace, sums)
        number = jnp.ones((), jnp.float32)
        new = {"grads": grads, "number": number, "one": sums, "two": sums, "same": state["same"], "trace": trace}
        return updates, new

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_of_state_is_the_optimizers_after_a_good_step_and_the_old_one_after_a_bad_one(engine):
    tx = odd_transform()
    layout, step = made(engine, tx=tx)
    run = js.init(init_fn, tx, layout, 0)
    params, state = jax.tree.map(np.asarray, (run.params, run.opt_state))
    before = jax.tree.map(jnp.copy, run)
    run, metrics = step(run, batch(bad=True))
    assert metrics["bad"]
    assert_same(run._replace(step=before.step), before)

    @jax.jit
    def plain(params, state):
        updates, state = tx.update(jax.grad(lambda params: loss_fn(params, batch(), None).value)(params), state)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        run, metrics = step(run, batch())
        assert not metrics["bad"]
        params, state = plain(params, state)
    both = zip(jax.tree.leaves((run.params, run.opt_state)), jax.tree.leaves((params, state)), strict=True)
    for ours, expected in both:
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_what_an_optimizer_prints_is_printed():
    seen = []

    def update(grads, state, params=None):
        jax.debug.callback(lambda x: seen.append(float(x)), grads["w0"].sum())
        return grads, state

    tx = optax.chain(optax.GradientTransformation(lambda params: (), update), optax.sgd(0.1))
    layout, step = made("auto", tx=tx)
    step(js.init(init_fn, tx, layout, 0), batch())
    jax.effects_barrier()
    assert seen


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_without_norms_computes_none_of_them(engine):
    """An SGD step has square roots and sums of squares for the two norms alone."""
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, optax.sgd(0.1))
    found = {}
    for metrics in (("loss", "grad_norm", "update_norm"), ("loss",)):
        step = js.make_step(loss_fn, optax.sgd(0.1), layout, engine=ENGINES[engine](), guarded=False, metrics=metrics)
        lines = step.compile(batch()).as_text().splitlines()
        sums = sum("reduce(" in line and "f32[] reduce" in line for line in lines)
        run, returned = step(js.init(init_fn, optax.sgd(0.1), layout, 0), batch())
        assert set(returned) == set(metrics)
        found[metrics] = sums, any("sqrt" in line for line in lines), returned["loss"], run
    (many, roots, loss, run), (few, no_roots, same_loss, same_run) = found.values()
    assert roots and not no_roots
    assert many - few >= 2 * COUNT
    np.testing.assert_allclose(loss, same_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(run.params), jax.tree.leaves(same_run.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("metrics", [("loss", "norm"), ("grad_norm",), "loss"])
def test_unknown_metrics_are_refused_with_those_that_exist(metrics):
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r'metrics: got .*; name "loss" and any of "grad_norm" and "update_norm"'):
        js.make_step(loss_fn, optax.sgd(0.1), layout, metrics=metrics)
