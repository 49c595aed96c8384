"""Find the parameters on which each value of an optimizer's program depends: by arrays, or only by scalars.

This is a domain of `proofs/walk.py`. Every value has a `Reach`: the parameters whose gradient, state or value the value
depends on. A scalar that is a sum over arrays, such as a global norm, costs only a few bytes to send to all devices.
So the dependence through such scalars is recorded separately from the dependence on arrays:

    sum(g_a**2) + sum(g_b**2)             a scalar that depends on a and b
    g_a * (1.0 / norm)                    the array a; b only through a scalar
    g_a + g_b, stack([g_a, g_b])          the arrays a and b: it mixes two parameters

A `lax.cond` around the update of all parameters mixes none of them. Every result of an unknown operation depends on all
of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import CALLS
from jaxshard.core.primitives import ELEMENTWISE, RESHAPES, SAME
from jaxshard.optim.proof.facts import Context, Origin, origin_of
from jaxshard.proofs.dims import FACTORIZATIONS
from jaxshard.proofs.walk import CONTROL_FLOW, Domain, Place


class Reach(NamedTuple):
    """The parameters on which a value depends, as bits of an integer: 0b101 for the parameters 0 and 2.

    Attributes:
      arrays: the parameters on whose arrays the value depends.
      numbers: the parameters on which the value depends only by scalars that are sums over arrays, such as a global
        norm.
      why: the first equation that combined arrays of several parameters; None if none did.
    """

    arrays: int = 0
    numbers: int = 0
    why: Origin | None = None

    def within(self, leaf: int | None) -> bool:
        """Return True if the value depends on no parameter's arrays, or only on those of parameter `leaf`."""
        return not self.arrays & ~bit(leaf)


def bit(leaf: int | None) -> int:
    """Return an integer in which only the bit of this parameter is set: 2 -> 0b100; None -> 0."""
    return 0 if leaf is None else 1 << leaf


def leaves_of(bits: int) -> list[int]:
    """Return the indices of the parameters whose bits are set: 0b101 -> [0, 2]."""
    return [leaf for leaf in range(bits.bit_length()) if bits >> leaf & 1]


class Flow(Domain[Reach]):
    """Find the parameters on which each value of an optimizer's program depends, as a `Reach`.

    Attributes:
      products: the parameters whose arrays are operands of matrix products or factorizations, as bits; set by the walk.
      known: {jaxpr variable: its reach}, for variables outside of calls, branches and loops; filled by the walk.
    """

    def __init__(self, context: Context):
        self.context, self.products = context, 0
        self.known: dict[Any, Reach] = {}

    def value(self, values: Sequence[Any], place: Place) -> Reach:
        """Return that a literal or constant depends on no parameter."""
        return Reach()

    def join(self, place: Place, facts: Sequence[Reach]) -> Reach:
        """Return the union of several reaches, for a value that is computed from values with these reaches."""
        arrays, numbers, why = 0, 0, None
        for one in facts:
            arrays, numbers, why = arrays | one.arrays, numbers | one.numbers, why or one.why
        if arrays & (arrays - 1) and why is None:  # more than one bit is set
            why = origin_of(place, self.context, f"mixes arrays of {self.context.some_names(leaves_of(arrays))}")
        return Reach(arrays, numbers, why)

    def rule(self, place: Place, facts: list[Reach]) -> list[Reach]:
        """Return the parameters on which each result of an equation depends, given the parameters of each operand."""
        if place.name in SAME and len(facts) == len(place.equation.outvars):
            return facts
        joined = self.join(place, facts)
        if _is_opaque(place.equation):
            text = "has side effects, or runs a program that is not understood"
            why = joined.why or origin_of(place, self.context, text)
            return place.joined(Reach(joined.arrays | joined.numbers, why=why))
        return place.joined(self._reach(place, facts, joined))

    def _reach(self, place: Place, facts: Sequence[Reach], joined: Reach) -> Reach:
        eqn, name, everything = place.equation, place.name, joined.arrays | joined.numbers
        if not joined.arrays:
            if not joined.numbers or name in ELEMENTWISE or name in RESHAPES or is_whole_sum(eqn):
                return joined
            # A vector of the norms of all arrays is not a scalar: later equations may treat its elements differently.
            text = "puts numbers of several parameters into one array"
            return Reach(everything, why=origin_of(place, self.context, text))
        # A scalar that is added to a sum over other parameters, or to another scalar parameter, becomes such a sum.
        several = joined.arrays & (joined.arrays - 1) or any(one.numbers and not one.arrays for one in facts)
        adds = name in ("add", "add_any") and eqn.outvars[0].aval.shape == () and several
        return Reach(numbers=everything) if is_whole_sum(eqn) or adds else joined

    def leave(self, place: Place, facts: list[Reach]) -> list[Reach]:
        """Return the parameters on which each result of a scan depends, given the parameters of its body's results."""
        _, carries = scan_counts(place.equation.params)
        # An array with a scalar per iteration is not a scalar, but still depends on no arrays.
        stacked = [one if one.arrays else Reach(one.numbers, why=one.why) for one in facts[carries:]]
        return [*facts[:carries], *stacked]

    def conclude(self, place: Place, operands: list[Reach], results: list[Reach]) -> list[Reach]:
        """Record matrix products in `products` and results outside of loops and calls in `known`."""
        if place.settled:
            is_entered = place.name in CALLS or place.name in CONTROL_FLOW
            if not is_entered and (multiplies_matrices(place.equation) or _is_opaque(place.equation)):
                self.products |= self.join(place, operands).arrays
            if not place.around:
                self.known.update(zip(place.equation.outvars, results, strict=True))
        return results


def _is_opaque(eqn: Any) -> bool:
    return bool(eqn.effects) or bool(list(jaxprs_in_params(eqn.params)))


def multiplies_matrices(eqn: Any) -> bool:
    """Return True if an equation multiplies two matrices (not vectors) or factorizes a matrix."""
    name = eqn.primitive.name
    if name == "dot_general":
        _, batches = eqn.params["dimension_numbers"]
        return all(len(x.aval.shape) - len(batch) >= 2 for x, batch in zip(eqn.invars, batches, strict=True))
    return name in FACTORIZATIONS


def is_whole_sum(eqn: Any) -> bool:
    """Return True if an equation reduces arrays to one scalar: a sum, a maximum or a dot product of all elements."""
    name = eqn.primitive.name
    reduces = name.startswith("reduce_") and name != "reduce_precision"
    return (reduces or name == "dot_general") and bool(eqn.outvars[0].aval.shape == ())
