"""Model FLOPs: the matrix products and convolutions that a function calls for, counted in its jaxpr."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def model_flops(fn: Callable, *abstract_args: Any) -> int:
    """FLOPs of `fn` on arrays of these shapes: two for every multiply-add of a matrix product or convolution.

    Nothing is computed and no device is touched; the arguments may be `jax.ShapeDtypeStruct`. The body of a `scan`
    counts as often as it runs, of several branches the dearest counts, and per-device code (`shard_map`) counts on
    every device. Elementwise work, reductions, gathers and collectives count nothing. What a `custom_vjp` or a remat
    adds to a backward pass is counted when `fn` contains that backward pass.

    Raises:
      ValueError: a `while` loop around matrix products, whose number of trips is not known, or a kernel without a cost
        estimate.
    """
    return _flops(jax.make_jaxpr(fn)(*abstract_args).jaxpr)


def train_flops(fn: Callable, *abstract_args: Any) -> int:
    """FLOPs of a training step by convention: three times the forward pass `fn`.

    A backward pass computes two products of the same size for every product of the forward pass, one for the inputs and
    one for the weights. Recomputation (remat) is left out on purpose: model FLOPs measure useful work, and MFU must not
    reward doing it twice. Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    return 3 * model_flops(fn, *abstract_args)


def _flops(jaxpr: core.Jaxpr) -> int:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return 2 * _size(equation) * _extent(equation.invars[0], contracting)
    if name == "ragged_dot_general":
        (contracting, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return 2 * _size(equation) * _extent(equation.invars[0], contracting)
    if name == "conv_general_dilated":
        # The kernel's own input features: with feature groups these are already those of one group.
        _, features, *spatial = params["dimension_numbers"].rhs_spec
        return 2 * _size(equation) * _extent(equation.invars[1], (features, *spatial))
    if name == "scan":
        return params["length"] * _flops(params["jaxpr"].jaxpr)
    if name == "cond":
        return max(_flops(branch.jaxpr) for branch in params["branches"])
    if name == "shard_map":
        manual = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        return manual * _flops(params["jaxpr"])
    if name == "pallas_call":
        return _kernel(params)
    inner = sum(_flops(jaxpr) for jaxpr in _inner(params))
    if name == "while" and inner:
        raise ValueError(
            "model_flops: a while loop with matrix products in it runs an unknown number of times; "
            "use lax.scan or lax.fori_loop with constant bounds"
        )
    return inner


def _size(equation: core.JaxprEqn) -> int:
    output: Any = equation.outvars[0].aval
    return output.size


def _extent(variable: Any, dims: tuple[int, ...]) -> int:
    return math.prod(variable.aval.shape[dim] for dim in dims)


def _kernel(params: dict[str, Any]) -> int:
    estimate = params.get("cost_estimate")
    if estimate is None:
        raise ValueError(
            "model_flops: a pallas_call that does not say what it costs; pass cost_estimate=pl.CostEstimate(...) to it"
        )
    return int(estimate.flops)


def _inner(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The jaxprs that an equation calls once: jit, remat, and the forward function of custom_jvp and custom_vjp."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                found.append(item)
    return found
