"""Model FLOPs: count the matrix products and convolutions in a function's jaxpr.

Counting in the jaxpr, not in the compiled program, gives the work that the model asks for, the same on every mesh and
compiler. A product `[4, 8] @ [8, 16]` is one equation and 2 * 4 * 16 * 8 FLOPs:

    c:f32[4,16] = dot_general[dimension_numbers=(([1], [0]), ([], []))] a b
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxshard.core.compat import contracted_kernel_dims, newly_manual_axes
from jaxshard.core.counting import count_formulas


def model_flops(fn: Callable[..., Any], *abstract_args: Any) -> int:
    """Count the FLOPs of `fn` on arrays of these shapes: two for every multiply-add of a product or convolution.

    Nothing is computed and no device is touched. The body of a `scan` counts once per iteration, a conditional counts
    its most expensive branch, and per-device code (`shard_map`) counts on every device. Elementwise operations,
    reductions, gathers and collectives count as zero. What a `custom_vjp` or a remat adds to a backward pass is counted
    when `fn` contains that backward pass. `js.attention` counts as full attention without a mask, on every platform.

    Args:
      fn: any function that JAX can trace; for a training step, a function that calls `jax.grad`.
      *abstract_args: its arguments; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
      FLOPs of one call, over all devices together.

    Raises:
      ValueError: a `while` loop around matrix products, whose number of trips is not known, or a kernel without a cost
        estimate.

    Example:
      >>> x, w = jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((8, 16), "float32")
      >>> model_flops(lambda x, w: x @ w, x, w)
      1024
    """
    with count_formulas():
        return jaxpr_flops(jax.make_jaxpr(fn)(*abstract_args).jaxpr)


def train_flops(fn: Callable[..., Any], *abstract_args: Any) -> int:
    """Count the FLOPs of a training step by convention: three times those of the forward pass.

    A backward pass computes two products of the same size for every product of the forward pass, one for the inputs and
    one for the weights. Recomputation (remat) is left out on purpose: model FLOPs measure useful work, and MFU must not
    reward doing it twice. Source: Chowdhery et al. 2022, "PaLM", appendix B.

    Args:
      fn: the forward pass, such as the loss function.
      *abstract_args: its arguments; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
      FLOPs of one step, over all devices together.

    Raises:
      ValueError: a `while` loop around matrix products, or a kernel without a cost estimate.

    Example:
        js.plan.train_flops(loss_fn, params, batch, key)    # of one step, over all devices together
    """
    return 3 * model_flops(fn, *abstract_args)


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """Count the FLOPs of a traced function, as `model_flops` does; raise the same ValueError."""
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: JaxprEqn) -> int:
    params = equation.params
    match equation.primitive.name:
        # A product has one multiply-add per element of the result and of the dimensions that it contracts.
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            return _product(equation, equation.invars[0], contracted)
        case "ragged_dot_general":
            (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
            return _product(equation, equation.invars[0], contracted)
        case "conv_general_dilated":
            return _product(equation, equation.invars[1], contracted_kernel_dims(params))
        case "scan":
            return int(params["length"]) * jaxpr_flops(params["jaxpr"].jaxpr)
        case "cond":
            return max(jaxpr_flops(branch.jaxpr) for branch in params["branches"])
        case "shard_map":
            # Shapes inside are per device. A nested shard_map multiplies only by the axes that it adds.
            devices: int = math.prod(params["mesh"].shape[axis] for axis in newly_manual_axes(params))
            return devices * jaxpr_flops(params["jaxpr"])
        case "pallas_call":
            return _estimated(params)
    # Inner jaxprs that run once: jit, remat, and the forward functions of custom_jvp and custom_vjp.
    flops = sum(jaxpr_flops(inner) for inner in jaxprs_in_params(params))
    if equation.primitive.name == "while" and flops:
        raise ValueError(
            "model_flops: a while loop with matrix products in it runs an unknown number of times; "
            "use lax.scan or lax.fori_loop with constant bounds"
        )
    return flops


def _product(equation: JaxprEqn, operand: Any, contracted: tuple[int, ...]) -> int:
    result: Any = equation.outvars[0].aval
    multiply_adds: int = result.size * math.prod(operand.aval.shape[dim] for dim in contracted)
    return 2 * multiply_adds


def _estimated(params: dict[str, Any]) -> int:
    """Return the FLOPs of a Pallas kernel's cost estimate; raise ValueError if it has none."""
    estimate = params.get("cost_estimate")
    if estimate is None:
        raise ValueError(
            "model_flops: a pallas_call that does not say what it costs; pass cost_estimate=pl.CostEstimate(...) to it"
        )
    return int(estimate.flops)
