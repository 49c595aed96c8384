"""Rotary positions: the rotation rates of pairs of dimensions, and their scaling for longer rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RopeScaling(NamedTuple):
    """The scaling of Llama 3.1: dimensions that turn slowly turn `factor` times slower still.

    A dimension is slow if its wavelength is above `original` / `low` positions. It is fast, and does not change, if its
    wavelength is below `original` / `high`; between the two the rate is interpolated linearly in `original` /
    wavelength.

    Attributes:
      factor: how much slower, so how much longer the rows may be.
      low: low_freq_factor in Meta's code.
      high: high_freq_factor.
      original: the number of positions that the model was trained on before.

    Source: `apply_scaling` in Meta's reference code of Llama 3.1 (llama_models/llama3/reference_impl/model.py).

    Example:
        model = js.models.make("llama-1m", rope_scaling=js.models.RopeScaling(factor=32))
    """

    factor: float = 8
    low: float = 1
    high: float = 4
    original: int = 8192


class YarnScaling(NamedTuple):
    """The scaling of YaRN: slow dimensions turn `factor` times slower, and attention is sharper.

    A dimension that rotates more than `high` times over `original` positions does not change, one that rotates less
    than `low` times becomes `factor` times slower; between the two the rate goes over linearly in the number of the
    dimension. Rotated queries and keys are multiplied by `attention`, so that logits grow by its square: a softmax over
    more keys is flatter.

    Attributes:
      factor: how much slower, so how much longer the rows may be.
      low: beta_slow in published configurations.
      high: beta_fast.
      original: the number of positions that the model was trained on before.
      attention: the factor of queries and of keys; None for 0.1 ln(factor) + 1.

    Source: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2 and 3.4,
    in the form of the authors' code, with which weights are published (the paper has the ramp linear in the turns).

    Example:
        model = js.models.make("llama-1m", rope_scaling=js.models.YarnScaling(4, original=256))
    """

    factor: float
    low: float = 1
    high: float = 32
    original: int = 8192
    attention: float | None = None


class LinearScaling(NamedTuple):
    """The scaling of position interpolation: all dimensions turn `factor` times slower.

    Attributes:
      factor: how much slower, so how much longer the rows may be.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation".

    Example:
        model = js.models.make("llama-1m", rope_scaling=js.models.LinearScaling(4))
    """

    factor: float


Scaling = RopeScaling | YarnScaling | LinearScaling


def as_scaling(scaling: Scaling | float | None) -> Scaling | None:
    """Convert the argument `rope_scaling` to a scaling; a number is the factor of Llama 3.1's.

    Raises:
      TypeError: something else.
      ValueError: not factor >= 1, 0 < low < high, original >= 1 and attention above 0.
    """
    if scaling is None:
        return None
    if isinstance(scaling, (int, float)) and not isinstance(scaling, bool):
        scaling = RopeScaling(scaling)
    if not isinstance(scaling, Scaling):
        raise TypeError(
            "rope_scaling must be a factor such as 8, a js.models.RopeScaling or a YarnScaling or LinearScaling, "
            f"got {scaling!r}"
        )
    if isinstance(scaling, LinearScaling):
        if scaling.factor < 1:
            raise ValueError(f"rope_scaling: factor must be at least 1, got {scaling}")
        return scaling
    if scaling.factor < 1 or not 0 < scaling.low < scaling.high or scaling.original < 1:
        raise ValueError(
            f"rope_scaling: factor must be at least 1, 0 < low < high and original at least 1, got {scaling}"
        )
    if isinstance(scaling, YarnScaling) and scaling.attention is not None and scaling.attention <= 0:
        raise ValueError(f"rope_scaling: attention must be above 0, got {scaling.attention}")
    return scaling


def rotary_rates(dims: int, base: float, scaling: Scaling | None = None) -> NDArray[np.float64]:
    """Compute the angles per position, in radians, of the `dims` / 2 pairs of dimensions: base^(-2 i / dims), scaled.

    Source: Su et al. 2021, "RoFormer", section 3.2; `RopeScaling`, `YarnScaling` and `LinearScaling` for the scaling.
    """
    rates = base ** (-np.arange(0, dims, 2) / dims)
    if scaling is None:
        return rates
    if isinstance(scaling, LinearScaling):
        return rates / scaling.factor
    if isinstance(scaling, YarnScaling):
        share = _yarn_share(dims, base, scaling)
        return (1 - share) * rates / scaling.factor + share * rates
    turns = scaling.original * rates / (2 * math.pi)  # over the original length
    share = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)  # 0 where slow, 1 where fast
    return (1 - share) * rates / scaling.factor + share * rates


def rotary_gain(scaling: Scaling | None) -> float:
    """Return the factor of rotated queries and keys: YaRN's, or 1 for other scalings."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1 if scaling.attention is None else float(scaling.attention)


def _yarn_share(dims: int, base: float, scaling: YarnScaling) -> NDArray[np.float64]:
    """Return 1 for fast pairs of dimensions, 0 for slow ones, and a ramp between."""

    def pair_that_turns(times: float) -> float:
        return dims * math.log(scaling.original / (2 * math.pi * times)) / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(scaling.high)), 0)
    last = min(math.ceil(pair_that_turns(scaling.low)), dims - 1)
    return 1 - np.clip((np.arange(dims // 2) - first) / max(last - first, 1e-3), 0, 1)
