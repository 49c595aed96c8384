"""Read the collectives of a compiled step: kind, mesh axes, executions per step, bytes and source line.

The optimized program is what runs, so this reads its text: the computations that it calls, loops with their trip
counts, branches. On a mesh (x=2, y=4) a scan of 12 iterations around

    ROOT %r = f32[64,16]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, ..., metadata={... stack_frame_id=3}

gives the record

    Collective(kind="all-reduce", axes=("y",), count=12, arrays=(("f32", (64, 16)),), source="/home/user/model.py:22")

Not seen: communication inside custom kernels (remote copies of Pallas) and transfers to the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxshard.core.compat import device_order
from jaxshard.core.mesh import mesh_str, slice_indices
from jaxshard.core.text_table import Table
from jaxshard.hlo import hlo
from jaxshard.hlo.asynchronous import users
from jaxshard.hlo.counts import grouped, number_str, total
from jaxshard.hlo.groups import UNKNOWN, Groups, find_groups
from jaxshard.hlo.operation import Operation, origin_of
from jaxshard.hlo.overlap import is_synchronous
from jaxshard.hlo.trail import Trail, find_trail
from jaxshard.hlo.transfers import is_transfer, transfer_kind
from jaxshard.hlo.walk import Executed, executed, is_fused

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
"""The opcodes that communicate, in the order of summaries."""
SUMS = ("all-reduce", "reduce-scatter")
"""The kinds that sum arrays."""

COLLECTIVE = re.compile(rf" (?:{'|'.join(KINDS)})(?:-start)?\(| (?:send|recv)\(.*_xla_megascale_transfer_type=")
"""Finds the lines of collectives; no other lines are parsed."""


@dataclass(frozen=True, kw_only=True)
class Collective(Operation):
    """One collective operation of a compiled program, as one device sees it. Its `kind` is one of `KINDS`.

    Its arrays are unscattered: the result of an all-gather, the operand of all other kinds. There are several arrays if
    the compiler combined operations.

    Attributes:
      axes: the mesh axes it communicates over, in mesh order; `("?",)` if its groups match no product of mesh axes.
      groups: groups, or pairs of source and target, of positions in `mesh.devices.flat`.
      conditional: True in a branch of a conditional; `count` then assumes that the branch is always taken.
      synchronous: True if the device waits for it, False if it computes at the same time (see `overlap.py`).
      trails: for each array the argument or operation that it comes from and the operation that reads it; () in
        records written by hand.
    """

    axes: tuple[str, ...]
    groups: Groups = ()
    conditional: bool = False
    synchronous: bool = True
    trails: tuple[Trail, ...] = ()

    @property
    def trail(self) -> Trail:
        """Where the first array comes from and which operation reads it; empty if not known."""
        return self.trails[0] if self.trails else Trail()

    @property
    def title(self) -> str:
        """Kind and axes as a title in lists, such as "all-gather over data"."""
        return f"{self.kind} over {'+'.join(self.axes)}"

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON: the entries of `Operation.as_dict`, and "axis" (several joined by "+")."""
        return super().as_dict() | {"axis": "+".join(self.axes)}


@dataclass(frozen=True)
class Row:
    """All collectives of one kind over the same axes, added up.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes, in mesh order.
      count: executions per step; None where a trip count is unknown.
      bytes: bytes of the unscattered arrays, per step and device; None where a trip count is unknown.
      conditional: True if one of these collectives is in a branch of a conditional.

    Example:
        for row in js.plan.summary(js.collectives(step.compile(batch), mesh)):
            print(row.kind, row.axes, row.count, row.bytes)
    """

    kind: str
    axes: tuple[str, ...]
    count: int | None
    bytes: int | None
    conditional: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary for JSON: kind, axis (several joined by "+"), count, bytes."""
        return {"kind": self.kind, "axis": "+".join(self.axes), "count": self.count, "bytes": self.bytes}


def collectives(compiled: Compiled | str, mesh: Mesh) -> tuple[Collective, ...]:
    """List the collectives of a compiled step, with mesh axes, executions, bytes and source lines.

    Bytes count the unscattered array on one device: the result of an all-gather, the operand of a
    reduce-scatter, all-reduce, all-to-all or permute. Groups of a single device are left out. An asynchronous operation
    counts once, and a TPU's fusion of all-reduce and slice counts as the reduce-scatter it is.

    Args:
      compiled: the result of `jax.jit(f).lower(...).compile()`, or its text.
      mesh: the mesh it was compiled for: positions in a program are positions in `mesh.devices.flat`.

    Returns:
      One record per operation, in the order of the program.

    Raises:
      TypeError: a program that is lowered but not compiled.
      ValueError: a program for another number of devices, or for the same devices in another order.

    Example:
      found = js.collectives(step.compile(batch), mesh)
      print(js.plan.table(js.plan.summary(js.plan.arrays_only(found))))
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = hlo.parse(text or "")
    _check_mesh(compiled, module, mesh)
    return tuple(record for _, record in locate(module, mesh))


def locate(module: hlo.Module, mesh: Mesh) -> tuple[tuple[Executed, Collective], ...]:
    """List (execution, collective) for each collective of a parsed program; `execution` is one place that runs it."""
    # A computation that is called from several places is found several times; the device may wait in some of them only.
    found = grouped(
        executed(module, COLLECTIVE),
        lambda one: (one.scope.computation.name, one.op.name, is_synchronous(one.scope, one.op)),
    )
    records = ((of[0], _make_record(mesh, of, key[-1])) for key, of in found.items())
    return tuple((executed, record) for executed, record in records if record is not None)


def _check_mesh(compiled: Compiled | str, module: hlo.Module, mesh: Mesh) -> None:
    if module.devices not in (mesh.size, mesh.size // len(np.unique(slice_indices(mesh)))):
        raise ValueError(
            f"the program was compiled for {module.devices} device(s), the mesh ({mesh_str(mesh)}) has {mesh.size}; "
            "compile it with arguments or in_shardings on this mesh"
        )
    order = device_order(compiled) or tuple(mesh.devices.flat)
    if order != tuple(mesh.devices.flat):
        theirs, ours = ([device.id for device in devices] for devices in (order, mesh.devices.flat))
        raise ValueError(
            f"the program was compiled for the devices {theirs} in this order, the mesh has {ours}; pass the mesh it "
            "was compiled for"
        )


def kind_of(scope: hlo.Scope, op: hlo.Op) -> str | None:
    """Return the kind of collective that an operation is or starts, such as "all-gather"; None for others.

    None is also returned for an operation that repeats or ends a collective which another operation started.
    """
    if is_transfer(op):
        return transfer_kind(op)
    kind = op.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if not is_fused(scope):
        return kind
    # TPU repeats an asynchronous collective in every fusion that overlaps with it; the first one starts it.
    used_by = list(users(scope.computation, op.name))
    if "chain_id=" in op.notes and not any('"AsyncCollectiveStart"' in user.attributes for user in used_by):
        return None
    # An all-reduce of which each device keeps its slice is how TPU writes a reduce-scatter.
    sliced = kind == "all-reduce" and any(user.opcode == "dynamic-slice" for user in used_by)
    return "reduce-scatter" if sliced else kind


def _make_record(mesh: Mesh, executions: Sequence[Executed], synchronous: bool) -> Collective | None:
    """Make the `Collective` of one operation; None if it is no collective or its groups have a single device.

    `executions` has an entry for each place of the program that runs the operation; their counts are added up.
    """
    scope, op = executions[0].scope, executions[0].op
    kind = kind_of(scope, op)
    groups, axes = ((), ()) if kind is None else find_groups(scope, op, mesh)
    if kind is None or not axes:
        return None
    arrays = hlo.arrays(op.type)[:1] if is_transfer(op) else _unscattered(scope, op, kind, len(groups[0]))
    return Collective(
        kind=kind,
        axes=axes,
        count=total(one.times for one in executions),
        arrays=arrays,
        groups=groups,
        conditional=all(one.conditional for one in executions),
        synchronous=synchronous,
        trails=tuple(find_trail(scope, op, part) for part in range(len(arrays))),
        **origin_of(scope, op),
    )


def _unscattered(scope: hlo.Scope, op: hlo.Op, kind: str, width: int) -> tuple[hlo.Array, ...]:
    """Return the full arrays of a collective: after an all-gather, before all other kinds. A group has `width` devices.

    They are derived from the operands, not from the result: an asynchronous start returns a tuple of buffers, which
    differs from kind to kind.
    """
    computation = scope.computation
    sources = [computation[name] for name in op.operands]
    if kind == "reduce-scatter" and is_fused(scope):
        # TPU pads inside its fusions, so that every shard has whole tiles. Elsewhere a pad is the program's own.
        sources = [computation[one.operands[0]] if one.opcode == "pad" else one for one in sources]
    operands = tuple(array for one in sources for array in hlo.arrays(one.type))
    if kind == "all-gather":
        dim = int((op.attribute("dimensions") or "{0}").strip("{}"))
        return tuple((dtype, (*shape[:dim], shape[dim] * width, *shape[dim + 1 :])) for dtype, shape in operands)
    if kind == "all-to-all" and len(operands) == width:
        dtype, shape = operands[0]  # one operand per peer: the parts of one array
        return ((dtype, (width, *shape)),)
    # These write into an output that is an operand too, and have offsets as further operands.
    in_place = "slice_sizes=" in op.attributes or kind == "ragged-all-to-all"
    return operands[:1] if in_place else operands


def arrays_only(found: Iterable[Collective], *, above: int = 1) -> tuple[Collective, ...]:
    """Leave out scalars: return the collectives with only their arrays of more than `above` elements.

    Args:
      found: collectives; arrays that the compiler combined are judged one by one.
      above: the most elements of an array that is left out; 1 leaves out scalars.

    Returns:
      The collectives in their order; a collective with no array left is dropped.

    Example:
        arrays = js.plan.arrays_only(js.collectives(step.compile(batch), mesh))
    """
    return split_scalars(found, above=above)[0]


def split_scalars(
    found: Iterable[Collective], *, above: int = 1
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Separate collectives of arrays from collectives of scalars, such as losses, norms and counters.

    Args:
      found: collectives. If the compiler combined arrays and scalars in one, it is in both results, with its arrays in
        the first and its scalars in the second.
      above: the most elements of an array that counts as a scalar.

    Returns:
      (the collectives of arrays, the collectives of scalars), each in their order.

    Example:
        arrays, scalars = split_scalars(js.collectives(step.compile(batch), mesh))
    """
    arrays: list[Collective] = []
    scalars: list[Collective] = []
    for one in found:
        for kept, large in ((arrays, True), (scalars, False)):
            if parts := [part for part, shape in enumerate(one.shapes) if (math.prod(shape) > above) is large]:
                kept.append(pick(one, parts))
    return tuple(arrays), tuple(scalars)


def pick(one: Collective, parts: Sequence[int]) -> Collective:
    """Return a copy of a collective with only some of its arrays, those with the indices `parts`."""
    trails = tuple(one.trails[part] for part in parts) if one.trails else ()
    return replace(one, arrays=tuple(one.arrays[part] for part in parts), trails=trails)


def summary(found: Iterable[Collective]) -> tuple[Row, ...]:
    """Add up counts and bytes of collectives: one row per kind and axes, in the order of `KINDS`.

    Args:
      found: the result of `js.collectives`.

    Example:
        rows = js.plan.summary(js.collectives(step.compile(batch), mesh))
        print(js.plan.table(rows))
    """
    groups = grouped(found, lambda one: (one.kind, one.axes))
    rows = [
        Row(*key, total(one.count for one in of), total(one.bytes for one in of), any(one.conditional for one in of))
        for key, of in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (KINDS.index(row.kind), row.axes)))


def table(rows: Iterable[Row]) -> str:
    """Format the rows of a summary as aligned plain text, with notes on figures that are not exact.

        collective      axis  count  bytes
        all-reduce      a+c       1  2,048
        reduce-scatter  a         1  2,048

    Args:
      rows: the result of `js.plan.summary`.

    Returns:
      Several lines; "no collectives" if there are no rows.

    Example:
        print(js.plan.table(js.plan.summary(js.collectives(step.compile(batch), mesh))))
    """
    rows = tuple(rows)
    if not rows:
        return "no collectives"
    cells = [
        (row.kind, "+".join(row.axes), number_str(row.count) + "*" * row.conditional, number_str(row.bytes))
        for row in rows
    ]
    notes = {
        "count ?: inside a loop whose trip count is only known while it runs": any(r.count is None for r in rows),
        "count *: inside a conditional, counted as if that branch were always taken": any(r.conditional for r in rows),
        "axis ?: among groups of devices that are no product of mesh axes": any(r.axes == UNKNOWN for r in rows),
    }
    lines = Table(cells, "<<>>", ("collective", "axis", "count", "bytes")).lines
    return "\n".join([*lines, *(note for note, holds in notes.items() if holds)])
