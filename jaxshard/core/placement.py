"""Where one array lives: `View` (how it rests in memory), `Placement` (which mesh axes split which dimension)."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.tree import Leaf, bytes_of


@dataclass(frozen=True)
class View:
    """How an array rests: padded with zeros at the end of its dimensions, then reshaped.

    `logical` is the shape that the model knows, `padded` the shape after padding, `stored` the shape at rest, where the
    first dimension may be several (`cut`: so many more), as blocks in pipeline order are.
    """

    logical: tuple[int, ...]
    padded: tuple[int, ...]
    stored: tuple[int, ...]
    cut: int = 0

    @property
    def is_padded(self) -> bool:
        return self.padded != self.logical

    def apply(self, x: jax.Array) -> jax.Array:
        """logical -> stored."""
        if self.is_padded:
            x = jnp.pad(x, [(0, wide - size) for size, wide in zip(self.logical, self.padded)])
        return x.reshape(self.stored) if self.stored != self.padded else x

    def invert(self, x: jax.Array) -> jax.Array:
        """stored -> logical."""
        x = x.reshape(self.padded) if self.stored != self.padded else x
        return x[tuple(slice(size) for size in self.logical)] if self.is_padded else x

    def clear_padding(self, x: jax.Array) -> jax.Array:
        """stored -> stored with zeros in the padding, elementwise."""
        if not self.is_padded:
            return x
        inside = jnp.ones((), bool)
        for dim, size in enumerate(self.logical):
            if size != self.padded[dim]:
                inside &= jax.lax.broadcasted_iota(jnp.int32, self.padded, dim) < size
        return jnp.where(inside.reshape(self.stored), x, jnp.zeros((), x.dtype))

    def origin(self, dim: int) -> int:
        """The logical dimension of which a stored one is a part."""
        return max(0, dim - self.cut)

    def at(self, dim: int) -> int:
        """The stored dimension that a logical one is; the last of several."""
        return dim + self.cut

    def cut_first(self, sizes: tuple[int, ...]) -> View:
        """The same view with the first dimension, padded if need be, stored as several of these sizes."""
        assert not self.cut, "the first dimension is cut once"
        padded = (math.prod(sizes), *self.padded[1:])
        return View(self.logical, padded, (*sizes, *padded[1:]), len(sizes) - 1)

    def tail(self) -> View:
        """The view of one slice along the first logical dimension."""
        return View(self.logical[1:], self.padded[1:], self.stored[1 + self.cut :])


@dataclass(frozen=True)
class Placement:
    """Where one array lives in one role.

    `use` is what computation sees (over the logical dimensions), `store` how the array rests between steps (over the
    stored dimensions); both have one entry per dimension. `why` says why a fill left the array whole, `rule` which
    rule of `js.tensor` took it, and to what effect.
    """

    view: View
    use: PartitionSpec
    store: PartitionSpec
    why: str = ""
    rule: str = ""

    def split(self, dim: int, names: tuple[str, ...]) -> Placement:
        """The same placement with the mesh axes `names` splitting the stored dimension `dim` further."""
        entries = list(self.store)
        entries[dim] = spec_entry(axis_names(entries[dim]) + names)
        return replace(self, store=PartitionSpec(*entries), why="")

    def use_split(self, dim: int, names: tuple[str, ...]) -> Placement:
        """The same placement with the logical dimension `dim` also used split over the mesh axes `names`."""
        entries = list(self.use)
        entries[dim] = spec_entry(axis_names(entries[dim]) + names)
        return replace(self, use=PartitionSpec(*entries))

    def pad(self, dim: int, size: int) -> Placement:
        """The same placement with the stored dimension `dim` padded to `size`."""
        view, origin = self.view, self.view.origin(dim)
        assert view.stored[dim] == view.padded[origin], "a dimension that was cut is not padded again"
        padded = (*view.padded[:origin], size, *view.padded[origin + 1 :])
        stored = (*view.stored[:dim], size, *view.stored[dim + 1 :])
        return replace(self, view=View(view.logical, padded, stored, view.cut))

    def cut_first(self, sizes: tuple[int, ...]) -> Placement:
        """The same placement with the first dimension, so far whole, stored as several of these sizes."""
        assert self.store[0] is None, self
        more = (None,) * (len(sizes) - 1)
        return replace(self, view=self.view.cut_first(sizes), store=PartitionSpec(*more, *self.store))

    def tail(self) -> Placement:
        """The placement of one slice along the first logical dimension."""
        use, store = PartitionSpec(*self.use[1:]), PartitionSpec(*self.store[1 + self.view.cut :])
        return Placement(self.view.tail(), use, store, self.why, self.rule)

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """How the stored array is spread."""
        return NamedSharding(mesh, self.store)

    def shard_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of the stored array on one device."""
        return tuple(size // axis_size(mesh, entry) for size, entry in zip(self.view.stored, self.store, strict=True))

    def bytes_per_device(self, mesh: Mesh, dtype: object) -> int:
        """Bytes of the stored array on one device, compiler's tiles left out."""
        return bytes_of(self.shard_shape(mesh), dtype)


def whole(leaf: Leaf) -> Placement:
    """The placement that every strategy starts from: as the model has it, on every device."""
    spec = PartitionSpec(*(None,) * len(leaf.shape))
    return Placement(View(leaf.shape, leaf.shape, leaf.shape), spec, spec)


def spec_entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """One dimension's entry of a PartitionSpec."""
    return None if not names else names[0] if len(names) == 1 else names


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes of a spec, in the order of its dimensions."""
    return tuple(name for entry in spec for name in axis_names(entry))


def only_axes(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """The spec without the mesh axes that are not among `axes`."""
    return PartitionSpec(*(spec_entry(tuple(name for name in axis_names(e) if name in axes)) for e in spec))


def split_dims(spec: PartitionSpec) -> list[tuple[int, str]]:
    """(dim, axis) for every mesh axis of a spec, major axes first."""
    return [(dim, name) for dim, entry in enumerate(spec) for name in axis_names(entry)]


def splits_per_dim(mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Into how many parts the spec splits each dimension."""
    return tuple(axis_size(mesh, entry) for entry in spec)
