"""Draw images of digits: a small image classification task that needs no download."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from jaxshard.data.images import ImageArrays, Images

_GLYPHS = """
.###. ..#.. .###. ####. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# ....# ..##. #.... #.... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ..##. .###. #..#. ....# ####. ...#. .###. .####
##..# ..#.. .#... ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. #.... ....# ...#. #...# #...# ..#.. #...# ....#
.###. .###. ##### ####. ...#. .###. .###. ..#.. .###. .###.
"""

SIDE = 32


def digits(train: int = 8192, held_out: int = 1024, *, seed: int = 0) -> Images:
    """Draw coloured images of the digits 0 to 9, 32 x 32 pixels: a corpus that needs no download.

    Each image shows one of ten bitmaps of 5 x 7 points with its own rotation (up to 15 degrees), size, slant, position,
    two colours, noise, and a part of another digit at either side. Guessing has an accuracy of 10 %. The images are the
    same on every machine with the same NumPy. Takes about two seconds.

    Args:
      train: the number of images to train on.
      held_out: the number of images to evaluate on.
      seed: the random seed of the images.

    Returns:
      The images, with classes "0" to "9".

    Example:
        images = js.data.digits(train=64, held_out=16)
        source = js.data.images(images.train, batch=8, seed=0)
    """
    return _digits(train, held_out, seed)


@lru_cache(maxsize=2)
def _digits(train: int, held_out: int, seed: int) -> Images:
    random = np.random.default_rng((seed, 5, 7))
    parts = _draw(train, random), _draw(held_out, random)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.images.data)
        digest.update(part.labels.data)
    return Images(f"digits-{seed}", *parts, tuple("0123456789"), SIDE, 3, digest.hexdigest())


def _bitmaps() -> np.ndarray:
    """Return the bitmaps of all digits, f32[10, 9, 7], with a border of zeros."""
    rows = [line.split() for line in _GLYPHS.split("\n") if line]
    points = np.array([[[char == "#" for char in row[digit]] for row in rows] for digit in range(10)], np.float32)
    return np.pad(points, ((0, 0), (1, 1), (1, 1)))


def _draw(count: int, random: np.random.Generator) -> ImageArrays:
    labels = random.integers(0, 10, count).astype(np.int32)
    ink = _place(labels, random, shift=random.uniform(-3, 3, (count, 2)))
    for side in (-1, 1):
        beside = np.stack([random.uniform(-6, 6, count), side * random.uniform(17, 22, count)], axis=1)
        ink = np.maximum(ink, _place(random.integers(0, 10, count), random, shift=beside))
    # Ink is lighter than the background in every channel.
    ground, colour = (random.uniform(low, low + 0.5, (count, 1, 1, 3)).astype(np.float32) for low in (0.0, 0.5))
    pixels = ground + ink[..., None] * (colour - ground)
    pixels += random.normal(0, 0.08, pixels.shape).astype(np.float32)
    return ImageArrays((np.clip(pixels, 0, 1) * 255).round().astype(np.uint8), labels)


def _place(labels: np.ndarray, random: np.random.Generator, shift: np.ndarray) -> np.ndarray:
    """Draw one digit into each image; return the ink of each pixel, f32[count, side, side], from 0 to 1."""
    count = len(labels)
    turn, size = np.radians(random.uniform(-15, 15, count)), random.uniform(2.4, 3.6, count)
    slant = random.uniform(-0.2, 0.2, count)
    # The linear map from a pixel to a point of the bitmap: rotation, slant, and division by the size of a point.
    across = np.stack([np.cos(turn), np.sin(turn)], 1) / size[:, None]
    down = np.stack([-np.sin(turn) + slant * np.cos(turn), np.cos(turn) + slant * np.sin(turn)], 1) / size[:, None]
    at = np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2
    y, x = (at[None] - shift[:, :1]).astype(np.float32), (at[None] - shift[:, 1:]).astype(np.float32)

    def point(vector: np.ndarray, middle: float) -> np.ndarray:
        vector = vector.astype(np.float32)
        found: np.ndarray = vector[:, 0, None, None] * x[:, None, :] + vector[:, 1, None, None] * y[:, :, None]
        return found + np.float32(middle)

    return _sample(_bitmaps(), labels, point(down, 4.0), point(across, 3.0))


def _sample(bitmaps: np.ndarray, labels: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Sample the bitmaps of labels bilinearly; points outside have no ink."""
    height, width = bitmaps.shape[1:]
    row, column = np.clip(row, 0, height - 1.001), np.clip(column, 0, width - 1.001)
    top, left = row.astype(np.int32), column.astype(np.int32)
    below, right = row - top, column - left
    which = labels[:, None, None]
    ink: np.ndarray = (
        bitmaps[which, top, left] * (1 - below) * (1 - right)
        + bitmaps[which, top, left + 1] * (1 - below) * right
        + bitmaps[which, top + 1, left] * below * (1 - right)
        + bitmaps[which, top + 1, left + 1] * below * right
    )
    return ink
