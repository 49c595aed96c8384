"""Over which mesh axes a value may differ between devices: a domain of `proofs/walk.py`.

Inside a `shard_map` every device has values of its own. A fact is the set of axes along which they may differ; over all
others they are proven equal, bit for bit as far as devices compute alike:

    def on_device(params, rows):         facts             params: {}, rows: {"data"}
        loss = f(params, rows)           {"data"}          made of rows
        total = lax.psum(loss, "data")   {}                a sum over the axis is the same on all of it
        place = lax.axis_index("data")   {"data"}
        teacher = 0.9 * teacher + params {}                constants and what is made of equal values are equal

Outside of `shard_map` values are global arrays, of which no device has another. But the results of a `shard_map`
without `check_vma` may say that they are replicated (`out_specs=P()`) and differ nevertheless: that fact is carried on.

A name in a fact need not be that of a mesh axis: given to the inputs that hold the rows of one micro-batch, say, it
reaches all that depends on which micro-batch it is, and no sum over devices takes it away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jaxshard.core.compat import newly_manual_axes
from jaxshard.core.placement import axes_of
from jaxshard.core.primitives import SAME
from jaxshard.core.types import PyTree
from jaxshard.proofs.walk import Domain, Place, walk

Axes = frozenset[str]

EQUAL: Axes = frozenset()
"""The fact about a value that is equal on all devices."""

SUMS = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast"})
"""Collectives whose result is the same on all devices of their axes, unless they have groups."""

EXCHANGES = frozenset(
    {"reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "psend", "precv", "pbroadcast_dynamic"}
    | {"all_gather_reduced", "unreduced_psum", "unreduced_pmax", "unreduced_pmin", "unreduced_reduce_scatter"}
)  # fmt: skip
"""Collectives after which devices of their axes have values of their own, or may have."""

_CALLBACKS = frozenset({"pure_callback", "io_callback", "infeed"})
_REFERENCES = frozenset({"get", "swap", "freeze"})
"""Primitives that read a `jax.Ref`, whose content the walk does not follow."""


def differing(program: Any, facts: Sequence[Axes], manual: Axes = EQUAL) -> list[Axes]:
    """Return over which axes the results of a program may differ between devices.

    Args:
      program: a jaxpr, closed or not.
      facts: the axes over which each of its inputs may differ, flat.
      manual: the axes of the `shard_map` in which the program was traced; over these the results of callbacks differ.
    """
    return walk(program, facts, differences(manual))


def differing_results(fn: Callable[..., PyTree], args: tuple[PyTree, ...], facts: PyTree, manual: Axes) -> PyTree:
    """Trace a function, inside a `shard_map` too, and return over which axes each of its results may differ.

    Args:
      fn: the function; it is traced once and not run.
      args: its arguments, arrays or their shapes.
      facts: for each argument the axes over which it may differ; a set in place of a tree is that of all its leaves.
      manual: as in `differing`.

    Returns:
      A tree like the results, of frozensets.

    Example:
        facts = differing_results(new_state, (state, rows), (EQUAL, frozenset({"data"})), frozenset({"data"}))
        once = jax.tree.map(lambda axes: not axes, facts)      # the leaves that are proven equal
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    found = differing(closed, jax.tree.leaves(jax.tree.broadcast(facts, args)), manual)
    results: PyTree = jax.tree.unflatten(jax.tree.structure(shapes), found)
    return results


def differences(manual: Axes = EQUAL) -> Domain[Axes]:
    """Make the domain; `manual` are the axes of the `shard_map` in which the program was traced, if it was."""
    return Domain(
        literal=lambda value: EQUAL,
        constant=lambda array: EQUAL,
        join=lambda facts: EQUAL.union(*facts),
        rule=partial(_rule, manual),
        enter=_enter,
        leave=_leave,
    )


def collective_of(equation: Any) -> str | None:
    """Return the name of the collective that an equation issues, such as "psum"; None if it issues none.

    Asynchronous collectives are issued by the primitive that starts them.
    """
    name = equation.primitive.name.removesuffix("_start").removesuffix("_invariant")
    return name if name in SUMS or name in EXCHANGES else None


def axes_named(equation: Any) -> Axes:
    """Return the mesh axes that an equation names: those of a collective, or of `axis_index`."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    # Numbers among them are dimensions of a `vmap`.
    return frozenset(axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(axis, str))


def _rule(manual: Axes, place: Place, facts: list[Axes]) -> list[Axes] | None:
    equation, name = place.equation, place.name
    if name in _CALLBACKS or name in _REFERENCES:
        made = (newly_manual_axes(one.equation.params) for one in place.around if _is_shard_map(one.equation))
        return place.joined(manual.union(*facts, *made))
    if name in SAME:
        return facts if len(facts) == len(equation.outvars) else None
    if name == "axis_index":
        return place.joined(axes_named(equation))
    if (kind := collective_of(equation)) is None:
        return None
    axes, before = axes_named(equation), EQUAL.union(*facts)
    equals = kind in SUMS and equation.params.get("axis_index_groups") is None
    return place.joined(before - axes if equals else before | axes)


def _is_shard_map(equation: Any) -> bool:
    return bool(equation.primitive.name == "shard_map")


def _spec_axes(place: Place, spec: Any) -> Axes:
    """The axes over which a `shard_map` splits an operand or result; what is unreduced over an axis differs there."""
    split = frozenset(axes_of(spec)) | frozenset(getattr(spec, "unreduced", ()))
    return split & newly_manual_axes(place.equation.params)


def _enter(place: Place, facts: list[Axes]) -> list[Axes]:
    if not _is_shard_map(place.equation):
        return facts
    specs = place.equation.params["in_specs"]
    return [fact | _spec_axes(place, spec) for fact, spec in zip(facts, specs, strict=True)]


def _leave(place: Place, facts: list[Axes]) -> list[Axes]:
    if not _is_shard_map(place.equation):
        return facts
    specs = place.equation.params["out_specs"]
    return [fact - _spec_axes(place, spec) for fact, spec in zip(facts, specs, strict=True)]
