"""A run of four arrays and a counter, which takes no time to save."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

TX = optax.adam(1e-2)


def init_fn(key: jax.Array) -> js.Model:
    """Parameters, one of them empty, and a state with a random key of its own."""
    w = jax.random.normal(key, (64, 48))
    params = {"a/b": w, "w": jnp.full((48, 24), 0.5), "": jnp.ones((3,), jnp.bfloat16), "none": jnp.zeros((0, 4))}
    return js.Model(params, {"key": jax.random.split(key), "mean": jnp.arange(5.0), "seen": jnp.zeros((), bool)})


def loss_fn(model: js.Model, batch: Any, key: jax.Array) -> js.Loss:
    x = jnp.tanh(batch["x"] @ model.params["a/b"]) @ model.params["w"]
    state = model.state | {"mean": model.state["mean"] + 1}
    return js.Loss(js.Mean(jnp.square(x).sum() * model.params[""].sum().astype(x.dtype), 4.0), state=state)


BATCH = {"x": np.ones((8, 64), np.float32)}


@cache
def layout(devices: int = 2) -> js.Layout:
    return js.layout(js.fsdp("data", min_size=0), js.make_mesh(jax.devices()[:devices], data=devices), init_fn, TX)


def placed(
    init_fn: Any, tx: Any = None, strategy: Any = None, *, devices: int = 2, given: Any = None, **options: Any
) -> tuple[js.TrainState, js.Layout]:
    """Return a run and its layout, under SGD and data parallelism unless told otherwise.

    Args:
      given: the arrays that the run begins with, in place of what `init_fn` draws.
    """
    tx, mesh = tx or optax.sgd(1.0), js.make_mesh(jax.devices()[:devices], data=devices)
    made = js.layout(strategy or js.ddp("data"), mesh, init_fn, tx, **options)
    return js.init(init_fn, tx, made, 0, init_from=given), made


@cache
def step() -> js.Step:
    return js.make_step(loss_fn, TX, layout())


@cache
def start() -> js.TrainState:
    return js.init(init_fn, TX, layout(), 0)


def at(step: int) -> js.TrainState:
    """The same run at some step."""
    return start()._replace(step=jax.device_put(np.int32(step), start().step.sharding))


def new_run(step: int = 0) -> js.TrainState:
    """The same run in arrays of its own, which a step may be given."""
    return jax.tree.map(lambda x: x.copy(), at(step))
