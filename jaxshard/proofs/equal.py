"""Find the mesh axes over which a value may differ between devices: a domain of `proofs/walk.py`.

Inside a `shard_map` every device computes its own values. A fact is the set of mesh axes along which a value may differ
between devices; along all other axes it is proven equal (bit for bit, if equal programs give equal bits):

    def on_device(params, rows):         facts             params: {}, rows: {"data"}
        loss = f(params, rows)           {"data"}          depends on rows
        total = lax.psum(loss, "data")   {}                a psum has the same result on all devices of the axis
        place = lax.axis_index("data")   {"data"}
        teacher = 0.9 * teacher + params {}                computed from equal values and constants

Outside of `shard_map` values are global arrays, which are the same for all devices. There are two exceptions. First, a
result of a `shard_map` without `check_vma` may claim to be replicated (`out_specs=P()`) and still differ; its fact is
kept. Second, the residuals of the backward pass leave a `shard_map` split over all axes even if their shards are equal;
the fact about the shards is kept, and holds again where a later `shard_map` reads them.

A fact may contain names that are not mesh axes. For example, give the inputs that hold the rows of one micro-batch the
name "microbatch": it reaches every value that depends on the micro-batch, and no collective removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxshard.core.compat import newly_manual_axes, scan_counts
from jaxshard.core.placement import axes_of
from jaxshard.core.primitives import SAME
from jaxshard.core.types import PyTree
from jaxshard.proofs.walk import Domain, Place, walk

Axes = frozenset[str]

EQUAL: Axes = frozenset()
"""The fact about a value that is equal on all devices."""

SUMS = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast"})
"""Collectives whose result is equal on all devices of their axes, unless they have `axis_index_groups`."""

EXCHANGES = frozenset(
    {"reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "psend", "precv", "pbroadcast_dynamic"}
    | {"all_gather_reduced", "unreduced_psum", "unreduced_pmax", "unreduced_pmin", "unreduced_reduce_scatter"}
)  # fmt: skip
"""Collectives whose result may differ between the devices of their axes."""


class Difference(NamedTuple):
    """The mesh axes over which a value of a program may differ between devices, and what is known of its shards.

    Attributes:
      over: the mesh axes over which the value may differ; along all other axes it is equal on all devices.
      shards: for a global array that a `shard_map` returned, (its PartitionSpec, the axes over which its shards may
        differ from each other). () if all elements of the array are equal, so that its shards are too. None if nothing
        is known.
    """

    over: Axes = EQUAL
    shards: tuple[Any, ...] | None = None


_CALLBACKS = frozenset({"pure_callback", "io_callback", "infeed"})
_REFERENCES = frozenset({"get", "swap", "freeze"})
"""Primitives that read a `jax.Ref`; the walk does not follow the content of references."""


def differing(program: Any, facts: Sequence[Axes], manual: Axes = EQUAL) -> list[Axes]:
    """Return for each result of a jaxpr the mesh axes over which it may differ between devices.

    Args:
      program: a jaxpr, closed or not.
      facts: for each flat input the mesh axes over which it may differ.
      manual: the manual axes of the `shard_map` in which the program was traced, if any. Results of host callbacks may
        differ over all of these axes.

    Example:
        # traced inside shard_map over "data": lambda params, rows: (2 * params, params + rows, lax.psum(rows, "data"))
        differing(jaxpr, [frozenset(), frozenset({"data"})])      # [frozenset(), frozenset({"data"}), frozenset()]
    """
    return [fact.over for fact in walk(program, list(map(Difference, facts)), Differences(manual))]


def differing_results(fn: Callable[..., PyTree], args: tuple[PyTree, ...], facts: PyTree, manual: Axes) -> PyTree:
    """Trace a function and return for each of its results the mesh axes over which it may differ between devices.

    Args:
      fn: the function; it is traced once and not run. The call may itself be inside a `shard_map`.
      args: its arguments, arrays or their shapes.
      facts: for each argument the mesh axes over which it may differ; one set may stand for all leaves of a tree.
      manual: the manual axes of the `shard_map` around the call; empty if there is none.

    Returns:
      A tree like the results, with a frozenset of mesh axes for each array.

    Example:
        data = frozenset({"data"})      # inside shard_map over "data": rows differ between devices, the state does not
        facts = differing_results(new_state, (state, rows), (frozenset(), data), data)
        is_equal = jax.tree.map(lambda axes: not axes, facts)      # True for results that are equal on all devices
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    found = differing(closed, jax.tree.leaves(jax.tree.broadcast(facts, args)), manual)
    results: PyTree = jax.tree.unflatten(jax.tree.structure(shapes), found)
    return results


class Differences(Domain[Difference]):
    """Rules that find, for each value of a jaxpr, the mesh axes over which it may differ between devices.

    Args:
      manual: the manual axes of the `shard_map` in which the program was traced; empty if it was traced outside.
    """

    def __init__(self, manual: Axes = EQUAL):
        self.manual = manual

    def value(self, values: Sequence[Any], place: Place) -> Difference:
        """Return the fact about a literal or constant: it is equal on all devices."""
        return Difference()

    def join(self, place: Place, facts: Sequence[Difference]) -> Difference:
        """Return the union of the axes of all facts; keep what is known of shards only if the facts agree."""
        shards = {fact.shards for fact in facts if fact.shards != ()} or {()}
        return Difference(_over(facts), shards.pop() if len(shards) == 1 else None)

    def choose(self, place: Place, choice: Difference, facts: list[Difference]) -> list[Difference]:
        """Return the facts about the results of a `cond` or `while`, each with the mesh axes of its predicate added."""
        return [fact._replace(over=fact.over | choice.over) for fact in facts]

    def unknown(self, place: Place, facts: list[Difference]) -> list[Difference]:
        """Return the same fact for every result: the union of the mesh axes over which the operands may differ."""
        return place.joined(Difference(_over(facts)))

    def rule(self, place: Place, facts: list[Difference]) -> list[Difference] | None:
        """Return the facts about the results of a collective, or another primitive with a rule; else None."""
        equation, name, before = place.equation, place.name, _over(facts)
        if name in _CALLBACKS or name in _REFERENCES:
            # The host of every device may return another value: differ over all axes of the shard_maps around.
            made = (newly_manual_axes(one.equation.params) for one in place.around if _is_shard_map(one.equation))
            return place.joined(Difference(before.union(self.manual, *made)))
        if name in SAME:
            return facts if len(facts) == len(equation.outvars) else None
        if name == "broadcast_in_dim" and equation.invars[0].aval.shape == ():
            return [Difference(before, shards=())]
        if name == "axis_index":
            return place.joined(Difference(axes_named(equation)))
        if (kind := collective_of(equation)) is None:
            return None
        axes = axes_named(equation)
        equals = kind in SUMS and equation.params.get("axis_index_groups") is None
        return place.joined(Difference(before - axes if equals else before | axes))

    def enter(self, place: Place, facts: list[Difference]) -> list[Difference]:
        """Turn facts about the operands of a `scan` or `shard_map` into facts about the inputs of its body.

        The body of a `scan` gets one row of each scanned array, the body of a `shard_map` one shard of each operand.
        """
        if place.name == "scan":
            kept = sum(scan_counts(place.equation.params))
            return facts[:kept] + [_with_spec(fact, _row_of) for fact in facts[kept:]]
        if not _is_shard_map(place.equation):
            return facts

        def shard(fact: Difference, spec: Any) -> Difference:
            # The shards are known if the array is split here as the shard_map that returned it had split it.
            if fact.shards is not None and fact.shards[:1] in ((), (tuple(spec),)):
                return Difference(fact.over.union(*fact.shards[1:]))
            return Difference(fact.over | _split_over(place, spec))

        return [shard(fact, spec) for fact, spec in zip(facts, place.equation.params["in_specs"], strict=True)]

    def leave(self, place: Place, facts: list[Difference]) -> list[Difference]:
        """Turn facts about the results of the body of a `scan` or `shard_map` into facts about its own results.

        A `scan` stacks what its iterations return, a `shard_map` assembles global arrays from shards.
        """
        if not _is_shard_map(place.equation):
            _, kept = scan_counts(place.equation.params)
            return facts[:kept] + [_with_spec(fact, _Rows) for fact in facts[kept:]]

        def assemble(fact: Difference, spec: Any) -> Difference:
            split = _split_over(place, spec)
            return Difference(fact.over - split, (tuple(spec), fact.over & split) if split else None)

        return [assemble(fact, spec) for fact, spec in zip(facts, place.equation.params["out_specs"], strict=True)]


def collective_of(equation: Any) -> str | None:
    """Return the name of the collective that an equation issues, such as "psum"; None if it issues none.

    An asynchronous collective is issued by the equation that starts it, not by the equation that waits for it.
    """
    name = equation.primitive.name.removesuffix("_start").removesuffix("_invariant")
    return name if name in SUMS or name in EXCHANGES else None


def axes_named(equation: Any) -> Axes:
    """Return the mesh axes that a collective or `axis_index` names: {"data"} for `lax.psum(x, "data")`."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    # Integers among them are array dimensions under `vmap`.
    return frozenset(axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(axis, str))


def _over(facts: Sequence[Difference]) -> Axes:
    return EQUAL.union(*(fact.over for fact in facts))


def _is_shard_map(equation: Any) -> bool:
    return bool(equation.primitive.name == "shard_map")


def _split_over(place: Place, spec: Any) -> Axes:
    """Return the manual axes of a `shard_map` over which `spec` splits an array, or leaves it unreduced."""
    split = frozenset(axes_of(spec)) | frozenset(getattr(spec, "unreduced", ()))
    return split & newly_manual_axes(place.equation.params)


class _Rows(NamedTuple):
    """The spec of an array that a scan stacked along a new first dimension; `row` is the spec of each slice."""

    row: Any


def _row_of(spec: Any) -> Any:
    return spec.row if isinstance(spec, _Rows) else None


def _with_spec(fact: Difference, change: Callable[[Any], Any]) -> Difference:
    """Replace the PartitionSpec of a fact's shards by `change(spec)`; if that is None, forget the shards."""
    if not fact.shards:
        return fact
    spec = change(fact.shards[0])
    return fact._replace(shards=None if spec is None else (spec, *fact.shards[1:]))
