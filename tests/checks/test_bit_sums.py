"""The checksum of bits: every flipped bit of every dtype changes it, and so do changes that would cancel in a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.checks.bit_sums import bit_sum

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8"]
OTHERS = ["float16", "float8_e5m2", "uint32", "int16", "int8"]


@jax.jit
def sums(arrays):
    return jnp.stack([bit_sum(x) for x in arrays])


def every_flip(host):
    """The array with each of its bits flipped, one at a time."""
    for byte in range(host.nbytes):
        for bit in range(8):
            wrong = host.copy()
            wrong.reshape(-1).view(np.uint8)[byte] ^= 1 << bit
            yield wrong


def check(dtype):
    """Every single flipped bit changes the sum, and the sums of no two flips of an array are equal by chance here."""
    host = np.random.default_rng(0).integers(0, 100, (2, 3)).astype(jnp.dtype(dtype))
    arrays = np.stack([host, *every_flip(host)])
    found = np.asarray(jax.jit(jax.vmap(bit_sum))(arrays))
    assert found.dtype == np.uint32 and len(set(found.tolist())) == 1 + 8 * host.nbytes


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS])
def test_every_flipped_bit_changes_it(dtype):
    check(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_every_flipped_bit_of_wide_elements_changes_it(dtype):
    with jax.enable_x64(True):
        check(dtype)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "bool", "complex64"])
def test_dtypes_without_bytes_of_their_own(dtype):
    values = [False, True] if dtype == "bool" else [0, 1, 2, 3, 1j] if dtype == "complex64" else [0, 1, 2, 3, 7]
    arrays = np.zeros((len(values), 5), jnp.dtype(dtype))
    arrays[:, 2] = values
    assert len(set(np.asarray(sums(list(arrays))).tolist())) == len(values)


def test_keys_zeros_and_numbers_that_are_none():
    nan = np.uint32([0x7FC00000, 0x7FC00001, 0xFFC00000]).view(np.float32)
    zeros = np.float32([0.0, -0.0])
    keys = [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]
    found = np.asarray(sums([*map(jnp.asarray, [*nan, *zeros]), *keys]))
    assert len(set(found.tolist())) == 8
    assert sums([jnp.zeros((0, 3))]) == 0


def test_top_bits_that_cancel_in_a_linear_sum_and_elements_that_change_places():
    host = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    wrong = [host, -host, host[::-1], host.T.reshape(4, 6), np.roll(host, 1)]
    for first in range(6):  # signs of two elements
        other = host.copy()
        other[0, first], other[3, 2] = -other[0, first], -other[3, 2]
        wrong.append(other)
    found = np.asarray(sums(list(map(jnp.asarray, wrong))))
    assert len(set(found.tolist())) == len(wrong)


def test_it_is_the_sum_that_the_text_says():
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    total = 0
    for i, w in enumerate(x.reshape(-1).view(np.uint32).tolist()):
        h = (w + i * 0x9E3779B9) % 2**32
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        total += h ^ h >> 16
    assert int(sums([jnp.asarray(x)])[0]) == total % 2**32
