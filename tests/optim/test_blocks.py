"""Blocks of neighbouring elements of arrays."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.optim.blocks import box_of, largest_per_block, scales_shape, spread

pytestmark = pytest.mark.fast_cases(2)

BOXES = {
    (1024, 4096): (1, 128),
    (50257, 768): (1, 192),
    (1600, 4800): (1, 150),
    (768, 12, 64): (1, 3, 64),
    (7, 7, 3, 64): (1, 1, 3, 64),
    (33, 257): (1, 129),
    (33, 127): (2, 127),
    (65, 3, 86): (1, 2, 86),
    (5000, 1): (200, 1),
    (4099,): (242,),
}


@pytest.mark.parametrize("shape", BOXES)
def test_boxes_have_128_to_256_elements(shape: tuple[int, ...]) -> None:
    box, count = box_of(shape), math.prod(scales_shape(shape))
    assert box == BOXES[shape]
    assert 128 <= math.prod(box) <= 256
    assert count <= math.prod(shape) / 128


@pytest.mark.parametrize("shape", [shape for shape in BOXES if math.prod(shape) < 100_000])
def test_scales_are_the_largest_magnitudes_of_boxes(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    scales = np.asarray(largest_per_block(jnp.asarray(x)))
    assert scales.shape == scales_shape(shape)
    expected = np.zeros(scales.shape, np.float32)
    for index in np.ndindex(*scales.shape):
        box = tuple(slice(i * length, (i + 1) * length) for i, length in zip(index, box_of(shape), strict=True))
        expected[index] = np.abs(x[box]).max()
    np.testing.assert_array_equal(scales, expected)
    wide = np.asarray(jax.jit(spread, static_argnums=1)(scales, shape))
    assert wide.shape == shape and (np.abs(x) <= wide).all()
    np.testing.assert_array_equal(largest_per_block(wide), scales)
