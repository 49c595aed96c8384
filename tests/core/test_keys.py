"""Row keys do not depend on which device holds the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.core.keys import advance, typed_key


def data(keys):
    return np.asarray(jax.random.key_data(keys))


@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 2**32 - 1), seed=st.integers(0, 2**32 - 1))
def test_rows_of_a_shard_have_the_keys_of_the_global_batch(first, seed):
    everything, shard = map(np.asarray, all_rows_and_last(np.uint32(first), np.uint32(seed)))
    np.testing.assert_array_equal(everything[4:], shard)
    assert len(np.unique(everything, axis=0)) == 6


@jax.jit
def all_rows_and_last(first, seed):
    """The keys of six rows, and of the last two by themselves."""
    key = advance(jax.random.wrap_key_data(jnp.stack([jnp.uint32(7), seed])), first)
    return [jax.random.key_data(js.row_keys(advance(key, skipped), 6 - skipped)) for skipped in (0, 4)]


def test_the_keys_of_steps_and_layers_do_not_meet():
    @jax.jit
    @jax.vmap
    def keys(number):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number // 4), number % 4)
        return jax.random.key_data(js.row_keys(key, 64))

    assert len(np.unique(np.asarray(keys(np.arange(16))).reshape(16 * 64, -1), axis=0)) == 16 * 64


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_any_kind_of_key(impl):
    key = jax.random.key(0, impl=impl)
    keys = jax.eval_shape(lambda key: js.row_keys(key, 3), key)
    assert keys.shape == (3,) and keys.dtype == key.dtype


def test_no_rows_and_fewer():
    assert js.row_keys(jax.random.key(0), 0).shape == (0,)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        js.row_keys(jax.random.key(0), -1)


def test_seeds_and_both_styles_are_the_same_key():
    keys = [typed_key(3), typed_key(np.int64(3)), typed_key(jax.random.PRNGKey(3)), typed_key(jax.random.key(3))]
    assert all((data(key) == data(keys[0])).all() for key in keys)
    with pytest.raises(TypeError, match=r"key must be a seed or a jax.random key, got str"):
        typed_key("3")
    with pytest.raises(TypeError, match=r"got float32\[2\]"):
        typed_key(jnp.zeros(2))
