"""Rotary positions: the rates at which pairs of dimensions turn, and their scaling for rows longer than trained on."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RopeScaling(NamedTuple):
    """The scaling of Llama 3.1: dimensions that turn slowly turn `factor` times slower still.

    A dimension is slow if its wavelength is above `original` / `low` positions, and fast, and stays as it is, if that
    is below `original` / `high`; between the two the rate goes over linearly in `original` / wavelength.

    Attributes:
      factor: how much slower, so how much longer the rows may be.
      low: low_freq_factor in Meta's code.
      high: high_freq_factor.
      original: the number of positions that the model was trained on before.

    Source: `apply_scaling` in Meta's reference code of Llama 3.1 (llama_models/llama3/reference_impl/model.py).
    """

    factor: float = 8
    low: float = 1
    high: float = 4
    original: int = 8192


def as_scaling(scaling: RopeScaling | float | None) -> RopeScaling | None:
    """Return a scaling, of which a number is the factor.

    Raises:
      TypeError: something else.
      ValueError: not factor >= 1, 0 < low < high and original >= 1.
    """
    if scaling is None:
        return None
    if isinstance(scaling, (int, float)) and not isinstance(scaling, bool):
        scaling = RopeScaling(scaling)
    if not isinstance(scaling, RopeScaling):
        raise TypeError(f"rope_scaling must be a factor such as 8 or a js.models.RopeScaling, got {scaling!r}")
    if scaling.factor < 1 or not 0 < scaling.low < scaling.high or scaling.original < 1:
        raise ValueError(
            f"rope_scaling: factor must be at least 1, 0 < low < high and original at least 1, got {scaling}"
        )
    return scaling


def rotary_rates(dims: int, base: float, scaling: RopeScaling | None = None) -> NDArray[np.float64]:
    """Compute the angles per position, in radians, of the `dims` / 2 pairs of dimensions: base^(-2 i / dims), scaled.

    Source: Su et al. 2021, "RoFormer", section 3.2; `RopeScaling` for the scaling.
    """
    rates = base ** (-np.arange(0, dims, 2) / dims)
    if scaling is None:
        return rates
    turns = scaling.original * rates / (2 * math.pi)  # over the original length
    share = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)  # 0 where slow, 1 where fast
    return (1 - share) * rates / scaling.factor + share * rates
