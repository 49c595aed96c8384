"""Two losses of one set of parameters, each with a run of its own: the generator and the discriminator of a GAN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import normal, tree_error

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = {"generator": optax.adam(1e-2), "critic": optax.sgd(1e-2, momentum=0.9)}
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 5)).astype(np.float32), "z": RNG.normal(size=(16, 3)).astype(np.float32)}
FSDP = js.fsdp(min_size=0)


def init_fn(key):
    return {"generator": {"w": normal(0, 3, 5)}, "critic": {"up": normal(1, 5, 13), "down": normal(2, 13, 1)}}


def judge(params, x):
    return jnp.tanh(x @ params["critic"]["up"]) @ params["critic"]["down"]


def generator_loss(params, batch, key):
    fake = jax.nn.softplus(-judge(params, batch["z"] @ params["generator"]["w"]))
    return js.Mean(fake.sum(), fake.size)


def critic_loss(params, batch, key):
    real, fake = judge(params, batch["x"]), judge(params, batch["z"] @ params["generator"]["w"])
    return js.Mean((jax.nn.softplus(-real) + jax.nn.softplus(fake)).sum(), real.size)


LOSSES = {"generator": generator_loss, "critic": critic_loss}


def made(donate, engine=None):
    layouts, runs, steps = {}, {}, {}
    for name, loss_fn in LOSSES.items():
        layouts[name] = js.layout(
            FSDP, js.make_mesh(data=8), init_fn, TX[name], trainable=lambda path, n=name: path.startswith(n)
        )
        runs[name] = js.init(init_fn, TX[name], layouts[name], 0)
        steps[name] = js.make_step(loss_fn, TX[name], layouts[name], engine=engine, donate=donate)
    return layouts, runs, steps


def one_device(*, at_once):
    """The plain loop of three rounds, in which the critic sees the generator of the round before or the new one."""
    params = init_fn(jax.random.key(0))
    states = {name: TX[name].init(params[name]) for name in LOSSES}
    for _ in range(3):
        seen, after = params, dict(params)
        for name, loss_fn in LOSSES.items():
            seen = params if at_once else after
            grads = jax.grad(lambda part, s=seen, n=name, f=loss_fn: f(s | {n: part}, BATCH, None).value)(seen[name])
            updates, states[name] = TX[name].update(grads, states[name], seen[name])
            after[name] = optax.apply_updates(seen[name], updates)
        params = after
    return params


@pytest.mark.slow
def test_losses_of_the_same_parameters_at_once_equal_one_device_within_1e_5():
    layouts, runs, steps = made(donate=False, engine=js.explicit())
    for _ in range(3):
        params = runs["generator"].params
        runs["critic"] = runs["critic"]._replace(params=params)
        runs = {name: steps[name](runs[name], BATCH)[0] for name in LOSSES}
        assert not params["generator"]["w"].is_deleted()
        joined = {name: runs[name].params[name] for name in LOSSES}
        runs["generator"] = runs["generator"]._replace(params=joined)
    found = js.logical(runs["generator"], layouts["generator"]).params
    assert tree_error(jax.device_get(found), jax.device_get(one_device(at_once=True))) < 1e-5


@pytest.mark.slow
def test_losses_in_turn_need_no_second_copy_and_equal_one_device_within_1e_5():
    layouts, runs, steps = made(donate=True)
    run = runs["critic"]
    for _ in range(3):
        generator, _ = steps["generator"](runs["generator"]._replace(params=run.params), BATCH)
        run, _ = steps["critic"](run._replace(params=generator.params), BATCH)
        runs["generator"] = generator
    found = js.logical(run, layouts["critic"]).params
    assert tree_error(jax.device_get(found), jax.device_get(one_device(at_once=False))) < 1e-5


def test_a_run_whose_arrays_went_with_another_is_told_so():
    _, runs, steps = made(donate=True)
    critic = runs["critic"]
    runs["critic"] = critic._replace(params=runs["generator"].params)
    steps["generator"](runs["generator"], BATCH)
    shared = r"with another run that shares them: params/critic/down, params/critic/up, params/generator/w; .*donate=F"
    with pytest.raises(ValueError, match=shared):
        steps["critic"](runs["critic"], BATCH)
    with pytest.raises(ValueError, match=r"this run was donated to an earlier step.*or make the step with .*donate=Fa"):
        steps["generator"](runs["generator"], BATCH)
    batch = BATCH | {"fixed": runs["generator"].params["generator"]}
    with pytest.raises(ValueError, match=r"arrays of the batch were donated.*held them: fixed/w; take them"):
        steps["critic"](critic, batch)
