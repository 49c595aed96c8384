"""The arrays of a run by name: in model order and without padding, whatever layout stored them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard._layout import Layout
from jaxshard._placement import Placement, View, spec_entry, whole
from jaxshard._state import TrainState
from jaxshard._tree import leaf_of
from jaxshard.checkpoint.manifest import Saved


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
        """What lies in a checkpoint, spread over the mesh: as it is stored, or wherever a dimension divides."""
        view = self.placement.view
        spec = self.placement.store if view.stored == view.logical else split(self.shape, mesh)
        shape, dtype = self.shape, self.dtype
        if self.is_key:
            words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
            shape, dtype, spec = words.shape, words.dtype, PartitionSpec(*spec, None)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def to_saved(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """stored -> saved; the array itself where that is the same."""
        view = self.placement.view
        if view.stored == view.logical and not self.is_key:
            return x
        return jax.block_until_ready(_saver(view, self.is_key, self.shape_saved(mesh).sharding)(x))

    def to_stored(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """saved -> stored."""
        view = self.placement.view
        if view.stored == view.logical and not self.is_key:
            return x
        impl = impl_of(self.dtype) if self.is_key else None
        return jax.block_until_ready(_storer(view, impl, self.placement.sharding(mesh))(x))


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


def split(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Every mesh axis on the largest dimension that it divides, the largest axes first; an axis may divide none."""
    left = list(shape)
    names: list[tuple[str, ...]] = [()] * len(shape)
    for axis, size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        fits = [dim for dim, length in enumerate(left) if length and length % size == 0]
        if fits:
            dim = max(fits, key=shape.__getitem__)
            left[dim], names[dim] = left[dim] // size, (*names[dim], axis)
    return PartitionSpec(*(spec_entry(part) for part in names))


def impl_of(dtype: Any) -> Any:
    """The implementation behind a dtype of random keys, as `jax.random.wrap_key_data` takes it."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def unsupported(entry: Entry) -> bool:
    """Whether the dtype of an array can't be saved: unsigned integers of less than a byte."""
    return not entry.is_key and jnp.dtype(entry.dtype).name in ("uint2", "uint4")


def _name(path: tuple[Any, ...]) -> str:
    """ "opt_state/0/mu/w" of a key path: different for different paths, whatever the keys are."""
    words = (jax.tree_util.keystr((key,), simple=True) for key in path)
    odd = {"": "%", ".": "%2E", "..": "%2E%2E"}
    return "/".join(odd.get(word) or quote(word, safe="") for word in words)


@lru_cache(maxsize=512)
def _saver(view: View, is_key: bool, sharding: NamedSharding) -> Any:
    def convert(x: jax.Array) -> jax.Array:
        x = view.invert(x)
        return jax.random.key_data(x) if is_key else x

    return jax.jit(convert, out_shardings=sharding)


@lru_cache(maxsize=512)
def _storer(view: View, impl: Any, sharding: NamedSharding) -> Any:
    def convert(x: jax.Array) -> jax.Array:
        return view.apply(x if impl is None else jax.random.wrap_key_data(x, impl=impl))

    return jax.jit(convert, out_shardings=sharding)
