"""The arrays of a run by name: in model order and without padding, whatever layout stored them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.checkpoint.manifest import Saved
from jaxshard.core.keys import key_impl_of
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.placement import Placement, axes_of, spec_entry, whole
from jaxshard.core.tree import leaf_of
from jaxshard.training.state import TrainState


class Entry(NamedTuple):
    """One array of a run: its name in a checkpoint, its logical shape and dtype, and where the layout stores it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    placement: Placement

    @property
    def is_key(self) -> bool:
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    @property
    def is_empty(self) -> bool:
        """Without elements: there is nothing to save."""
        return 0 in self.shape

    @property
    def saved(self) -> Saved:
        return Saved(self.path, self.shape, str(self.dtype))

    def shape_saved(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """What lies in a checkpoint, spread over the mesh as far as possible as it is stored."""
        shape, dtype, spec = self.shape, self.dtype, logical_spec(self.placement, mesh)[0]
        if self.is_key:
            words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
            shape, dtype, spec = words.shape, words.dtype, PartitionSpec(*spec, None)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def to_saved(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """stored -> saved; the array itself where that is the same."""
        return x if self._is_saved_as_stored else jax.block_until_ready(saver(self, mesh)(x))

    def to_stored(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """saved -> stored."""
        return x if self._is_saved_as_stored else jax.block_until_ready(storer(self, mesh)(x))

    @property
    def _is_saved_as_stored(self) -> bool:
        return self.placement.view.stored == self.shape and not self.is_key


def entries(layout: Layout) -> tuple[list[Entry], Any]:
    """The arrays of a run in the order of its leaves, and the structure of the run.

    The name of an array is its path; what is not a letter, a digit or one of _ . - ~ is percent-encoded.
    """
    step, shapes = jax.ShapeDtypeStruct((), jnp.int32), layout.shapes
    alone = [whole(leaf_of((), x)) for x in (step, shapes.key)]
    make: Any = TrainState
    run = make(step, shapes.params, shapes.opt_state, shapes.state, shapes.key)
    placements = make(alone[0], layout.params, layout.opt_state, layout.state, alone[1])
    leaves, structure = jax.tree_util.tree_flatten_with_path(run)
    pairs = zip(leaves, jax.tree.leaves(placements), strict=True)
    return [Entry(_name(path), tuple(x.shape), x.dtype, placement) for (path, x), placement in pairs], structure


def logical_spec(placement: Placement, mesh: Mesh) -> tuple[PartitionSpec, PartitionSpec]:
    """How an array is spread over the mesh when it is logical, and over the stored dimensions just before that.

    A dimension that is neither padded nor cut stays split as it is. The axes of the others go to the largest of those
    that they divide, or to none: so an array moves between devices by all-to-all and is not gathered.
    """
    view, store = placement.view, placement.store
    sizes = {dim: view.logical[dim] for dim in range(len(view.logical)) if view.logical[dim] == view.padded[dim]}
    if view.cut:
        sizes.pop(0, None)
    kept = {dim: axis_names(store[view.at(dim)]) for dim in sizes}
    left = {dim: size // axis_size(mesh, kept[dim]) for dim, size in sizes.items()}
    for axis in (name for name in axes_of(store) if not any(name in names for names in kept.values())):
        fits = [dim for dim, size in left.items() if size and size % mesh.shape[axis] == 0]
        if fits:
            dim = max(fits, key=sizes.__getitem__)
            kept[dim], left[dim] = (*kept[dim], axis), left[dim] // mesh.shape[axis]
    logical = [spec_entry(kept.get(dim, ())) for dim in range(len(view.logical))]
    before = [None] * view.cut
    return PartitionSpec(*logical), PartitionSpec(*before, *logical)


def saver(entry: Entry, mesh: Mesh) -> Any:
    """The jitted function stored -> saved."""
    placement = replace(entry.placement, why="", rule="")  # arrays that lie alike share a program
    return _saver(placement, mesh, entry.shape_saved(mesh).sharding, entry.is_key)


def storer(entry: Entry, mesh: Mesh) -> Any:
    """The jitted function saved -> stored."""
    placement = replace(entry.placement, why="", rule="")
    return _storer(placement, mesh, key_impl_of(entry.dtype) if entry.is_key else None)


def unsupported(entry: Entry) -> bool:
    """Whether the dtype of an array can't be saved: unsigned integers of less than a byte."""
    return not entry.is_key and jnp.dtype(entry.dtype).name in ("uint2", "uint4")


def _name(path: tuple[Any, ...]) -> str:
    """ "opt_state/0/mu/w" of a key path: different for different paths, whatever the keys are."""
    words = (jax.tree_util.keystr((key,), simple=True) for key in path)
    odd = {"": "%", ".": "%2E", "..": "%2E%2E"}
    return "/".join(odd.get(word) or quote(word, safe="") for word in words)


@lru_cache(maxsize=512)
def _saver(placement: Placement, mesh: Mesh, sharding: NamedSharding, is_key: bool) -> Any:
    stored, moved = placement.sharding(mesh), NamedSharding(mesh, logical_spec(placement, mesh)[1])

    def convert(x: jax.Array) -> jax.Array:
        bits = _spread(_spread(_as_bits(x), stored), moved)
        bits = placement.view.invert(bits)
        return jax.random.key_data(bits) if is_key else _as(_spread(bits, sharding), x.dtype)

    return jax.jit(convert, out_shardings=sharding)


@lru_cache(maxsize=512)
def _storer(placement: Placement, mesh: Mesh, impl: Any) -> Any:
    stored, (logical, before) = placement.sharding(mesh), logical_spec(placement, mesh)

    def convert(x: jax.Array) -> jax.Array:
        bits = _as_bits(x) if impl is None else jax.random.wrap_key_data(x, impl=impl)
        bits = placement.view.apply(_spread(bits, NamedSharding(mesh, logical)))
        bits = _spread(_spread(bits, NamedSharding(mesh, before)), stored)
        return bits if impl is not None else _as(bits, x.dtype)

    return jax.jit(convert, out_shardings=stored)


def _spread(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)


def _as_bits(x: jax.Array) -> jax.Array:
    """Narrow floats as integers: XLA pads, cuts and sends them as f32 on a CPU (up to 0.12), which changes NaN's bits.

    Constraints on both sides of a conversion keep it from being moved behind what it is there for.
    """
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits in (8, 16)
    return jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}") if narrow else x


def _as(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_as_bits`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)
