"""What a promise leaves open, read from the traced step: sums over tensor axes, exchanges of tokens and activations.

Over tensor axes the compiler moves activations, "as needed". How much that is the program says: a product contracts
dimensions that are split, so that each device has a part of the sum. Parts are added up where something else than a
sum, a cast or a reshape reads them: at once for the products that make one gradient, as TPU compilers do it.

    x[B, C] @ up[C, F/t] -> h[B, F/t]          nothing is moved
    h[B, F/t] @ down[F/t, C] -> y[B, C]        partial: an all-reduce of y over the tensor axis, or a reduce-scatter
                                               where y is constrained to be split over it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxshard.checks.collectives.promise import Promise
from jaxshard.core.tree import bytes_of
from jaxshard.cost.hardware import Chip
from jaxshard.plan.memory.graph import Op, Region, Value
from jaxshard.plan.time.network import CollectiveCost, collective_cost, join_costs
from jaxshard.plan.time.pipeline import Ticks
from jaxshard.plan.time.products import exchanges

_SUMS = frozenset({"add", "add_any", "sub"})
_LINEAR = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "neg", "reduce_precision", "copy",
})  # fmt: skip


def exchange_costs(
    closed_jaxpr: Any, promise: Promise, mesh: Mesh, chip: Chip | None = None, ticks: Ticks | None = None
) -> tuple[CollectiveCost, ...]:
    """Return the permutes and all-to-alls that a promise allows without a number: between stages, and to experts.

    Args:
      closed_jaxpr: of the traced step.
      promise: of the step.
      mesh: of the layout.
      chip: of the mesh, or None, which leaves out the times.
      ticks: of a pipeline's program.

    Returns:
      One for each kind and axes. Of ragged exchanges, whose rows the routing decides, the whole buffers count.
    """
    open_kinds = {(one.kind, one.axes): one.what for one in promise.expected if one.shape is None}
    found: dict[tuple[str, tuple[str, ...]], list[CollectiveCost]] = {}
    for one in exchanges(closed_jaxpr, mesh, ticks):
        axes = tuple(axis for axis in mesh.axis_names if axis in one.axes and mesh.shape[axis] > 1)
        if (what := open_kinds.get((one.kind, axes))) is not None:
            cost = collective_cost(one.kind, axes, one.size, mesh, chip, count=round(one.times), what=what)
            found.setdefault((one.kind, axes), []).append(cost)
    return tuple(replace(join_costs(costs), what=costs[0].what) for costs in found.values())


class _Moved(NamedTuple):
    """A collective: its kind and axes, the bytes of its array, and how often it runs in a step."""

    kind: str
    axes: tuple[str, ...]
    size: int
    times: int


def activation_costs(
    region: Region, mesh: Mesh, axes: frozenset[str], chip: Chip | None = None
) -> tuple[CollectiveCost, ...]:
    """Return the collectives of activations over axes that are left to the compiler.

    Args:
      region: the graph of the traced step (`plan/memory/graph.build`).
      mesh: of the layout.
      axes: those that split weights where they are used (tensor).
      chip: of the mesh, or None, which leaves out the times.

    Returns:
      One for each kind and axes.
    """
    found: dict[tuple[str, tuple[str, ...]], list[CollectiveCost]] = {}
    order = [axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] > 1]
    for one in _moved(region, frozenset(order), 1) if order else ():
        names = tuple(axis for axis in order if axis in one.axes)
        cost = collective_cost(one.kind, names, one.size, mesh, chip, count=one.times, what="activations")
        found.setdefault((one.kind, names), []).append(cost)
    return tuple(replace(join_costs(costs), what="activations") for costs in found.values())


def _moved(region: Region, axes: frozenset[str], times: int) -> Iterator[_Moved]:
    """Yield what is moved in a region that runs so many times."""
    partial: dict[Value, tuple[str, ...]] = {}
    for op in region.ops:
        yield from _inside(op, axes, times)
        over = {partial[one] for one in op.ins if one in partial}
        if over and _stays_partial(op, partial):
            partial[op.outs[0]] = over.pop()
            continue
        for one in dict.fromkeys(op.ins):
            if one in partial:
                scattered = op.name == "sharding_constraint" and set(_axes(op.outs[0])) & set(partial[one])
                yield _Moved("reduce-scatter" if scattered else "all-reduce", partial.pop(one), _size(one), times)
                # Whoever reads it next reads the sum.
        if op.outs and (contracted := tuple(sorted(_contracted(op) & axes))):
            partial[op.outs[0]] = contracted
        if op.name == "sharding_constraint":
            gone = tuple(sorted((set(_axes(op.ins[0])) - set(_axes(op.outs[0]))) & axes))
            if gone:
                yield _Moved("all-gather", gone, _size(op.outs[0]), times)
    for one in dict.fromkeys(region.outputs):
        if one in partial:
            yield _Moved("all-reduce", partial[one], _size(one), times)


def _inside(op: Op, axes: frozenset[str], times: int) -> Iterator[_Moved]:
    """What is moved in the bodies of a loop or branch; of several branches in that which moves most."""
    if op.name == "cond":
        branches = [list(_moved(one, axes, times)) for one in op.regions]
        yield from max(branches, key=lambda ones: sum(one.size * one.times for one in ones), default=[])
        return
    length = int(op.params["length"]) if op.name == "scan" else 1
    for one in op.regions:
        yield from _moved(one, axes, times * length)


def _stays_partial(op: Op, partial: Mapping[Value, tuple[str, ...]]) -> bool:
    """Whether parts of sums go through an operation, to be added up later."""
    if op.name in _LINEAR:
        return True
    return op.name in _SUMS and len(op.ins) == 2 and len({partial.get(one) for one in op.ins}) == 1


def _contracted(op: Op) -> set[str]:
    """The axes over which an operation leaves parts of sums: those that split what it adds up."""
    if op.name == "dot_general":
        (left, right), _ = op.params["dimension_numbers"]
        return {
            axis
            for value, dims in zip(op.ins[:2], (left, right), strict=True)
            for dim in dims
            for axis in value.split[dim]
        }
    if op.name == "reduce_sum":
        return {axis for dim in op.params["axes"] for axis in op.ins[0].split[dim]}
    if op.name == "gather":  # rows of a table whose rows are split: each device has those of its part
        skipped = op.params["dimension_numbers"].collapsed_slice_dims
        return {axis for dim in skipped for axis in op.ins[0].split[dim]}
    return set()


def _axes(value: Value) -> list[str]:
    return [axis for entry in value.split for axis in entry]


def _size(value: Value) -> int:
    return int(bytes_of(value.shard, value.dtype))
