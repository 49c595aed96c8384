"""The arrays of a run by name, and their conversion between a layout's storage and a checkpoint's.

A checkpoint has arrays in model order and without padding ("saved"). Devices have them as the layout says ("stored"):
padded, in pipeline order, sharded over the mesh. Random keys are saved as their words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import jax.numpy as jnp
from jax import device_put
from jax.lax import bitcast_convert_type, optimization_barrier, with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.checkpoint.manifest import SavedArray
from jaxshard.core.keys import is_key, keys_of, words_of
from jaxshard.core.layout import Layout, select
from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.placement import Placement, axes_of, spec_entry, whole
from jaxshard.core.tree import leaf_of
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState


class Entry(NamedTuple):
    """One array of a run.

    Attributes:
      path: its name in a checkpoint, such as "opt_state/0/mu/w".
      shape: its logical shape.
      dtype: its dtype, which may be that of random keys.
      placement: its placement in the layout.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    placement: Placement

    @property
    def is_key(self) -> bool:
        """True for random keys."""
        return is_key(self.dtype)

    @property
    def words(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype in a file, where random keys are their words."""
        return words_of(jax.ShapeDtypeStruct(self.shape, self.dtype))

    @property
    def saved(self) -> SavedArray:
        """The array as a manifest lists it."""
        return SavedArray(self.path, self.shape, str(self.dtype))

    def shape_saved(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype in a checkpoint, with the sharding of `logical_spec`."""
        words, spec = self.words, logical_spec(self.placement, mesh)[0]
        spec = PartitionSpec(*spec, *(None,) * (len(words.shape) - len(spec)))
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=NamedSharding(mesh, spec))

    def to_saved(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """Convert from stored to saved, on the devices; return the array itself if both are the same."""
        return x if self._is_saved_as_stored else jax.block_until_ready(jit_to_saved(self, mesh)(x))

    def to_stored(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """Convert from saved to stored, the inverse of `to_saved`."""
        return x if self._is_saved_as_stored else jax.block_until_ready(jit_to_stored(self, mesh)(x))

    @property
    def _is_saved_as_stored(self) -> bool:
        return self.placement.view.stored == self.shape and not self.is_key and not self.placement.memory


def entries(layout: Layout, *, base: bool = False) -> tuple[list[Entry], Any]:
    """List the arrays of a layout's runs.

    Args:
      layout: the layout.
      base: whether to include `layout.base`, which checkpoints leave out.

    Returns:
      (the entries in the order of a run's leaves, the tree structure of a run). The name of an array is its path, in
      which everything but letters, digits and _ . - ~ is percent-encoded.
    """
    step, shapes = jax.ShapeDtypeStruct((), jnp.int32), layout.shapes
    alone = [whole(leaf_of((), x)) for x in (step, shapes.key)]
    make: Any = TrainState
    keep = jax.tree.map(lambda given: base or not given, layout.base)
    run = make(step, select(keep, shapes.params), shapes.opt_state, shapes.state, shapes.key)
    places = make(alone[0], select(keep, layout.params), layout.opt_state, layout.state, alone[1])
    return pair_up(run, places, encode_path)


def pair_up(shapes: PyTree, placements: PyTree, name: Callable[[Any], str]) -> tuple[list[Entry], Any]:
    """Return (the entries of a tree's leaves, its structure); `name(key path)` names an array."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    pairs = zip(leaves, jax.tree.leaves(placements), strict=True)
    return [Entry(name(path), tuple(x.shape), x.dtype, placement) for (path, x), placement in pairs], structure


def logical_spec(placement: Placement, mesh: Mesh) -> tuple[PartitionSpec, PartitionSpec]:
    """Choose the sharding of an array in model order, as close as possible to its stored sharding.

    A dimension that is neither padded nor split into several keeps its mesh axes. The axes of all others move to the
    largest dimension that they divide, or to none. So the conversion is an all-to-all, not an all-gather.

    Args:
      placement: how the array is stored.
      mesh: the mesh.

    Returns:
      (the spec over the logical dimensions, the same split over the stored dimensions). The array moves from its stored
      split to the second one, and is reshaped and cut then.
    """
    view, store = placement.view, placement.store
    sizes = {dim: view.logical[dim] for dim in range(len(view.logical)) if view.logical[dim] == view.padded[dim]}
    if view.extra_dims:
        sizes.pop(0, None)
    kept = {dim: axis_names(store[view.stored_dim(dim)]) for dim in sizes}
    left = {dim: size // axis_size(mesh, kept[dim]) for dim, size in sizes.items()}
    for axis in (name for name in axes_of(store) if not any(name in names for names in kept.values())):
        fits = [dim for dim, size in left.items() if size and size % mesh.shape[axis] == 0]
        if fits:
            dim = max(fits, key=sizes.__getitem__)
            kept[dim], left[dim] = (*kept[dim], axis), left[dim] // mesh.shape[axis]
    logical = [spec_entry(kept.get(dim, ())) for dim in range(len(view.logical))]
    before = [None] * view.extra_dims
    return PartitionSpec(*logical), PartitionSpec(*before, *logical)


def jit_to_saved(entry: Entry, mesh: Mesh) -> Any:
    """Return the jitted function from a stored array to a saved one, shared by arrays with equal placements."""
    return _jit_both(_without_names(entry), mesh)[0]


def jit_to_stored(entry: Entry, mesh: Mesh) -> Any:
    """Return the jitted function from a saved array to a stored one, shared by arrays with equal placements."""
    return _jit_both(_without_names(entry), mesh)[1]


def list_differences(found: Mapping[str, str], wanted: Mapping[str, str], where: str = "") -> list[str]:
    """Compare the arrays that were found with those of a layout, both as text by name, such as "float32[48, 24]".

    Args:
      found: the arrays that were found.
      wanted: the arrays of the layout.
      where: the place of the found arrays, for messages.

    Returns:
      A line for every array that is missing, not in the layout, or has another shape or dtype.
    """
    problems = [f"{name}: missing{where}, expected {wanted[name]}" for name in wanted if name not in found]
    problems += [f"{name}: {found[name]}{where}, not in the layout" for name in found if name not in wanted]
    return problems + [
        f"{name}: {found[name]}{where}, expected {wanted[name]}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]


def encode_path(path: tuple[Any, ...]) -> str:
    """Name an array by its key path, "opt_state/0/mu/w": different for different paths, whatever the keys are."""
    words = (jax.tree_util.keystr((key,), simple=True) for key in path)
    odd = {"": "%", ".": "%2E", "..": "%2E%2E"}
    return "/".join(odd.get(word) or quote(word, safe="") for word in words)


def _without_names(entry: Entry) -> Entry:
    return entry._replace(path="", placement=replace(entry.placement, why="", rule=""))


@lru_cache(maxsize=512)
def _jit_both(entry: Entry, mesh: Mesh) -> tuple[Any, Any]:
    """Return the jitted functions (from stored to saved, from saved to stored)."""
    rests, saved, view = entry.placement.sharding(mesh), entry.shape_saved(mesh).sharding, entry.placement.view
    stored = entry.placement.on_device().sharding(mesh)
    logical, moved = (NamedSharding(mesh, spec) for spec in logical_spec(entry.placement, mesh))

    # Constraints before and after a cast keep the compiler from moving the cast past the resharding.
    def to_saved(x: jax.Array) -> jax.Array:
        x = device_put(x, jax.memory.Space.Device) if entry.placement.memory else x
        bits = with_sharding_constraint(with_sharding_constraint(_float_to_bits(x), stored), moved)
        return words_of(_bits_to(entry.dtype, with_sharding_constraint(view.invert(bits), logical)))

    def to_stored(x: jax.Array) -> jax.Array:
        bits = view.apply(with_sharding_constraint(_float_to_bits(keys_of(x, entry.dtype)), logical))
        made = _bits_to(entry.dtype, with_sharding_constraint(with_sharding_constraint(bits, moved), stored))
        return device_put(made, jax.memory.Space.Host) if entry.placement.memory else made

    return jax.jit(to_saved, out_shardings=saved), jax.jit(to_stored, out_shardings=rests)


def _float_to_bits(x: jax.Array) -> jax.Array:
    """Cast floats of 8 and 16 bits to integers of the same bits.

    XLA pads, slices and sends 8- and 16-bit floats as f32 on a CPU (up to JAX 0.12), which changes the bits of
    signalling NaNs.
    """
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 0
    return bitcast_convert_type(x, f"uint{bits}") if bits in (8, 16) else x


def _bits_to(dtype: Any, bits: jax.Array) -> jax.Array:
    """Cast bits to an array with this dtype, the inverse of `_float_to_bits`.

    The barrier keeps the cast out of the loop that pads: there JAX 0.12, compiling without optimizations, handles the
    padded floats as f32 after all.
    """
    return bits if bits.dtype == dtype else bitcast_convert_type(optimization_barrier(bits), dtype)
