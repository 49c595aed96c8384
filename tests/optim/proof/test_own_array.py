"""Every alias of optax classified: elementwise, own array or global; and transforms that mix parameters are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxshard as js
from jaxshard.core.tree import path_str
from tests.optim.proof.aliases import ALIASES, WRAPPERS

SHAPES = {"layer": {"bias": (24,), "kernel": (16, 24)}, "kernel": (13, 7), "deep": (3, 5, 16), "scale": ()}
ARRAYS = {name: shapes for name, shapes in SHAPES.items() if name != "scale"}

OWN_ARRAY = {
    *("adafactor", "fromage", "lamb", "lars", "novograd", "sm3", "noisy_sgd", "contrib.muon", "contrib.galore"),
    *("clip_by_block_rms", "adaptive_grad_clip", "centralize", "zero_nans", "add_noise", "snapshot"),
    "scale_by_distance_over_gradients",
}
"""Own arrays alone."""

WITH_TOTALS = {
    *("contrib.dadapt_adamw", "contrib.dog", "contrib.dowg", "contrib.prodigy", "clip_by_global_norm", "normalize"),
    *("normalize_by_update_norm", "apply_if_finite", "skip_large_updates", "mechanize", "sam", "skip_not_finite"),
}
"""Own arrays, and numbers that are summed over several parameters."""

GLOBAL = {"flatten", "lbfgs_without_search"}

FAST = {"adamw", "lamb", "contrib.muon", "contrib.dowg", "flatten", "clip_by_global_norm"}

EVERY = ALIASES | WRAPPERS
NO_SCALARS = {"sm3", "scale_by_distance_over_gradients"}


def _abstract(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: type(s) is tuple)


def _kind(name: str) -> tuple[str, bool]:
    if name in GLOBAL:
        return "global", False
    return ("own array" if name in OWN_ARRAY | WITH_TOTALS else "elementwise"), name in WITH_TOTALS


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in sorted(EVERY)])
def test_every_alias_is_classified(name: str) -> None:
    found = js.optim.check_own_array(EVERY[name](), _abstract(ARRAYS if name in NO_SCALARS else SHAPES))
    assert (found.kind, bool(found.totals)) == _kind(name), found
    products = ("kernel", "layer/kernel") if name in ("contrib.muon", "contrib.galore") else ()
    assert found.products == products


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EVERY.keys() - GLOBAL - WITH_TOTALS - {"noisy_sgd", "add_noise"}))
def test_a_gradient_changes_the_update_of_no_other_parameter(name: str) -> None:
    """What the proof claims, tried: bit-equal updates of all others in two steps."""
    tx, shapes = EVERY[name](), ARRAYS if name in NO_SCALARS else SHAPES
    rng = np.random.default_rng(0)
    params, grads = (jax.tree.map(lambda s: rng.normal(size=s.shape).astype("f"), _abstract(shapes)) for _ in range(2))

    @jax.jit
    def two_steps(grads: Any) -> Any:
        first, state = tx.update(grads, tx.init(params), params)
        return first, tx.update(grads, state, optax.apply_updates(params, first))[0]

    before = two_steps(grads)
    changed = {**grads, "kernel": -3 * grads["kernel"]}
    for ours, others in zip(before, two_steps(changed), strict=True):
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(others), strict=True):
            if path_str(path) != "kernel":
                np.testing.assert_array_equal(x, y)


def _mixing(update: Callable[[Any], Any], state: Any = ()) -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: state, lambda grads, state, params=None: (update(grads), state))


def _stacked(grads: Any) -> Any:
    both = jnp.stack([grads["a"], grads["b"]])
    return dict(zip("ab", jnp.linalg.svd(both)[0] @ both, strict=True))


def _in_a_branch(grads: Any) -> Any:
    return jax.lax.cond(jnp.sum(grads["a"]) > 0, lambda g: {"a": g["b"], "b": g["a"]}, lambda g: g, grads)


def _in_a_loop(grads: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, g: {"a": g["b"], "b": g["a"]}, grads)


def _by_norms(grads: Any) -> Any:
    norms = jnp.stack([jnp.sum(grads["a"] ** 2), jnp.sum(grads["b"] ** 2)])
    return {"a": grads["a"] * norms[1], "b": grads["b"] * norms[0]}


MIXING = {
    "swapped": lambda g: {"a": g["b"], "b": g["a"]},
    "added": lambda g: {"a": g["a"] + g["b"], "b": g["b"]},
    "stacked": _stacked,
    "one element": lambda g: {"a": g["a"] * g["b"][0, 0], "b": g["b"]},
    "in a branch": _in_a_branch,
    "in a loop": _in_a_loop,
    "a vector of norms": _by_norms,
    "a called function": lambda g: {"a": jax.jit(lambda x, y: x @ y)(g["a"], g["b"]), "b": g["b"]},
    "a callback": lambda g: jax.pure_callback(lambda x: x, g, g),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_transform_that_mixes_parameters_is_global(name: str) -> None:
    params = _abstract({"a": (4, 4), "b": (4, 4)})
    found = js.optim.check_own_array(_mixing(MIXING[name]), params)
    assert found.kind == "global" and not found and found.reasons, found


def test_state_that_holds_all_parameters_in_one_array_is_global() -> None:
    def init(params: Any) -> Any:
        return {"all": jnp.concatenate([x.ravel() for x in jax.tree.leaves(params)])}

    tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    found = js.optim.check_own_array(tx, _abstract({"a": (4, 4), "b": (4, 4)}))
    assert found.kind == "global"
    assert "state all" in str(found)


def test_clipping_before_muon_lets_one_number_enter() -> None:
    params = _abstract({"a": (8, 4), "b": (8, 8), "bias": (8,)})
    found = js.optim.check_own_array(optax.chain(optax.clip_by_global_norm(1.0), contrib.muon(0.1)), params)
    assert str(found) == "own array; matrix products on a, b; sums over several parameters reach a, b, bias"


def test_blocks_of_a_stack_are_one_array() -> None:
    params = _abstract({"blocks": {"w": (3, 16, 24), "b": (3, 24)}, "embed": (7, 13)})
    found = js.optim.check_own_array(js.optim.per_block(contrib.muon(0.1)), params)
    assert (found.kind, found.products) == ("own array", ("blocks/w", "embed"))


def test_a_transform_that_can_not_be_traced_is_global() -> None:
    found = js.optim.check_own_array(optax.polyak_sgd(), _abstract({"w": (6, 4)}))
    assert found.kind == "global" and "could not be traced" in str(found)
