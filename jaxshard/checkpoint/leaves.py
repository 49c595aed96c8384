"""The named arrays of a run, and their conversion between devices ("stored") and checkpoints ("saved").

Stored arrays are as the layout says: padded, in pipeline order, sharded over the mesh. Saved arrays are in model order
and without padding; random keys are saved as the uint32 words of their data.
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
from jaxshard.core.placement import Placement, axes_of, spec_entry
from jaxshard.core.types import PyTree
from jaxshard.training.state import run_arrays


class Entry(NamedTuple):
    """The name, shape, dtype and placement of one array of a run, without its values.

    Attributes:
      path: the array's name in a checkpoint, such as "opt_state/0/mu/w".
      shape: the logical shape, without padding.
      dtype: the dtype; for random keys a key dtype, such as key<fry>.
      placement: the array's placement in the layout.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    placement: Placement

    @property
    def is_key(self) -> bool:
        """True for an array of random keys, such as the result of `jax.random.key`."""
        return is_key(self.dtype)

    @property
    def words(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the array in a file; random keys are written as their uint32 words."""
        return words_of(jax.ShapeDtypeStruct(self.shape, self.dtype))

    @property
    def saved(self) -> SavedArray:
        """The name, shape and dtype of the array, as a manifest lists them."""
        return SavedArray(self.path, self.shape, str(self.dtype))

    def shape_saved(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of the saved array: in model order, unpadded, keys as uint32 words."""
        words, spec = self.words, logical_spec(self.placement, mesh)[0]
        spec = PartitionSpec(*spec, *(None,) * (len(words.shape) - len(spec)))
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=NamedSharding(mesh, spec))

    def to_saved(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """Convert a stored array, as the layout keeps it on the devices, to a saved array (in model order, unpadded).

        The conversion runs on the devices. If both arrays are the same, `x` itself is returned.
        """
        return x if self._is_saved_as_stored else jax.block_until_ready(jit_to_saved(self, mesh)(x))

    def to_stored(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """Convert a saved array (in model order, unpadded) to a stored array, as the layout keeps it on the devices."""
        return x if self._is_saved_as_stored else jax.block_until_ready(jit_to_stored(self, mesh)(x))

    @property
    def _is_saved_as_stored(self) -> bool:
        return self.placement.view.stored == self.shape and not self.is_key and not self.placement.memory


def entries(layout: Layout, *, base: bool = False) -> tuple[list[Entry], Any]:
    """List the arrays of a run with this layout, except residuals (rounding errors of gradients).

    Args:
      layout: the layout.
      base: True to include the frozen base weights of `js.lora`, which checkpoints leave out.

    Returns:
      (the entries in the order of a run's leaves, the tree structure of a run). The name of an array is its path, in
      which everything but letters, digits and _ . - ~ is percent-encoded.
    """
    keep = jax.tree.map(lambda given: base or not given, layout.base)
    shapes, places = (run._replace(params=select(keep, run.params)) for run in run_arrays(layout))
    return pair_up(shapes, places, encode_path)


def pair_up(shapes: PyTree, placements: PyTree, name: Callable[[Any], str]) -> tuple[list[Entry], Any]:
    """Combine a tree of shapes and a tree of placements; return (an `Entry` for each leaf, the tree structure).

    `name(key path of a leaf)` returns the name of the leaf's array.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    pairs = zip(leaves, jax.tree.leaves(placements), strict=True)
    return [Entry(name(path), tuple(x.shape), x.dtype, placement) for (path, x), placement in pairs], structure


def logical_spec(placement: Placement, mesh: Mesh) -> tuple[PartitionSpec, PartitionSpec]:
    """Choose the sharding of an array in model order, as close as possible to the sharding of the stored array.

    A dimension that is neither padded nor reshaped into several keeps its mesh axes. A mesh axis that splits a padded
    or reshaped dimension is moved to the largest dimension that it divides evenly, or dropped if there is none. To move
    an axis takes an all-to-all, which is cheaper than the all-gather for a dropped axis.

    Args:
      placement: how the array is stored.
      mesh: the mesh.

    Returns:
      (PartitionSpec of the logical array, the same sharding as a PartitionSpec of the stored array). To convert a
      stored array, reshard it to the second spec, then reshape it and cut off the padding.
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
    """Return the jitted conversion from a stored to a saved array, the same for entries that differ only in name."""
    return _jit_both(_without_names(entry), mesh)[0]


def jit_to_stored(entry: Entry, mesh: Mesh) -> Any:
    """Return the jitted conversion from a saved to a stored array, the same for entries that differ only in name."""
    return _jit_both(_without_names(entry), mesh)[1]


def list_differences(found: Mapping[str, str], wanted: Mapping[str, str], where: str = "") -> list[str]:
    """Compare arrays in a file or in memory with the arrays that a layout expects, by name, shape and dtype.

    Args:
      found: {name: shape and dtype as text, such as "float32[48, 24]"} of the arrays that are there.
      wanted: {name: shape and dtype as text} of the arrays of the layout.
      where: the place of the arrays, for messages, such as " in the checkpoint".

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
    """Convert a key path to a name, such as "opt_state/0/mu/w".

    Special characters in a key are percent-encoded, so different paths always get different names.
    """
    words = (jax.tree_util.keystr((key,), simple=True) for key in path)
    odd = {"": "%", ".": "%2E", "..": "%2E%2E"}
    return "/".join(odd.get(word) or quote(word, safe="") for word in words)


def _without_names(entry: Entry) -> Entry:
    return entry._replace(path="", placement=replace(entry.placement, why="", rule=""))


@lru_cache(maxsize=512)
def _jit_both(entry: Entry, mesh: Mesh) -> tuple[Any, Any]:
    """Return two jitted functions: from a stored to a saved array, and from a saved to a stored array."""
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
    """Bitcast floats of 8 and 16 bits to unsigned integers; return other arrays unchanged.

    On a CPU (up to JAX 0.12) XLA casts 8- and 16-bit floats to f32 when it pads, slices or communicates them, which
    changes the bits of signalling NaNs.
    """
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 0
    return bitcast_convert_type(x, f"uint{bits}") if bits in (8, 16) else x


def _bits_to(dtype: Any, bits: jax.Array) -> jax.Array:
    """Bitcast unsigned integers to an array with this dtype: the inverse of `_float_to_bits`.

    The `optimization_barrier` keeps XLA from moving the bitcast into the loop that pads the array. There JAX 0.12,
    compiling without optimizations, would cast the padded floats to f32 again.
    """
    return bits if bits.dtype == dtype else bitcast_convert_type(optimization_barrier(bits), dtype)
