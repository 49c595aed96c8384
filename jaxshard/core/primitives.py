"""Tables of JAX's primitives: elementwise ones, those that only move elements, those that draw random numbers.

A primitive in none of the tables may do anything, so that proofs fail, but never succeed wrongly, if JAX renames a
primitive (except for `GENERATORS`). A test checks that each of them exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxshard.core.jaxpr import all_equations

SAME = {
    "copy", "copy_p", "device_put", "optimization_barrier", "pcast", "pvary", "sharding_constraint", "stop_gradient",
}  # fmt: skip
"""Primitives whose every output equals the input of the same index."""

RESHAPES = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"}
"""Primitives that only move or repeat elements: an array of equal elements stays one."""

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos, "div": np.divide,
    "eq": np.equal, "exp": np.exp, "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "log1p": np.log1p, "lt": np.less, "max": np.maximum,
    "min": np.minimum, "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "pow": np.power, "sign": np.sign,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "sqrt": np.sqrt, "square": np.square, "sub": np.subtract,
    "tanh": np.tanh, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": lambda x: x, "integer_pow": lambda x, y: np.float64(x) ** y,
    "select_n": lambda which, *cases: cases[int(which)],
}  # fmt: skip
"""Elementwise primitives with NumPy functions, by which proofs compute the constant values in padding."""

ELEMENTWISE = frozenset(ARITHMETIC) | {
    "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "clz", "complex", "conj", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp2", "igamma",
    "igammac", "imag", "lgamma", "logistic", "nextafter", "not", "or", "polygamma", "population_count", "real",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sinh", "tan", "xor", "zeta",
}  # fmt: skip
"""Primitives whose element i depends on element i of each argument, or on scalars."""

GENERATORS = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Primitives that draw random numbers."""


def evaluate(name: str, params: dict[str, Any], numbers: Sequence[float | None], dtype: Any) -> float | None:
    """Compute an elementwise primitive on Python numbers, rounded to `dtype`.

    Return None if this file does not know the primitive, or if the result is not finite.
    """
    if name not in ARITHMETIC or jnp.issubdtype(dtype, np.complexfloating):
        return None
    extra = {"y": params["y"]} if name == "integer_pow" else {}
    with np.errstate(all="ignore"):
        result = ARITHMETIC[name](*(np.float64(number or 0) for number in numbers), **extra)
        result = float(np.asarray(result).astype(dtype))
    return result if math.isfinite(result) else None


def draws_random_bits(program: Any) -> bool:
    """Return whether a jaxpr, or one of its inner jaxprs, draws random numbers."""
    return any(equation.primitive.name in GENERATORS for equation in all_equations(program))
