"""What of an update needs a whole matrix: what goes to its owner, what comes back, and the state that lives there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import jaxshard as js
from jaxshard.optim.owners.cores import find_cores
from tests.optim.owners.shampoo import shampoo
from tests.optim.owners.soap import soap


def _params(*shapes: tuple[int, ...]) -> Any:
    return {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}


def test_of_shampoo_the_factors_live_with_the_owner() -> None:
    params = _params((8, 4), (5,))
    made = find_cores(shampoo(0.1), params, {0, 1})
    assert made is not None and list(made.cores) == [0]
    held = jax.tree_util.tree_leaves_with_path(jax.eval_shape(shampoo(0.1).init, params))
    owned = [jax.tree_util.keystr(held[number][0]) for number in made.cores[0].states]
    assert owned == [".left['w0']", ".right['w0']"]
    assert [x.aval.shape for x in made.cores[0].ins] == [(8, 4)]


def test_work_behind_joins_the_core_where_fewer_arrays_travel_then() -> None:
    """Two results are computed, of which a count chooses element by element: neither travels."""

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        count, factors = state

        def choose(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(jnp.broadcast_to(count == 0, x.shape), x, y)

        new = jax.tree.map(lambda g, f: choose(g @ g.T, f @ g), grads, factors)
        return jax.tree.map(lambda g, f: choose(f @ g, g @ f), grads, factors), (count + 1, new)

    made = find_cores(optax.GradientTransformation(init, update), _params((8, 8)), {0})
    assert made is not None
    core = made.cores[0]
    assert (len(core.ins), core.states, len(core.outs)) == (1, (1,), 1)


def test_of_soap_mapped_over_blocks_all_state_lives_with_the_owner() -> None:
    """Its two branches become choices, element by element, before and behind; the average is made in one of them."""
    params = {"blocks": {"w": jax.ShapeDtypeStruct((3, 4, 6), jnp.float32)}}
    made = find_cores(js.optim.per_block(soap(0.1)), params, {0})
    assert made is not None
    core = made.cores[0]
    assert (len(core.ins), len(core.states), len(core.outs)) == (1, 4, 1)


def test_nothing_is_found_where_no_matrices_are_multiplied_or_parameters_meet() -> None:
    params = _params((8, 4), (8, 4))
    assert find_cores(optax.adafactor(0.1), params, {0, 1}) is None
    assert find_cores(optax.flatten(contrib.muon(0.1)), params, {0, 1}) is None

    def swap(grads: Any, state: Any, params: Any = None) -> Any:
        return {"w0": grads["w0"] @ grads["w1"].T @ grads["w0"], "w1": grads["w1"]}, state

    assert find_cores(optax.GradientTransformation(lambda params: (), swap), params, {0, 1}) is None
