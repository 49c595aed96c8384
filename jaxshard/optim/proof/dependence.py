"""Find the elements on which the results of a program depend, by a forward analysis of two traces of it.

`propagate` walks through the jaxpr once, from the facts about its inputs to the facts about its outputs (`facts`
defines them, `transfer` has the rule of each operation). It is an abstract interpretation in the sense of Cousot and
Cousot 1977: a claim holds for all values of the arrays, and an unknown operation yields no claim (MIXED).

A single trace can't show whether a literal such as 24 is a constant or the size of an array. So the program is traced
at two sets of shapes, and both jaxprs are walked together: a literal or operation that differs depends on the shapes.

Example, the update of `optax.adam` for one parameter w. The inputs are g, mu, nu: ELEMENTWISE(w) with padding 0, and
count: UNIFORM.

    mu = b1 * mu + (1 - b1) * g                  ELEMENTWISE(w), padding 0 * b1 + 0 = 0
    nu = b2 * nu + (1 - b2) * g**2               ELEMENTWISE(w), padding 0
    count = count + 1                            UNIFORM
    mu_hat = mu / (1 - b1**count)                ELEMENTWISE(w) / UNIFORM = ELEMENTWISE(w)
    nu_hat = nu / (1 - b2**count)                ELEMENTWISE(w)
    -rate * mu_hat / (sqrt(nu_hat) + eps)        ELEMENTWISE(w), padding 0 / (0 + eps) = 0

Every output depends on its own element: Adam is elementwise. Where the dependence enters `optax.clip_by_global_norm`:

    sum(a**2)                                    MIXED, and so are the norm and all updates
      inside shard_map over "data"               PARTIAL_SUM over a, as the padding of a**2 is 0
    sum(a**2) + sum(b**2)                        PARTIAL_SUM over a and b
    lax.psum(..., "data")                        UNIFORM: the same number, however a and b are split
    sqrt(...)                                    UNIFORM, but MIXED if it came before the psum: it is not linear
    g * (max_norm / norm)                        ELEMENTWISE, as `js.optim.clip_by_global_norm(1.0, "data")` is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.optim.proof.facts import Context, Fact, Kind, Origin, join, mixed, origin_of
from jaxshard.optim.proof.transfer import elementwise, reduces_all, transfer


def propagate(first: Any, second: Any, inputs: Sequence[Fact], context: Context) -> list[Fact]:
    """Return the fact about every output of a program, from its two traces and the facts about its inputs."""
    (one, one_consts), (two, two_consts) = open_jaxpr(first), open_jaxpr(second)
    # Invariant: `known` has a fact about every variable of trace one so far, and `twins` the corresponding variable of
    # trace two. Two equations are the same only if their inputs are twins.
    known: dict[Any, Fact] = {}
    twins: dict[Any, Any] = {}

    def write(variables: Sequence[Any], others: Sequence[Any], facts: Sequence[Fact]) -> None:
        for variable, other, fact in zip(variables, others, facts, strict=True):
            # An INDEPENDENT value of shape () is one number, so it is UNIFORM.
            is_number = fact.kind is Kind.INDEPENDENT and variable.aval.shape == ()
            known[variable] = fact._replace(kind=Kind.UNIFORM) if is_number else fact
            twins[variable] = other

    def read(atom: Any, other: Any, equation: Any) -> Fact:
        return _literal(atom, other, equation, context) if isinstance(atom, Literal) else known[atom]

    def differ(equation: Any) -> list[Fact]:
        why = origin_of(equation, context, "belongs to a program that depends on the shape of the parameters")
        return [mixed(range(len(context.names)), why)] * len(one.outvars)

    if len(one_consts) != len(two_consts):
        return differ(None)
    write(one.constvars, two.constvars, [_constant(a, b) for a, b in zip(one_consts, two_consts, strict=True)])
    write(one.invars, two.invars, inputs)
    for eqn, twin in zip(one.eqns, two.eqns):
        if not _same_operation(eqn, twin, twins):
            return differ(eqn)
        facts = [read(x, y, eqn) for x, y in zip(eqn.invars, twin.invars)]
        write(eqn.outvars, twin.outvars, _outputs(eqn, twin, facts, context))
    if len(one.eqns) != len(two.eqns):
        longer = max(one, two, key=lambda jaxpr: len(jaxpr.eqns))
        return differ(longer.eqns[min(len(one.eqns), len(two.eqns))])
    return [read(x, y, None) for x, y in zip(one.outvars, two.outvars)]


def _outputs(eqn: Any, twin: Any, facts: list[Fact], context: Context) -> list[Fact]:
    """Return the facts about the outputs of any equation."""
    name = eqn.primitive.name
    if name in CALLS:
        inner = context if context.call is not None else context._replace(call=eqn)
        return propagate(eqn.params[CALLS[name]], twin.params[CALLS[name]], facts, inner)
    if name in CONTROL_FLOW:
        return CONTROL_FLOW[name](eqn, twin, facts, context)
    return transfer(eqn, twin, facts, context)


def _same_operation(eqn: Any, twin: Any, twins: dict[Any, Any]) -> bool:
    """Return whether two equations are the same except for shapes, and for literals, which `_literal` compares."""
    if eqn.primitive is not twin.primitive or len(eqn.invars) != len(twin.invars):
        return False
    if len(eqn.outvars) != len(twin.outvars):
        return False
    for x, y in zip(eqn.invars, twin.invars):
        if isinstance(x, Literal) != isinstance(y, Literal) or (not isinstance(x, Literal) and twins[x] is not y):
            return False
    name = eqn.primitive.name
    if name == "cond":
        return len(eqn.params["branches"]) == len(twin.params["branches"])
    if name in CALLS or name == "while":
        return True  # the programs inside are compared when they are entered
    if name == "scan":
        return all(eqn.params[key] == twin.params[key] for key in ("length", "reverse"))
    keys = eqn.params.keys() - {"shape", "new_sizes", "sharding", "out_sharding"}
    if reduces_all(eqn) and reduces_all(twin):  # of arrays that may differ in rank
        keys -= {"axes"}
    same_keys = eqn.params.keys() == twin.params.keys()
    return same_keys and all(repr(eqn.params[key]) == repr(twin.params[key]) for key in keys)


# Values that no equation makes.


def _constant(a: Any, b: Any) -> Fact:
    """Return the fact about a constant of the jaxpr, which is `a` in one trace and `b` in the other."""
    if np.shape(a) == () and a is b:
        return Fact(Kind.UNIFORM, padding=_finite_number(a))
    if not isinstance(a, jax.core.Tracer) and not isinstance(b, jax.core.Tracer):
        x, y = (jax.random.key_data(c) if jnp.issubdtype(c.dtype, jax.dtypes.prng_key) else c for c in (a, b))
        x, y = np.asarray(x), np.asarray(y)
        if x.size and y.size and (x == x.flat[0]).all() and (y == x.flat[0]).all():
            return Fact(Kind.UNIFORM, padding=_finite_number(x.flat[0]))
        if np.array_equal(x, y):
            return Fact(Kind.INDEPENDENT, why=Origin("a constant of the transform", f"has shape {x.shape}"))
    return mixed((), Origin("a constant of the transform", "depends on the shape of the parameters"))


def _literal(a: Any, b: Any, equation: Any, context: Context) -> Fact:
    """Return the fact about a literal, which is `a` in one trace and `b` in the other."""
    if isinstance(b, Literal) and (a.val == b.val or (a.val != a.val and b.val != b.val)):
        return Fact(Kind.UNIFORM, padding=_finite_number(a.val))
    numbers = f"{a.val} and {getattr(b, 'val', b)}"
    text = f"uses a number that depends on the shape of the parameters or the size of the axis: {numbers}"
    return mixed((), origin_of(equation, context, text))


def _finite_number(x: Any) -> float | None:
    dtype = jax.dtypes.result_type(x)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))
    return float(x) if is_real and not isinstance(x, jax.core.Tracer) and math.isfinite(x) else None


# Branches and loops.


def _chosen_by(eqn: Any, twin: Any, choice: Fact, facts: list[Fact], context: Context) -> list[Fact]:
    """Return the facts about values of a branch or loop that depends on a scalar.

    A UNIFORM scalar decides alike on all devices. A scalar that depends on an element is another input of the values.
    """
    if choice.kind is Kind.UNIFORM:
        return [fact._replace(influences=fact.influences | choice.influences) for fact in facts]
    return [elementwise(eqn, twin, [choice, fact], context, i)._replace(padding=None) for i, fact in enumerate(facts)]


def _cond(eqn: Any, twin: Any, facts: list[Fact], context: Context) -> list[Fact]:
    branches = zip(eqn.params["branches"], twin.params["branches"], strict=True)
    either, *others = [propagate(one, two, facts[1:], context) for one, two in branches]
    for other in others:
        either = [join(eqn, x, y, context) for x, y in zip(either, other, strict=True)]
    return _chosen_by(eqn, twin, facts[0], either, context)


def _loop_invariant(
    body: Callable[[list[Fact]], list[Fact]], start: list[Fact], eqn: Any, context: Context
) -> list[Fact]:
    """Return the facts about the carry of a loop that hold before the loop and after every iteration.

    The fixpoint iteration ends, since `join` only weakens facts, and a fact can be weakened only a finite number of
    times (three kinds, one padding value, one influence per parameter).
    """
    while True:
        kept = [join(eqn, x, y, context) for x, y in zip(start, body(start), strict=True)]
        if kept == start:
            return kept
        start = kept


def _while(eqn: Any, twin: Any, facts: list[Fact], context: Context) -> list[Fact]:
    cond_count, body_count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, rest = facts[:cond_count], facts[cond_count:]
    body_consts, start = rest[:body_count], rest[body_count:]
    bodies = eqn.params["body_jaxpr"], twin.params["body_jaxpr"]
    carry = _loop_invariant(lambda carry: propagate(*bodies, [*body_consts, *carry], context), start, eqn, context)
    conditions = eqn.params["cond_jaxpr"], twin.params["cond_jaxpr"]
    (goes_on,) = propagate(*conditions, [*cond_consts, *carry], context)
    return _chosen_by(eqn, twin, goes_on, carry, context)


def _scan(eqn: Any, twin: Any, facts: list[Fact], context: Context) -> list[Fact]:
    const_count, carry_count = scan_counts(eqn.params)
    consts, rest = facts[:const_count], facts[const_count:]

    def row(fact: Fact) -> Fact:
        """Return the fact about a row of a scanned array, or an array of rows: neither has a parameter's shape."""
        if fact.kind is not Kind.ELEMENTWISE:
            return fact
        text = f"scans over the elements of {context.some_names(fact.influences)}"
        return mixed(fact.influences, origin_of(eqn, context, text))

    def stack(fact: Fact) -> Fact:
        if fact.kind is Kind.UNIFORM:
            why = origin_of(eqn, context, "stacks one number per iteration")
            return Fact(Kind.INDEPENDENT, influences=fact.influences, why=why)
        return row(fact) if fact.kind is not Kind.PARTIAL_SUM else mixed(fact.influences, fact.why)

    rows = [row(fact) for fact in rest[carry_count:]]
    bodies = eqn.params["jaxpr"], twin.params["jaxpr"]

    def body(carry: list[Fact]) -> list[Fact]:
        return propagate(*bodies, [*consts, *carry, *rows], context)

    carry = _loop_invariant(lambda carry: body(carry)[:carry_count], rest[:carry_count], eqn, context)
    return [*carry, *(stack(fact) for fact in body(carry)[carry_count:])]


CONTROL_FLOW: dict[str, Callable[[Any, Any, list[Fact], Context], list[Fact]]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
