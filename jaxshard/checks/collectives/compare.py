"""Compare the promised collectives, derived from a layout, with those of a compiled program: `js.audit`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from jax.sharding import Mesh

from jaxshard.checks.collectives.comparison import Comparison
from jaxshard.checks.collectives.compiler_choices import explain_substitutes
from jaxshard.checks.collectives.forbidden import explain_forbidden, is_forbidden
from jaxshard.checks.collectives.inserted import warn_of_inserted
from jaxshard.checks.collectives.matching import Allowance, Allowances
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.collectives.promise import Promise, promise
from jaxshard.checks.collectives.surprise import Surprise, merged, wanted_axes
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.layout import human_bytes
from jaxshard.core.settings import own_settings
from jaxshard.core.text_table import first_words
from jaxshard.core.types import PyTree
from jaxshard.hlo.counts import grouped
from jaxshard.hlo.found import Collective, collectives, pick
from jaxshard.hlo.instructions import in_host_memory, rematerialized
from jaxshard.training.step import Step


def audit(step: Step, batch: PyTree) -> Comparison:
    """Compile a step and compare its collectives with the collectives that follow from its layout and engine.

    Nothing runs and no array is allocated, so the mesh may be that of a TPU topology (`js.plan.topology_mesh`).

    Args:
      step: the step that `js.make_step` returned.
      batch: a tree of global arrays or of `jax.ShapeDtypeStruct`.

    Returns:
      The comparison; `print` it, or check `comparison.ok`.

    Example:
      comparison = js.audit(js.make_step(loss_fn, tx, layout), batch_shapes)
      assert comparison.ok, str(comparison)
    """
    batch = as_arrays("the batch", batch)
    with own_settings(step.layout.mesh):
        promised = promise(step.layout, step.engine, step.loss_fn, batch)
    compiled, mesh = step.compile(batch), step.layout.mesh
    found = collectives(compiled, mesh)
    warn_of_inserted(step.choices, compiled, mesh)
    # A CPU has no asynchronous collectives, so there is nothing to report of it.
    waited = tuple(one for one in found if one.synchronous and not _is_cpu(mesh))
    program = Program(waited, rematerialized(compiled), in_host_memory(compiled))
    return replace(compare(promised, found), program=program)


def compare(promised: Promise, found: Iterable[Collective]) -> Comparison:
    """Match every collective of a program with a promised collective, by kind, axes and number of elements.

    An all-reduce may replace a reduce-scatter or an all-gather of the same array, and an array may be sent in more bits
    than promised. Reported as surprises are: a sum in fewer bits than promised; an array in `promised.never`; and
    every array without a match, except the smallest arrays, up to `promised.slack` bytes in total.

    Args:
      promised: the result of `js.plan.promise`.
      found: the result of `js.collectives`, for the same mesh.

    Returns:
      The promised and the found collectives, with the differences.

    Example:
        promised = js.plan.promise(layout, js.auto(), loss_fn, batch)
        print(compare(promised, js.collectives(step.compile(batch), mesh)))
    """
    found = tuple(found)
    allowances = Allowances(promised.expected)
    arrays = [pick(one, [part]) for one in found for part in range(len(one.arrays))]
    problems: dict[int, str] = {}
    left: list[int] = []
    # Match the engines' collectives before the user's, so that of equal arrays the user's own is the surprise. Match
    # frequent ones before rare ones: each needs a promise with room for all of its executions.
    for at in sorted(range(len(arrays)), key=lambda at: (arrays[at].is_users, -(arrays[at].count or 0))):
        if banned := [one for one in promised.never if is_forbidden(one, arrays[at])]:
            problems[at] = explain_forbidden(banned, arrays[at])
        else:
            left.append(at)
    # From the closest match to the loosest: the promised kind, an all-reduce in place of another kind, then both in
    # fewer bits than promised. Fewer bits are a surprise for a sum. They are none for a weight: if its only use is a
    # product that rounds it to bf16, as TPUs do by default, it may as well be rounded before it is gathered.
    taken: list[tuple[Collective, Allowance]] = []
    for options in ({}, {"as_other": True}, {"fewer_bits": True}, {"as_other": True, "fewer_bits": True}):
        for at in tuple(left):
            covered = allowances.take(arrays[at], **options)
            if covered is None:
                continue
            left.remove(at)
            if "fewer_bits" in options and covered.kind != "all-gather":
                problems[at] = f"wire dtype {arrays[at].dtype}, promised {covered.dtype}: {first_words(covered.what)}"
            else:
                taken.append((arrays[at], covered))
    unknown = {at: arrays[at] for at in left if not allowances.take_joined(arrays[at])}
    small = smallest(unknown, promised.slack)
    problems |= {at: allowances.explain(one) for at, one in unknown.items() if at not in small}
    instead = [one for of, one in allowances.as_needed if of.limit is None]
    surprises = ((arrays[at], why) for at, why in sorted(problems.items()))
    return Comparison(
        promised.expected,
        found,
        surprises=merged(Surprise(one, why, _constraint(one, why, promised.names)) for one, why in surprises),
        missing=tuple(allowances.missing()),
        tolerated=sum(one.bytes or 0 for one in small.values()),
        substitutes=tuple(_explain_substitutes(promised, taken)),
        needed_bytes=sum(one.bytes or 0 for _, one in allowances.as_needed if one.elements > 1),
        unread=tuple(allowances.unread(found, [*instead, *small.values(), *(arrays[at] for at in problems)])),
        widened_bytes=sum(map(_bytes_added_by_f32, taken)) if _is_cpu(promised.mesh) else 0,
    )


def smallest(arrays: Mapping[int, Collective], slack: int) -> dict[int, Collective]:
    """Select the smallest unpromised arrays, at most `slack` bytes in total, which are not reported as surprises.

    `arrays` maps an index to a collective of one array; the result is the part of this mapping that is selected.
    """
    chosen = {}
    for at, one in sorted(arrays.items(), key=lambda item: item[1].bytes or 0):
        if one.bytes is not None and one.bytes <= slack:
            slack -= one.bytes
            chosen[at] = one
    return chosen


def _is_cpu(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.devices.flat[0].platform == "cpu"


def _bytes_added_by_f32(pair: tuple[Collective, Allowance]) -> int:
    """Return the bytes that an array sent as f32 takes beyond its promised 16-bit dtype; 0 in all other cases."""
    one, covered = pair
    return (one.bytes or 0) // 2 if one.dtype == "f32" and covered.dtype in ("bf16", "f16") else 0


def _constraint(one: Collective, why: str, names: Mapping[str, str]) -> str:
    """Write the `js.constrain` call that keeps a collective's first array sharded, so that it is not moved.

    `why` tells whether the array is the logits; `names` maps mesh axes to dimension names, as in `Promise.names`.
    """
    split = "vocab" if why.startswith("logits") else "features"
    rows = [axis for axis, name in names.items() if name == "batch"]
    dims = [names.get(axes[0], split) if axes else None for axes in wanted_axes(one, rows)]
    return f"js.constrain(x, {tuple(split if name == 'features' else name for name in dims)})"


def _explain_substitutes(promised: Promise, taken: Iterable[tuple[Collective, Allowance]]) -> Iterator[str]:
    """Yield a line of the report for each kind or dtype of collective that replaces a promised one.

    A line says axes, count, bytes, arrays and the remedy: "all-reduce in place of reduce-scatter over data, ...".
    `taken` has each found collective together with the promise that it matches.
    """

    def words(pair: tuple[Collective, Allowance]) -> tuple[str, str, tuple[str, ...]]:
        one, covered = pair
        if covered.dtype in ("", one.dtype):
            return one.kind, covered.kind, one.axes
        return f"{one.kind} in {one.dtype}", f"{covered.kind} in {covered.dtype}", one.axes

    for (found, instead, axes), of in grouped(taken, words).items():
        if found == instead:
            continue
        count, size = (sum(numbers) for numbers in zip(*((one.count or 0, one.bytes or 0) for one, _ in of)))
        names = dict.fromkeys(name for _, covered in of for name in covered.what)
        over = f"over {'+'.join(axes)}, {count:,} times, {human_bytes(size)}"
        other_kind = found.split()[0] != instead.split()[0]
        remedy = explain_substitutes(promised.mesh, axes) if promised.mesh is not None and other_kind else ""
        yield f"{found} in place of {instead} {over}: {first_words(list(names))}" + (remedy and f"\n    {remedy}")
