"""A promised collective: kind, axes, shape and dtype of its array, and how often a step issues it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxshard.core.encoded_collectives import Travel
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import Placement, split_dims
from jaxshard.core.tree import bytes_of

Shape = tuple[int, ...]

_SENT = ("int8", "uint8", "uint16")
"""Integer dtypes in which the engines send floats of fewer bits."""


@dataclass(frozen=True)
class Expected:
    """A promised collective: a collective that follows from a layout, as one device sees it.

    Attributes:
      kind: one of `found.KINDS`.
      axes: the mesh axes, in mesh order; () for any.
      shape: the shape of the full, unscattered array; None for activations, whose shapes depend on the loss function.
      dtype: the dtype that is sent; the CPU compiler sends 16-bit floats as f32. None for activations.
      least: the fewest executions per step; 0 if the compiler may leave it out.
      most: the most executions per step; None if the number depends on the loss function.
      what: the array in words, such as "gradient of w".
      unpadded: the fewest elements of the array, if the compiler may move it without its padding, or only a part of it;
        None if all elements of `shape` are moved.
      limit: the most elements of an array whose `shape` is None; None if it may have any number of elements.
      stack: the number of blocks whose executions the compiler may join into a single one, on a stacked array.
      pooled: True if only the sum of the elements of all such collectives is compared, because the compiler cuts and
        joins their arrays; False if each array is compared.
      every: 1 if it happens in every step, n if it happens once in n steps. `least` and `most` are for such a step.
      until: n if it happens only in the first n steps, 0 if it happens in all steps.
      instead_of: the `what` of another promised collective that this collective may replace, so that bytes are not
        counted twice; "" if it replaces none.

    Example:
        promised = js.plan.promise(layout, js.explicit(), loss_fn, batch)
        [(one.kind, one.axes, one.what) for one in promised.expected]
    """

    kind: str
    axes: tuple[str, ...]
    shape: Shape | None
    dtype: Any
    least: int
    most: int | None
    what: str
    unpadded: int | None = None
    limit: int | None = None
    stack: int = 1
    pooled: bool = False
    instead_of: str = ""
    every: int = 1
    until: int = 0

    @property
    def elements(self) -> tuple[int, int]:
        """The fewest and the most elements that the array may have."""
        assert self.shape is not None, self
        size = math.prod(self.shape)
        return min(size, self.unpadded or size), size

    @property
    def wire_dtype(self) -> str:
        """The dtype as a compiled program writes it, such as "bf16" or "s8"; "" for other integers and for None."""
        name = "" if self.dtype is None else str(jnp.dtype(self.dtype).name)
        if name not in _SENT and not (name and jnp.issubdtype(self.dtype, jnp.floating)):
            return ""
        return name.replace("uint", "u").replace("int", "s").replace("float", "f").replace("_", "")

    @property
    def name(self) -> str:
        """The array in words, such as "gradient of w"; all alternative forms of a promise have the same name."""
        return self.instead_of or self.what

    @property
    def is_counted(self) -> bool:
        """True if it counts in the byte total: its size is known, and it is no alternative form of another promise."""
        sized = self.shape is not None and bool(self.axes) and not self.instead_of
        return sized and self.elements[1] > 1 and bool(self.most)

    @property
    def bytes(self) -> int | None:
        """Bytes of the full array times `most`, how often it may move at most; None if the loss decides either."""
        if self.shape is None or self.most is None:
            return None
        return self.most * bytes_of(self.shape, self.dtype)


def over_several(mesh: Mesh, expected: Iterable[Expected]) -> Iterator[Expected]:
    """Remove mesh axes of size 1 from collectives, order the rest as the mesh, and drop collectives without axes."""
    for one in expected:
        if axes := tuple(axis for axis in mesh.axis_names if axis in one.axes and mesh.shape[axis] > 1):
            yield replace(one, axes=axes)


def gather_stages(
    mesh: Mesh, old: Placement, keep: Sequence[str], one: Expected, at_once: bool = True
) -> Iterator[Expected]:
    """Yield the all-gathers, one after the other, that gather an array over all its mesh axes except `keep`.

    For example an array [16] split over (x=2, y=4) is gathered over y to [8], then over x to [16]. With `at_once` it is
    gathered over (x, y) to [16].

    Args:
      mesh: the mesh.
      old: the placement of the array before it is gathered.
      keep: the mesh axes over which it stays split.
      one: the all-gather of which each stage is a copy, with its own axes and shape.
      at_once: gather over all axes of a dimension in one stage, not over one axis after the other.
    """
    shape = list(old.shard_shape(mesh))
    gone = [(dim, axis) for dim, axis in reversed(split_dims(old.store)) if axis not in keep]
    for dim, group in itertools.groupby(gone, key=lambda one: one[0]):
        axes = tuple(axis for _, axis in group)
        for stage in [axes] if at_once else [(axis,) for axis in axes]:
            shape[dim] *= axis_size(mesh, stage)
            yield replace(one, axes=stage, shape=tuple(shape))


def common_axes(one: Placement, two: Placement) -> list[str]:
    """Return the mesh axes that split the stored array along the same dimension in both placements."""
    return [axis for dim, axis in split_dims(one.store) if (dim, axis) in split_dims(two.store)]


def as_travels(one: Expected, travels: Iterable[Travel]) -> Iterator[Expected]:
    """Yield a copy of the promise `one` for each array that a `js.wire` format sends, such as codes and scales."""
    for travel in travels:
        yield replace(one, kind=travel.kind, axes=travel.axes, shape=travel.shape, dtype=travel.dtype)


def normal_shape(shape: Shape) -> Shape:
    """Return a sorted shape without dimensions of size 1, to compare shapes that a compiler transposes and squeezes.

    >>> normal_shape((8, 1, 4))
    (4, 8)
    """
    return tuple(sorted(size for size in shape if size != 1))


def joined_shapes(shape: Shape) -> Iterator[Shape]:
    """Yield a shape, and each shape in which some neighbouring dimensions are joined into one.

    >>> list(joined_shapes((2, 3, 4)))
    [(2, 3, 4), (6, 4), (24,), (2, 12)]
    """
    yield shape
    for first, last in itertools.combinations(range(len(shape) + 1), 2):
        if last - first > 1:
            yield (*shape[:first], math.prod(shape[first:last]), *shape[last:])
