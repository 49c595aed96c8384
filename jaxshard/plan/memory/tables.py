"""The layout in which a loop over micro-batches adds up the gradient of a table that is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxshard.plan.memory.graph import Op, Region, Value, every_op
from jaxshard.plan.memory.shards import SCATTERS

_ADDS = frozenset({"add", "add_any"})
_PASSED_ON = frozenset({
    "convert_element_type", "enter", "enter_moved", "optimization_barrier", "reshape", "sharding_constraint", "slice",
    *SCATTERS,
})  # fmt: skip
"""What may lie between the gradient and the sum, such as collectives that leave each device a part of it."""


def tables_by_rows(region: Region) -> dict[Value, tuple[int, int]]:
    """Find the sums of tables' gradients that loops carry, and the dimensions along their lanes and sublanes.

    Rows are added to a table one by one, so that its columns lie along the lanes. A part of its columns is added up in
    the same layout, and padded to 128 of them.

    Args:
      region: a step.

    Returns:
      What the loops are given, carry and return.
    """
    found: dict[Value, tuple[int, int]] = {}
    for loop in every_op(region):
        if loop.name not in ("scan", "while") or len(loop.regions) != 1:
            continue
        (body,) = loop.regions
        makers = {one: op for op in body.ops for one in op.outs}
        for alike in _carries(loop):
            out, carried = alike[-2:]
            terms = _terms(out, makers)
            if len(out.shard) == 2 and carried in terms and any(_is_scattered(one, makers) for one in terms):
                found.update(dict.fromkeys(alike, (1, 0)))
                for inner in (makers.get(one) for one in terms):  # another loop adds up the rest of it, in its layout
                    found.update((one, _by_rows(one)) for one in _alike_of(inner, terms))
    return found


def _carries(loop: Op) -> Iterator[tuple[Value, ...]]:
    """Yield what a loop is given to carry, what it returns of it, what a turn returns, and what it is given."""
    (body,) = loop.regions
    start, inside = (loop.counts[0], loop.counts[0]) if loop.name == "scan" else (sum(loop.counts), loop.counts[1])
    count = loop.counts[1] if loop.name == "scan" else len(loop.outs)
    yield from zip(loop.ins[start:], loop.outs, body.outputs[:count], body.inputs[inside:], strict=False)


def _alike_of(loop: Op | None, terms: Sequence[Value]) -> Iterator[Value]:
    if loop is not None and loop.name in ("scan", "while") and len(loop.regions) == 1:
        for alike in _carries(loop):
            if alike[1] in terms:
                yield from alike


def _terms(value: Value, makers: Mapping[Value, Op]) -> list[Value]:
    """Return what is added up to a value: arrays that no addition, reshape or collective over parts of them makes."""
    found = [value]
    for one in found:
        op = makers.get(one)
        if op is not None and op.name in _PASSED_ON | _ADDS:
            added = op.ins if op.name in _ADDS else [op.ins[op.outs.index(one)]]
            found += [other for other in added if other not in found]
    return [one for one in found if (op := makers.get(one)) is None or op.name not in _PASSED_ON | _ADDS]


def _is_scattered(value: Value, makers: Mapping[Value, Op]) -> bool:
    op = makers.get(value)
    return op is not None and op.name in ("scatter-add", "scatter_add")


def _by_rows(value: Value) -> tuple[int, int]:
    return len(value.shard) - 1, len(value.shard) - 2
