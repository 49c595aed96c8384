"""Which sums of an optimizer are taken in one order. That their bits don't depend on processes is tested in engines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from jaxshard.optim.ordered import with_ordered_sums


def init_fn(key: Any) -> Any:
    return {"w": jnp.ones((13, 3)), "b": jnp.ones(16)}


def test_a_norm_over_parameters_in_bf16_is_that_of_one_device() -> None:
    """The sum over a bf16 array is taken in f32 and rounded: updates within a unit in the last place of bf16."""

    def in_bf16(key: Any) -> Any:
        return init_fn(key) | {"w": jnp.ones((13, 3), jnp.bfloat16)}

    tx = optax.clip_by_global_norm(1.0)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), in_bf16, tx)
    keys = jax.random.split(jax.random.key(0), 2)
    grads = {"w": jax.random.normal(keys[0], (13, 3), jnp.bfloat16), "b": jax.random.normal(keys[1], (16,))}
    alone, _ = tx.update(grads, tx.init(grads))
    places = layout.opt_params
    stored = {k: jax.device_put(places[k].view.apply(x), places[k].sharding(layout.mesh)) for k, x in grads.items()}
    ordered = with_ordered_sums(tx, layout.shapes.params, layout)
    split, _ = jax.jit(ordered.update)(stored, tx.init(stored), stored)
    for name, x in alone.items():
        np.testing.assert_allclose(
            np.float32(places[name].view.invert(split[name])), np.float32(x), rtol=2**-7 if name == "w" else 1e-6
        )
