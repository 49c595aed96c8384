"""The rules (see `rules.py`) of slice, gather and scatter."""

from __future__ import annotations

from jaxshard.adapt.positionwise.checks import check_degrees, check_same, plain
from jaxshard.adapt.positionwise.facts import SAME, Fact, Kind, Mixes, same_positions
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.adapt.positionwise.shares import is_share, refuse, sum_of
from jaxshard.proofs.dims import follow_dim


def gather(pair: Pair, facts: list[Fact]) -> list[Fact]:
    """Return the fact about the result of `lax.gather`: how it depends on the sequence positions.

    Args:
      pair: the equation, in the traces for all positions and for one device's positions.
      facts: how the operand and the indices depend on the positions.

    Raises:
      Mixes: the gather selects positions by their index or by the values of other positions.
    """
    table, indices = facts
    numbers, sizes = pair.params["dimension_numbers"], pair.params["slice_sizes"]
    for fact in facts:
        if is_share(fact):
            raise refuse(pair, fact)
    found: list[Fact] = []
    if indices.kind is Kind.ALONG:
        if (to := follow_dim(pair.one, 1, indices.dim)) is None:
            raise Mixes("makes one index of the values of several positions")
        found.append(indices._replace(dim=to))
    if table.kind is Kind.ALONG:
        batched = table.dim in numbers.operand_batching_dims
        to = follow_dim(pair.one, 0, table.dim)
        if to is None or not (batched or pair.is_whole(0, table.dim, sizes, pair.two.params["slice_sizes"])):
            raise Mixes("takes positions by their index", "gather")
        found.append(table._replace(dim=to))
        if batched and indices.kind is not Kind.ALONG:
            raise Mixes("takes positions by the values of other positions", "gather")
    check_degrees(facts)
    if not found:
        return [SAME]
    if len({fact.dim for fact in found}) > 1:
        raise Mixes("takes positions by the values of other positions", "gather")
    return [same_positions(found)]


def slice_of(pair: Pair, facts: list[Fact]) -> list[Fact]:
    """Return the fact about the result of `lax.slice` or `lax.dynamic_slice`: how it depends on the sequence positions.

    Args:
      pair: the equation, in the traces for all positions and for one device's positions.
      facts: how the operand and the start indices depend on the positions.

    Raises:
      Mixes: the slice takes only some of the positions, or its start or size depends on how many there are.
    """
    fact, *starts = facts
    if fact.kind is Kind.ALONG:
        if not pair.is_whole(0, fact.dim, *pair.out_shapes()):
            raise Mixes("takes some of the positions", "shift")
    elif pair.grown():
        raise Mixes("takes as much of an array as there are positions", "positions")
    one, two = (eqn.params.get("start_indices", ()) for eqn in (pair.one, pair.two))
    if any(a != b for a, b in zip(one, two, strict=True)):
        raise Mixes("selects elements by the number of positions", "number")
    check_same(pair, starts)
    return [fact]


def dynamic_update_slice(pair: Pair, facts: list[Fact]) -> list[Fact]:
    """Return the fact about the result of `lax.dynamic_update_slice`: how it depends on the sequence positions.

    Args:
      pair: the equation, in the traces for all positions and for one device's positions.
      facts: how the array, the update and the start indices depend on the positions.

    Raises:
      Mixes: the update is written to only some of the positions.
    """
    array, update, *starts = facts
    check_same(pair, starts)
    if is_share(array) or is_share(update):
        return [sum_of(pair, [array, update])]
    check_degrees(facts)
    positions = [fact for fact in (array, update) if fact.kind is Kind.ALONG]
    if not positions:
        return [SAME]
    fact = same_positions(positions)
    if pair.shapes(1)[0][fact.dim] != pair.shapes(0)[0][fact.dim] or len(positions) < 2:
        raise Mixes("writes to some of the positions", "shift")
    return [fact]


def scatter(pair: Pair, facts: list[Fact]) -> list[Fact]:
    """Return the fact about the result of `lax.scatter` or `lax.scatter_add`: how it depends on the sequence positions.

    Args:
      pair: the equation, in the traces for all positions and for one device's positions.
      facts: how the array, the indices and the updates depend on the positions.

    Raises:
      Mixes: the updates are written to only some of the positions, or they vary by position and are written to an array
        without positions, in any way but counting.
    """
    into, indices, updates = facts
    if found := plain(pair, facts):
        return [found]
    for fact in facts:
        if is_share(fact):
            raise refuse(pair, fact)
    check_degrees(facts)
    if into.kind is Kind.SAME:
        return [_count(pair, facts)]
    numbers, dim = pair.params["dimension_numbers"], into.dim
    if dim in numbers.operand_batching_dims:
        of_indices = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        outer = [at for at in range(len(pair.shapes(2)[0])) if at not in numbers.update_window_dims]
        right = indices.kind is Kind.ALONG and indices.dim == of_indices
        expected = outer[of_indices]
    else:
        taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        window = [at for at in range(len(pair.shapes(0)[0])) if at not in taken]
        right = dim in window and dim not in numbers.scatter_dims_to_operand_dims and indices.kind is Kind.SAME
        expected = numbers.update_window_dims[window.index(dim)] if right else -1
    if not right or updates.kind is not Kind.ALONG or updates.dim != expected:
        raise Mixes("writes to some of the positions", "shift")
    return [same_positions([into, updates._replace(dim=dim)])]


def _count(pair: Pair, facts: list[Fact]) -> Fact:
    """Return the fact about the result of a scatter into an array without sequence positions.

    Only a scatter-add of one entry per position to zeros is allowed, such as counting the tokens of each expert. Its
    result is a sum over positions, of which each device has a summand.
    """
    into, indices, updates = facts
    numbers = pair.params["dimension_numbers"]
    window = numbers.update_window_dims
    apart = indices.kind is not Kind.ALONG or indices.dim != len(pair.shapes(1)[0]) - 1
    if pair.name != "scatter-add" or not into.zero or not apart or updates.kind is not Kind.ALONG:
        raise Mixes("writes the values of single positions")
    if updates.dim in window:
        raise Mixes("writes to some of the positions", "shift")
    if indices.kind is Kind.ALONG:
        outer = [dim for dim in range(len(pair.shapes(2)[0])) if dim not in window]
        same_positions([indices._replace(dim=outer[indices.dim]), updates])
    return Fact(Kind.SUM)
