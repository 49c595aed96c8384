"""An optimizer that changes the dtypes of its state: refused by the user's shapes, with what keeps them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import normal

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 9)).astype(np.float32)}


def init_fn(key):
    vector, matrix = normal(0, 9), normal(1, 9, 5)
    return {"w": vector, "h": vector.astype(jnp.bfloat16), "m": matrix, "hm": matrix.astype(jnp.bfloat16)}


def loss_fn(params, batch, key=None):
    sums = (batch["x"] @ x.astype(jnp.float32) for x in jax.tree.leaves(params))
    errors = sum(x.reshape(len(x), -1).mean(-1) for x in sums) - 1
    return js.Mean(jnp.square(errors).sum(), errors.size)


def injected(make, **options):
    return lambda static_args=(): optax.inject_hyperparams(make, static_args=static_args)(1e-2, **options)


def chained(static_args=()):
    return optax.chain(optax.clip_by_global_norm(1.0), injected(optax.lion)(static_args))


def step_of(tx, strategy):
    return js.make_step(loss_fn, tx, js.layout(strategy, js.make_mesh(data=8), init_fn, tx))


FSDP = js.fsdp(min_size=0)
MIXED = {
    "adamw": (injected(optax.adamw), FSDP, "inner_state/0/mu/h"),
    "owners": (injected(optax.contrib.muon), FSDP, "inner_state/inner_states/adam/inner_state/0/mu/h"),
    "sgd": (injected(optax.sgd, momentum=0.9), js.zero1(min_size=0), "inner_state/0/trace/h"),
    "chain": (chained, FSDP, "1/inner_state/0/mu/h"),
    "offload": (injected(optax.adamw), js.compose(FSDP, js.offload()), "inner_state/0/mu/h"),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", MIXED)
def test_dtypes_that_change_are_refused_with_what_keeps_them(name):
    make, strategy, path = MIXED[name]
    message = rf"(?s)static_args=.*  - {path}: bfloat16\[9\] becomes float32\[9\]"
    with pytest.raises(ValueError, match=message) as caught:
        step_of(make(), strategy).lower(BATCH)
    advice = eval(re.search(r"static_args=(\(.*?\))", str(caught.value))[1])
    if name != "adamw":  # which the next test trains
        step_of(make(advice), strategy).lower(BATCH)


def test_an_array_that_promotes_the_state_is_told_apart_from_hyperparameters():
    tx = optax.chain(optax.scale(jnp.float32(2)), optax.trace(0.9))
    with pytest.raises(ValueError, match=r"(?s)write Python numbers, or .*  - 1/trace/hm: bfloat16\[9, 5\] becomes"):
        step_of(tx, FSDP).lower(BATCH)
