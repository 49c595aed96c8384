"""Find the parameters on which each value of an optimizer's program depends: by arrays, or only by scalars.

This is a forward walk over the traced update. Every value has a `Reach`: the parameters whose gradient, state or value
it depends on. A scalar that is a sum over arrays, such as a global norm, costs only a few bytes to send to all devices.
So the dependence through such scalars is recorded separately from the dependence on arrays:

    sum(g_a**2) + sum(g_b**2)             a scalar that depends on a and b
    g_a * (1.0 / norm)                    the array a; b only through a scalar
    g_a + g_b, stack([g_a, g_b])          the arrays a and b: it mixes two parameters

The walk follows branches, loops and calls, so that a `lax.cond` around the update of all parameters mixes none of them.
Every result of an unknown operation depends on all of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params

from jaxshard.core.compat import scan_counts
from jaxshard.core.factorizations import FACTORIZATIONS
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.core.primitives import ELEMENTWISE, RESHAPES, SAME
from jaxshard.optim.proof.facts import Context, Origin, origin_of


class Reach(NamedTuple):
    """The parameters on which a value depends, as the bits of integers.

    Attributes:
      arrays: the parameters on whose arrays it depends.
      numbers: the parameters on which it depends through scalars that are sums over arrays.
      why: the first equation that combined arrays of several parameters.
    """

    arrays: int = 0
    numbers: int = 0
    why: Origin | None = None

    def within(self, leaf: int | None) -> bool:
        """Return whether the value depends on no arrays of other parameters."""
        return not self.arrays & ~bit(leaf)


def bit(leaf: int | None) -> int:
    """Return the bit of a parameter; no bit for None."""
    return 0 if leaf is None else 1 << leaf


def leaves_of(bits: int) -> list[int]:
    """List the parameters whose bits are set."""
    return [leaf for leaf in range(bits.bit_length()) if bits >> leaf & 1]


class Flow(NamedTuple):
    """The results of one equation or program.

    Attributes:
      reaches: the reach of each result.
      products: the parameters whose arrays are operands of matrix products or factorizations, as bits.
    """

    reaches: list[Reach]
    products: int


def walk(program: Any, inputs: Sequence[Reach], context: Context) -> Flow:
    """Return the flow of a jaxpr from the reaches of its inputs."""
    jaxpr, _ = open_jaxpr(program)
    known: dict[Any, Reach] = dict.fromkeys(jaxpr.constvars, Reach())
    known |= dict(zip(jaxpr.invars, inputs, strict=True))
    products = 0
    for eqn in jaxpr.eqns:
        flow = follow(eqn, [read(atom, known) for atom in eqn.invars], context)
        known.update(zip(eqn.outvars, flow.reaches, strict=True))
        products |= flow.products
    return Flow([read(atom, known) for atom in jaxpr.outvars], products)


def read(atom: Any, known: dict[Any, Reach]) -> Reach:
    """Return the reach of an operand; that of a literal is empty."""
    return Reach() if isinstance(atom, Literal) else known[atom]


def follow(eqn: Any, given: list[Reach], context: Context) -> Flow:
    """Return the flow of one equation from the reaches of its operands."""
    name = eqn.primitive.name
    if name in CALLS:
        inner = context if context.call is not None else context._replace(call=eqn)
        return walk(eqn.params[CALLS[name]], given, inner)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](eqn, given, context)
    if name in SAME and len(given) == len(eqn.outvars):
        return Flow(given, 0)
    joined = join(given, eqn, context)
    if eqn.effects or list(jaxprs_in_params(eqn.params)):
        why = joined.why or origin_of(eqn, context, "has side effects, or runs a program that is not understood")
        return Flow([Reach(joined.arrays | joined.numbers, why=why)] * len(eqn.outvars), joined.arrays)
    reach = _reach(eqn, given, joined, context)
    return Flow([reach] * len(eqn.outvars), joined.arrays if multiplies_matrices(eqn) else 0)


def join(given: Sequence[Reach], eqn: Any, context: Context) -> Reach:
    """Return the reach of a value that depends on all given values."""
    arrays, numbers, why = 0, 0, None
    for one in given:
        arrays, numbers, why = arrays | one.arrays, numbers | one.numbers, why or one.why
    if arrays & (arrays - 1) and why is None:  # more than one bit is set
        why = origin_of(eqn, context, f"mixes arrays of {context.some_names(leaves_of(arrays))}")
    return Reach(arrays, numbers, why)


def multiplies_matrices(eqn: Any) -> bool:
    """Return whether an equation multiplies two matrices (at least two dimensions each), or factorizes one."""
    name = eqn.primitive.name
    if name == "dot_general":
        _, batches = eqn.params["dimension_numbers"]
        return all(len(x.aval.shape) - len(batch) >= 2 for x, batch in zip(eqn.invars, batches, strict=True))
    return name in FACTORIZATIONS


def is_whole_sum(eqn: Any) -> bool:
    """Return whether an equation reduces all elements of its operands to a scalar: a sum, a maximum, a dot product."""
    name = eqn.primitive.name
    reduces = name.startswith("reduce_") and name != "reduce_precision"
    return (reduces or name == "dot_general") and bool(eqn.outvars[0].aval.shape == ())


def _reach(eqn: Any, given: Sequence[Reach], joined: Reach, context: Context) -> Reach:
    name, everything = eqn.primitive.name, joined.arrays | joined.numbers
    if not joined.arrays:
        if not joined.numbers or name in ELEMENTWISE or name in RESHAPES or is_whole_sum(eqn):
            return joined
        # A vector of the norms of all arrays is not a scalar: later equations may treat its elements differently.
        return Reach(everything, why=origin_of(eqn, context, "puts numbers of several parameters into one array"))
    # A scalar that is added to a sum over other parameters, or to another scalar parameter, becomes such a sum.
    several = joined.arrays & (joined.arrays - 1) or any(one.numbers and not one.arrays for one in given)
    adds = name in ("add", "add_any") and eqn.outvars[0].aval.shape == () and several
    return Reach(numbers=everything) if is_whole_sum(eqn) or adds else joined


# Branches and loops.


def _cond(eqn: Any, given: list[Reach], context: Context) -> Flow:
    flows = [walk(branch, given[1:], context) for branch in eqn.params["branches"]]
    either = zip(*(flow.reaches for flow in flows), strict=True)
    products = 0
    for flow in flows:
        products |= flow.products
    return Flow([join([given[0], *ways], eqn, context) for ways in either], products)


def _fixpoint(
    body: Callable[[list[Reach]], Flow], start: list[Reach], eqn: Any, context: Context
) -> tuple[list[Reach], Flow]:
    """Return (the fixpoint of a loop's carry, the flow of its body). Reaches only grow, so the iteration ends."""
    while True:
        flow = body(start)
        after = [join(pair, eqn, context) for pair in zip(start, flow.reaches, strict=False)]
        if [one[:2] for one in after] == [one[:2] for one in start]:
            return start, flow
        start = after


def _while(eqn: Any, given: list[Reach], context: Context) -> Flow:
    cond_count, body_count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = given[:cond_count], given[cond_count : cond_count + body_count]
    start = given[cond_count + body_count :]
    carry, flow = _fixpoint(
        lambda carry: walk(eqn.params["body_jaxpr"], [*body_consts, *carry], context), start, eqn, context
    )
    goes_on = walk(eqn.params["cond_jaxpr"], [*cond_consts, *carry], context).reaches[0]
    return Flow([join([goes_on, one], eqn, context) for one in carry], flow.products)


def _scan(eqn: Any, given: list[Reach], context: Context) -> Flow:
    const_count, carry_count = scan_counts(eqn.params)
    consts, start = given[:const_count], given[const_count : const_count + carry_count]
    rows = given[const_count + carry_count :]
    body = eqn.params["jaxpr"]
    carry, flow = _fixpoint(lambda carry: walk(body, [*consts, *carry, *rows], context), start, eqn, context)
    # An array with a scalar per iteration is not a scalar, but still depends on no arrays.
    stacked = [one if one.arrays else Reach(one.numbers, why=one.why) for one in flow.reaches[carry_count:]]
    return Flow([*carry, *stacked], flow.products)


_CONTROL_FLOW: dict[str, Callable[[Any, list[Reach], Context], Flow]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
