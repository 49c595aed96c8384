"""Clipping by the global norm without an axis; with one it is tested on shards, in test_zero.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxshard import optim

UPDATES = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.asarray(3.0), "none": None}


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_like_optax(max_norm: float) -> None:
    """To 1e-6."""
    ours, theirs = optim.clip_by_global_norm(max_norm), optax.clip_by_global_norm(max_norm)
    a, _ = ours.update(UPDATES, ours.init(UPDATES))
    b, _ = theirs.update(UPDATES, theirs.init(UPDATES))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_dtypes() -> None:
    updates = {"half": jnp.full((4096,), 1.0, jnp.bfloat16), "complex": jnp.asarray([3 + 4j])}
    assert optim.global_norm(updates).dtype == jnp.float32
    np.testing.assert_allclose(optim.global_norm(updates), np.sqrt(4096 + 25), rtol=1e-6)
    clipped, _ = optim.clip_by_global_norm(jnp.float32(1.0)).update(updates, optax.EmptyState())
    assert jax.tree.map(lambda x: x.dtype, clipped) == jax.tree.map(lambda x: x.dtype, updates)
    np.testing.assert_allclose(optim.global_norm(clipped), 1.0, rtol=1e-2)
