"""Find the roles of a kernel's dimensions from its layer, for Flax's DenseGeneral, Einsum and convolutions.

The shape of a kernel does not say it: a kernel [512, 8, 64] may project a vector to 8 heads, or be a convolution over
512 positions. The layer's arguments say it. `js.tensor` needs it to split a kernel along its output dimensions or its
contracted (summed over) dimensions (`jaxshard.core.rules.kernel_names`), and never along the window of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flax import linen as nn

from jaxshard.adapt.compat import Names, Path
from jaxshard.core.tree import CONTRACTED, SPATIAL


def contracted_in_calls(found: dict[Path, Names]) -> Callable[..., Any]:
    """Make a Linen interceptor that records which dimensions of each kernel are contracted (summed over) by its layer.

    Only DenseGeneral, Einsum and convolution layers are recorded. A kernel [embed, heads, head_dim] that contracts
    "embed" is recorded as (CONTRACTED, None, None), one of a convolution as (SPATIAL, SPATIAL, CONTRACTED, None).

    Args:
      found: the dict {path of a kernel: `CONTRACTED`, `SPATIAL` or None for each dimension}, which is filled while the
        model runs.
    """

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if context.method_name == "__call__":
            if isinstance(layer, nn.DenseGeneral):
                _note(found, layer.path, (CONTRACTED,) * _count(layer.axis) + (None,) * _count(layer.features))
            elif isinstance(layer, nn.Einsum):
                equation = kwargs.get("einsum_str") or (args[1] if len(args) > 1 else layer.einsum_str)
                _note(found, layer.path, _names_in_equation(equation))
            elif isinstance(layer, (nn.Conv, nn.ConvLocal, nn.ConvTranspose)):
                _note(found, layer.path, _names_of_convolution(layer))
        return next_fun(*args, **kwargs)

    return intercept


def contracted_in_modules(modules: Iterable[tuple[Path, Any]]) -> dict[Path, Names]:
    """Return which dimensions of each kernel are contracted (summed over) by its NNX layer.

    Only LinearGeneral, Einsum and convolution layers are looked at.

    Args:
      modules: (path, module) of all submodules.

    Returns:
      {path of a kernel: `CONTRACTED`, `SPATIAL` or None for each dimension}.
    """
    from flax import nnx  # imported lazily: it imports IPython, which Linen models do not need

    found: dict[Path, Names] = {}
    for path, layer in modules:
        if isinstance(layer, nnx.LinearGeneral):
            _note(found, path, (CONTRACTED,) * len(layer.in_features) + (None,) * len(layer.out_features))
        elif isinstance(layer, nnx.Einsum):
            _note(found, path, _names_in_equation(layer.einsum_str))
        elif isinstance(layer, (nnx.Conv, nnx.ConvTranspose)):
            _note(found, path, _names_of_convolution(layer))
    return found


def _note(found: dict[Path, Names], path: Path, names: Names) -> None:
    if names:
        found[(*path, "kernel")] = names


def _count(dims: Any) -> int:
    return len(dims) if isinstance(dims, (tuple, list)) else 1


def _names_of_convolution(layer: Any) -> Names:
    """Return the names for a kernel [*window, inputs, outputs], or [*window, outputs, inputs] if it is transposed."""
    channels = (None, CONTRACTED) if getattr(layer, "transpose_kernel", False) else (CONTRACTED, None)
    return (SPATIAL,) * _count(layer.kernel_size) + channels


def _names_in_equation(equation: str | None) -> Names:
    """Return which dimensions of an einsum's second operand (the kernel) are summed over; () if the equation has "...".

    For example "BTD,DNH->BTNH" -> (CONTRACTED, None, None).
    """
    operands, _, result = (equation or "").replace(" ", "").partition("->")
    _, _, kernel = operands.partition(",")
    return () if "." in kernel else tuple(None if letter in result else CONTRACTED for letter in kernel)
