"""Find on which elements of the inputs every result of a program depends, by walking two traces of the program.

This is a domain of `proofs/walk.py` (`facts.py` defines the facts, `transfer.py` has the rule of each operation): an
abstract interpretation in the sense of Cousot and Cousot 1977. A claim holds for all values of the arrays, and an
unknown operation yields no claim (MIXED). The program is traced at two sets of shapes: a literal or operation that
differs between both traces depends on the shapes.

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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import CALLS
from jaxshard.optim.proof.facts import Context, Fact, Kind, Origin, join, mixed, origin_of
from jaxshard.optim.proof.transfer import elementwise, reduces_all, transfer
from jaxshard.proofs.alike import Difference
from jaxshard.proofs.walk import Domain, Place, walk


def propagate(first: Any, second: Any, inputs: Sequence[Fact], context: Context) -> list[Fact]:
    """Return a fact about every output of a program: on which elements of the inputs it depends.

    Args:
      first, second: two traces (jaxprs) of the program, at different shapes, to detect what depends on shapes.
      inputs: the facts about the inputs.
      context: the parameters and axes that facts and error messages refer to.
    """
    return walk((first, second), inputs, _Elements(context))


class _Elements(Domain[Fact]):
    def __init__(self, context: Context):
        self.context = context

    def value(self, values: Sequence[Any], place: Place) -> Fact:
        """Return the fact about a literal or constant, given its values in both traces.

        It is UNIFORM (equal on all devices, for all shapes) if all its elements are the same number in both traces.
        """
        if all(np.shape(x) == () for x in values):
            a, b = values
            if a is b or (not _is_traced(*values) and (a == b or (a != a and b != b))):
                return Fact(Kind.UNIFORM, padding=_finite_number(a))
            text = f"uses a number that depends on the shape of the parameters or the size of the axis: {a} and {b}"
            return mixed((), origin_of(place, self.context, text))
        if not _is_traced(*values):
            x, y = (jax.random.key_data(c) if jnp.issubdtype(c.dtype, jax.dtypes.prng_key) else c for c in values)
            x, y = np.asarray(x), np.asarray(y)
            if x.size and y.size and (x == x.flat[0]).all() and (y == x.flat[0]).all():
                return Fact(Kind.UNIFORM, padding=_finite_number(x.flat[0]))
            if np.array_equal(x, y):
                return Fact(Kind.INDEPENDENT, why=Origin("a constant of the transform", f"has shape {x.shape}"))
        return mixed((), Origin("a constant of the transform", "depends on the shape of the parameters"))

    def join(self, place: Place, facts: Sequence[Fact]) -> Fact:
        """Return the strongest fact that is true whichever of `facts` holds, as for the results of two branches.

        The walk joins facts about a loop's carry until they no longer change. This ends, since a fact can be weakened
        only a finite number of times (three kinds, one padding value, one influence per parameter).
        """
        first, *others = facts
        for other in others:
            first = join(place, first, other, self.context)
        return first

    def rule(self, place: Place, facts: list[Fact]) -> list[Fact]:
        return transfer(place, facts, self.context)

    def conclude(self, place: Place, operands: list[Fact], results: list[Fact]) -> list[Fact]:
        """Return the facts about the results, with UNIFORM in place of INDEPENDENT for a result of shape ().

        Both mean that a value is equal on all devices: UNIFORM for scalars, INDEPENDENT for arrays.
        """
        return [_as_number(fact, x.aval.shape) for fact, x in zip(results, place.equation.outvars, strict=True)]

    def choose(self, place: Place, choice: Fact, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the results of a branch or loop, given the fact `choice` about its predicate.

        If the predicate is UNIFORM (equal on all devices), all devices decide alike. Otherwise every result is a
        function of the predicate, too.
        """
        if choice.kind is Kind.UNIFORM:
            return [fact._replace(influences=fact.influences | choice.influences) for fact in facts]
        return [
            elementwise(place, [choice, fact], self.context, out)._replace(padding=None)
            for out, fact in enumerate(facts)
        ]

    def enter(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the inputs of the body of a branch, loop or call, given the facts about its operands.

        The body of a scan gets one row of each scanned array.
        """
        if place.name != "scan":
            return facts
        kept = sum(scan_counts(place.equation.params))
        rows = zip(facts[kept:], place.equation.invars[kept:], strict=True)
        return [*facts[:kept], *(_as_number(self._unlike(place, fact), x.aval.shape[1:]) for fact, x in rows)]

    def leave(self, place: Place, facts: list[Fact]) -> list[Fact]:
        """Return the facts about the results of a scan: the carry, and the stacked results of its iterations."""
        _, carries = scan_counts(place.equation.params)
        return [*facts[:carries], *(self._stack(place, fact) for fact in facts[carries:])]

    def _stack(self, place: Place, fact: Fact) -> Fact:
        if fact.kind is Kind.UNIFORM:
            why = origin_of(place, self.context, "stacks one number per iteration")
            return Fact(Kind.INDEPENDENT, influences=fact.influences, why=why)
        return self._unlike(place, fact) if fact.kind is not Kind.PARTIAL_SUM else mixed(fact.influences, fact.why)

    def _unlike(self, place: Place, fact: Fact) -> Fact:
        """Convert a fact about an array to a fact about its rows, or a fact about rows to a fact about their stack.

        An ELEMENTWISE fact (element i belongs to element i of a parameter) becomes MIXED, which claims nothing, since
        the shape is no longer that of the parameter.
        """
        if fact.kind is not Kind.ELEMENTWISE:
            return fact
        text = f"scans over the elements of {self.context.some_names(fact.influences)}"
        return mixed(fact.influences, origin_of(place, self.context, text))

    def same(self, place: Place) -> bool:
        """Return True if the two traces of an equation differ at most in shapes."""
        one, two = place.equation.params, place.twin.params
        if place.name == "cond":
            return len(one["branches"]) == len(two["branches"])
        if place.name in CALLS or place.name == "while":
            return True  # the programs inside are compared when they are entered
        if place.name == "scan":
            return all(one[key] == two[key] for key in ("length", "reverse"))
        keys = one.keys() - {"shape", "new_sizes", "sharding", "out_sharding"}
        if reduces_all(place.equation) and reduces_all(place.twin):  # of arrays that may differ in rank
            keys -= {"axes"}
        return one.keys() == two.keys() and all(repr(one[key]) == repr(two[key]) for key in keys)

    def differ(self, place: Place, difference: Difference, results: Sequence[tuple[Any, Any]]) -> list[Fact]:
        """Return MIXED (nothing is known) for every result of a body that is not the same in both traces.

        The traces are at different shapes, so such a body depends on the shapes of the parameters.
        """
        why = origin_of(place, self.context, "belongs to a program that depends on the shape of the parameters")
        return [mixed(range(len(self.context.names)), why)] * len(results)


def _as_number(fact: Fact, shape: tuple[int, ...]) -> Fact:
    return fact._replace(kind=Kind.UNIFORM) if fact.kind is Kind.INDEPENDENT and shape == () else fact


def _is_traced(*values: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in values)


def _finite_number(x: Any) -> float | None:
    dtype = jax.dtypes.result_type(x)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))
    return float(x) if is_real and not _is_traced(x) and math.isfinite(x) else None
