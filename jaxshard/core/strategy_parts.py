"""The parts of strategies: a callable dataclass for each way to place an array.

`core/strategy.py` has the functions that make them, which users call. Order matters between parts: placements by name
(`Tensor`, `Pipeline`) decide first, and `Shard` splits dimensions that are still free, so `compose` sorts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from jax.sharding import Mesh

from jaxshard.core.mesh import axis_names, axis_size, check_axis
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.rules import BY_KERNEL, BY_MODEL, EXPERTS, Fate, Rules, find_routed, pad_names
from jaxshard.core.tree import BLOCKS, Leaf, raise_all
from jaxshard.core.types import AxisName, Role

Part = TypeVar("Part")

Strategy = Callable[[Role, Leaf, Placement, Mesh], Placement]
"""A pure function (role, array, placement so far, mesh) -> placement.

Example:
    def columns(role, leaf, placement, mesh):
        splits = role in ("param", "grad", "opt") and len(leaf.shape) == 2 and leaf.shape[1] % mesh.shape["data"] == 0
        return placement.split(placement.view.stored_dim(1), ("data",)) if splits else placement

    layout = js.layout(js.compose(js.batch("data"), columns), mesh, init_fn, tx)
"""

RANK = 3
"""The rank of a part of a strategy without an attribute `rank`: `compose` applies parts in the order of their ranks."""

MIN_SIZE = 2**14
"""Arrays with fewer elements are replicated: splitting them costs a collective and saves almost no memory."""

INDIVISIBLE = "the axis does not divide the dimension to split of"

MIN_PART = 8
"""`Shard` prefers dimensions whose shards have at least this size, as TPUs pad smaller ones to tiles of 8 rows."""

LARGE = 2**20
"""Stacked blocks of at least this number of elements prefer dimensions whose shards are full tiles of 8 rows."""


@dataclass(frozen=True)
class Composed:
    """The strategy that applies other strategies one after the other; made by `js.compose`."""

    parts: tuple[Strategy, ...]

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        for part in self.parts:
            placement = part(role, leaf, placement, mesh)
        return placement


@dataclass(frozen=True)
class Batch:
    """The strategy that splits the rows (dimension 0) of a batch over mesh axes; made by `js.batch`."""

    rank: ClassVar[int] = 1

    axes: tuple[str, ...]

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axes, "batch")
        if role != "batch":
            return placement
        if not leaf.shape:
            return replace(placement, why="scalar")
        _check_unused(names, leaf, placement, "batch")
        return _split_rows("batch", names, leaf, placement, mesh)


@dataclass(frozen=True)
class WithoutRows:
    """The strategy that names the arrays of a batch without rows, such as tables; made by `js.without_rows`.

    It changes no placement: `BatchPlan` reads its patterns.
    """

    patterns: tuple[str, ...]

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        return placement


@dataclass(frozen=True)
class Expert:
    """The strategy that splits experts, and the rows of a batch, over mesh axes; made by `js.expert`."""

    rank: ClassVar[int] = 2

    axis: tuple[str, ...]
    rules: Rules
    exchange: Literal["equal"] | None = None

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axis, "expert")
        if role == "batch":
            free = tuple(name for name in names if name not in axes_of(placement.store))
            return _split_rows("expert", free, leaf, placement, mesh) if leaf.shape and free else placement
        dim = next((dim for dim, name in enumerate(leaf.names) if name in EXPERTS), None)
        if role == "state" or dim is None:
            return placement
        _check_unused(names, leaf, placement, "expert")
        split = placement.split(placement.view.stored_dim(dim), names).use_split(dim, names)
        return replace(split, rule=f"{leaf.names[dim]}: {leaf.named_by or BY_MODEL}")

    def name_dims(self, leaves: Sequence[Leaf], given: Sequence[Leaf], mesh: Mesh) -> list[Leaf]:
        """Name the dimension of experts in every parameter that stacks experts.

        The name comes from the rules of `js.tensor`, or else from the model, or else from the rules of this strategy.

        Args:
          leaves: the parameters, with names from the rules of `js.tensor` if it is used.
          given: the same parameters, with names from the model.
          mesh: the mesh of the layout.

        Raises:
          ValueError: no parameter has experts, or the axis does not divide their number; the message lists such
            parameters.
        """
        parts = axis_size(mesh, check_axis(mesh, self.axis, "expert"))
        routed = find_routed(given)
        named = [
            self._name_dim(leaf, before, before.path in routed) for leaf, before in zip(leaves, given, strict=True)
        ]
        dims = {leaf.path: dim for leaf in named for dim, name in enumerate(leaf.names) if name in EXPERTS}
        if not dims:
            raise ValueError(
                "expert: no parameter has a dimension of experts; name it in the model "
                '(nn.with_partitioning(init, ("expert", None, None)), a PartitionSpec in NNX) or by a rule, '
                'js.expert(rules=[("moe/up", ("expert", None, None)), *js.RULES]), or leave js.expert out'
            )
        sizes = [(leaf, leaf.shape[dims[leaf.path]]) for leaf in named if leaf.path in dims]
        raise_all(
            (f"{leaf.path} {list(leaf.shape)}: {count} experts" for leaf, count in sizes if count % parts),
            ValueError,
            f"expert: the {parts} devices of axis {_quote_axes(self.axis)} do not divide the number of experts; choose "
            "an axis whose size divides it, or another number of experts",
        )
        return named

    def _name_dim(self, leaf: Leaf, given: Leaf, routed: bool) -> Leaf:
        for source in (leaf, given, self.rules.name_dims(given, routed=routed)):
            dim = next((dim for dim, name in enumerate(source.names) if name in EXPERTS), None)
            if dim is not None:
                names = pad_names(leaf).names
                return leaf._replace(
                    names=(*names[:dim], source.names[dim], *names[dim + 1 :]), named_by=source.named_by or BY_MODEL
                )
        return leaf


@dataclass(frozen=True)
class Shard:
    """The strategy that splits a dimension which no other axis splits; made by `js.shard`."""

    rank: ClassVar[int] = 4

    axis: AxisName
    roles: tuple[Role, ...]
    min_size: int
    never_split: ClassVar[frozenset[str]] = frozenset({BLOCKS})

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axis, "shard")
        if role not in self.roles:
            return placement
        # The axes that split experts can't split such an array again; the remaining axes split another dimension.
        experts = _expert_axes(leaf, placement)
        names = tuple(name for name in names if name not in experts)
        if not names:
            return placement
        _check_unused(names, leaf, placement, "shard")
        if leaf.size < 2:
            return replace(placement, why="one element" if leaf.size else "no elements")
        if leaf.size < self.min_size:
            return replace(placement, why=f"small: {leaf.size} elements, under {self.min_size}")
        sizes = placement.view.stored
        names_at = [leaf.names[placement.view.logical_dim(dim)] for dim in range(len(sizes))]
        free = [d for d, entry in enumerate(placement.store) if entry is None and names_at[d] not in self.never_split]
        parts = axis_size(mesh, names)
        dividing = [dim for dim in free if sizes[dim] % parts == 0]
        # Prefer the first dimension over the largest: an all-gather along a leading dimension concatenates the shards,
        # along any other it interleaves them. Skip dimensions whose shards would have fewer rows than a TPU tile, such
        # as the leading ones of a convolution [3, 3, 512, 512]; of stacked blocks also those whose shards end inside a
        # tile, such as the 43 rows of bf16[32, 11008, 4096] over 256 devices: a TPU gathers [1, 43, 4096] with a row of
        # padding after each row, in twice the memory.
        if dividing:
            rows, by_tiles = {dim: sizes[dim] // parts for dim in dividing}, leaf.size >= LARGE and BLOCKS in leaf.names
            best = min(dividing, key=lambda dim: (-min(rows[dim], MIN_PART), by_tiles and rows[dim] % MIN_PART > 0))
            return placement.split(best, names)
        if not free:
            return replace(placement, why="no free dimension")
        # Nothing divides: pad where that adds the smallest fraction. [1600, 4800] of GPT-2 XL over 256 devices becomes
        # [1600, 4864], 1.3 % more. Replicated it would take 256 times the memory of a shard.
        dim = min(free, key=lambda dim: (-sizes[dim] % parts) / sizes[dim])
        return placement.pad(dim, sizes[dim] + -sizes[dim] % parts).split(dim, names)


@dataclass(frozen=True)
class Tensor:
    """The strategy that splits dimensions by their names; made by `js.tensor`."""

    rules: Rules
    axis: AxisName

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axis, "tensor")
        if role in ("batch", "state"):
            return placement
        parts = axis_size(mesh, self.axis)
        for dim, name in enumerate(leaf.names):
            fate = self.fate(name)
            if fate not in ("split", "split or whole") or placement.use[dim] is not None:
                continue  # not split, or split already by `expert`
            if leaf.shape[dim] % parts == 0:
                _check_unused(names, leaf, placement, "tensor")
                split = placement.split(placement.view.stored_dim(dim), names).use_split(dim, names)
                return replace(split, rule=f"{name}: {leaf.named_by}")
            if fate == "split":
                problem = _describe_indivisible(leaf.path, dim, str(name), leaf.shape[dim], parts, self.axis)
                by = {BY_MODEL: "the model", BY_KERNEL: "its kernel"}.get(leaf.named_by, f"the rule {leaf.named_by!r}")
                raise ValueError(
                    f"{problem}, or this array alone with ('*/{leaf.path}', 'whole'). The name {name!r} comes from {by}"
                )
            return replace(placement, rule=f"{leaf.shape[dim]} {name} on each of {parts} devices: {leaf.named_by}")
        untaken = f"whole: {leaf.named_by}" if leaf.named_by else "no rule took it"
        return placement if placement.rule else replace(placement, rule=untaken)

    def fate(self, name: str | None) -> Fate | None:
        """Return whether dimensions of this name are split: "split", "whole" (not split) or "split or whole".

        "split or whole" means split if the devices divide the dimension. The strategy's own mesh axis is a name too,
        which is split. Return None if no rule knows the name.
        """
        return self.rules.fate(name) or ("split" if name in axis_names(self.axis) else None)

    def name_dims(self, leaves: Sequence[Leaf], mesh: Mesh) -> list[Leaf]:
        """Give the dimensions of parameters their names, from the rules of `js.tensor` and the model's annotations.

        Models may be annotated with mesh axes instead of names (`nn.with_partitioning`, a PartitionSpec in NNX). A
        dimension annotated with this strategy's own axis is split. Annotations with other mesh axes are ignored.
        """
        own = axis_names(self.axis)
        foreign = {name for name in mesh.axis_names if name not in own and self.rules.fate(name) is None}

        def without_foreign(leaf: Leaf) -> Leaf:
            kept = tuple(None if name in foreign else name for name in leaf.names)
            return leaf._replace(names=kept if any(kept) else (None,) * len(leaf.shape))

        return self.rules.resolve([without_foreign(leaf) for leaf in leaves], own)

    def find_whole(self, leaves: Sequence[Leaf], mesh: Mesh) -> dict[str, list[Leaf]]:
        """Return the large parameters that stay replicated although no rule asks for it, as {reason: parameters}.

        Large means `MIN_SIZE` elements or more. Three kinds are left out: parameters that the user's own rules keep
        replicated, tables of positions, and kernels with fewer key and value heads than devices.
        """
        found: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            if leaf.size >= MIN_SIZE and (reason := self._why_whole(leaf, mesh)):
                found.setdefault(reason, []).append(leaf)
        return found

    def _why_whole(self, leaf: Leaf, mesh: Mesh) -> str:
        split = [dim for dim, name in enumerate(leaf.names) if self.fate(name) != "whole"]
        if not leaf.named_by:
            return "no rule took"
        if split:
            guessed = self.fate(leaf.names[split[0]]) == "split or whole" and leaf.names[split[0]] == "features"
            divides = leaf.shape[split[0]] % axis_size(mesh, self.axis) == 0
            return INDIVISIBLE if guessed and not divides else ""
        if leaf.named_by != BY_MODEL or self.rules.keeps_whole(leaf.names):
            return ""
        return "the model's annotations split nothing of"

    def entry(self, name: str | None, size: int, mesh: Mesh, who: str = "constrain") -> tuple[str, ...]:
        """Return the mesh axes that split a dimension of an activation with this name; () if no axis does.

        Args:
          name: the name of the dimension.
          size: its size.
          mesh: the mesh.
          who: the function that the user called, for error messages.

        Raises:
          ValueError: no rule knows the name, or the axis does not divide a dimension that is to be split.
        """
        fate = self.rules.fate(name)
        if fate is None:
            raise ValueError(f"{who}: no rule knows the name {name!r}; add ({name!r}, 'split') or ({name!r}, 'whole')")
        parts = axis_size(mesh, self.axis)
        if fate == "whole" or (fate == "split or whole" and size % parts):
            return ()
        if size % parts:
            raise ValueError(_describe_indivisible(who, None, str(name), size, parts, self.axis))
        return axis_names(self.axis)


@dataclass(frozen=True)
class Pipeline:
    """The strategy that splits stacked blocks into stages; made by `js.pipeline`."""

    rank: ClassVar[int] = 0

    axis: str
    chunks: int

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        names = check_axis(mesh, self.axis, "pipeline")
        if role in ("batch", "state") or leaf.names[:1] != (BLOCKS,):
            return placement
        _check_unused(names, leaf, placement, "pipeline")
        sizes = (self.chunks, axis_size(mesh, self.axis), self.per_stage(leaf.shape[0], mesh))
        return placement.unfold_first(sizes).split(1, names)

    def stages(self, mesh: Mesh) -> int:
        """Return the number of stages: chunks times devices of the axis."""
        return self.chunks * axis_size(mesh, self.axis)

    def per_stage(self, blocks: int, mesh: Mesh) -> int:
        """Return the number of blocks per stage, rounded up; raise ValueError if there are fewer blocks than stages."""
        stages = self.stages(mesh)
        if blocks < stages:
            most = max(1, blocks // axis_size(mesh, self.axis))
            raise ValueError(
                f"pipeline: {blocks} blocks are fewer than the {stages} stages of chunks={self.chunks} on "
                f"{axis_size(mesh, self.axis)} devices of axis {self.axis!r}; use chunks={most}, or a smaller axis"
            )
        return -(-blocks // stages)

    def holders(self, blocks: int, mesh: Mesh) -> list[tuple[int, int, range]]:
        """Return where each stage is, in model order: (device on the axis, chunk, range of its blocks).

        7 blocks on 2 devices in 2 chunks: (0, 0, 0-1), (1, 0, 2-3), (0, 1, 4-5), (1, 1, 6).
        """
        devices, each = axis_size(mesh, self.axis), self.per_stage(blocks, mesh)
        return [
            (stage % devices, stage // devices, range(min(blocks, stage * each), min(blocks, (stage + 1) * each)))
            for stage in range(self.stages(mesh))
        ]


@dataclass(frozen=True)
class Context:
    """The strategy that splits the positions of a batch; made by `js.context`.

    It changes no placement: arrays of a batch are stored replicated over its axis, and engines take each device's part.

    Attributes:
      axis: the mesh axes, major first.
      dims: pairs (last name of a batch array's path, dimension of its positions or None).
      how: how attention sees the keys and values of other devices: "gather", "ulysses", "usp" or "ring".
    """

    axis: tuple[str, ...]
    dims: tuple[tuple[str, int | None], ...]
    how: str

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        check_axis(mesh, self.axis, "context")
        return placement

    def dim_of(self, path: str, ndim: int) -> int | None:
        """Return the dimension of an array of a batch that has positions; None if it has none.

        Args:
          path: the array's path in the batch.
          ndim: its number of dimensions. An array without that dimension, such as weights [rows], has no positions.
        """
        dim = dict(self.dims).get(path.rsplit("/", 1)[-1])
        return dim if dim is not None and dim < ndim else None


def part_of(strategy: Strategy, kind: type[Part]) -> Part | None:
    """Return the part of a composed strategy that is an instance of `kind`, such as `Pipeline`; None without one."""
    return next((part for part in parts_of(strategy) if isinstance(part, kind)), None)


def parts_of(strategy: Strategy) -> tuple[Strategy, ...]:
    """Return the strategies that a strategy is composed of; the strategy itself if it is not composed."""
    return strategy.parts if isinstance(strategy, Composed) else (strategy,)


def _describe_indivisible(who: str, dim: int | None, name: str, size: int, parts: int, axis: AxisName) -> str:
    where = who if dim is None else f"tensor: dim {dim} of {who}"
    near = " or ".join(str(s) for s in (size - size % parts, size + -size % parts) if s)
    return (
        f"{where} ({name}) has {size} elements, which the {parts} devices of axis {_quote_axes(axis)} do not divide; "
        f"sizes that would work: {near}. Or choose an axis whose size divides {size}, or keep it whole with the rule "
        f"({name!r}, 'whole')"
    )


def _split_rows(who: str, names: tuple[str, ...], leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
    rows = leaf.shape[0]
    split = placement.split(0, names)
    parts = axis_size(mesh, split.store[0])
    if rows % parts:
        raise ValueError(
            f"{who}: {leaf.path} has {rows} rows, which the {parts} devices of axis {_quote_axes(split.store[0])} "
            f"do not divide; use a multiple of {parts} rows, such as {rows + -rows % parts}, or name it in "
            "js.without_rows(...) if it has none"
        )
    return replace(split, use=split.store)


def _expert_axes(leaf: Leaf, placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes that split the dimension of experts of an array in computation; () if there is none."""
    dims = (dim for dim, name in enumerate(leaf.names) if name in EXPERTS)
    return tuple(axis for dim in dims for axis in axis_names(placement.use[dim]))


def _check_unused(names: tuple[str, ...], leaf: Leaf, placement: Placement, who: str) -> None:
    repeated = [name for name in names if name in axes_of(placement.store)]
    if repeated:
        dims = [dim for dim, entry in enumerate(placement.store) if set(repeated) & set(axis_names(entry))]
        dim = placement.view.logical_dim(dims[0])
        where = f"the rows of {leaf.path}" if who == "batch" else f"dim {dim} of {leaf.path} {list(leaf.shape)}"
        raise ValueError(
            f"{who}: axis {', '.join(map(repr, repeated))} already splits {where}; apply each strategy once per axis"
        )


def _quote_axes(entry: AxisName | None) -> str:
    return " x ".join(map(repr, axis_names(entry)))
