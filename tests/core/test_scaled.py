"""Numbers in fewer bytes: how far off each may be, and what becomes of odd shapes and of what is not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.core.scaled import STEPS, decode, encode, from_bits, to_bits

FORMATS = [js.wire.int8(block=4), js.wire.int8(), js.wire.fp8(block=4), js.wire.fp8(), js.wire.fp8(mantissa=3)]


def bound(x, wire):
    """The largest error that is stated of each number."""
    size = x.shape[-1]
    blocks = np.pad(np.abs(x), (0, -size % wire.block)).reshape(-1, wire.block)
    largest = np.repeat(blocks.max(1), wire.block)[:size]
    if wire.dtype == "int8":
        return largest / 254
    if wire.dtype == "float8_e3m4":
        return np.maximum(np.abs(x) / 32, largest / 15.5 / 128)
    return np.maximum(np.abs(x) / 16, largest / 448 / 1024)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(FORMATS), st.sampled_from([1, 5, 300]), st.integers(-20, 20), st.integers(0, 2**31), st.floats(0, 1)
)
def test_no_number_is_off_by_more_than_is_stated(wire, size, exponent, seed, zeros):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=size) * 10.0 ** rng.uniform(-4, 4, size) * 10.0**exponent).astype(np.float32)
    x[rng.random(size) < rng.random()] = 0
    sent = encode(jnp.asarray(x), wire)
    assert sent.values.shape == (size,) and sent.scales.shape == (-(-size // wire.block),)
    assert sent.values.dtype == wire.carrier
    error = np.abs(np.asarray(decode(sent, wire)) - x)
    assert (error <= bound(x, wire) * (1 + 1e-5)).all()
    assert (error[x == 0] == 0).all()


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("odd", [-np.inf, np.nan])
def test_what_is_not_finite_stays_visible_in_its_block_alone(wire, odd):
    x = np.ones(3 * wire.block, np.float32)
    x[wire.block + 1] = odd
    found = np.asarray(decode(encode(jnp.asarray(x), wire), wire)).reshape(3, -1)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], 1)


def test_a_very_large_number_neither_overflows_nor_vanishes():
    x = jnp.asarray([3e38, 1.0, 0.0], jnp.float32)
    for wire in FORMATS:
        np.testing.assert_allclose(decode(encode(x, wire), wire), [3e38, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_bits_come_back(dtype):
    x = jnp.asarray([0.1, -3, 0], dtype)
    bits = to_bits(x)
    assert jnp.issubdtype(bits.dtype, jnp.unsignedinteger) and bits.dtype.itemsize == x.dtype.itemsize
    np.testing.assert_array_equal(np.asarray(from_bits(bits, dtype)), np.asarray(x))


def test_a_checkpoint_policy_never_keeps_a_weight_that_has_travelled():
    """Each step between what is stored and a weight is one equation with a name that `STEPS` has."""
    traced = jax.make_jaxpr(lambda x: decode(encode(x, FORMATS[0]), FORMATS[0]))(jnp.zeros(8))
    assert [equation.primitive.name for equation in traced.eqns] == ["wire_scales", "wire_values", "wire_decode"]
    assert {"wire_scales", "wire_values", "wire_decode", "wire_bits", "wire_from_bits"} == set(STEPS)
