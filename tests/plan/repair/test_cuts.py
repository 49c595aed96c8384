"""Dimensions that an operation cuts elsewhere than between two devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxshard.plan.repair.cuts import cut_sizes


@pytest.mark.parametrize(
    ("shape", "fn", "sizes"),
    [
        ((4, 36), lambda x: x.reshape(4, 3, 12), {36}),
        ((4, 3, 12), lambda x: x.reshape(4, 36), {36}),
        ((4, 48), lambda x: x.reshape(4, 4, 12), set()),
        ((4, 96), lambda x: x.reshape(4, 3, 4, 8), {96}),
        ((4, 36), lambda x: x.reshape(4, 1, 36), set()),
        ((3, 5, 36), lambda x: x.reshape(15, 36), {15}),
        ((4, 96), lambda x: jnp.split(x, 3, 1)[1], {96}),
        ((4, 96), lambda x: x[:, :32], {96}),
        ((4, 32), lambda x: jnp.concatenate([x, x], 1), {64}),
        ((4, 32), lambda x: x[:, ::-1], {32}),
        ((4, 32), lambda x: jnp.tanh(x).T, set()),
    ],
)
def test_dimensions_that_are_cut(shape, fn, sizes):
    eqns = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr.eqns
    assert {size for eqn in eqns for size in cut_sizes(eqn, 2)} == sizes
