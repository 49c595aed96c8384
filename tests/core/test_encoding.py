"""Numbers in fewer bytes: how far off each may be, and what becomes of odd shapes and of what is not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.core.encoding import STEPS, decode, encode, from_bits, to_bits

FORMATS = [js.wire.int8(block=4), js.wire.int8(), js.wire.fp8(block=4), js.wire.fp8(), js.wire.fp8(mantissa=3)]


def sent_and_read(x, wire):
    """What arrives of numbers, computed by one program."""
    return np.asarray(jax.jit(lambda x: decode(encode(x, wire), wire, x.size))(x))


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
    assert [one.shape for one in sent] == [(size,), (-(-size // wire.block),)]
    assert sent[0].dtype == ("int8" if wire.dtype == "int8" else "uint8")
    error = np.abs(np.asarray(decode(sent, wire, size)) - x)
    assert (error <= bound(x, wire) * (1 + 1e-5)).all()
    assert (error[x == 0] == 0).all()


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("odd", [-np.inf, np.nan])
def test_what_is_not_finite_stays_visible_in_its_block_alone(wire, odd):
    x = np.ones(3 * wire.block, np.float32)
    x[wire.block + 1] = odd
    found = sent_and_read(x, wire).reshape(3, -1)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], 1)


def test_a_very_large_number_neither_overflows_nor_vanishes():
    x = np.asarray([3e38, 1.0, 0.0], np.float32)
    for wire in FORMATS:
        np.testing.assert_allclose(sent_and_read(x, wire), [3e38, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_bits_come_back(dtype):
    x = jnp.asarray([0.1, -3, 0], dtype)
    bits = to_bits(x)
    assert jnp.issubdtype(bits.dtype, jnp.unsignedinteger) and bits.dtype.itemsize == x.dtype.itemsize
    np.testing.assert_array_equal(np.asarray(from_bits(bits, dtype)), np.asarray(x))


def test_a_checkpoint_policy_never_keeps_a_weight_that_has_travelled():
    """Each step between what is stored and a weight is one equation with a name that `STEPS` has."""
    traced = jax.make_jaxpr(lambda x: decode(encode(x, FORMATS[0]), FORMATS[0], 8))(jnp.zeros(8))
    assert [equation.primitive.name for equation in traced.eqns] == ["wire_encode", "wire_decode"]
    assert {"wire_encode", "wire_decode", "wire_bits", "wire_from_bits"} == set(STEPS)


class Halves(js.wire.Format):
    def encode(self, x):
        return x.astype(jnp.bfloat16)

    def decode(self, sent, size):
        return sent.astype(jnp.float32)


class Signs(js.wire.Format):
    """The sign of each number in a bit, and the mean magnitude of all."""

    def encode(self, x):
        return {"mean": jnp.mean(jnp.abs(x)), "negative": jnp.packbits(x < 0)}

    def decode(self, sent, size):
        return jnp.where(jnp.unpackbits(sent["negative"], count=size), -sent["mean"], sent["mean"])


def test_a_format_of_ones_own_encodes_along_the_last_dimension():
    """Also into scalars and trees; small floats are sent as their bits, whatever a compiler does with them."""
    x = np.random.default_rng(0).normal(size=(2, 3, 13)).astype(np.float32)
    (halves,), (mean, negative) = encode(jnp.asarray(x), Halves()), encode(jnp.asarray(x), Signs())
    assert (halves.dtype, halves.shape) == (jnp.uint16, (2, 3, 13))
    assert (mean.shape, negative.dtype, negative.shape) == ((2, 3), jnp.uint8, (2, 3, 2))
    found = decode([halves], Halves(), 13)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, x.astype(jnp.bfloat16).astype(np.float32))
    expected = np.where(x < 0, -1, 1) * np.abs(x).mean(-1, keepdims=True)
    np.testing.assert_allclose(decode([mean, negative], Signs(), 13), expected, rtol=1e-6)
