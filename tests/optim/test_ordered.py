"""Which sums of an optimizer are taken in one order. That their bits don't depend on processes is tested in engines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.optim.ordered import with_ordered_sums
from jaxshard.optim.proof.elementwise import stored_shapes


def init_fn(key: Any) -> Any:
    return {"w": jnp.ones((13, 3)), "b": jnp.ones(16)}


def norm_of_state() -> Any:
    """Divides by the norm of the last step's gradients, which it keeps as they come."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(1 + sum(jnp.sum(x**2) for x in jax.tree.leaves(state)))
        return jax.tree.map(lambda u: u / norm, updates), updates

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def layout_of(tx: Any) -> Any:
    return js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx)


@pytest.mark.parametrize("tx", [optax.clip_by_global_norm(1.0), norm_of_state()], ids=["gradients", "state"])
def test_every_sum_over_an_array_is_ordered(tx: Any) -> None:
    layout = layout_of(tx)
    params = layout.shapes.params
    views = stored_shapes(params, layout.opt_params)
    ordered = with_ordered_sums(tx, params, layout)
    plain, program = (jax.make_jaxpr(one.update)(views, jax.eval_shape(tx.init, views), views) for one in (tx, ordered))

    def sums(program: Any) -> list[tuple[int, ...]]:
        found = [e.invars[0].aval.shape for e in open_jaxpr(program)[0].eqns if e.primitive.name == "reduce_sum"]
        return sorted(shape for shape in found if shape)

    assert sums(plain) == [(16,), (16, 3)] and sums(program) == [], "those left are inside shard_map"


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


def test_an_array_of_the_transforms_own_that_is_padded_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jnp.roll(state, 1).at[0].add(1.0)

    tx = optax.GradientTransformation(lambda params: jnp.zeros(3), update)
    layout = layout_of(tx)
    with pytest.raises(ValueError, match=r"'ordered' needs .*state \(root\) \[3\] is stored as \[8\]"):
        with_ordered_sums(tx, layout.shapes.params, layout)
