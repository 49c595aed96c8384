"""The short form of a comparison, as `jaxshard audit` prints it: findings by line and kind, each with one advice.

    collective  axis    promised at most   found  times
    all-gather  tensor               0 B  3.84 kB      3

    surprises:
    - all-gather over tensor, 3 times, 3.84 kB: f32[2, 4, 40]
        at model.py:31
        logits, all 40 of a vocabulary: must never move over tensor
        js.cross_entropy works on logits that are split: hand it these, and let no constraint replicate them

Explanations of differences in bytes are only counted; `str(comparison)` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxshard.checks.collectives import describe
from jaxshard.checks.collectives.compare import MISSING, SUBSTITUTES, UNREAD, Comparison, Surprise, listed
from jaxshard.checks.collectives.differences import WIDENED
from jaxshard.checks.collectives.found import Collective
from jaxshard.checks.collectives.trail import PRODUCTS, operation_of
from jaxshard.checks.collectives.walk import add_counts
from jaxshard.core.layout import human_bytes

_SHOWN = 8
"""The groups of surprises that are printed."""
_OWN = ("all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "psum_scatter", "pmax", "pmin")
_ORDERED = ("sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k")


def short(comparison: Comparison) -> str:
    """Write the table, the surprises grouped by line and kind, and the number of entries of all other lists."""
    groups = group(comparison.surprises)
    surprises = [_group_str(one) for one in groups[:_SHOWN]]
    if rest := groups[_SHOWN:]:
        surprises.append(f"and at {len(rest)} more lines, {_size([one.found for of in rest for one in of])}")
    missing = [f"{len(comparison.missing)} kinds of arrays"] if len(comparison.missing) > 1 else comparison.missing
    parts = (
        comparison.table_str(),
        listed(UNREAD, comparison.unread),
        listed("surprises", surprises),
        listed(MISSING, missing),
        listed(SUBSTITUTES, comparison.other_forms),
        "\n".join([*comparison.notes(), *_counts(comparison)]),
    )
    return "\n\n".join(part for part in parts if part)


def group(surprises: Iterable[Surprise]) -> list[tuple[Surprise, ...]]:
    """Put the surprises of one line, kind and axes together, the largest group first."""
    groups: dict[tuple[object, ...], list[Surprise]] = {}
    for one in surprises:
        groups.setdefault((one.place, one.found.kind, one.found.axes), []).append(one)
    ordered = [tuple(sorted(of, key=lambda one: -(one.found.bytes or 0))) for of in groups.values()]
    return sorted(ordered, key=lambda of: -sum(one.found.bytes or 0 for one in of))


def advice(one: Surprise) -> str:
    """Return one sentence on what to do about a surprise."""
    own, over = operation_of(one.found.op_name), "+".join(one.found.axes)
    trail = one.found.trails[0] if one.found.trails else None
    made, read = (trail.maker, trail.reader) if trail else ("", "")
    if one.why.startswith("wire dtype"):
        return "to add in fewer bits say so, by reduce_dtype= of the engine; else cast after the sum"
    if "optax" in one.place:
        return "the optimizer reads full arrays: take an elementwise one, or a strategy that keeps its state replicated"
    if own in _OWN and describe.is_users(one.found):
        return "take it out: return js.Mean and js.Sum of a device's own rows, which the engine adds up"
    if one.why.startswith("logits"):
        return "js.cross_entropy works on logits that are split: hand it these, and let no constraint replicate them"
    if own == "sharding_constraint" or read == "sharding_constraint":
        return f"take the constraint out, or let it keep the dimension split over {over}"
    if {own, made, read} & set(_ORDERED):
        return f"sort or accumulate within a row, or after a reduction: along {over} each device has a part"
    if "must never move" in one.why:
        return f"use the weight in a product as it is stored, or keep it replicated over {over} by a rule of js.tensor"
    if {own, made} & set(PRODUCTS):
        return "shard both operands of the product alike: js.constrain its result to the sharding in which it is read"
    return "js.constrain the array where it is made to the sharding in which it is read, or use js.explicit"


def _group_str(of: Sequence[Surprise]) -> str:
    largest = of[0]
    found = [one.found for one in of]
    count: int | None = 0
    for one in found:
        count = add_counts(count, one.count)
    more = f" and {len(of) - 1} more" if len(of) > 1 else ""
    head = f"{largest.found.kind} over {'+'.join(largest.found.axes)}, {describe.times_str(count)}, {_size(found)}"
    arrays = describe.arrays_str(largest.found)
    return "\n    ".join([f"{head}: {arrays}{more}", f"at {largest.place}", largest.why, advice(largest)])


def _size(found: Iterable[Collective]) -> str:
    sizes = [one.bytes for one in found]
    return "? bytes" if None in sizes else human_bytes(sum(size or 0 for size in sizes))


def _counts(comparison: Comparison) -> Iterable[str]:
    """The number of entries of each list that is left out."""
    explained = [one for one in comparison.deviations() if one.why != WIDENED]
    if explained:
        lines = "difference in bytes is" if len(explained) == 1 else "differences in bytes are"
        yield f"{len(explained)} {lines} explained by --all"
    if comparison.tolerated:
        yield f"left to the compiler: {human_bytes(comparison.tolerated)}"
    if comparison.program is not None:
        yield from comparison.program.titles()
