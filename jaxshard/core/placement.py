"""The placement of one array: `View` (its stored shape) and `Placement` (the mesh axes that split each dimension).

A view pads an array with zeros and then reshapes it. Padding makes a dimension divisible. f32[10] over 4 devices:

    logical [10]    0 1 2 3 4 5 6 7 8 9
    stored  [12]    0 1 2 | 3 4 5 | 6 7 8 | 9 . .         spec ("data"), a "|" between devices

The reshape puts stacked blocks into pipeline order: [L, ...] becomes [chunks, p, per stage, ...], whose second
dimension is split over the p devices of the pipeline. With L = 7, p = 2 and 2 chunks there are 4 stages of 2 blocks:

    logical [7]            0 1 2 3 4 5 6
    padded  [8]            0 1 2 3 4 5 6 .
    stored  [2, 2, 2]                 device 0    device 1
                           chunk 0     0 1    ->   2 3      stages 0 and 1
                           chunk 1     4 5    ->   6 .      stages 2 and 3

Consecutive stages are on consecutive devices, as interleaved schedules need it, and still it is a plain reshape:
nothing is permuted, and dropping the padding of the flattened array gives the blocks in model order again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.tree import Leaf, bytes_of
from jaxshard.core.types import AxisName


@dataclass(frozen=True)
class View:
    """The stored shape of an array: padded with zeros at the end of its dimensions, then reshaped.

    Only the first dimension may be stored as several, for blocks in pipeline order (see the drawing at the top of this
    file).

    Attributes:
      logical: the shape in the model.
      padded: the shape after padding, at least as large in every dimension.
      stored: the stored shape, `len(logical) + extra_dims` dimensions with as many elements as `padded`.
      extra_dims: the number of dimensions that unfolding the first dimension adds.

    Example:
        view = js.View(logical=(7, 64), padded=(8, 64), stored=(2, 2, 2, 64), extra_dims=2)
        view.invert(view.apply(x)) == x     # f32[7, 64] -> f32[2, 2, 2, 64] -> f32[7, 64]
    """

    logical: tuple[int, ...]
    padded: tuple[int, ...]
    stored: tuple[int, ...]
    extra_dims: int = 0

    @property
    def is_padded(self) -> bool:
        return self.padded != self.logical

    def apply(self, x: Shaped[Array, "*logical"]) -> Shaped[Array, "*stored"]:
        """Pad and reshape an array from its logical shape to its stored shape."""
        if self.is_padded:
            x = jnp.pad(x, [(0, wide - size) for size, wide in zip(self.logical, self.padded)])
        return x.reshape(self.stored) if self.stored != self.padded else x

    def invert(self, x: Shaped[Array, "*stored"]) -> Shaped[Array, "*logical"]:
        """Reshape a stored array and drop its padding, to get the array in its logical shape."""
        x = x.reshape(self.padded) if self.stored != self.padded else x
        return x[tuple(slice(size) for size in self.logical)] if self.is_padded else x

    def clear_padding(self, x: Shaped[Array, "*stored"]) -> Shaped[Array, "*stored"]:
        """Set the padding of a stored array to zero, elementwise, so that a sharded array needs no communication."""
        if not self.is_padded:
            return x
        inside = jnp.ones((), bool)
        for dim, size in enumerate(self.logical):
            if size != self.padded[dim]:
                inside &= jax.lax.broadcasted_iota(jnp.int32, self.padded, dim) < size
        return jnp.where(inside.reshape(self.stored), x, jnp.zeros((), x.dtype))

    def logical_dim(self, stored_dim: int) -> int:
        """Return the logical dimension that a stored dimension belongs to.

        For [7, 64] stored as [2, 2, 2, 64], the stored dimensions 0, 1 and 2 belong to dimension 0, and 3 to 1.
        """
        return max(0, stored_dim - self.extra_dims)

    def stored_dim(self, logical_dim: int) -> int:
        """Return the stored dimension of a logical dimension, the last one if there are several.

        For [7, 64] stored as [2, 2, 2, 64], the dimensions 0 and 1 are stored as 2 and 3.
        """
        return logical_dim + self.extra_dims

    def unfold_first(self, sizes: tuple[int, ...]) -> View:
        """Return a view that stores the first dimension as several, padded to the product of their sizes.

        With the sizes (2, 2, 2) an array [7, 64] is stored as [2, 2, 2, 64].
        """
        assert not self.extra_dims, "the first dimension is unfolded once"
        padded = (math.prod(sizes), *self.padded[1:])
        return View(self.logical, padded, (*sizes, *padded[1:]), len(sizes) - 1)

    def drop_first(self) -> View:
        """Return the view of one slice along the first logical dimension, such as one block of a stack."""
        return View(self.logical[1:], self.padded[1:], self.stored[1 + self.extra_dims :])


@dataclass(frozen=True)
class Placement:
    """The sharding of one array in one role (parameter, gradient, optimizer state, model state or batch).

    Attributes:
      view: the array's stored shape.
      use: the PartitionSpec in computation, one entry per logical dimension.
      store: the PartitionSpec in storage, between steps, one entry per stored dimension. If it splits more than `use`,
        an engine issues an all-gather before the computation.
      why: why `js.shard` left the array replicated, as text for people; "" if it is split.
      rule: the rule of `js.tensor` that decided about the array, for people; "" without one.
      owned: "" for most arrays. An optimizer with owners (`Layout.owners`) stores the states of several matrices as one
        stack, which `view` and `store` do not describe; this text says to people where the stack is.
      memory: the memory kind of the stored array, such as "pinned_host"; "" is the device's own memory.

    Example:
      A weight f32[1024, 4096] under `js.compose(js.fsdp("data"), js.tensor())` is stored split over both axes, and used
      split over "tensor" only:

        placement.store    # PartitionSpec("data", "tensor")
        placement.use      # PartitionSpec(None, "tensor")
    """

    view: View
    use: PartitionSpec
    store: PartitionSpec
    why: str = ""
    rule: str = ""
    owned: str = ""
    memory: str = ""

    def split(self, dim: int, names: AxisName) -> Placement:
        """Split the stored dimension `dim` over one or several mesh axes, minor to the axes that split it already."""
        return replace(self, store=_add_axes(self.store, dim, names), why="")

    def use_split(self, dim: int, names: AxisName) -> Placement:
        """Split the logical dimension `dim` over mesh axes in computation (`use`), which needs no gather over them."""
        return replace(self, use=_add_axes(self.use, dim, names))

    def pad(self, dim: int, size: int) -> Placement:
        """Pad the stored dimension `dim` with zeros at its end, to `size` elements."""
        dim = _check_dim(self.view.stored, dim, "padded")
        view, logical_dim = self.view, self.view.logical_dim(dim)
        assert view.stored[dim] == view.padded[logical_dim], "a dimension that was unfolded is not padded again"
        padded = (*view.padded[:logical_dim], size, *view.padded[logical_dim + 1 :])
        stored = (*view.stored[:dim], size, *view.stored[dim + 1 :])
        return replace(self, view=View(view.logical, padded, stored, view.extra_dims))

    def unfold_first(self, sizes: tuple[int, ...]) -> Placement:
        """Store the first dimension as several dimensions of these sizes. No axis may split it yet.

        With the sizes (2, 2, 2) an array [7, 64] is stored as [2, 2, 2, 64].
        """
        assert self.store[0] is None, self
        more = (None,) * (len(sizes) - 1)
        return replace(self, view=self.view.unfold_first(sizes), store=PartitionSpec(*more, *self.store))

    def resize(self, dim: int, size: int) -> Placement:
        """Return the placement of a chunk of this array, with `size` elements along `dim` and no padding there."""
        view = self.view
        assert not view.extra_dims, "blocks in pipeline order have no chunks"

        def resized(shape: tuple[int, ...]) -> tuple[int, ...]:
            return (*shape[:dim], size, *shape[dim + 1 :])

        return replace(self, view=View(resized(view.logical), resized(view.padded), resized(view.stored)))

    def drop_first(self) -> Placement:
        """Return the placement of one slice along the first logical dimension, such as one block of a stack."""
        use, store = PartitionSpec(*self.use[1:]), PartitionSpec(*self.store[1 + self.view.extra_dims :])
        return replace(self, view=self.view.drop_first(), use=use, store=store)

    def of_blocks(self, counts: tuple[int, ...], mesh: Mesh) -> Placement | None:
        """Return the placement of an array with one value per block of this array's elements, such as 8-bit scales.

        A block and its value are on the same device. The exception are axes that would cut a block: they split another
        dimension that they divide, or none.

        Args:
          counts: the shape of the array of values: the number of blocks along each dimension.
          mesh: the mesh of the layout.

        Returns:
          The placement; None if `counts` can't be numbers of blocks, or if this array is padded or unfolded along a
          dimension with several elements per block.
        """
        view, sizes = self.view, self.view.logical
        if len(counts) != len(sizes) or counts == sizes or math.prod(counts) < 2:
            return None
        blocked = [dim for dim, count in enumerate(counts) if count != sizes[dim]]
        if any(counts[dim] > sizes[dim] or view.padded[dim] != sizes[dim] for dim in blocked):
            return None
        if view.extra_dims and 0 in blocked:
            return None

        def numbers(shape: tuple[int, ...], extra_dims: int) -> tuple[int, ...]:
            return tuple(
                counts[dim - extra_dims] if dim - extra_dims in blocked else size for dim, size in enumerate(shape)
            )

        stored, specs, moved = numbers(view.stored, view.extra_dims), list(self.store), list[str]()
        for dim in map(view.stored_dim, blocked):
            if not _splits_evenly(view.stored[dim], stored[dim], axis_size(mesh, specs[dim])):
                moved += axis_names(specs[dim])
                specs[dim] = None
        store = PartitionSpec(*specs)
        parts = axis_size(mesh, tuple(moved))
        other = (d for d, size in enumerate(stored) if moved and size % (axis_size(mesh, store[d]) * parts) == 0)
        for dim in list(other)[:1]:
            store = _add_axes(store, dim, tuple(moved))
        of_numbers = View(counts, numbers(view.padded, 0), stored, view.extra_dims)
        return replace(self, view=of_numbers, use=PartitionSpec(*(None,) * len(counts)), store=store)

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Return the sharding of the stored array."""
        return NamedSharding(mesh, self.store, memory_kind=self.memory or None)

    def on_device(self) -> Placement:
        """Return the same placement, but in the device's own memory."""
        return replace(self, memory="")

    def shard_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the stored array on one device."""
        return tuple(size // axis_size(mesh, entry) for size, entry in zip(self.view.stored, self.store, strict=True))

    def bytes_per_device(self, mesh: Mesh, dtype: object) -> int:
        """Return the bytes of the stored array on one device, without the compiler's padding to tiles."""
        return bytes_of(self.shard_shape(mesh), dtype)


def _splits_evenly(size: int, count: int, parts: int) -> bool:
    """Return whether `size` elements in `count` blocks can be split over `parts` devices without cutting a block."""
    return parts == 1 or (size % count == 0 and count % parts == 0)


def whole(leaf: Leaf) -> Placement:
    """Return the placement from which every strategy starts: the array in its logical shape, replicated."""
    spec = PartitionSpec(*(None,) * len(leaf.shape))
    return Placement(View(leaf.shape, leaf.shape, leaf.shape), spec, spec)


def spec_entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Return the entry of a PartitionSpec for a dimension that is split over these axes.

    () gives None, ("data",) gives "data", and several names stay a tuple.
    """
    return None if not names else names[0] if len(names) == 1 else names


def _add_axes(spec: PartitionSpec, dim: int, names: AxisName) -> PartitionSpec:
    """Split a dimension of a spec over more axes, minor to the axes that split it already."""
    entries = list(spec)
    dim = _check_dim(entries, dim, "split")
    entries[dim] = spec_entry(axis_names(entries[dim]) + axis_names(names))
    return PartitionSpec(*entries)


def _check_dim(dims: Sequence[object], dim: int, done: str) -> int:
    """Return `dim` as an index from 0 on; raise IndexError if there is no such dimension.

    Args:
      dims: anything with one element per dimension.
      dim: the dimension, counted from the end if it is negative.
      done: what was to be done with it, for the error: "split" or "padded".
    """
    if not -len(dims) <= dim < len(dims):
        raise IndexError(f"dim {dim} of an array with {len(dims)} dimensions can't be {done}; test leaf.shape first")
    return dim % len(dims)


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Return all mesh axes of a spec, in the order of its dimensions."""
    return tuple(name for entry in spec if entry is not None for name in axis_names(entry))


def only_axes(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """Drop the mesh axes of a spec that are not among `axes`."""
    return PartitionSpec(*(e and spec_entry(tuple(name for name in axis_names(e) if name in axes)) for e in spec))


def split_dims(spec: PartitionSpec) -> list[tuple[int, str]]:
    """List (dimension, axis) for every mesh axis of a spec; the major axes of a dimension come first.

    P(("data", "tensor"), "pipe") gives [(0, "data"), (0, "tensor"), (1, "pipe")].
    """
    return [(dim, name) for dim, entry in enumerate(spec) for name in axis_names(entry)]


def splits_per_dim(mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Return the number of parts into which the spec splits each dimension."""
    return tuple(axis_size(mesh, entry) for entry in spec)
