"""Find the results of a jaxpr that are unchanged arguments, through calls, loops and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.primitives import SAME
from jaxshard.proofs.walk import Domain, Place, walk, walk_equation


class _Source(NamedTuple):
    """The argument of which a value is a copy, or one row if a scan goes over the rows of the argument.

    Attributes:
      argument: the index of the argument.
      scans: the ids of the scan equations around the value that go over the rows of this argument, the outermost first.
    """

    argument: int
    scans: tuple[int, ...] = ()


def handed_through(program: Any) -> list[int | None]:
    """Return for each result of a jaxpr the index of the argument that it returns unchanged; else None.

    For example, [1, None] for the jaxpr of `lambda x, y: (y, x + y)`.
    """
    arguments = map(_Source, range(len(open_jaxpr(program)[0].invars)))
    return [None if one is None else one.argument for one in walk(program, list(arguments), _Sources())]


def operands_handed_through(eqn: Any) -> list[int | None]:
    """Return for each result of an equation the index of the operand that it returns unchanged; else None.

    For example, [1, None] for a call of `jax.jit(lambda x, y: (y, x + y))`.
    """
    operands = map(_Source, range(len(eqn.invars)))
    return [None if one is None else one.argument for one in walk_equation(eqn, list(operands), _Sources())]


class _Sources(Domain[_Source | None]):
    def value(self, values: Sequence[Any], place: Place) -> None:
        return None

    def join(self, place: Place, facts: Sequence[_Source | None]) -> _Source | None:
        return facts[0] if len(set(facts)) == 1 else None

    def choose(self, place: Place, choice: _Source | None, facts: list[_Source | None]) -> list[_Source | None]:
        return facts  # the same in all branches, and after any number of iterations

    def rule(self, place: Place, facts: list[_Source | None]) -> list[_Source | None]:
        return facts if place.name in SAME else place.joined(None)

    def enter(self, place: Place, facts: list[_Source | None]) -> list[_Source | None]:
        if place.name != "scan":
            return facts
        kept, scan = sum(scan_counts(place.equation.params)), id(place.equation)
        rows = [one and one._replace(scans=(*one.scans, scan)) for one in facts[kept:]]
        return [*facts[:kept], *rows]

    def leave(self, place: Place, facts: list[_Source | None]) -> list[_Source | None]:
        (_, carries), scan = scan_counts(place.equation.params), id(place.equation)

        def stack(one: _Source | None) -> _Source | None:
            return one._replace(scans=one.scans[:-1]) if one and one.scans[-1:] == (scan,) else None

        return [*facts[:carries], *map(stack, facts[carries:])]
