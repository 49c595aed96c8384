"""Estimate the collectives that a promise allows "as needed", from the traced step: sums and exchanges of activations.

Over tensor axes the compiler moves activations. The traced program tells how many bytes: if a product contracts a split
dimension, each device has a partial sum. Additions, casts and reshapes are applied to partial sums; before any other
operation they are summed over devices. So several products that add to one gradient are summed over devices once, as by
TPU compilers.

    x[B, C] @ up[C, F/t] -> h[B, F/t]          nothing is moved
    h[B, F/t] @ down[F/t, C] -> y[B, C]        partial: an all-reduce of y over the tensor axis, or a reduce-scatter
                                               where y is constrained to be split over it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.sharding import Mesh

from jaxshard.checks.collectives.promise import Promise
from jaxshard.cost.hardware import Chip
from jaxshard.plan.memory.graph import Op, Region, Value
from jaxshard.plan.time.executed import EXCHANGES, executed
from jaxshard.plan.time.network import CollectiveCost, collective_cost, join_costs
from jaxshard.plan.time.pipeline import Ticks
from jaxshard.plan.time.product import device_bytes

_ADDS = frozenset({"add", "add_any", "sub"})
_LINEAR = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "neg", "reduce_precision", "copy",
})  # fmt: skip


class _Moved(NamedTuple):
    """A collective found in the traced step: its kind, its mesh axes, and the bytes of its array on one device."""

    kind: str
    axes: tuple[str, ...]
    size: int


def open_costs(
    region: Region, promise: Promise, mesh: Mesh, tensor_axes: frozenset[str], chip: Chip | None = None,
    ticks: Ticks | None = None,
) -> tuple[CollectiveCost, ...]:  # fmt: skip
    """Estimate the costs of collectives without a promised size: of activations, pipeline stages and experts.

    Args:
      region: the step as a graph (`plan/memory/peak.step_graph`).
      promise: the collectives that the step may issue (`js.plan.promise`).
      mesh: the mesh of the layout.
      tensor_axes: the axes that split weights during use.
      chip: the chip of the mesh; None leaves out the times.
      ticks: the ticks of a pipeline's program (`ticks_of`).

    Returns:
      One cost for each kind and axes. A ragged all-to-all counts its full buffers, because the rows that it sends are
      known only when it runs.
    """
    words = {(one.kind, one.axes): one.what for one in promise.expected if one.shape is None}
    several = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    split = tensor_axes & set(several)
    found: dict[tuple[str, tuple[str, ...], str], list[CollectiveCost]] = {}
    for body, times in executed(region, ticks):
        moved = [(one, words.get((one.kind, one.axes))) for one in _exchanges(body, several)]
        moved += [(one, "activations") for one in _sums(body, split)]
        for one, what in moved:
            if what is not None:
                axes = tuple(axis for axis in several if axis in one.axes)
                cost = collective_cost(one.kind, axes, one.size, mesh, chip, count=round(times), what=what)
                found.setdefault((one.kind, axes, what), []).append(cost)
    return tuple(replace(join_costs(costs), what=what) for (_, _, what), costs in found.items())


def _exchanges(region: Region, several: Sequence[str]) -> Iterator[_Moved]:
    """Yield the permutes and all-to-alls that are operations of the traced program."""
    for op in region.ops:
        if op.name in EXCHANGES:
            named = op.params["axis_name"]
            axes = tuple(axis for axis in several if axis in (named if isinstance(named, tuple) else (named,)))
            yield _Moved(EXCHANGES[op.name], axes, min(device_bytes(op.ins[0]), device_bytes(op.outs[0])))


def _sums(region: Region, axes: frozenset[str]) -> Iterator[_Moved]:
    """Yield the sums and gathers of activations over the given mesh axes, which the compiler will insert."""
    partial: dict[Value, tuple[str, ...]] = {}
    for op in region.ops if axes else ():
        over = {partial[one] for one in op.ins if one in partial}
        if over and _stays_partial(op, partial):
            partial[op.outs[0]] = over.pop()
            continue
        for one in dict.fromkeys(op.ins):
            if one in partial:
                scattered = op.name == "sharding_constraint" and set(_axes(op.outs[0])) & set(partial[one])
                yield _Moved("reduce-scatter" if scattered else "all-reduce", partial.pop(one), device_bytes(one))
                # The next operation reads the sum.
        if op.outs and (contracted := tuple(sorted(_contracted(op) & axes))):
            partial[op.outs[0]] = contracted
        if op.name == "sharding_constraint":
            gone = tuple(sorted((set(_axes(op.ins[0])) - set(_axes(op.outs[0]))) & axes))
            if gone:
                yield _Moved("all-gather", gone, device_bytes(op.outs[0]))
    for one in dict.fromkeys(region.outputs):
        if one in partial:
            yield _Moved("all-reduce", partial[one], device_bytes(one))


def _stays_partial(op: Op, partial: Mapping[Value, tuple[str, ...]]) -> bool:
    """Return True if an operation is linear, so that it can run on each device's partial sum before the all-reduce."""
    if op.name in _LINEAR:
        return True
    return op.name in _ADDS and len(op.ins) == 2 and len({partial.get(one) for one in op.ins}) == 1


def _contracted(op: Op) -> set[str]:
    """Return the mesh axes over which an operation leaves partial sums: they split a dimension that it sums over."""
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
    if op.name == "gather":  # a lookup in a table whose rows are split: each device has some of them
        skipped = op.params["dimension_numbers"].collapsed_slice_dims
        return {axis for dim in skipped for axis in op.ins[0].split[dim]}
    return set()


def _axes(value: Value) -> list[str]:
    return [axis for entry in value.split for axis in entry]
