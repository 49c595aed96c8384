"""Edits that may remove a surprise, in the order in which they are worth trying.

A surprise says what moves (kind, axes, shape) and the user's line that it moves for. From these follow

- another constraint, or none, where the user constrains an array,
- no sort where nothing depends on the order,
- rows that are not split over an axis that splits weights,
- another dimension for a tensor axis to split, by a rule; without rules of the user's own; two such rules at once,
- a constraint on what the line computes, of the same number of elements first,
- an engine that computes each device's rows by themselves, where the compiler moves rows between devices,
- a weight that stays whole over the tensor axis, which takes memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxshard.checks.collectives.compare import Comparison
from jaxshard.checks.collectives.parameters import Parameter, is_stacked, parameters_of, tensor_axes
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.rules import RULES, Rule, ends_with
from jaxshard.core.strategy_parts import Batch, Tensor, parts_of
from jaxshard.engines.auto import Auto
from jaxshard.engines.engine import Engine, WholeModelEngine
from jaxshard.engines.explicit import Explicit
from jaxshard.plan.repair.cuts import cut_sizes
from jaxshard.plan.repair.edits import (
    ChangeConstraint,
    ConstrainResult,
    Edit,
    LeaveOutSort,
    Names,
    SetEngine,
    SetRows,
    SetRules,
)
from jaxshard.plan.repair.parts import Parts, Traced
from jaxshard.plan.repair.rewrite import Site, is_constraint, is_users_constraint, list_sites
from jaxshard.plan.repair.unordered import needless_sorts

_PER_LINE = 4
"""The number of constraints that are tried on the results of one line."""
_PAIRS = 8
"""The number of pairs of rules that are tried."""


class Group(NamedTuple):
    """Edits of one kind.

    Attributes:
      edits: in the order in which they are worth trying.
      at_once: True if an edit that removes some of the surprises is taken before other groups are tried: those that
        take out what the user wrote. Others may lead away from the edit that removes all.
      try_all: True if the edit that moves least is looked for among those that remove all surprises, not the first.
      has_to_save: True if such an edit has to move fewer bytes in all, promised ones too: those that take memory.
    """

    edits: list[Edit]
    at_once: bool = False
    try_all: bool = False
    has_to_save: bool = False


def propose(
    parts: Parts, layout: Layout, comparison: Comparison, traced: Traced, measured: Mapping[Edit, int]
) -> Iterator[Group]:
    """Yield groups of edits, those first that undo what the user wrote.

    Args:
      parts: the step whose surprises are to be removed.
      layout: of these parts.
      comparison: the audit of the step.
      traced: what it was traced to.
      measured: the unexpected bytes with each edit that was tried, filled while the groups are consumed.
    """
    found = [surprise.found for surprise in comparison.surprises]
    axes = {axis for one in found for axis in one.axes}
    lines = list(dict.fromkeys(surprise.place.removeprefix("near ") for surprise in comparison.surprises))
    yield Group(list(_other_constraints(parts, layout, traced, lines)), at_once=True)
    yield Group(list(_needless_sorts(traced, lines)), at_once=True)
    over_tensor = bool(axes & set(tensor_axes(layout)))
    tensors = [one for one in parts_of(parts.strategy) if isinstance(one, Tensor)] if over_tensor else []
    for part in tensors:
        near = _near_first(parameters_of(layout), comparison)
        yield Group(list(_rows_elsewhere(parts, part)), at_once=True)
        yield Group(list(_without_own_rules(part)))
        yield Group(list(_whole_where_cut(part, near, layout, traced, lines)), at_once=True, has_to_save=True)
        moved = _moved_dims(part, near, layout)
        yield Group([_in_front(part, [rule]) for rule in moved], try_all=True)
        yield Group(_two_rules(part, moved, near, measured), try_all=True)
    yield Group(list(_constrained_results(parts, layout, comparison, traced, lines)))
    yield Group(list(_other_engines(parts.engine)))
    for part in tensors:
        yield Group(_kept_whole(part, _near_first(parameters_of(layout), comparison)), has_to_save=True)


# Constraints.


def _other_constraints(parts: Parts, layout: Layout, traced: Traced, lines: Sequence[str]) -> Iterator[Edit]:
    """Without each of the user's constraints, those of the surprises' lines first; then with another in its place."""
    mine = sorted(_constraints(traced.loss, parts.loss_changes).items(), key=lambda item: item[0] not in lines)
    yield from (ChangeConstraint(tuple(sites), None, "loss") for _, sites in mine)
    yield from (
        ChangeConstraint(tuple(sites), None, "tx") for sites in _constraints(traced.tx, parts.tx_changes).values()
    )
    for _, sites in mine:
        shapes = {eqn.outvars[0].aval.shape for eqn in sites.values()}
        for names in list(_possible_names(parts, layout, min(shapes)))[:4] if len(shapes) == 1 else ():
            yield ChangeConstraint(tuple(sites), names, "loss")


def _constraints(program: Any, changed: Container[Site]) -> dict[str, dict[Site, Any]]:
    """The user's constraints by line, but for those that are changed already."""
    found: dict[str, dict[Site, Any]] = {}
    for site, eqn in list_sites(program).items():
        if is_users_constraint(eqn) and site not in changed:
            found.setdefault(site.line, {})[site] = eqn
    return found


def _constrained_results(
    parts: Parts, layout: Layout, comparison: Comparison, traced: Traced, lines: Sequence[str]
) -> Iterator[Edit]:
    """Constraints on what the lines of the surprises compute, on arrays of the size of what is moved first."""
    sizes = {math.prod(shape) for surprise in comparison.surprises for shape in surprise.found.shapes}
    sites = list_sites(traced.loss)
    for line in lines:
        # What one expression of the line makes, each time that it runs: results of one primitive and shape.
        made: dict[tuple[str, int, Any], list[Site]] = {}
        for site, eqn in sites.items():
            if site.line == line and not is_constraint(eqn):
                for number, var in enumerate(eqn.outvars):
                    made.setdefault((site.primitive, number, var.aval), []).append(site)
        edits = []
        for (_, number, aval), same in made.items():
            shape = getattr(aval, "shape", ())
            whole = max(1, math.prod(shape))
            far = not any(size % whole == 0 or whole % size == 0 for size in sizes)
            for order, names in enumerate(_possible_names(parts, layout, shape)):
                edit = ConstrainResult(tuple(same), number, names, f"{aval.dtype.name}{list(shape)}")
                edits.append(((not jnp.issubdtype(aval.dtype, jnp.floating), far, -whole, order, same[0].number), edit))
        edits.sort(key=lambda item: item[0])
        yield from [edit for _, edit in edits[:_PER_LINE]]


def _possible_names(parts: Parts, layout: Layout, shape: Sequence[int]) -> Iterator[Names]:
    """The names by which `js.constrain` can split an array: rows over the batch axes, another dimension over tensor."""
    if len(shape) < 2:
        return
    chooses, count = parts.engine.compiler_chooses, axis_size(layout.mesh, layout.batch_axes)
    # Under engines that give each device its own rows "batch" says nothing, and stands where rows are.
    rows: list[int | None] = [0]
    if chooses:
        rows = [*[dim for dim, size in enumerate(shape[:-1]) if size % count == 0 and count > 1][:2], None]
    features: list[tuple[int, str] | None] = [
        (dim, name) for dim in reversed(range(len(shape))) if (name := _split_name(parts, layout, shape[dim]))
    ]
    if set(layout.mesh.axis_names) <= parts.engine.manual_axes(layout):
        return  # nothing is left to the compiler
    for row, feature in itertools.product(rows, [*features, None]):
        if (row, feature) != (None, None) and (feature is None or feature[0] != row):
            names: list[str | None] = [None] * len(shape)
            if row is not None:
                names[row] = "batch"
            if feature is not None:
                names[feature[0]] = feature[1]
            yield tuple(names)


def _split_name(parts: Parts, layout: Layout, size: int) -> str | None:
    """A name that a tensor axis splits, for a dimension of this size: a parameter's of that size, if there is one."""
    for part in parts_of(parts.strategy):
        if isinstance(part, Tensor) and size % axis_size(layout.mesh, part.axis) == 0:
            named = {one.shape[dim]: _name_of(one) for one in parameters_of(layout) for dim in _split(one, part)}
            known = [named[size]] if size in named else []
            return next((name for name in (*known, "features", *named.values()) if part.rules.fate(name)), None)
    return None


def _needless_sorts(traced: Traced, lines: Sequence[str]) -> Iterator[Edit]:
    """Without the sorts of the surprises' lines whose order nothing depends on."""
    sorts = {id(eqn) for eqn in needless_sorts(traced.loss)} if traced.loss is not None else set()
    for line in lines:
        same = [site for site, eqn in list_sites(traced.loss).items() if site.line == line and id(eqn) in sorts]
        if same:
            yield LeaveOutSort(tuple(same))


# Rules.


def _rows_elsewhere(parts: Parts, part: Tensor) -> Iterator[Edit]:
    """Rows split over the axes that split no weights."""
    for one in parts_of(parts.strategy):
        if isinstance(one, Batch):
            axes = tuple(axis for axis in one.axes if axis not in axis_names(part.axis))
            if axes and axes != one.axes:
                yield SetRows(one.axes, axes)


def _near_first(parameters: Iterable[Parameter], comparison: Comparison) -> list[Parameter]:
    """The matrices, first those that a surprise names, then those with a dimension of its size."""
    why = " ".join(surprise.why for surprise in comparison.surprises)
    sizes = {size for surprise in comparison.surprises for shape in surprise.found.shapes for size in shape}
    matrices = [one for one in parameters if len(one.shape) - is_stacked(one.path) > 1]
    return sorted(matrices, key=lambda one: (one.path not in why, not sizes & set(one.shape)))


def _without_own_rules(part: Tensor) -> Iterator[Edit]:
    """The rules without one of the user's own, or without all of them."""
    rules = part.rules.rules
    own = [rule for rule in rules if rule not in RULES]
    for rule in own:
        yield SetRules(part.axis, tuple(one for one in rules if one is not rule), f"leave out the rule {rule!r}")
    if len(own) > 1:
        yield SetRules(part.axis, tuple(one for one in rules if one in RULES), "leave out your own rules")


def _moved_dims(part: Tensor, parameters: Sequence[Parameter], layout: Layout) -> list[Rule]:
    """Rules that split another dimension of a matrix than now."""
    rules: dict[Rule, None] = {}
    count = axis_size(layout.mesh, part.axis)
    for one in parameters:
        now, first = _split(one, part), int(is_stacked(one.path))
        name = _name_of(one) if now else "features"
        for dim in range(first, len(one.shape)):
            if dim not in now and one.shape[dim] % count == 0 and part.fate(name) in ("split", "split or whole"):
                names = tuple(name if at == dim else None for at in range(first, len(one.shape)))
                rules[_pattern(one, parameters), names] = None
    return list(rules)


def _two_rules(
    part: Tensor, moved: Sequence[Rule], parameters: Sequence[Parameter], measured: Mapping[Edit, int]
) -> list[Edit]:
    """Two rules at once for different matrices.

    A pair of layers that is split the wrong way round moves more if only one of them is put right. Those come first
    that then split dimensions of one size, as the features between the two layers are, and did least harm singly.
    """
    harm = {rule: measured[edit] for rule in moved if (edit := _in_front(part, [rule])) in measured}
    sizes = {
        (pattern, names): {
            size for one in parameters if ends_with(one.path, pattern) for size in _named_sizes(one, names)
        }
        for pattern, names in harm
    }
    pairs = [pair for pair in itertools.combinations(harm, 2) if pair[0][0] != pair[1][0]]
    pairs.sort(key=lambda pair: (sizes[pair[0]] != sizes[pair[1]], harm[pair[0]] + harm[pair[1]]))
    return [_in_front(part, pair) for pair in pairs[:_PAIRS]]


def _named_sizes(one: Parameter, names: Any) -> Iterator[int]:
    """The sizes of the dimensions to which a rule gives a name."""
    for name, size in zip(reversed(names), reversed(one.shape), strict=False):
        if name is not None:
            yield size


def _whole_where_cut(
    part: Tensor, parameters: Sequence[Parameter], layout: Layout, traced: Traced, lines: Sequence[str]
) -> Iterator[Edit]:
    """Whole dimensions where the lines cut or fold them elsewhere than between devices.

    Three heads of 12 on two devices: [36] is split in the middle of the second head, and so is [3 * 32], of which
    queries, keys and values are taken.
    """
    sites = list_sites(traced.loss)
    cut = {size for site, eqn in sites.items() if site.line in lines for size in cut_sizes(eqn, _parts(part, layout))}
    names = list(
        dict.fromkeys(_name_of(one) for one in parameters if cut & {one.shape[dim] for dim in _split(one, part)})
    )
    for some in (*((name,) for name in names), *([tuple(names)] if len(names) > 1 else [])):
        yield _in_front(part, [(name, "whole") for name in some])


def _parts(part: Tensor, layout: Layout) -> int:
    """The number of devices over which a `js.tensor` splits a dimension."""
    return axis_size(layout.mesh, part.axis)


def _kept_whole(part: Tensor, parameters: Sequence[Parameter]) -> list[Edit]:
    """Rules by which one matrix, or dimensions of one or two names, stay whole over the axis; least memory first."""
    split = [one for one in parameters if _split(one, part)]
    sizes: dict[Edit, int] = {}
    for pattern in dict.fromkeys(_pattern(one, parameters) for one in split):
        edit = _in_front(part, [(pattern if "/" in pattern else f"*/{pattern}", "whole")])
        sizes[edit] = sum(math.prod(one.shape) for one in split if ends_with(one.path, pattern))
    names = dict.fromkeys(map(_name_of, split))
    for some in (*((name,) for name in names), *itertools.combinations(names, 2)):
        edit = _in_front(part, [(name, "whole") for name in some])
        sizes[edit] = sum(math.prod(one.shape) for one in split if _name_of(one) in some)
    return sorted(sizes, key=lambda edit: sizes[edit])


def _name_of(one: Parameter) -> str:
    """The name of the dimension that a rule split."""
    return one.param.rule.split(":")[0]


def _split(one: Parameter, part: Tensor) -> list[int]:
    """The dimensions that the axes of a `js.tensor` split."""
    axes = set(axis_names(part.axis))
    return [dim for dim, entry in enumerate(one.param.use) if axes & set(axis_names(entry))]


def _pattern(one: Parameter, parameters: Sequence[Parameter]) -> str:
    """The end of a path, two words of it or more, that fits this matrix and others of its shape only."""
    words = one.path.split("/")
    for count in range(min(2, len(words)), len(words) + 1):
        pattern = "/".join(words[-count:])
        if all(other.shape == one.shape for other in parameters if ends_with(other.path, pattern)):
            return pattern
    return one.path


def _in_front(part: Tensor, rules: Sequence[Rule]) -> Edit:
    replaced = {rule[0] for rule in rules}
    kept = tuple(rule for rule in part.rules.rules if rule in RULES or rule[0] not in replaced)
    shown = " and ".join(repr(rule) for rule in rules)
    return SetRules(part.axis, (*rules, *kept), f"put the rule{'s' * (len(rules) > 1)} {shown} in front")


# Engines.


def _other_engines(engine: Engine) -> Iterator[Edit]:
    """The other engine that runs whole models, with the same choices."""
    if isinstance(engine, WholeModelEngine):
        kind = Explicit if engine.compiler_chooses else Auto
        shared = {name: getattr(engine, name) for name in WholeModelEngine.__dataclass_fields__}
        yield SetEngine(kind(**shared))
