"""The rule of each primitive: compute the facts about its results from the facts about its operands.

A rule receives an equation in both traces and the facts about its operands. It returns a fact for each result, or
raises `Mixes` if the results are wrong on a part of the positions. A primitive without a rule is refused if an operand
or a result depends on positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxshard.adapt.positionwise.checks import check_degrees, check_same, moved, plain
from jaxshard.adapt.positionwise.facts import (
    SAME,
    Fact,
    Kind,
    Mixes,
    along,
    constant_along,
    reshaped,
    same_positions,
)
from jaxshard.adapt.positionwise.indexing import dynamic_update_slice, gather, scatter, slice_of
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.adapt.positionwise.primitives import EACH_ELEMENT, KEPT, REDUCTIONS, SHARDED_SUMS, WITHOUT_RESULT
from jaxshard.adapt.positionwise.shares import combine_numbers, combine_shares, is_share, refuse, sum_of
from jaxshard.core.marks import MARK
from jaxshard.proofs.dims import SCANNED, follow_dim

_ORDERINGS = frozenset({"sort", "top_k", "approx_top_k"})

Rule = Callable[[Pair, list[Fact]], list[Fact]]
"""(equation in both traces, facts about its operands) -> facts about its results."""


def apply_rule(pair: Pair, facts: list[Fact]) -> list[Fact]:
    """Return how the results of an equation depend on the sequence positions, by the rule of its primitive.

    The equation must not contain a jaxpr, as calls, loops and branches do.

    Args:
      pair: the equation, in the traces for all positions and for one device's positions.
      facts: how each operand depends on the positions.

    Raises:
      Mixes: the results would be wrong on a device with only its own positions, or the primitive has no rule.
    """
    name = pair.name
    if name in WITHOUT_RESULT:
        return []
    found = _rule_of(name)(pair, facts)
    pair.check_unchanged()
    return found


def has_rule(name: str) -> bool:
    """Return True if the proof knows how the results of this primitive depend on the sequence positions."""
    return _rule_of(name) is not _unknown


def _rule_of(name: str) -> Rule:
    for names, rule in ((KEPT, _keep), (EACH_ELEMENT, _elementwise), (REDUCTIONS, _reduce), (SCANNED, _scanned)):
        if name in names:
            return rule
    return _RULES.get(name, _unknown)


def _keep(pair: Pair, facts: list[Fact]) -> list[Fact]:
    return facts


def _elementwise(pair: Pair, facts: list[Fact]) -> list[Fact]:
    return [_combine(pair, facts)]


def _combine(pair: Pair, facts: list[Fact]) -> Fact:
    positions = [fact for fact in facts if fact.kind is Kind.ALONG]
    share = next((fact for fact in facts if is_share(fact)), None)
    if share is not None and positions:
        raise refuse(pair, share, "it is combined with single positions")
    if share is not None:
        return combine_shares(pair, facts)
    if not positions:
        return combine_numbers(pair, facts)
    check_degrees(facts)
    return same_positions(positions)


def _broadcast(pair: Pair, facts: list[Fact]) -> list[Fact]:
    fact, *_ = facts
    to = pair.params["broadcast_dimensions"]
    grown = pair.grown()
    if fact.kind is Kind.ALONG:
        if grown != [to[fact.dim]]:
            raise Mixes("repeats positions for other positions", "attention")
        return [fact._replace(dim=to[fact.dim])]
    if not grown:
        return [fact]
    if is_share(fact):
        raise refuse(pair, fact, "single positions need all of it")
    check_degrees(facts)
    if len(grown) > 1:
        raise Mixes("makes an array of positions by positions", "attention")
    return [constant_along(grown[0])]


def _reshape(pair: Pair, facts: list[Fact]) -> list[Fact]:
    (fact,) = facts
    if fact.kind is not Kind.ALONG:
        return facts
    if pair.params.get("dimensions") is not None:
        raise Mixes("reorders positions")
    found = reshaped(fact, pair.shapes(0)[0], pair.out_shapes()[0], pair.grown(), pair.length)
    if found is None:
        raise Mixes("cuts the positions into several dimensions", "blocks")
    return [found]


def _reordered(pair: Pair, facts: list[Fact]) -> list[Fact]:
    return [moved(pair, facts)]


def _rev(pair: Pair, facts: list[Fact]) -> list[Fact]:
    if facts[0].kind is Kind.ALONG and facts[0].dim in pair.params["dimensions"]:
        raise Mixes("reverses the positions")
    return facts


def _reduce(pair: Pair, facts: list[Fact]) -> list[Fact]:
    results = len(pair.one.outvars)
    if pair.name == "reduce":  # operands, then their initial values
        facts = facts[: len(facts) // 2]
    if (share := next((fact for fact in facts if is_share(fact)), None)) is not None:
        kind = Kind.SUM if pair.name == "reduce_sum" else Kind.MAX if pair.name == "reduce_max" else None
        if share.kind is not kind:
            raise refuse(pair, share)
        return [share]
    positions = [fact for fact in facts if fact.kind is Kind.ALONG]
    if not positions:
        zero = pair.name == "reduce_sum" and facts[0].zero
        return [SAME._replace(degree=_only_degree(pair, facts), zero=zero)] * results
    fact = same_positions(positions)
    if (to := follow_dim(pair.one, 0, fact.dim)) is not None:
        return [fact._replace(dim=to)] * results
    if pair.name == "reduce_sum":
        return [Fact(Kind.SUM)]
    if pair.name == "reduce_max":
        return [Fact(Kind.MAX)]
    raise Mixes("reduces the positions", "sum")


def _only_degree(pair: Pair, facts: Sequence[Fact]) -> float:
    if len({fact.degree for fact in facts}) == 1 and pair.name in ("reduce_sum", "reduce_max"):
        return facts[0].degree
    check_same(pair, facts)
    return 0


def _scanned(pair: Pair, facts: list[Fact]) -> list[Fact]:
    results = len(pair.one.outvars)
    if found := plain(pair, facts):
        return [found] * results
    for fact in facts:
        if is_share(fact):
            raise refuse(pair, fact)
    check_degrees(facts)
    positions = same_positions([fact for fact in facts if fact.kind is Kind.ALONG])
    if follow_dim(pair.one, 0, positions.dim) is None:
        raise Mixes("goes over the positions in their order", "experts" if pair.name in _ORDERINGS else "auto")
    return [positions] * results


def _dot_general(pair: Pair, facts: list[Fact]) -> list[Fact]:
    (contract, _) = pair.params["dimension_numbers"]
    left, right = facts
    kinds = [fact.kind for fact in facts]
    if any(map(is_share, facts)):
        if kinds.count(Kind.SAME) != 1 or Kind.MAX in kinds:
            raise refuse(pair, left if is_share(left) else right)
        share, other = (left, right) if is_share(left) else (right, left)
        return [share._replace(degree=share.degree - other.degree)]
    if kinds == [Kind.SAME, Kind.SAME]:
        return [SAME._replace(degree=left.degree + right.degree)]
    check_degrees(facts)
    found: list[Fact] = []
    for side, fact in enumerate(facts):
        if fact.kind is not Kind.ALONG:
            continue
        if (to := follow_dim(pair.one, side, fact.dim)) is None:
            place = contract[side].index(fact.dim)
            other = facts[1 - side]
            if other.kind is not Kind.ALONG or other.dim != contract[1 - side][place]:
                raise Mixes("sums products of positions with an array that has none", "sum")
            same_positions([fact, other._replace(dim=fact.dim)])
            return [Fact(Kind.SUM)]
        found.append(fact._replace(dim=to))
    if len({fact.dim for fact in found}) > 1:
        raise Mixes("multiplies positions with other positions", "attention")
    return [same_positions(found)]


def _concatenate(pair: Pair, facts: list[Fact]) -> list[Fact]:
    if any(map(is_share, facts)):
        if any(fact.kind is Kind.ALONG for fact in facts):
            raise refuse(pair, next(filter(is_share, facts)))
        return [sum_of(pair, facts)]
    positions = [fact for fact in facts if fact.kind is Kind.ALONG]
    if not positions:
        if len({fact.degree for fact in facts}) > 1:
            check_degrees(facts)
        return [facts[0]._replace(zero=False)]
    check_degrees(facts)
    if any(fact.dim == pair.params["dimension"] for fact in positions):
        raise Mixes("joins positions with others", "shift")
    return [same_positions(positions)]


def _stack(pair: Pair, facts: list[Fact]) -> list[Fact]:
    if any(map(is_share, facts)) or all(fact.kind is Kind.SAME for fact in facts):
        return _concatenate(pair, facts)
    check_degrees(facts)
    fact = same_positions([fact for fact in facts if fact.kind is Kind.ALONG])
    return [fact._replace(dim=fact.dim + (fact.dim >= pair.params["axis"]))]


def _unstack(pair: Pair, facts: list[Fact]) -> list[Fact]:
    (fact,) = facts
    if fact.kind is Kind.ALONG and fact.dim == pair.params["axis"]:
        raise Mixes("takes some of the positions", "shift")
    return [fact._replace(dim=fact.dim - (fact.dim > pair.params["axis"]))] * len(pair.one.outvars)


def _tile(pair: Pair, facts: list[Fact]) -> list[Fact]:
    (fact,) = facts
    if pair.changed() or (fact.kind is Kind.ALONG and pair.params["reps"][fact.dim] != 1):
        raise Mixes("repeats positions for other positions", "attention")
    return [fact]


def _split(pair: Pair, facts: list[Fact]) -> list[Fact]:
    (fact,) = facts
    if fact.kind is Kind.ALONG and fact.dim == pair.params["axis"]:
        raise Mixes("takes some of the positions", "shift")
    if pair.changed() and fact.kind is not Kind.ALONG:
        raise Mixes("takes as much of an array as there are positions", "positions")
    return facts * len(pair.one.outvars)


def _pad(pair: Pair, facts: list[Fact]) -> list[Fact]:
    fact, value = facts
    if fact.kind is Kind.ALONG:
        if tuple(pair.params["padding_config"][fact.dim]) != (0, 0, 0):
            raise Mixes("shifts or pads the positions", "shift")
        check_same(pair, [value])
    elif is_share(fact):
        return [sum_of(pair, facts)]
    else:
        check_degrees(facts)
    return [fact._replace(zero=fact.zero and value.zero)]


def _iota(pair: Pair, facts: list[Fact]) -> list[Fact]:
    grown = pair.grown()
    if not grown:
        return [SAME]
    if pair.params["dimension"] in grown:
        raise Mixes("counts from 0 on each device", "positions")
    return [constant_along(grown[0])]


def _random_bits(pair: Pair, facts: list[Fact]) -> list[Fact]:
    (keys,) = facts
    if is_share(keys):
        raise refuse(pair, keys)
    drawn = [name for name in pair.changed() if name == "shape"]
    if drawn:
        raise Mixes("draws random numbers for the positions, the same on each device", "random")
    return [keys]


def _random_wrap(pair: Pair, facts: list[Fact]) -> list[Fact]:
    (words,) = facts
    if words.kind is Kind.ALONG and words.dim >= len(pair.out_shapes()[0]):
        raise Mixes("makes one key from several positions")
    check_same(pair, [words] if words.kind is not Kind.ALONG else [])
    return [words]


def _convolution(pair: Pair, facts: list[Fact]) -> list[Fact]:
    array, kernel = facts
    if found := plain(pair, facts):
        return [found]
    check_same(pair, [kernel])
    if is_share(array):
        return [array]
    numbers, params = pair.params["dimension_numbers"], pair.params
    rows, _, *window = numbers.lhs_spec
    if array.dim == rows and params["batch_group_count"] == 1:
        return [array._replace(dim=numbers.out_spec[0])]
    if array.dim in window:
        at = window.index(array.dim)
        # A window of size 1 without stride, dilation or padding: the convolution is a product at each position.
        one_by_one = pair.shapes(1)[0][numbers.rhs_spec[2 + at]] == params["window_strides"][at] == params[
            "lhs_dilation"
        ][at] == 1 and tuple(params["padding"][at]) == (0, 0)
        if one_by_one:
            return [array._replace(dim=numbers.out_spec[2 + at])]
    raise Mixes("convolves along the positions")


def _sum_over_devices(pair: Pair, facts: list[Fact]) -> list[Fact]:
    """Return the facts about the results of a `psum` that the user's loss calls.

    Allowed are a `psum` over mesh axes that do not split positions, and a `psum` over all axes that do, of values of
    which each device has a summand.

    Raises:
      Mixes: any other `psum`.
    """
    axes = set(pair.params["axes"])
    whole = bool(pair.axes) and axes >= set(pair.axes) and pair.params.get("axis_index_groups") is None
    if whole and all(fact.kind is Kind.SUM and not fact.degree for fact in facts):
        return [SAME] * len(facts)
    if any(fact.kind is Kind.MAX or fact.degree for fact in facts) or axes & set(pair.axes):
        raise Mixes("sums over devices a value of which each has a share", "sum")
    return facts


def _axis_index(pair: Pair, facts: list[Fact]) -> list[Fact]:
    named = pair.params["axis_name"]
    if set(named if isinstance(named, tuple) else (named,)) & set(pair.axes):
        raise Mixes("asks which device it is", "positions")
    return [SAME]


def _mark(pair: Pair, facts: list[Fact]) -> list[Fact]:
    who = pair.params["name"]
    for number, (fact, dim) in enumerate(zip(facts, pair.params["positions"], strict=True)):
        shape = list(pair.shapes(number)[0])
        if dim == "sum":
            if (fact.kind is not Kind.SUM or fact.degree) and not fact.zero:
                raise Mixes(f"gets an array {shape} that is not a sum over the positions", "mark")
            continue
        if is_share(fact):
            raise refuse(pair, fact, f"{who} gets it")
        if dim is None:
            if fact.kind is Kind.ALONG or fact.degree:
                raise Mixes(f"gets an array {shape} that has positions, but should have none", "mark")
            continue
        at = len(shape) + dim
        if fact.kind is not Kind.ALONG or fact.dim != at or (fact.outer, fact.inner) not in ((1, 1), (0, 0)):
            raise Mixes(f"gets an array {shape} that should have the positions in dimension {at}", "mark")
    return [
        along(len(pair.out_shapes(number)[0]) + dim)
        if isinstance(dim, int)
        else Fact(Kind.SUM)
        if dim == "sum"
        else SAME
        for number, dim in enumerate(pair.params["result_positions"])
    ]


def _unknown(pair: Pair, facts: list[Fact]) -> list[Fact]:
    arrays = [*range(len(pair.one.outvars))]
    fixed = all(fact.kind is Kind.SAME and not fact.degree for fact in facts) and not any(map(pair.grown, arrays))
    if fixed and not pair.changed() and not pair.one.effects:
        return [SAME] * len(arrays)
    raise Mixes("is not known to treat positions one by one")


_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _reordered,
    "squeeze": _reordered,
    "rev": _rev,
    "dot_general": _dot_general,
    "gather": gather,
    "slice": slice_of,
    "dynamic_slice": slice_of,
    "dynamic_update_slice": dynamic_update_slice,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "split": _split,
    "pad": _pad,
    "iota": _iota,
    "random_bits": _random_bits,
    "random_split": _random_bits,
    "random_wrap": _random_wrap,
    "random_unwrap": _keep,
    "conv_general_dilated": _convolution,
    "scatter": scatter,
    "scatter-add": scatter,
    "scatter-mul": scatter,
    "scatter-min": scatter,
    "scatter-max": scatter,
    "axis_index": _axis_index,
    MARK.name: _mark,
} | dict.fromkeys(SHARDED_SUMS, _sum_over_devices)
