"""Strategies: pure functions that say where each array lives. They compose because functions compose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from jaxshard.core.mesh import axis_names, axis_size, check_axis, make_mesh
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.rules import RULES, Rule, Rules
from jaxshard.core.tree import BLOCKS, Leaf
from jaxshard.core.types import ROLES, AxisName, Role

Strategy = Callable[[Role, Leaf, Placement, Mesh], Placement]

MIN_SIZE = 2**14
"""Arrays with fewer elements stay whole: splitting them costs a collective and saves next to nothing."""

MIN_PART = 8
"""Parts of a dimension should have at least so many elements, the rows of a TPU tile: thinner ones rest padded."""


def shard(axis: AxisName, roles: Role | Iterable[Role], *, min_size: int = MIN_SIZE) -> Strategy:
    """A fill: splits every array of the given roles over `axis`, along a free dimension that divides.

    That is the first one whose parts have at least `MIN_PART` elements, because gathering along a leading dimension
    puts parts after one another where another one must interleave them; without such a dimension, the largest that
    divides. An array with no such dimension is padded along the dimension where that costs least; scalars, and arrays
    of fewer than `min_size` elements, stay whole. The dimension of stacked blocks is never split by a fill. An axis
    may be a tuple of mesh axes, which split one dimension together.

    Raises (when applied):
      ValueError: the mesh has no such axis, or the axis already splits the array.
    """
    chosen: tuple[Any, ...] = (roles,) if isinstance(roles, str) else tuple(roles)
    unknown = [role for role in chosen if role not in ROLES or role == "batch"]
    if unknown:
        raise ValueError(f"shard: unknown roles {unknown}; use some of 'param', 'grad', 'opt', 'state'")
    if min_size < 0:
        raise ValueError(f"shard: min_size must be at least 0 elements, got {min_size}")
    return Shard(axis, chosen, min_size)


def batch(*axes: AxisName) -> Strategy:
    """Splits the rows (dimension 0) of every batch array over the axes, the first one major; scalars stay whole."""
    return Batch(tuple(name for axis in axes for name in axis_names(axis)))


def tensor(rules: Iterable[Rule] = RULES, axis: AxisName = "tensor") -> Strategy:
    """Tensor parallelism: parameters, gradients and optimizer state split over `axis` by the names of their dimensions.

    Computation uses them split, and the compiler derives the collectives: column-parallel layers then row-parallel
    ones cost one all-reduce of the activations forward and one backward (Shoeybi et al. 2019, "Megatron-LM", section
    3). Weights are never gathered over the axis. Of an array whose rules split several dimensions the first is split.

    `rules` are pairs, the first that fits decides: `("mlp", "split")` says what happens to the dimensions of a name,
    `"split"`, `"whole"` or `"split or whole"` (where it does not divide: fewer key and value heads than devices);
    `("fuse/kernel", ("embed", "mlp"))` names the dimensions of the parameters whose path ends so. The model's own
    annotations go after your patterns and before those of `js.RULES`, which knows Flax's layers and the usual names.
    With `("sequence", "split")` in front, activations that the model constrains by that name (`js.constrain`) are
    split between blocks: sequence parallelism (Korthikanti et al. 2022, section 4.2.2).

    Raises (when applied):
      ValueError: the mesh has no such axis, or it does not divide a dimension that it is to split; a name that no
        rule knows.
      TypeError: rules that are no pairs.
    """
    if isinstance(rules, str):
        raise TypeError(
            f"tensor: rules are pairs, got {rules!r}; for the axis of this name write js.tensor(axis={rules!r})"
        )
    return Tensor(Rules(tuple(rules)), axis)


def pipeline(axis: AxisName = "pipe", *, chunks: int = 2) -> Strategy:
    """Pipeline parallelism: the stacked blocks of a `js.Stacked` model split over `axis`, `chunks` runs on each device.

    With p devices there are p * chunks stages; stage k is chunk k // p of device k % p and holds
    ceil(blocks / (p * chunks)) consecutive blocks. Where that does not divide, the last stages hold fewer: their
    padding is zeros at rest and passes activations through unchanged. At rest a leaf [blocks, ...] is
    [chunks, p, blocks per stage, ...]; in the model's order everywhere else. Parameters that are not stacked
    (embedding, head) are whole over the axis. More chunks make the bubble smaller and the traffic between stages
    larger (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).

    It places; `js.pipelined(...)` is the engine that runs it.

    Raises (when applied):
      ValueError: the mesh has no such axis; fewer blocks than stages.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"pipeline: chunks must be a whole number from 1 on, got {chunks!r}")
    if len(axis_names(axis)) != 1:
        raise ValueError(f"pipeline: name one mesh axis, whose devices form the ring of stages, got {axis!r}")
    return Pipeline(axis_names(axis)[0], chunks)


def compose(*strategies: Strategy) -> Strategy:
    """All strategies in one: placements by name first, fills after them, whatever the order they are written in."""
    for strategy in strategies:
        if not callable(strategy):
            raise TypeError(f"compose: expected strategies, got {type(strategy).__name__} ({strategy!r})")
    flat = [part for s in strategies for part in (s.parts if isinstance(s, Composed) else (s,))]
    return Composed(tuple(sorted(flat, key=lambda part: (isinstance(part, Shard), not isinstance(part, Pipeline)))))


def ddp(axis: AxisName = "data") -> Strategy:
    """Data parallelism: rows split, everything else whole on every device."""
    return compose(batch(axis))


def zero1(axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1): optimizer state split, parameters and gradients whole."""
    return compose(batch(axis), shard(axis, ["opt"], min_size=min_size))


def zero2(axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """ZeRO stage 2 (Rajbhandari et al. 2020, section 5.2): optimizer state and gradients split, parameters whole."""
    return compose(batch(axis), shard(axis, ["opt", "grad"], min_size=min_size))


def fsdp(axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """Fully sharded data parallelism (ZeRO stage 3, section 5.3): parameters, gradients and optimizer state split."""
    return compose(batch(axis), shard(axis, ["opt", "grad", "param"], min_size=min_size))


def hsdp(replica: AxisName = "replica", axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """Hybrid sharding: rows split over both axes, everything else split over `axis` and copied over `replica`."""
    return compose(batch(replica, axis), shard(axis, ["opt", "grad", "param"], min_size=min_size))


def hybrid(
    devices: Sequence[jax.Device] | None = None,
    /,
    *,
    data: int = -1,
    tensor: int | None = None,
    pipe: int | None = None,
    chunks: int = 2,
    split: Callable[..., Strategy] = fsdp,
    rules: Iterable[Rule] = RULES,
) -> tuple[Mesh, Strategy]:
    """(mesh, strategy) of data, tensor and pipeline parallelism over all devices; one size may be -1.

    The mesh has the axes "pipe", "data" and "tensor", in this order: neighbours on the last axis are nearest to one
    another, and tensor parallelism communicates most. Without a size, tensor and pipe are left out. `split` is what
    happens along data: `js.ddp`, `js.zero1`, `js.zero2` or `js.fsdp`; `rules` are those of `js.tensor`, `chunks` those
    of `js.pipeline`. With pipe the engine is `js.pipelined(...)`.

        mesh, strategy = js.hybrid(data=-1, tensor=2, pipe=2)
        layout = js.layout(strategy, mesh, model.init, tx)

    Raises:
      ValueError: more than one -1, or sizes that do not multiply to the number of devices.
    """
    asked = {"pipe": pipe, "data": data, "tensor": tensor}
    mesh = make_mesh(devices, **{name: size for name, size in asked.items() if size is not None})
    parts = [split("data")]
    if tensor is not None:
        parts.append(Tensor(Rules(tuple(rules)), "tensor"))
    if pipe is not None:
        parts.append(pipeline("pipe", chunks=chunks))
    return mesh, compose(*parts)


@dataclass(frozen=True)
class Composed:
    """Strategies applied one after the other."""

    parts: tuple[Strategy, ...]

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        for part in self.parts:
            placement = part(role, leaf, placement, mesh)
        return placement


@dataclass(frozen=True)
class Batch:
    """Rows split over the axes."""

    axes: tuple[str, ...]

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axes, "batch")
        if role != "batch":
            return placement
        if not leaf.shape:
            return replace(placement, why="scalar")
        _check_unused(names, leaf, placement, "batch")
        rows = leaf.shape[0]
        split = placement.split(0, names)
        parts = axis_size(mesh, split.store[0])
        if rows % parts:
            raise ValueError(
                f"batch: {leaf.path} has {rows} rows, which the {parts} devices of axis {_joined(split.store[0])} do "
                f"not divide; use a multiple of {parts} rows, such as {rows + -rows % parts}"
            )
        return replace(split, use=split.store)


@dataclass(frozen=True)
class Shard:
    """A fill over one axis or a tuple of axes."""

    axis: AxisName
    roles: tuple[Role, ...]
    min_size: int
    keep: ClassVar[frozenset[str]] = frozenset({BLOCKS})

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axis, "shard")
        if role not in self.roles:
            return placement
        _check_unused(names, leaf, placement, "shard")
        if leaf.size < 2:
            return replace(placement, why="one element" if leaf.size else "no elements")
        if leaf.size < self.min_size:
            return replace(placement, why=f"small: {leaf.size} elements, under {self.min_size}")
        sizes = placement.view.stored
        names_at = [leaf.names[placement.view.origin(dim)] for dim in range(len(sizes))]
        free = [d for d, entry in enumerate(placement.store) if entry is None and names_at[d] not in self.keep]
        parts = axis_size(mesh, self.axis)
        dividing = [dim for dim in free if sizes[dim] % parts == 0]
        if dividing:
            long = [dim for dim in dividing if sizes[dim] >= MIN_PART * parts]
            return placement.split(long[0] if long else max(dividing, key=lambda dim: sizes[dim]), names)
        if not free:
            return replace(placement, why="no free dimension")
        dim = min(free, key=lambda dim: (-sizes[dim] % parts) / sizes[dim])
        return placement.pad(dim, sizes[dim] + -sizes[dim] % parts).split(dim, names)


@dataclass(frozen=True)
class Tensor:
    """Dimensions split by name."""

    rules: Rules
    axis: AxisName

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axis, "tensor")
        if role in ("batch", "state"):
            return placement
        parts = axis_size(mesh, self.axis)
        for dim, name in enumerate(leaf.names):
            fate = self.rules.fate(name)
            if fate not in ("split", "split or whole"):
                continue
            if leaf.shape[dim] % parts == 0:
                _check_unused(names, leaf, placement, "tensor")
                split = placement.split(placement.view.at(dim), names).use_split(dim, names)
                return replace(split, rule=f"{name}: {leaf.named_by}")
            if fate == "split":
                raise ValueError(_indivisible(leaf.path, dim, str(name), leaf.shape[dim], parts, self.axis))
            return replace(placement, rule=f"{leaf.shape[dim]} {name} on each of {parts} devices: {leaf.named_by}")
        return replace(placement, rule=f"whole: {leaf.named_by}" if leaf.named_by else "no rule took it")

    def entry(self, name: str | None, size: int, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes that split a dimension of an activation; an error where they do not divide it."""
        fate = self.rules.fate(name)
        if fate is None:
            raise ValueError(
                f"constrain: no rule knows the name {name!r}; add ({name!r}, 'split') or ({name!r}, 'whole')"
            )
        parts = axis_size(mesh, self.axis)
        if fate == "whole" or (fate == "split or whole" and size % parts):
            return ()
        if size % parts:
            raise ValueError(_indivisible("constrain", None, str(name), size, parts, self.axis))
        return axis_names(self.axis)


@dataclass(frozen=True)
class Pipeline:
    """Stacked blocks split over an axis, in pipeline order."""

    axis: str
    chunks: int

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axis, "pipeline")
        if role in ("batch", "state") or leaf.names[:1] != (BLOCKS,):
            return placement
        _check_unused(names, leaf, placement, "pipeline")
        sizes = (self.chunks, axis_size(mesh, self.axis), self.per_stage(leaf.shape[0], mesh))
        return placement.cut_first(sizes).split(1, names)

    def stages(self, mesh: Mesh) -> int:
        """How many stages the model is cut into."""
        return self.chunks * axis_size(mesh, self.axis)

    def per_stage(self, blocks: int, mesh: Mesh) -> int:
        """How many blocks a stage holds; an error where there are fewer blocks than stages."""
        stages = self.stages(mesh)
        if blocks < stages:
            most = max(1, blocks // axis_size(mesh, self.axis))
            raise ValueError(
                f"pipeline: {blocks} blocks are fewer than the {stages} stages of chunks={self.chunks} on "
                f"{axis_size(mesh, self.axis)} devices of axis {self.axis!r}; use chunks={most}, or a smaller axis"
            )
        return -(-blocks // stages)

    def holders(self, blocks: int, mesh: Mesh) -> list[tuple[int, int, range]]:
        """(device on the axis, chunk, its blocks) of every stage, in the model's order."""
        devices, each = axis_size(mesh, self.axis), self.per_stage(blocks, mesh)
        return [
            (stage % devices, stage // devices, range(min(blocks, stage * each), min(blocks, (stage + 1) * each)))
            for stage in range(self.stages(mesh))
        ]


def pipeline_of(strategy: Strategy) -> Pipeline | None:
    """The pipeline of a strategy; None without."""
    return next((part for part in parts_of(strategy) if isinstance(part, Pipeline)), None)


def parts_of(strategy: Strategy) -> tuple[Strategy, ...]:
    """The strategies that one is composed of; itself where it is not composed."""
    return strategy.parts if isinstance(strategy, Composed) else (strategy,)


def _indivisible(who: str, dim: int | None, name: str, size: int, parts: int, axis: AxisName) -> str:
    where = who if dim is None else f"tensor: dim {dim} of {who}"
    near = " or ".join(str(s) for s in (size - size % parts, size + -size % parts) if s)
    return (
        f"{where} ({name}) has {size} elements, which the {parts} devices of axis {_joined(axis)} do not divide; sizes "
        f"that would work: {near}. Or choose an axis whose size divides {size}, or keep it whole with the rule "
        f"({name!r}, 'whole')"
    )


def _check_unused(names: tuple[str, ...], leaf: Leaf, placement: Placement, who: str) -> None:
    repeated = [name for name in names if name in axes_of(placement.store)]
    if repeated:
        dims = [dim for dim, entry in enumerate(placement.store) if set(repeated) & set(axis_names(entry))]
        dim = placement.view.origin(dims[0])
        raise ValueError(
            f"{who}: axis {', '.join(map(repr, repeated))} already splits dim {dim} of {leaf.path} "
            f"{list(leaf.shape)}; apply each strategy once per axis"
        )


def _joined(entry: AxisName | None) -> str:
    return " x ".join(map(repr, axis_names(entry)))
