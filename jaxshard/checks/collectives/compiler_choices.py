"""Promise the collectives that the compiler chooses: the layout does not determine their exact number and shape.

They are promised "as needed" or up to a number and a size, never as certain: activations over tensor axes, sums over
rows under `js.auto`, and on a TPU permutes of shards that are not a whole number of tiles.
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
from jaxshard.checks.collectives.parameters import Parameter, expert_axes, longest_dim, rank_of, tensor_axes
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size, slice_indices
from jaxshard.core.placement import axes_of
from jaxshard.core.strategy_parts import Tensor, parts_of
from jaxshard.core.tree import path_str
from jaxshard.hlo.groups import covering_axes, groups_across_slices, slice_members

_LANES = 128
_PARTS = ("all-reduce", "reduce-scatter", "all-gather")
"""The steps of a collective over several TPU slices: some inside each slice, some between slices."""
_SEQUENCE = ("sequence", "length", "positions")
"""The dimension names of models that mean the positions of a sequence."""


def activations(layout: Layout, compiler_chooses: bool) -> Iterator[Expected]:
    """Yield the collectives of activations over tensor axes and, if `compiler_chooses` (`js.auto`), over batch axes.

    A product that contracts a split dimension leaves partial sums, which are all-reduced. If a rule of `js.tensor`
    splits the sequence, activations are gathered before such a product, and reduce-scattered after it.
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
    """Yield the all-to-alls that send tokens to their experts and back, and the gather of token counts per expert.

    The routing decides how many bytes move. If it is uneven, tokens go in several rounds, whose number is not known
    before the program runs.
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
    """Yield the gathers of replicated vectors that a compiler computes from features split over the tensor axes.

    Examples are the gradients of a norm's scale and bias, if the norm follows a product whose columns are split, and
    the averages that a BatchNorm keeps.
    """
    tensor = tensor_axes(layout)
    replicated = [(one.path, one) for one in parameters if not set(axes_of(one.param.use)) & set(tensor)]
    state = [(path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(layout.shapes.state)]
    for path, x in (*replicated, *state):
        if rank_of(path, x.shape) == 1:
            most, what = 2 * math.prod(x.shape[:-1]), f"features of {path}"
            dtype = compute_dtype or x.dtype
            yield Expected("all-gather", tensor, tuple(x.shape[-1:]), dtype, 0, most, what, instead_of=what)


def fewest_features(layout: Layout, size: int) -> int:
    """Return the number of elements on each device if the compiler splits a vector of `size` over the tensor axes."""
    return max(1, size // axis_size(layout.mesh, tensor_axes(layout)))


def border_permutes(one: Expected, shard: Shape) -> Expected:
    """Return the permute between neighbouring devices that follows the reduce-scatter `one` on a TPU.

    A TPU scatters arrays padded to whole tiles. If a shard is not a whole number of tiles, the padded shards begin at
    other elements than the unpadded shards, and the compiler sends the difference to the neighbouring device.

    Args:
      one: the promised reduce-scatter.
      shard: the unpadded shape of its result on each device.
    """
    tiles = [1] * len(shard[:-2]) + [8, 128][-len(shard) :]
    padded = tuple(size + -size % tile for size, tile in zip(shard, tiles, strict=True))
    most = 0 if one.most is None or padded == shard else 2 * one.most
    what = f"borders of the {one.what}"
    form = replace(one, kind="collective-permute", shape=padded, least=0, most=most, what=what, unpadded=1)
    return replace(form, instead_of=one.name)


def ring_permutes(one: Expected, shard: Shape, parts: int) -> Expected:
    """Return the permutes by which a TPU's compiler may replace the reduce-scatter `one`.

    It may compute a matrix product shard by shard, and meanwhile pass the sums of earlier shards around a ring of
    devices. This takes one permute more than there are devices.

    Args:
      one: the promised reduce-scatter.
      shard: the shape of its result on each device.
      parts: the number of devices in the ring.
    """
    most = None if one.most is None else one.most * (parts + 1)
    what = f"shards of the {one.what}, around a ring"
    form = replace(one, kind="collective-permute", shape=shard, least=0, most=most, what=what, unpadded=None, stack=1)
    return replace(form, instead_of=one.name)


def between_slices(mesh: Mesh, expected: Iterable[Expected]) -> Iterator[Expected]:
    """Replace each collective over several TPU slices by the collectives it is compiled to; yield others unchanged.

    A sum over chips of a slice and over slices is scattered or summed in each slice, then summed between slices, then
    gathered in each slice. Between slices arrays are padded to tiles, and several are joined into one. So the result
    promises sums of elements, not single arrays (`Expected.pooled`): for each kind of collective above, over the axes
    inside a slice and over the axes across slices.
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
    """Return for each dimension the multiple to which it is padded between slices: `(8, 64, 256) -> (1, 16, 128)`."""
    return (*[1] * (len(shape) - 2), *[16, _LANES][-len(shape) :])


def torus_sizes(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Return how far a mesh axis extends along each dimension of the TPU torus: (4, 2) for an axis of 8 on 4 x 2 chips.

    Dimensions in which it does not extend are left out; the result is () on devices that are no TPUs.
    """
    dim = mesh.axis_names.index(axis)
    line = np.moveaxis(mesh.devices, dim, 0).reshape(mesh.devices.shape[dim], -1)[:, 0]
    coords = [getattr(device, "coords", ()) for device in line]
    return tuple(extent for extent in (len(set(places)) for places in zip(*coords, strict=True)) if extent > 1)


def explain_substitutes(mesh: Mesh, axes: Sequence[str]) -> str:
    """Explain why a TPU replaces promised collectives over these mesh axes by others, and how to avoid it.

    If an axis covers several dimensions of a TPU torus, libtpu has no reduce-scatter over it, in any order of the
    devices. It also turns some all-gathers into all-reduces, and turns every all-gather into an all-reduce if the axis
    covers three dimensions without wrap-around links. If no axis covers several dimensions, the explanation is "".
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
