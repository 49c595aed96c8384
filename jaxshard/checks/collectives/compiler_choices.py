"""Collectives that a compiler derives by itself: how many and of which shape no placement says exactly.

They are promised as "as needed", or up to a number and a size, never as certain. Over tensor axes these are
activations, under `js.auto` sums over rows as well, and on a TPU what is done to shards that are no whole tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxshard.checks.collectives.expected import Expected, Shape
from jaxshard.checks.collectives.groups import covering_axes, groups_across_slices, slice_members
from jaxshard.checks.collectives.parameters import Parameter, expert_axes, longest_dim, rank_of, tensor_axes
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size, slice_indices
from jaxshard.core.placement import axes_of
from jaxshard.core.strategy_parts import Tensor, parts_of
from jaxshard.core.tree import path_str

_LANES = 128
_PARTS = ("all-reduce", "reduce-scatter", "all-gather")
"""Of which a collective over chips of a slice and over slices is made."""
_SEQUENCE = ("sequence", "length", "positions")
"""Logical names of a sequence's dimension."""


def activations(layout: Layout, compiler_chooses: bool) -> Iterator[Expected]:
    """Yield the collectives of activations: over tensor axes, and where the compiler chooses over batch axes.

    A product with a weight whose contracted dimension is split leaves partial sums, hence all-reduces; a sequence that
    a rule splits is gathered before such a product and its sums are scattered after it.
    """
    one = Expected("all-reduce", tensor_axes(layout), None, None, 0, None, "activations")
    yield one
    if splits_sequence(layout):
        for kind in ("all-gather", "reduce-scatter"):
            yield replace(one, kind=kind, what="activations split along the sequence")
    if compiler_chooses:
        # Statistics of a batch have a number per feature: no more than the longest dimension of a parameter.
        sums = replace(one, axes=layout.sum_axes, limit=longest_dim(layout), what="sums over rows")
        yield sums
        yield replace(sums, kind="all-gather")


def exchanges(layout: Layout) -> Iterator[Expected]:
    """Yield what brings tokens to their experts and back, and the counts by which every device knows how many come.

    How much that is the routing decides. Where it is uneven, tokens go in several rounds, of which a program does not
    say how many there are.
    """
    axes = expert_axes(layout)
    for kind in ("all-to-all", "ragged-all-to-all") if axes else ():
        yield Expected(kind, axes, None, None, 0, None, "tokens sent to their experts and back")
    counts = axis_size(layout.mesh, axes) * longest_dim(layout)
    yield Expected("all-gather", axes, None, None, 0, None, "counts of tokens by expert", limit=counts)


def splits_sequence(layout: Layout) -> bool:
    """Return True if a rule of `js.tensor` may split activations along the sequence."""
    rules = [part.rules for part in parts_of(layout.strategy) if isinstance(part, Tensor)]
    return any(rule.fate(name) in ("split", "split or whole") for rule in rules for name in _SEQUENCE)


def feature_gathers(layout: Layout, parameters: Sequence[Parameter], compute_dtype: Any) -> Iterator[Expected]:
    """Yield gathers of vectors that are whole over the tensor axes, but made by features that are split there.

    Such are scale and bias of a norm after a product whose columns are split, and the norm's averages.
    """
    tensor = tensor_axes(layout)
    whole = [(one.path, one) for one in parameters if not set(axes_of(one.param.use)) & set(tensor)]
    state = [(path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(layout.shapes.state)]
    for path, x in (*whole, *state):
        if rank_of(path, x.shape) == 1:
            most, what = 2 * math.prod(x.shape[:-1]), f"features of {path}"
            dtype = compute_dtype or x.dtype
            yield Expected("all-gather", tensor, tuple(x.shape[-1:]), dtype, 0, most, what, instead_of=what)


def fewest_features(layout: Layout, size: int) -> int:
    """Return how many elements of a vector a device has if the compiler splits it over the tensor axes."""
    return max(1, size // axis_size(layout.mesh, tensor_axes(layout)))


def border_permutes(one: Expected, shard: Shape) -> Expected:
    """Return what crosses the borders of the shards when `one`, a reduce-scatter, leaves shards of this shape.

    A TPU scatters arrays padded to whole tiles. Where a shard is no whole number of tiles, padded shards begin at other
    elements than those wanted, and the compiler permutes what is off.
    """
    tiles = [1] * len(shard[:-2]) + [8, 128][-len(shard) :]
    padded = tuple(size + -size % tile for size, tile in zip(shard, tiles, strict=True))
    most = 0 if one.most is None or padded == shard else 2 * one.most
    what = f"borders of the {one.what}"
    form = replace(one, kind="collective-permute", shape=padded, least=0, most=most, what=what, unpadded=1)
    return replace(form, instead_of=one.name)


def ring_permutes(one: Expected, shard: Shape, parts: int) -> Expected:
    """Return what may stand for `one`, a reduce-scatter that leaves shards of this shape on `parts` devices.

    A TPU's compiler may multiply one shard after the other and pass the sums of each around a ring meanwhile, with one
    permute more than there are devices.
    """
    most = None if one.most is None else one.most * (parts + 1)
    what = f"shards of the {one.what}, around a ring"
    form = replace(one, kind="collective-permute", shape=shard, least=0, most=most, what=what, unpadded=None, stack=1)
    return replace(form, instead_of=one.name)


def between_slices(mesh: Mesh, expected: Iterable[Expected]) -> Iterator[Expected]:
    """Yield what becomes of collectives over several TPU slices; the others as they are.

    A sum over chips of a slice and over slices is scattered or summed in each slice, then summed between slices, then
    gathered in each slice. Between slices arrays are padded to tiles, and several are joined to one. So over both the
    axes in a slice and those across slices any of these kinds may move as many elements as were promised in all.
    """
    slices = slice_indices(mesh)
    if slices.max() == slices.min():
        yield from expected
        return
    across = covering_axes(groups_across_slices(slices), mesh)
    inside = covering_axes(slice_members(slices), mesh)
    for one in expected:
        crossed, own = (tuple(axis for axis in one.axes if axis in axes) for axes in (across, inside))
        if one.shape == () and not one.axes:  # scalars, in a row of a tile
            yield replace(one, shape=(_LANES,))
        elif one.shape is None or not crossed:
            yield one
        else:
            kinds = _PARTS if own and one.kind in _PARTS else (one.kind,)
            shape = tuple(size + -size % tile for size, tile in zip(one.shape, _tiles(one.shape)))
            form = replace(one, shape=shape, least=0, unpadded=None, pooled=True)
            for kind, axes in itertools.product(kinds, filter(None, (crossed, own))):
                yield replace(form, kind=kind, axes=axes)
                form = replace(form, instead_of=one.name)


def _tiles(shape: Shape) -> tuple[int, ...]:
    """The sizes of which the dimensions of an array are padded to multiples between slices: 16 of them in bf16."""
    return (*[1] * (len(shape) - 2), *[16, _LANES][-len(shape) :])


def torus_sizes(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Return how far a mesh axis reaches in every dimension of a TPU's torus that it covers; () on other devices."""
    dim = mesh.axis_names.index(axis)
    line = np.moveaxis(mesh.devices, dim, 0).reshape(mesh.devices.shape[dim], -1)[:, 0]
    coords = [getattr(device, "coords", ()) for device in line]
    return tuple(extent for extent in (len(set(places)) for places in zip(*coords, strict=True)) if extent > 1)


def explain_substitutes(mesh: Mesh, axes: Sequence[str]) -> str:
    """Return what may keep a TPU from the promised kind of collective over these axes, and the remedy; "" elsewhere.

    Over an axis that covers several dimensions of a torus libtpu has no reduce-scatter, in any order of the devices,
    and not every all-gather: some become all-reduces, all of them over three dimensions that are not closed to rings.
    """
    for axis in axes:
        sizes = torus_sizes(mesh, axis)
        if len(sizes) > 1:
            own = {f"{axis}{number}": size for number, size in enumerate(sizes)}
            parts = ", ".join(f"{name}={size}" for name, size in own.items())
            divided = [own if name == axis else {name: size} for name, size in mesh.shape.items()]
            flag = ",".join(f"{name}={size}" for of in divided for name, size in of.items())
            remedy = f"give each an axis: {parts} for ({', '.join(map(repr, own))}), by command --mesh {flag}"
            return f"{axis!r} covers {len(sizes)} dimensions of the torus; {remedy}"
    return ""
