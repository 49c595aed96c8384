"""Codes of numbers from 0 to 1 that are finer the larger the numbers are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.optim import dynamic_map

from . import fast_jit

decode_magnitude, encode_magnitude, decode_signed, encode_signed = (
    fast_jit(function, static_argnums=1 if "magnitude" in function.__name__ else ())
    for function in (
        dynamic_map.decode_magnitude,
        dynamic_map.encode_magnitude,
        dynamic_map.decode_signed,
        dynamic_map.encode_signed,
    )
)
CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("bits", [7, 8])
def test_every_code_comes_back_and_they_rise_to_exactly_one(bits: int) -> None:
    codes = CODES[: 2**bits]
    numbers = np.asarray(decode_magnitude(codes, bits))
    assert numbers[0] == 0 and numbers[-1] == 1 and (np.diff(numbers) > 0).all()
    np.testing.assert_allclose(numbers[1], 10.0 ** (1 - bits), rtol=1e-6)
    np.testing.assert_array_equal(encode_magnitude(jnp.asarray(numbers), bits), codes)


@pytest.mark.parametrize("bits", [7, 8])
def test_the_nearest_code_is_taken(bits: int) -> None:
    """Against a search through all codes, for numbers over all decades; 0.1 below the smallest code it is that one."""
    x = (10 ** np.random.default_rng(0).uniform(1 - bits, 0, 4000)).astype(np.float32)
    codes = np.asarray(decode_magnitude(CODES[: 2**bits], bits), np.float64)
    taken = codes[np.asarray(encode_magnitude(jnp.asarray(x), bits))]
    np.testing.assert_allclose(np.abs(taken - x), np.abs(codes[:, None] - x).min(0), rtol=1e-4, atol=1e-9)
    assert decode_magnitude(encode_magnitude(jnp.asarray([1e-30]), bits), bits) > 0, "nothing but 0 becomes 0"


def test_signs() -> None:
    x = jnp.asarray([-1.0, -0.3, -1e-4, 0.0, 1e-4, 0.3, 1.0])
    back = decode_signed(encode_signed(x))
    np.testing.assert_array_equal(back, -back[::-1])
    np.testing.assert_allclose(back, x, rtol=0.02)
