"""What a strategy promises to communicate: the collectives of a step, from the placements of every array.

Nothing here knows a strategy's name. A weight is gathered over what its `store` has and its `use` lacks, a gradient is
reduced over the batch axes that the weight's `use` does not own, a new parameter is gathered over what the optimizer
splits and the parameter does not; over the axes of `use` itself the compiler moves activations, never weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxshard.checks.collectives.pipeline import pipe_axes, pipelined_uses
from jaxshard.checks.collectives.weight_uses import Use, uses
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.placement import Placement, axes_of, only_axes, split_dims, splits_per_dim
from jaxshard.core.strategy import Tensor, parts_of
from jaxshard.core.tree import BLOCKS, bytes_of, path_str
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.accumulate import Engine
from jaxshard.engines.auto import Auto
from jaxshard.engines.pipeline.engine import Pipelined

Shape = tuple[int, ...]

SLACK = 0.01
"""The share of the parameters' bytes that a compiler may move of its own accord: borders of padded arrays, indices."""

_SCATTER = {"native": "reduce-scatter", "ordered": "all-to-all"}
"""What scatters a sum, by the engine's reduction."""

_SEQUENCE = ("sequence", "length", "positions")


@dataclass(frozen=True)
class Expected:
    """A collective that is promised, as one device sees it.

    Attributes:
      kind: one of `audit.KINDS`.
      axes: the mesh axes, in mesh order; () for any.
      shape: the whole, unscattered array; None for activations, whatever their shape.
      dtype: of the array; the CPU compiler promotes narrower ones to f32. None where the loss decides.
      least: executions per step that there will be (0 where the compiler has a choice).
      most: executions per step that there may be; None where the loss decides.
      what: the array in words, with its path.
      unpadded: the fewest elements, where the compiler may move the array before it is padded, or a part of it.
      limit: the most elements of an array whose shape the loss decides; None for any.
      stack: how many executions the compiler may join into one of a stacked array: the blocks of a loop.
    """

    kind: str
    axes: tuple[str, ...]
    shape: Shape | None
    dtype: Any
    least: int
    most: int | None
    what: str
    unpadded: int | None = None
    limit: int | None = None
    stack: int = 1

    @property
    def elements(self) -> tuple[int, int]:
        """The fewest and the most elements that the array may have."""
        assert self.shape is not None, self
        size = math.prod(self.shape)
        return min(size, self.unpadded or size), size

    @property
    def bytes(self) -> int | None:
        """Bytes of the whole array times `most`; None where the loss decides."""
        if self.shape is None or self.most is None:
            return None
        return self.most * bytes_of(self.shape, self.dtype)


@dataclass(frozen=True)
class Never:
    """An array that must not travel over the axes: a weight that they split, or one with a whole vocabulary (logits).

    `shapes` are the weight's, in every form in which a compiler moves it whole, without dimensions of one element and
    sorted; `shards` its numbers of elements on one device; `vocab` is the size of a dimension.
    """

    axes: tuple[str, ...]
    what: str
    shapes: frozenset[Shape] = frozenset()
    shards: frozenset[int] = frozenset()
    vocab: int = 0


@dataclass(frozen=True)
class Promise:
    """What a step may communicate.

    Attributes:
      expected: the collectives, one per array and stage.
      never: what nothing in `expected` covers, however small it is.
      slack: bytes that the compiler may move in all beyond what is expected.
    """

    expected: tuple[Expected, ...]
    never: tuple[Never, ...]
    slack: int


def promise(layout: Layout, engine: Engine, loss_fn: LossFn, batch: PyTree) -> Promise:
    """The collectives of the step that `make_step(loss_fn, tx, layout, engine=engine)` makes for a batch.

    `batch` holds global arrays or their shapes: the loss is traced, to know how often it uses each weight. Under
    `js.explicit` every collective is promised exactly, but for arrays over tensor axes; under `js.auto`, whose
    collectives the compiler chooses, nothing else than these and nothing more often, and an all-reduce may stand for
    a reduce-scatter:

    - every weight gathered over the axes that its `store` has and its `use` lacks, as often as the loss uses it: once,
      or in blocks and units once and once more where the backward pass needs it;
    - every gradient reduced, scattered over the batch axes in its `store`, summed over the others; under auto once per
      use of a weight, which may be tied;
    - every parameter gathered over what splits its optimizer state alone;
    - where sums have one order, an all-to-all for every reduce-scatter, and with an all-gather for every all-reduce;
    - scalars and metrics; under explicit the model's floating state; under auto sums over rows of no more numbers than
      the longest dimension of a parameter (statistics of a batch);
    - in a pipeline, permutes of activations over its axis, the gradients outside the blocks summed over it too, and
      what a slot of a tick does at most as often as there are ticks;
    - over axes that split the `use` of weights (tensor): all-reduces of activations, with a rule that splits the
      sequence their gathers and scatters too. Never a weight that is split there, nor an array with a dimension of a
      vocabulary that is.
    """
    leaves = list(_leaves(layout))
    if isinstance(engine, Pipelined):
        counts, metrics = pipelined_uses(layout, engine, loss_fn, batch)
    else:
        counts, metrics = uses(layout, engine, loss_fn, batch)
    auto = isinstance(engine, Auto)
    expected = [
        *itertools.chain.from_iterable(_weight(layout, engine, leaf, counts, auto) for leaf in leaves),
        *itertools.chain.from_iterable(_gradient(layout, engine, leaf, counts, auto) for leaf in leaves),
        *itertools.chain.from_iterable(_update(layout, leaf) for leaf in leaves),
        *_state(layout, engine, auto),
        *_metrics(layout, engine, metrics, auto),
        *_stages(layout, engine),
        *_features(layout, leaves),
        *_activations(layout, auto),
        *_scalars(layout, engine),
    ]
    total = sum(bytes_of(leaf.shape, leaf.dtype) for leaf in leaves)
    return Promise(tuple(expected), tuple(_never(layout, leaves)), int(SLACK * total))


@dataclass(frozen=True)
class _Leaf:
    path: str
    shape: Shape
    dtype: Any
    param: Placement
    grad: Placement | None
    opt: Placement | None


def _leaves(layout: Layout) -> Iterator[_Leaf]:
    def flat(tree: PyTree) -> list[Any]:
        return jax.tree.leaves(tree, is_leaf=lambda x: x is None)

    arrays = jax.tree_util.tree_leaves_with_path(layout.shapes.params)
    trees = jax.tree.leaves(layout.params), flat(layout.grads), flat(layout.opt_params)
    for (path, x), param, grad, opt in zip(arrays, *trees, strict=True):
        yield _Leaf(path_str(path), tuple(x.shape), x.dtype, param, grad, opt)


def _weight(layout: Layout, engine: Engine, leaf: _Leaf, counts: dict[Use, int], auto: bool) -> Iterator[Expected]:
    """The gathers of one weight, from `store` to `use`, minor axes first."""
    dtype = leaf.dtype
    if engine.compute_dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.dtype(engine.compute_dtype)
    for sliced in (True, False):
        if most := counts.get(Use("weight", leaf.path, sliced), 0):
            param = leaf.param.tail() if sliced else leaf.param
            # What does not depend on the turn the compiler may gather once.
            surely = 0 if isinstance(engine, Pipelined) else most  # the slots of a tick are conditional
            least = 0 if auto else surely if sliced or engine.microbatches == 1 else 1
            one = Expected("all-gather", (), (), dtype, least, most, f"weight {leaf.path}")
            yield from _gathers(layout.mesh, param, axes_of(param.use), one, at_once=auto)


def _gathers(mesh: Mesh, old: Placement, keep: Sequence[str], one: Expected, *, at_once: bool) -> Iterator[Expected]:
    """`one` for every stage of a gather that leaves the axes in `keep`; all axes of a dimension `at_once` or singly."""
    shape = list(old.shard_shape(mesh))
    gone = [(dim, axis) for dim, axis in split_dims(old.store) if axis not in keep]
    stages: list[tuple[int, tuple[str, ...]]] = [(dim, (axis,)) for dim, axis in reversed(gone)]
    if at_once:
        dims = dict.fromkeys(dim for dim, _ in reversed(gone))
        stages = [(dim, tuple(axis for d, axis in gone if d == dim)) for dim in dims]
    for dim, axes in stages:
        shape[dim] *= math.prod(mesh.shape[axis] for axis in axes)
        yield from _over(mesh, replace(one, shape=tuple(shape)), axes)


def _over(mesh: Mesh, one: Expected, axes: Iterable[str]) -> Iterator[Expected]:
    """`one` over those of the axes that have several devices; nothing where there are none."""
    axes = tuple(axes)
    if several := tuple(axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] > 1):
        yield replace(one, axes=several)


def _gradient(layout: Layout, engine: Engine, leaf: _Leaf, counts: dict[Use, int], auto: bool) -> Iterator[Expected]:
    """The reductions of one gradient: where it is born, or all turns at the end."""
    if leaf.grad is None:
        return
    if engine.scatter == "end":
        yield from _reductions(layout, engine, leaf, leaf.grad, 1, auto)
        return
    for sliced in (True, False):
        if count := counts.get(Use("gradient", leaf.path, sliced), 0):
            yield from _reductions(layout, engine, leaf, leaf.grad.tail() if sliced else leaf.grad, count, auto)


def _reductions(
    layout: Layout, engine: Engine, leaf: _Leaf, grad: Placement, count: int, auto: bool
) -> Iterator[Expected]:
    """The stages in which one gradient is reduced `count` times, in the order of `_collectives.scatter_sum`."""
    mesh, owned = layout.mesh, axes_of(leaf.param.use)
    sliced = len(grad.view.logical) < len(leaf.shape)
    if auto and not sliced:
        count *= 2  # a tied weight: the compiler sums each use over devices, then both
    also = () if _is_block(leaf.path) else pipe_axes(layout, engine)
    free = [axis for axis in (*layout.batch_axes, *also) if axis not in owned]
    shape = [size // parts for size, parts in zip(grad.view.stored, splits_per_dim(mesh, only_axes(grad.store, owned)))]
    fewest = math.prod(grad.view.logical) // math.prod(splits_per_dim(mesh, only_axes(grad.store, owned)))
    one = Expected(
        _SCATTER[engine.reduction], (), tuple(shape), engine.reduce_dtype or leaf.dtype, 0 if auto else count, count,
        f"gradient of {leaf.path}", unpadded=fewest if auto else None,
        stack=leaf.shape[0] if sliced else 1,
    )  # fmt: skip
    split = [(dim, axis) for dim, axis in split_dims(grad.store) if axis not in owned]
    for dim, axis in split:
        if axis in free:
            yield from _over(mesh, replace(one, shape=tuple(shape)), [axis])
        shape[dim] //= mesh.shape[axis]
        if axis in free and mesh.devices.flat[0].platform == "tpu":
            yield from _over(mesh, _borders(one, tuple(shape)), [axis])
    rest = [axis for axis in free if axis not in [name for _, name in split]]
    summed = replace(one, kind="all-reduce", shape=tuple(shape))
    if _rank(leaf.path, leaf.shape) == 1:
        summed = replace(summed, unpadded=_split_features(layout, math.prod(shape)))
    yield from _sum(layout, engine, summed, rest)
    if auto and split and len(free) > 1:
        yield from _over(mesh, replace(one, kind="all-reduce"), free)
    if auto and _splits_sequence(layout):
        yield from _over(mesh, replace(one, kind="all-reduce"), [*free, *_tensor_axes(layout)])


def _sum(layout: Layout, engine: Engine, one: Expected, axes: Sequence[str]) -> Iterator[Expected]:
    """`one`, an all-reduce over the axes; what stands for it where sums have one order (`_ordered.all_sum`)."""
    count, size = axis_size(layout.mesh, tuple(axes)), math.prod(one.shape or ())
    if engine.reduction == "native" or not jnp.issubdtype(one.dtype, jnp.inexact):
        yield from _over(layout.mesh, one, axes)
    elif size < count:
        yield from _over(layout.mesh, replace(one, kind="all-gather", shape=(count, size), unpadded=None), axes)
    else:
        flat = replace(one, shape=(size + -size % count,), unpadded=None)
        yield from _over(layout.mesh, replace(flat, kind="all-to-all"), axes)
        yield from _over(layout.mesh, replace(flat, kind="all-gather"), axes)


def _borders(one: Expected, shard: Shape) -> Expected:
    """What crosses the borders of shards that are no whole tiles: TPU scatters padded ones and permutes what is off."""
    tiles = [1] * len(shard[:-2]) + [8, 128][-len(shard) :]
    padded = tuple(size + -size % tile for size, tile in zip(shard, tiles, strict=True))
    most = None if one.most is None or padded == shard else 2 * one.most
    what = f"borders of the {one.what}"
    return replace(one, kind="collective-permute", shape=padded, least=0, most=most or 0, what=what, unpadded=1)


def _update(layout: Layout, leaf: _Leaf) -> Iterator[Expected]:
    """What brings a parameter and its gradient to where its optimizer state is, and the new parameter back."""
    if leaf.grad is None or leaf.opt is None:
        return
    yield from _move(layout, leaf, leaf.param, leaf.opt, f"parameter {leaf.path} for the optimizer")
    yield from _move(layout, leaf, leaf.grad, leaf.opt, f"gradient of {leaf.path} for the optimizer")
    yield from _move(layout, leaf, leaf.opt, leaf.param, f"new parameter {leaf.path}")


def _move(layout: Layout, leaf: _Leaf, old: Placement, new: Placement, what: str) -> Iterator[Expected]:
    one = Expected("all-gather", (), (), leaf.dtype, 1, 1, what)
    kept = [pair for pair in split_dims(old.store) if pair in split_dims(new.store)]
    yield from _gathers(layout.mesh, old, [axis for _, axis in kept], one, at_once=True)


def _state(layout: Layout, engine: Engine, auto: bool) -> Iterator[Expected]:
    """The model's state: gathered for use, and under explicit averaged over the batch axes."""
    arrays = jax.tree_util.tree_leaves_with_path(layout.shapes.state)
    for (path, x), placement in zip(arrays, jax.tree.leaves(layout.state), strict=True):
        one = Expected("all-gather", (), tuple(x.shape), x.dtype, 0, 1, f"state {path_str(path)}")
        yield from _gathers(layout.mesh, placement, axes_of(placement.use), one, at_once=True)
        if not auto and jnp.issubdtype(x.dtype, jnp.floating):
            summed = replace(one, kind="all-reduce", unpadded=_split_features(layout, x.size))
            yield from _sum(layout, engine, summed, layout.batch_axes)


def _stages(layout: Layout, engine: Engine) -> Iterator[Expected]:
    """What goes from stage to stage, and between them and the two ends."""
    one = Expected("collective-permute", (), None, None, 0, None, "activations and their cotangents between stages")
    yield from _over(layout.mesh, one, pipe_axes(layout, engine))


def _metrics(layout: Layout, engine: Engine, metrics: dict[str, PyTree], auto: bool) -> Iterator[Expected]:
    """Arrays among the metrics, combined over the devices that have other rows."""
    axes = (*layout.batch_axes, *pipe_axes(layout, engine))
    for name, metric in metrics.items():
        for x in jax.tree.leaves(metric):
            if x.size > 1:
                least = 0 if auto else 1
                one = Expected("all-reduce", (), tuple(x.shape), x.dtype, least, 1, f"metric {name}")
                yield from _sum(layout, engine, one, axes)


def _scalars(layout: Layout, engine: Engine) -> Iterator[Expected]:
    """Loss, weights, metrics and norms; in one order every device gathers the numbers of all, and adds them itself."""
    yield Expected("all-reduce", (), (), None, 0, None, "scalars: loss, weights, metrics and norms")
    if engine.reduction == "ordered":
        grads = jax.tree.leaves(layout.grads)
        axes = {axis for placement in grads for axis in axes_of(placement.store)}
        shape = (axis_size(layout.mesh, tuple(axes)), len(grads))
        one = Expected("all-gather", (), shape, jnp.float32, 1, 1, "squares of the gradients, for their norm")
        yield from _over(layout.mesh, one, axes)
        each = (layout.mesh.size,)
        yield Expected("all-gather", (), each, None, 0, None, "scalars of every device: loss, weights, metrics, sums")


def _split_features(layout: Layout, size: int) -> int:
    """How many elements of a vector one device may have where the compiler splits what is made of features."""
    return max(1, size // axis_size(layout.mesh, _tensor_axes(layout)))


def _features(layout: Layout, leaves: Sequence[_Leaf]) -> Iterator[Expected]:
    """Vectors that are whole over the tensor axes, but made by features that are split there: as a norm's may be."""
    tensor = _tensor_axes(layout)
    vectors = [(leaf.path, leaf.shape, leaf.dtype) for leaf in leaves if not set(axes_of(leaf.param.use)) & set(tensor)]
    state = jax.tree_util.tree_leaves_with_path(layout.shapes.state)
    vectors += [(path_str(path), tuple(x.shape), x.dtype) for path, x in state]
    for path, shape, dtype in vectors:
        if _rank(path, shape) == 1:
            one = Expected("all-gather", (), shape[-1:], dtype, 0, 2 * math.prod(shape[:-1]), f"features of {path}")
            yield from _over(layout.mesh, one, tensor)


def _activations(layout: Layout, auto: bool) -> Iterator[Expected]:
    """What the compiler derives: over tensor axes, and under auto over batch axes."""
    mesh, tensor = layout.mesh, _tensor_axes(layout)
    one = Expected("all-reduce", (), None, None, 0, None, "activations")
    yield from _over(mesh, one, tensor)
    if _splits_sequence(layout):
        for kind in ("all-gather", "reduce-scatter"):
            yield from _over(mesh, replace(one, kind=kind, what="activations split along the sequence"), tensor)
    if auto:
        longest = max(max(x.shape, default=1) for x in jax.tree.leaves(layout.shapes.params))
        sums = replace(one, limit=longest, what="sums over rows")
        yield from _over(mesh, sums, layout.batch_axes)
        yield from _over(mesh, replace(sums, kind="all-gather"), layout.batch_axes)


def _tensor_axes(layout: Layout) -> tuple[str, ...]:
    used = {axis for placement in jax.tree.leaves(layout.params) for axis in axes_of(placement.use)}
    return tuple(axis for axis in layout.mesh.axis_names if axis in used)


def _splits_sequence(layout: Layout) -> bool:
    rules = [part.rules for part in parts_of(layout.strategy) if isinstance(part, Tensor)]
    return any(rule.fate(name) in ("split", "split or whole") for rule in rules for name in _SEQUENCE)


def _never(layout: Layout, leaves: Sequence[_Leaf]) -> Iterator[Never]:
    for leaf in leaves:
        axes = tuple(axis for axis in axes_of(leaf.param.use) if layout.mesh.shape[axis] > 1)
        if axes and _rank(leaf.path, leaf.shape) > 1:  # a vector is as long as statistics of features are
            yield Never(axes, f"the weight {leaf.path}", *_forms(layout.mesh, leaf, axes))
    vocab = {pair for leaf in leaves for pair in _vocab(leaf)}
    others = {size for leaf in leaves for size in leaf.shape if size not in [size for _, size in _vocab(leaf)]}
    for axes, size in sorted(vocab):
        if size not in others:  # else the last dimension does not tell logits from other activations
            yield Never(axes, f"logits, all {size} of a vocabulary", vocab=size)


def _rank(path: str, shape: Shape) -> int:
    """The number of dimensions, that of stacked blocks left out."""
    return len(shape) - _is_block(path)


def _is_block(path: str) -> bool:
    return path.startswith(f"{BLOCKS}/")


def _vocab(leaf: _Leaf) -> list[tuple[tuple[str, ...], int]]:
    """The axes and size of a dimension that `js.tensor` split because it is called vocab."""
    if not leaf.param.rule.startswith("vocab:"):
        return []
    return [(axis_names(entry), size) for size, entry in zip(leaf.shape, leaf.param.use) if axis_names(entry)]


def _forms(mesh: Mesh, leaf: _Leaf, axes: tuple[str, ...]) -> tuple[frozenset[Shape], frozenset[int]]:
    """A weight's shapes when it is whole over the axes, and its numbers of elements when it is not.

    Whole or one block of it, over the other axes as used or as stored, flat, or with neighbouring dimensions joined.
    """
    shapes: set[Shape] = set()
    for placement in filter(None, (leaf.param, leaf.grad, leaf.opt)):
        others = [axis for axis in axes_of(placement.store) if axis not in axes]
        for spec in (PartitionSpec(*(None,) * len(placement.store)), only_axes(placement.store, others)):
            shape = tuple(size // parts for size, parts in zip(placement.view.stored, splits_per_dim(mesh, spec)))
            shapes |= {shape, shape[1:]} if _is_block(leaf.path) else {shape}
    joined = {
        (*s[:i], math.prod(s[i:j]), *s[j:]) for s in shapes for i in range(len(s)) for j in range(i + 1, len(s) + 1)
    }
    split = math.prod(splits_per_dim(mesh, leaf.param.use))
    ways = [leaf.shape, leaf.shape[1:]] if _is_block(leaf.path) else [leaf.shape]
    shards = {math.prod(shape) // split for shape in ways if len(shape) > 1}
    return frozenset(form(shape) for shape in joined | shapes), frozenset(shards)


def form(shape: Shape) -> Shape:
    """The shape up to the order of its dimensions and dimensions of size one."""
    return tuple(sorted(size for size in shape if size != 1))
