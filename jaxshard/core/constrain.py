"""Sharding constraints on activations by the names of their dimensions; without a layout they do nothing.

Engines run the user's code in a context with the layout (`follow_layout`). So a model only names its dimensions, and
its code depends on neither mesh nor strategy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from jaxshard.core.cache import cache_in_force
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import spec_entry
from jaxshard.core.strategy_parts import Tensor, parts_of

_FREE = PartitionSpec.UNCONSTRAINED

# JAX compiles a function again where this differs, so that one traced on a single device is never reused on a mesh.
_current = jax.make_user_context(default_value=None)

TOKENS = "tokens"
"""The name of a dimension into which `layers/head_loss.py` flattens the rows and positions of a batch."""

CONSTRAINED = "constrained"
"""The name that `constrain` gives its results, so that `jax.checkpoint` policies can save them."""


def constrain(
    x: Shaped[Array, "*dims"], names: Sequence[str | None], *, grad: Sequence[str | None] | None = None
) -> Shaped[Array, "*dims"]:
    """Constrain the dimensions of an activation to be split as the current strategy splits these names.

    "batch" is split over the batch axes (if they divide the rows), "context" over the axes of `js.context`, and any
    other name as the rules of `js.tensor` say. "sequence" is split over the axes of `js.context` and the axes of its
    rule. None is not split. Outside of jaxshard's steps, or without such axes, `x` is returned unchanged. Under
    `js.explicit` each device has its own rows and positions, so "batch" and "context" have no effect there.

    Collectives: the compiler chooses collectives that change the sharding of `x`.

    Args:
      x: an activation of any shape, global under `js.auto`.
      names: one name, or None, for each dimension.
      grad: the names for the gradient of `x`; by default the same.

    Returns:
      `x`, with the same values.

    Raises:
      ValueError: another number of names than dimensions; a name that no rule knows; a dimension that the axis does
        not divide.

    Example:
      With sequence parallelism, the input of a column-parallel layer has all positions in the forward pass, and its
      gradient is split in the backward pass, so that partial sums are reduce-scattered:

        h = js.constrain(h, ("batch", None, None), grad=("batch", "sequence", None))    # h: [batch, seq, embed]
    """
    grad = names if grad is None else grad
    for given in (names, grad):
        if len(given) != x.ndim:
            raise ValueError(f"constrain: {len(given)} names {tuple(given)} for an array of shape {list(x.shape)}")
    activations: Activations | None = _current.value
    return x if activations is None else activations.constrain(x, names, grad)


def is_split(name: str, size: int | None = None) -> bool:
    """Return True if the current strategy splits dimensions of this name; given `size`, only if the axes divide it."""
    activations: Activations | None = _current.value
    if activations is None:
        return False
    mesh = activations.layout.mesh
    return any(
        part.rules.fate(name) == "split" and (size is None or size % axis_size(mesh, part.axis) == 0)
        for part in activations.tensors()
    )


def split_count(name: str, size: int) -> int:
    """Return the number of parts into which the current strategy splits a dimension; 1 outside of jaxshard's steps."""
    activations: Activations | None = _current.value
    return 1 if activations is None else activations.split_count(name, size)


def activations_in_force() -> Activations | None:
    """Return the `Activations` of the current layout; None outside of jaxshard's steps."""
    activations: Activations | None = _current.value
    return activations


def devices_in_force() -> list[Any]:
    """Return the devices for which the program is traced: those of the layout's mesh, or else the default device."""
    activations: Activations | None = _current.value
    if activations is not None:
        return list(activations.layout.mesh.devices.flat)
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return [default] if hasattr(default, "platform") else jax.local_devices(backend=default)[:1]


def follow_layout(layout: Layout) -> AbstractContextManager[None]:
    """Return a context in which `constrain` follows the layout."""
    context: AbstractContextManager[None] = _current(Activations(layout))
    return context


# A custom VJP: JAX's own constraint gives the cotangent the sharding of the value, and `grad` may differ.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _constrain_both_ways(forward: NamedSharding, backward: NamedSharding, x: jax.Array) -> jax.Array:
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, forward)
    return constrained


def _forward(forward: NamedSharding, backward: NamedSharding, x: jax.Array) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(x, forward), None


def _backward(forward: NamedSharding, backward: NamedSharding, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(cotangent, backward),)


_constrain_both_ways.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Activations:
    """Constrains activations as a layout says.

    Two `Activations` are equal only if they have the same `Layout` object. So JAX traces a function again for another
    layout.
    """

    layout: Layout

    def __hash__(self) -> int:
        return id(self.layout)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activations) and other.layout is self.layout

    def constrain(self, x: jax.Array, names: Sequence[str | None], grad: Sequence[str | None]) -> jax.Array:
        """Constrain the dimensions of an activation by their names under this layout; see the function `constrain`."""
        mesh, manual = self.mesh()
        if set(mesh.axis_names) <= manual:
            return x

        def sharding(names: Sequence[str | None]) -> NamedSharding:
            axes = [self.axes(name, size) for name, size in zip(names, x.shape, strict=True)]
            entries = [e if e is _FREE else spec_entry(tuple(a for a in e if a not in manual)) for e in axes]
            return NamedSharding(mesh, PartitionSpec(*entries))

        # Named, so that a remat policy can save it; the constraints that gather weights are never saved.
        named: jax.Array = checkpoint_name(_constrain_both_ways(sharding(names), sharding(grad), x), CONSTRAINED)
        return named

    def split_count(self, name: str, size: int) -> int:
        """Return into how many parts this layout splits a dimension; see the function `split_count`."""
        mesh, manual = self.mesh()
        if name not in ("batch", "context", TOKENS) and not is_split(name, size):
            return 1
        axes = self.axes(name, size)
        return 1 if axes is _FREE else axis_size(mesh, tuple(axis for axis in axes if axis not in manual))

    def mesh(self) -> tuple[Mesh, frozenset[str]]:
        """Return (the mesh to name in constraints, its manual axes).

        Inside of a `shard_map` some mesh axes are manual. A constraint can't name these axes.
        """
        inside = jax.sharding.get_abstract_mesh()
        manual = [name for name, kind in zip(inside.axis_names, inside.axis_types) if kind == AxisType.Manual]
        return (inside if manual else self.layout.mesh), frozenset(manual)  # type: ignore[return-value]

    def axes(self, name: str | None, size: int, who: str = "constrain") -> Any:
        """Return the mesh axes that split a dimension of this name, () for none.

        If the axes of rows or positions do not divide the size, return `PartitionSpec.UNCONSTRAINED`, which leaves the
        choice to the compiler.

        Args:
          name: the name of the dimension, or None.
          size: its size.
          who: the function that the user called, for error messages.
        """
        if name is None:
            return ()
        if name in ("batch", TOKENS):
            axes = self.layout.batch_axes if name == "batch" else self.layout.sum_axes
            return axes if size % axis_size(self.layout.mesh, axes) == 0 else _FREE
        of_context = self._context_axes() if name in ("context", "sequence") else ()
        # Generation often runs one new position, fewer than there are devices.
        few = name == "sequence" and cache_in_force() is not None and size % self._size_of("sequence")
        parts = [] if name == "context" or few else self.tensors()
        axes = of_context + tuple(axis for part in parts for axis in part.entry(name, size, self.layout.mesh, who))
        return _FREE if of_context and size % axis_size(self.layout.mesh, axes) else axes

    def _size_of(self, name: str) -> int:
        """Return the number of devices over which `js.tensor` splits dimensions of this name."""
        return math.prod(axis_size(self.layout.mesh, p.axis) for p in self.tensors() if p.rules.fate(name) == "split")

    def _context_axes(self) -> tuple[str, ...]:
        """Return the axes of `js.context`, without those that an enclosing `shard_map` makes manual."""
        context, (_, manual) = self.layout.context, self.mesh()
        return () if context is None else tuple(axis for axis in context.axis if axis not in manual)

    def tensors(self) -> list[Tensor]:
        """Return the `js.tensor` parts of the strategy, which split dimensions by name."""
        return [part for part in parts_of(self.layout.strategy) if isinstance(part, Tensor)]
