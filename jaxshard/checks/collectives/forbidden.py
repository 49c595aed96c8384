"""Arrays that must never be communicated: weights over their tensor axes, and logits with the full vocabulary.

A compiler that does not find the sharded algorithm silently gathers the weight. The result is right, but every device
does all the work, so such a collective is a surprise however small it is. It can be recognised by its shape alone, and
compilers transpose, flatten and slice: `Never.shapes` has every shape that a gathered weight may have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from jaxshard.checks.collectives.expected import Shape, joined_shapes, normal_shape
from jaxshard.checks.collectives.parameters import Parameter, is_stacked, rank_of
from jaxshard.core.mesh import axis_names
from jaxshard.core.placement import axes_of, only_axes, splits_per_dim
from jaxshard.hlo.found import Collective


@dataclass(frozen=True)
class Never:
    """An array that must not be communicated over some mesh axes: a weight that these axes split, or logits.

    Attributes:
      axes: the mesh axes.
      what: the array in words, with its path.
      shapes: every shape that the gathered weight may have, sorted and without dimensions of size one.
      shards: the possible numbers of elements of a device's shard: of the stacked weight, or of one block's weight.
      vocab: the size of the vocabulary, the last dimension of logits; 0 for a weight.
      of_experts: True for weights of experts; an all-to-all over their axes may also move tokens.

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
    """Yield the arrays that must never be communicated: split weights, and logits if the vocabulary is split.

    Args:
      mesh: the mesh.
      parameters: all parameters of the model.
      experts: the mesh axes that split experts.
    """
    for one in parameters:
        axes = tuple(axis for axis in axes_of(one.param.use) if mesh.shape[axis] > 1)
        if axes and rank_of(one.path, one.shape) > 1:  # statistics of features have the shape of a vector, too
            forms = _gathered_shapes(mesh, one, axes), _shard_sizes(mesh, one)
            yield Never(axes, f"the weight {one.path}", *forms, of_experts=bool(set(axes) & set(experts)))
    vocab = {pair for one in parameters for pair in _vocab_dims(one)}
    others = {size for one in parameters for size in one.shape if size not in [size for _, size in _vocab_dims(one)]}
    for axes, size in sorted(vocab):
        if size not in others:  # else the last dimension does not tell logits from other activations
            yield Never(axes, f"logits, all {size} of a vocabulary", vocab=size)


def _vocab_dims(one: Parameter) -> list[tuple[tuple[str, ...], int]]:
    """Return (mesh axes, size) of each dimension that `js.tensor` splits as the vocabulary."""
    if not one.param.rule.startswith("vocab:"):
        return []
    return [(axis_names(entry), size) for size, entry in zip(one.shape, one.param.use) if axis_names(entry)]


def _gathered_shapes(mesh: Mesh, one: Parameter, axes: tuple[str, ...]) -> frozenset[Shape]:
    """Return the shapes that a weight may have once it is gathered over the axes.

    These are the shapes of all blocks and of one block, replicated over all other axes or still sharded over them, and
    with any neighbouring dimensions joined. A stacked kernel [2, 32, 128] over (data=4, tensor=2), stored as
    [2, 8, 64], may appear, gathered over tensor, as [2, 32, 128], [32, 128], [8, 128], [2, 8, 128], [4096], ...
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
    """Return True if a collective of one array seems to move the forbidden array `never` over a forbidden axis.

    A weight is recognised in an all-gather by its full shape, and in an all-to-all or permute of floats by the number
    of elements of its shards. It is not looked for in sums, where an array of this size may be an activation. Logits
    are recognised by their last dimension, the vocabulary.
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
    """Say which forbidden arrays a collective may move: "the weight head/kernel: must never move over tensor"."""
    weights = [never.what for never in banned if not never.vocab] or [never.what for never in banned]
    what = " or ".join(weights[:3]) + (f" or one of {len(weights) - 3} more" if len(weights) > 3 else "")
    size = "" if found.kind == "all-gather" or banned[0].vocab else "by its size part of "
    return f"{size}{what}: must never move over {'+'.join(banned[0].axes)}"
