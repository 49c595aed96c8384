"""Rotary positions: the rotation rates of pairs of dimensions, and their scaling for longer rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RopeScaling(NamedTuple):
    """The scaling of Llama 3.1: pairs of dimensions that rotate slowly rotate `factor` times slower still.

    A pair rotates slowly if its wavelength is above `original` / `low` positions. It rotates fast, and does not change,
    if its wavelength is below `original` / `high`. Between these two wavelengths the rate is interpolated linearly in
    `original` / wavelength.

    Attributes:
      factor: how many times slower slow pairs rotate, and so how many times longer rows may be.
      low: low_freq_factor in Meta's code.
      high: high_freq_factor in Meta's code.
      original: the length of rows in training before the scaling.

    Source: `apply_scaling` in Meta's reference code of Llama 3.1 (llama_models/llama3/reference_impl/model.py).

    Example:
        model = js.models.make("llama-1m", rope_scaling=js.models.RopeScaling(factor=32))
    """

    factor: float = 8
    low: float = 1
    high: float = 4
    original: int = 8192


class YarnScaling(NamedTuple):
    """The scaling of YaRN: slow pairs of dimensions rotate `factor` times slower, and attention is sharper.

    A pair that rotates more than `high` times over `original` positions does not change; a pair that rotates less than
    `low` times becomes `factor` times slower. Between the two the change is linear in the index of the pair. Rotated
    queries and keys are multiplied by `attention`, so that logits grow by its square, since a softmax over more keys is
    flatter.

    Attributes:
      factor: how many times slower slow pairs rotate, and so how many times longer rows may be.
      low: beta_slow in published configurations.
      high: beta_fast in published configurations.
      original: the length of rows in training before the scaling.
      attention: the factor of queries and of keys; None for 0.1 ln(factor) + 1.

    Source: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2 and 3.4,
    as in the authors' code, for which weights are published (in the paper the change is linear in the number of
    rotations, not in the index).

    Example:
        model = js.models.make("llama-1m", rope_scaling=js.models.YarnScaling(4, original=256))
    """

    factor: float
    low: float = 1
    high: float = 32
    original: int = 8192
    attention: float | None = None


class LinearScaling(NamedTuple):
    """The scaling of position interpolation: all pairs of dimensions rotate `factor` times slower.

    Attributes:
      factor: how many times slower pairs rotate, and so how many times longer rows may be.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation".

    Example:
        model = js.models.make("llama-1m", rope_scaling=js.models.LinearScaling(4))
    """

    factor: float


Scaling = RopeScaling | YarnScaling | LinearScaling


def as_scaling(scaling: Scaling | float | None) -> Scaling | None:
    """Check a model's `rope_scaling`, and convert a number to a `RopeScaling` with this factor.

    Raises:
      TypeError: neither a scaling, nor a number, nor None.
      ValueError: a factor or `original` below 1, an `attention` that is not positive, or not 0 < low < high.
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
    """Compute the angle per position of every pair i of dimensions, in radians: base^(-2 i / dims), then scaled.

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
    """Return the factor by which rotated queries and keys are multiplied: 1 except for YaRN."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1 if scaling.attention is None else float(scaling.attention)


def _yarn_share(dims: int, base: float, scaling: YarnScaling) -> NDArray[np.float64]:
    """Return how much of its unscaled rate each pair of dimensions keeps, [dims / 2]: 1 if fast, 0 if slow."""

    def pair_that_turns(times: float) -> float:
        return dims * math.log(scaling.original / (2 * math.pi * times)) / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(scaling.high)), 0)
    last = min(math.ceil(pair_that_turns(scaling.low)), dims - 1)
    return 1 - np.clip((np.arange(dims // 2) - first) / max(last - first, 1e-3), 0, 1)
