"""Classifiers of images: the batch that they take, its normalisation, and their loss.

A batch is {"images": [B, H, W, C], "labels": int[B]}. Images are uint8 from 0 to 255, or floats from 0 to 1; both are
normalised by the model, with a mean and a standard deviation for each channel. Beside them there may be

    weights        float[B] for each row; 1 by default

The loss is a `js.Mean` of nats per image, in f32; in evaluation there is a metric "accuracy" beside it.

Shape suffixes: B rows, H and W the sides of an image, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.constrain import constrain
from jaxshard.core.cross_entropy import cross_entropy
from jaxshard.core.loss import Loss, Mean
from jaxshard.core.types import PyTree

MEAN = (0.485, 0.456, 0.406)
"""The mean of ImageNet's red, green and blue, from 0 to 1."""
STDDEV = (0.229, 0.224, 0.225)
"""Their standard deviation."""


class ImageShape(NamedTuple):
    """The images that a model takes.

    Attributes:
      family: the name that errors begin with, such as "vit".
      side: height and width, in pixels.
      channels: 3 for colours.
      mean: what is taken away from each channel, from 0 to 1.
      stddev: by what each channel is then divided.
    """

    family: str
    side: int
    channels: int
    mean: tuple[float, ...]
    stddev: tuple[float, ...]

    def normalize(self, images: jax.Array) -> jax.Array:
        """Return images [B, H, W, C] as f32 with a mean near 0 and a standard deviation near 1, channel by channel.

        Raises:
          ValueError: another shape, or a dtype that is neither uint8 nor floating.
        """
        shape = (self.side, self.side, self.channels)
        dtype = jnp.result_type(images)
        floats = bool(jnp.issubdtype(dtype, jnp.floating))
        if not (floats or dtype == jnp.uint8) or np.shape(images)[1:] != shape:
            raise ValueError(
                f'{self.family}: batch["images"] must be uint8 or floats [rows, {", ".join(map(str, shape))}], got '
                f"{dtype}{list(np.shape(images))}; resize the images or build the model with another image="
            )
        scale = 1 if floats else 255
        x = images.astype(jnp.promote_types(jnp.float32, dtype) if floats else jnp.float32) / scale
        return (x - jnp.asarray(self.mean, x.dtype)) / jnp.asarray(self.stddev, x.dtype)


def image_shape(
    family: str, side: int, channels: int, mean: Sequence[float] | float | None, stddev: Sequence[float] | float | None
) -> ImageShape:
    """Make an `ImageShape` of numbers for all channels, or one for each; None for ImageNet's (grey: their means).

    Raises:
      ValueError: another number of means or standard deviations than channels, or a standard deviation that is not
        above 0.
    """

    def numbers(name: str, given: Sequence[float] | float | None, default: tuple[float, ...]) -> tuple[float, ...]:
        if given is None:
            given = default if channels == len(default) else sum(default) / len(default)
        each = (float(given),) * channels if isinstance(given, (int, float)) else tuple(given)
        if len(each) != channels or (name == "stddev" and min(each) <= 0):
            raise ValueError(f"{family}: {name} must be {channels} numbers (of stddev above 0), got {given}")
        return each

    return ImageShape(family, side, channels, numbers("mean", mean, MEAN), numbers("stddev", stddev, STDDEV))


def classifier_loss(family: str, classes: int, logits: jax.Array, batch: PyTree, *, accuracy: bool) -> Mean | Loss:
    """Compute the loss of logits [B, classes] against a batch's labels; with a metric "accuracy" if asked for.

    Raises:
      ValueError: labels or weights of another shape or dtype.
    """
    labels = batch["labels"] if isinstance(batch, Mapping) and "labels" in batch else None
    rows = logits.shape[:1]
    if labels is None or labels.shape != rows or not jnp.issubdtype(labels.dtype, jnp.integer):
        got = "none" if labels is None else f"{labels.dtype}{list(labels.shape)}"
        raise ValueError(f'{family}: batch["labels"] must be integers {list(rows)}, one for each image, got {got}')
    weights = batch.get("weights")
    if weights is not None and weights.shape != rows:
        raise ValueError(f'{family}: batch["weights"] must be numbers {list(rows)}, got {list(weights.shape)}')
    # Whole on every device: the compiler would split a few classes over a tensor axis, and gather their gradients.
    logits = constrain(logits, ("batch", None))
    weights = jnp.ones(rows, jnp.float32) if weights is None else weights.astype(jnp.float32)
    loss = Mean((weights * cross_entropy(logits, labels, where=weights != 0)).sum(), weights.sum())
    if not accuracy:
        return loss
    hits = logits.argmax(-1) == labels
    return Loss(loss, metrics={"accuracy": Mean((weights * hits).sum(), weights.sum())})


def check_images(family: str, batch: PyTree) -> Any:
    """Return the images of a batch; ValueError where it is no dict that has them."""
    if not isinstance(batch, Mapping) or "images" not in batch:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f'{family}: the batch must be a dict with "images" and "labels", got {got}')
    return batch["images"]
