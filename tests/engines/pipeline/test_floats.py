"""The floating part of a tree of activations, taken out and put back."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.engines.pipeline.floats import fill, floats_of

X = {"h": jnp.ones(2), "position": jnp.arange(2), "seen": jnp.array(True), "half": jnp.ones(1, jnp.bfloat16)}


def test_only_floats_are_leaves():
    assert [x.dtype for x in jax.tree.leaves(floats_of(X))] == [jnp.float32, jnp.bfloat16]
    assert floats_of(X)["position"] is None and floats_of(X)["seen"] is None


def test_filling_puts_new_floats_among_the_others():
    doubled = jax.tree.map(lambda x: 2 * x, floats_of(X))
    got = fill(doubled, X)
    assert jax.tree.structure(got) == jax.tree.structure(X)
    np.testing.assert_array_equal(got["h"], [2, 2])
    assert got["position"] is X["position"] and got["seen"] is X["seen"]


def test_an_array_alone_is_a_tree_too():
    assert floats_of(jnp.arange(3)) is None
    np.testing.assert_array_equal(fill(None, jnp.arange(3)), [0, 1, 2])
