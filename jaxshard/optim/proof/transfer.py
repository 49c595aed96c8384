"""The transfer functions of the elementwise proof: from facts about an equation's inputs to facts about its outputs.

A `Place` has the same operation in the traces at two sets of shapes, `equation` and `twin`. The result of an operation
that defines its own shape (random bits, iota) is INDEPENDENT only if the shape is the same in both traces. The result
of an unknown operation is MIXED.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxshard.core.primitives import ELEMENTWISE, RESHAPES, SAME, evaluate
from jaxshard.optim.proof.facts import Context, Fact, Kind, all_influences, mixed, origin_of
from jaxshard.proofs.walk import Place

_ORDERS = ("permutation", "broadcast_dimensions", "dimensions")
"""The equation parameters of reshaping primitives that contain the new order of dimensions."""


def transfer(place: Place, facts: list[Fact], context: Context) -> list[Fact]:
    """Return the facts about the results of an equation, given the facts about its operands.

    A fact says on which elements of the parameters a value depends. The equation must contain no jaxpr: calls, branches
    and loops are handled by the walk.
    """
    eqn, name = place.equation, place.name
    if name in SAME:
        return facts
    if name in ("psum", "psum_invariant"):
        return [_sum_over_devices(place, fact, context) for fact in facts]
    # bitcast_convert_type of f32 to u8 adds a dimension, over which even a UNIFORM value differs.
    if name in ELEMENTWISE and len(eqn.outvars[0].aval.shape) == max(len(x.aval.shape) for x in eqn.invars):
        term = _linear(eqn, facts) or _linear(eqn, _scalars_as_partial_sums(place, facts, context))
        return [term or elementwise(place, [_completed(fact, context) for fact in facts], context)]
    if len(facts) == 1 and (fact := _move_or_reduce(place, facts[0], context)):
        return [fact]
    return [_unknown(place, facts, context)] * len(eqn.outvars)


def elementwise(place: Place, facts: list[Fact], context: Context, out: int = 0) -> Fact:
    """Return the fact about a result of an elementwise equation: element i depends on element i of every operand.

    A function of one parameter's arrays and of UNIFORM scalars (equal on all devices) is again ELEMENTWISE. A function
    of the arrays of two parameters is MIXED: nothing can be claimed. A function of a parameter and an INDEPENDENT array
    (equal on all devices) is MIXED too, because the elements of that array differ, so the result for a shard would
    depend on the shard's offset.

    Args:
      place: the equation.
      facts: the facts about its operands.
      context: the parameters and axes to which facts refer.
      out: the index of the result.
    """
    influences = all_influences(facts)
    worst = max(facts, key=lambda fact: fact.kind)
    if worst.kind in (Kind.MIXED, Kind.PARTIAL_SUM):
        return mixed(influences, worst.why)
    if worst.kind is Kind.UNIFORM:
        return Fact(Kind.UNIFORM, influences=influences, padding=_padding(place.equation, facts))
    if worst.kind is Kind.INDEPENDENT:
        return Fact(Kind.INDEPENDENT, influences=influences, why=worst.why)
    owners = {fact.param for fact in facts if fact.param is not None}
    if len(owners) > 1:
        return mixed(influences, origin_of(place, context, f"mixes {context.some_names(owners)}"))
    independent = next((fact for fact in facts if fact.kind is Kind.INDEPENDENT), None)
    if independent is not None:
        return mixed(influences, independent.why)
    (owner,) = owners
    if (place.equation.outvars[out].aval.shape, place.twin.outvars[out].aval.shape) != context.shapes[owner]:
        return mixed(influences, origin_of(place, context, f"changes the shape of {context.some_names(owners)}"))
    return Fact(Kind.ELEMENTWISE, owner, influences, _padding(place.equation, facts))


def _padding(eqn: Any, facts: list[Fact]) -> float | None:
    """Return the value of an elementwise result in the padding of an array, or None if it is unknown.

    A UNIFORM scalar (equal on all devices) of unknown value is assumed to be finite and, as a divisor, not zero,
    because otherwise all other elements would be inf or NaN as well.
    """
    name, numbers = eqn.primitive.name, [fact.padding for fact in facts]
    if name == "mul" and 0.0 in numbers and all(fact.padding == 0 or fact.kind is Kind.UNIFORM for fact in facts):
        return 0.0
    if name == "div" and numbers[0] == 0 and numbers[1] is None and facts[1].kind is Kind.UNIFORM:
        return 0.0
    if name == "select_n" and len(set(numbers[1:])) == 1:
        return numbers[1]  # whichever case is selected
    return None if None in numbers else evaluate(name, eqn.params, numbers, eqn.outvars[0].aval.dtype)


def _move_or_reduce(place: Place, fact: Fact, context: Context) -> Fact | None:
    """Return the fact about the result of a reshape, transpose, broadcast or reduction; None if nothing is known."""
    eqn, name = place.equation, place.name
    if name in RESHAPES:
        keeps_shape = all(one.invars[0].aval.shape == one.outvars[0].aval.shape for one in place.equations)
        order = next((eqn.params[key] for key in _ORDERS if eqn.params.get(key) is not None), ())
        stays = keeps_shape and list(order) == sorted(order)
        return fact if stays or fact.kind in (Kind.UNIFORM, Kind.INDEPENDENT) else None
    if not name.startswith("reduce_") or fact.kind in (Kind.INDEPENDENT, Kind.MIXED):
        return None
    if not eqn.params.get("axes", (-1,)):
        return fact
    if not (name == "reduce_sum" and fact.kind is Kind.ELEMENTWISE and reduces_all(eqn)):
        return None
    if not (context.axes or context.totals):
        return None
    names = context.some_names(fact.influences)
    if fact.padding != 0:
        # The last shard is padded with zeros. Unless the padding is still zero here, each padded element would add f(0)
        # to the sum.
        text = f"sums {names} with padding that may not be zero: sum before changing gradients"
        return mixed(fact.influences, origin_of(place, context, text))
    text = f"sums a part of {names}, and uses that before lax.psum over {context.axes}"
    summed = frozenset() if fact.param is None else frozenset({fact.param})
    return Fact(Kind.PARTIAL_SUM, influences=fact.influences, summed=summed, why=origin_of(place, context, text))


def reduces_all(eqn: Any) -> bool:
    """Return True if an equation reduces an array over all of its dimensions, to a scalar."""
    axes = eqn.params.get("axes", ())
    return eqn.primitive.name.startswith("reduce_") and len(axes) == len(eqn.invars[0].aval.shape)


def _linear(eqn: Any, facts: list[Fact]) -> Fact | None:
    """Return the fact about a linear function of a PARTIAL_SUM (a device's term of a sum): again a PARTIAL_SUM.

    Linear means f(a) + f(b) = f(a + b). None for any other function.
    """
    name, kinds = eqn.primitive.name, [fact.kind for fact in facts]
    term = next((fact for fact in facts if fact.kind is Kind.PARTIAL_SUM), None)
    linear = (
        (name in ("add", "sub", "add_any") and all(fact.kind is Kind.PARTIAL_SUM or fact.is_zero for fact in facts))
        or (name == "mul" and set(kinds) == {Kind.PARTIAL_SUM, Kind.UNIFORM})
        or (name == "div" and kinds == [Kind.PARTIAL_SUM, Kind.UNIFORM])
        or name in ("neg", "real")
        or (name == "convert_element_type" and jnp.issubdtype(eqn.params["new_dtype"], np.inexact))
    )
    if term is None or not linear:
        return None
    summed = frozenset().union(*(fact.summed for fact in facts))
    return term._replace(influences=all_influences(facts), summed=summed)


def _scalars_as_partial_sums(place: Place, facts: list[Fact], context: Context) -> list[Fact]:
    """Treat a scalar parameter in an addition as the sum over its only element, if `Context.totals` is set.

    So sum(w**2) + scale**2 + ... is recognised as a sum over all parameters. An addition that involves only one
    parameter remains a function of its element.
    """
    params = {fact.param for fact in facts if fact.kind is Kind.ELEMENTWISE}
    alone = len(params) == 1 and not any(fact.kind is Kind.PARTIAL_SUM for fact in facts)
    if not context.totals or place.name not in ("add", "add_any") or alone:
        return facts

    def as_sum(fact: Fact, x: Any, y: Any) -> Fact:
        if fact.param is None or fact.padding != 0 or not x.aval.shape == y.aval.shape == ():
            return fact
        return Fact(Kind.PARTIAL_SUM, influences=fact.influences, summed=frozenset({fact.param}))

    return [as_sum(*each) for each in zip(facts, place.equation.invars, place.twin.invars, strict=True)]


def _completed(fact: Fact, context: Context) -> Fact:
    """Return UNIFORM for a sum over all elements of all parameters, if `Context.totals` is set; else the fact itself.

    UNIFORM means equal on all devices. A model with only one parameter is an exception, because there the parameter's
    own norm, which stacking changes, can't be distinguished from the global norm.
    """
    total = context.totals and fact.kind is Kind.PARTIAL_SUM and len(fact.summed) == len(context.names) > 1
    return Fact(Kind.UNIFORM, influences=fact.influences) if total else fact


def _sum_over_devices(place: Place, fact: Fact, context: Context) -> Fact:
    """Return the fact about the result of `lax.psum`: UNIFORM for a PARTIAL_SUM over all axes that split the arrays.

    A PARTIAL_SUM is a device's term of a sum, UNIFORM means equal on all devices. The psum of any other value is MIXED.
    """
    axes = place.equation.params["axes"]
    if fact.kind is Kind.MIXED:
        return fact
    in_groups = place.equation.params.get("axis_index_groups") is not None
    if fact.kind is Kind.PARTIAL_SUM and set(axes) >= set(context.axes) and not in_groups:
        return Fact(Kind.UNIFORM, influences=fact.influences)
    text = f"sums over {axes} a value that is not a partial sum over {context.axes}"
    return mixed(fact.influences, origin_of(place, context, text))


def _unknown(place: Place, facts: list[Fact], context: Context) -> Fact:
    """Return the fact about a result of an equation without a rule, which may mix elements and depend on shapes."""
    influences = all_influences(facts)
    worst = max(facts, key=lambda fact: fact.kind, default=Fact(Kind.UNIFORM))
    if worst.kind is Kind.MIXED:
        return worst._replace(influences=influences)
    eqn, twin = place.equation, place.twin
    if eqn.effects or place.name in ("rng_uniform", "infeed"):  # axis_index has an effect, too
        return mixed(influences, origin_of(place, context, "has side effects or depends on the device"))
    if worst.kind is Kind.PARTIAL_SUM:
        return mixed(influences, worst.why)
    arrays = [*eqn.invars, *eqn.outvars]
    if worst.kind is Kind.ELEMENTWISE:
        if all(x.aval.shape == () for x in arrays):  # there is one element to mix
            return elementwise(place, facts, context)._replace(padding=None)
        return mixed(influences, origin_of(place, context, f"mixes elements of {context.some_names(influences)}"))
    if [x.aval.shape for x in arrays] != [x.aval.shape for x in (*twin.invars, *twin.outvars)]:
        return mixed(influences, origin_of(place, context, "depends on the shape of the parameters"))
    why = worst.why or origin_of(place, context, "gives an array of its own")
    return Fact(Kind.INDEPENDENT, influences=influences, why=why)
