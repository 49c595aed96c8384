"""Arrays that must never travel: weights over the axes that split them in use, and logits with a whole vocabulary.

Where a compiler does not find the sharded algorithm it silently gathers a weight. The result is right and every device
does all the work, so such a collective is a surprise however small it is. In a program it has to be recognised by its
shape alone, and compilers transpose, flatten and slice: `Never.shapes` holds every form in which a weight may be met.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from jaxshard.checks.collectives.expected import Shape, joined_shapes, normal_shape
from jaxshard.checks.collectives.found import Collective
from jaxshard.checks.collectives.parameters import Parameter, is_stacked, rank_of
from jaxshard.core.mesh import axis_names
from jaxshard.core.placement import axes_of, only_axes, splits_per_dim


@dataclass(frozen=True)
class Never:
    """An array that must not travel over some axes: a weight that they split, or one with a whole vocabulary (logits).

    Attributes:
      axes: the mesh axes.
      what: the array in words, with its path.
      shapes: the weight's, in every form in which a compiler moves it whole, without dimensions of one element and
        sorted.
      shards: the weight's numbers of elements on one device, whole or one block of it.
      vocab: of logits the size of the last dimension; 0 for a weight.
      of_experts: True for the weights of experts, over whose axes tokens are exchanged.

    Example:
        promised = js.plan.promise(layout, js.explicit(), loss_fn, batch)
        [(one.what, one.axes) for one in promised.never]
    """

    axes: tuple[str, ...]
    what: str
    shapes: frozenset[Shape] = frozenset()
    shards: frozenset[int] = frozenset()
    vocab: int = 0
    of_experts: bool = False


def forbidden_arrays(mesh: Mesh, parameters: Sequence[Parameter], experts: Sequence[str] = ()) -> Iterator[Never]:
    """Yield the weights that axes split in use, those of `experts` among them, and logits of a vocabulary split so."""
    for one in parameters:
        axes = tuple(axis for axis in axes_of(one.param.use) if mesh.shape[axis] > 1)
        if axes and rank_of(one.path, one.shape) > 1:  # a vector is as long as statistics of features are
            forms = _whole_shapes(mesh, one, axes), _shard_sizes(mesh, one)
            yield Never(axes, f"the weight {one.path}", *forms, of_experts=bool(set(axes) & set(experts)))
    vocab = {pair for one in parameters for pair in _vocab_dims(one)}
    others = {size for one in parameters for size in one.shape if size not in [size for _, size in _vocab_dims(one)]}
    for axes, size in sorted(vocab):
        if size not in others:  # else the last dimension does not tell logits from other activations
            yield Never(axes, f"logits, all {size} of a vocabulary", vocab=size)


def _vocab_dims(one: Parameter) -> list[tuple[tuple[str, ...], int]]:
    """The axes and size of a dimension that `js.tensor` split because it is called vocab."""
    if not one.param.rule.startswith("vocab:"):
        return []
    return [(axis_names(entry), size) for size, entry in zip(one.shape, one.param.use) if axis_names(entry)]


def _whole_shapes(mesh: Mesh, one: Parameter, axes: tuple[str, ...]) -> frozenset[Shape]:
    """The shapes that a weight may have when it is whole over the axes.

    Whole or one block of it, over the other axes as used or as stored, flat, or with neighbouring dimensions joined. A
    stacked kernel [2, 32, 128] over (data=4, tensor=2), stored as [2, 8, 64], may be met whole over tensor as
    [2, 32, 128], [32, 128], [8, 128], [2, 8, 128], [4096], [64, 128], ...
    """
    shapes: set[Shape] = set()
    for placement in filter(None, (one.param, one.grad, one.opt)):
        others = [axis for axis in axes_of(placement.store) if axis not in axes]
        for spec in (PartitionSpec(*(None,) * len(placement.store)), only_axes(placement.store, others)):
            shape = tuple(size // parts for size, parts in zip(placement.view.stored, splits_per_dim(mesh, spec)))
            shapes |= {shape, shape[1:]} if is_stacked(one.path) else {shape}
    return frozenset(normal_shape(joined) for shape in shapes for joined in joined_shapes(shape))


def _shard_sizes(mesh: Mesh, one: Parameter) -> frozenset[int]:
    split = math.prod(splits_per_dim(mesh, one.param.use))
    shapes = [one.shape, one.shape[1:]] if is_stacked(one.path) else [one.shape]
    return frozenset(math.prod(shape) // split for shape in shapes if len(shape) > 1)


def is_forbidden(never: Never, found: Collective) -> bool:
    """Return True if the array of a collective, its only one, has the form of one that must not travel over its axes.

    A sum of a weight's size may be one of activations, so a weight's form is only looked for in what is gathered (the
    whole weight) and in what is exchanged or permuted (shards of it, which must be of a floating type: indices that are
    exchanged may have any size).
    """
    if not set(found.axes) & set(never.axes):
        return False
    (shape,) = found.shapes
    weights = [name for trail in found.trails for name in trail.arguments if name.startswith("weight ")]
    if weights and not never.vocab and never.what not in [f"the {name}" for name in weights]:
        return False  # another weight of the same form
    if never.vocab:
        return shape[-1:] == (never.vocab,) and found.elements > never.vocab and len(normal_shape(shape)) > 1
    if found.kind == "all-gather":
        return normal_shape(shape) in never.shapes
    exchanged = never.of_experts and found.kind.endswith("all-to-all")  # tokens, of any number
    moved = found.kind not in ("all-reduce", "reduce-scatter") and not exchanged
    return moved and found.elements in never.shards and found.dtype.startswith(("f", "bf"))


def explain_forbidden(banned: Sequence[Never], found: Collective) -> str:
    """Return why an array, which has the form of all those `banned`, is a surprise."""
    weights = [never.what for never in banned if not never.vocab] or [never.what for never in banned]
    what = " or ".join(weights[:3]) + (f" or one of {len(weights) - 3} more" if len(weights) > 3 else "")
    size = "" if found.kind == "all-gather" or banned[0].vocab else "by its size part of "
    return f"{size}{what}: must never move over {'+'.join(banned[0].axes)}"
