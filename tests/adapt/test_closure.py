"""A loss that closes over arrays of another mesh is refused by the names of its variables."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js

TX = optax.sgd(0.1)
BATCH = {"x": np.ones((8, 13), np.float32)}


def mesh():
    return js.make_mesh(jax.devices()[:4], data=4)


def spread(*devices: int) -> jax.Array:
    sharding = NamedSharding(js.make_mesh([jax.devices()[i] for i in devices], data=-1), P("data"))
    return jax.device_put(jnp.ones((8, 13)), sharding)


def make(loss, engine):
    pair = js.linen(nn.Dense(3), loss, BATCH)
    return js.make_step(pair.loss, TX, js.layout(js.fsdp(), mesh(), pair.init, TX), engine=engine)


@pytest.mark.parametrize("engine", [js.auto(), js.explicit()], ids=["auto", "explicit"])
@pytest.mark.parametrize("devices", [(4, 5, 6, 7), (7,), range(8), (0, 1)], ids=str)
def test_arrays_of_another_mesh(devices, engine):
    tables = {"scale": spread(*devices)}

    def loss(model, batch):
        y = model(batch["x"] * tables["scale"])
        return js.Mean(y.sum(), y.size)

    message = r"(?s)loss closes over .* other devices than the mesh of the layout \(\[0, 1, 2, 3\]\).*tables/scale: "
    with pytest.raises(ValueError, match=message + rf"float32\[8, 13\] on devices .*{devices[-1]}\]"):
        make(loss, engine)


def test_a_plain_loss_and_a_partial_are_looked_into_too():
    table = spread(7)

    def loss_fn(scale, params, batch, key):
        return js.Mean((batch["x"] * params["w"] * table).sum() * scale, 1.0)

    layout = js.layout(js.ddp(), mesh(), lambda key: {"w": jnp.ones(13)}, TX)
    with pytest.raises(ValueError, match=r"loss_fn closes over .*\n  - table: float32"):
        js.make_step(partial(loss_fn, 2.0), TX, layout)


def test_constants_are_left_alone():
    """NumPy arrays, arrays without a placement, on one device of the mesh, and on all of it."""
    constants = [np.ones(13, np.float32), jnp.ones(13), jax.device_put(jnp.ones(13), jax.devices()[2])]
    spread_out, unsortable = spread(0, 1, 2, 3), {1: None, "a": None}

    def loss(model, batch):
        assert unsortable
        y = model(batch["x"] * sum(constants) * spread_out[0])
        return js.Mean(y.sum(), y.size)

    make(loss, js.auto())
