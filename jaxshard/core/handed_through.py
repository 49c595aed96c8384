"""Find the results of a jaxpr that are unchanged arguments, through calls, loops and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.core.primitives import SAME

Sources = Sequence[int | None]
"""For each result of a program (or equation) the index of the argument (or operand) that it equals, or None."""


def handed_through(program: Any) -> Sources:
    """Return for each result of a program the index of the argument that it equals; None for a computed result."""
    jaxpr, _ = open_jaxpr(program)
    source = {var: index for index, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for var, index in zip(eqn.outvars, operands_handed_through(eqn)):
            atom = None if index is None else eqn.invars[index]
            if atom is not None and not isinstance(atom, Literal) and atom in source:
                source[var] = source[atom]
    return [None if isinstance(atom, Literal) else source.get(atom) for atom in jaxpr.outvars]


def operands_handed_through(eqn: Any) -> Sources:
    """Return for each result of an equation the index of the operand that it equals; None for a computed result."""
    name, params = eqn.primitive.name, eqn.params
    if name in SAME:
        return range(len(eqn.outvars))
    if name in CALLS:
        return handed_through(params[CALLS[name]])
    if name == "scan":
        consts, carries = scan_counts(params)
        # A carry is unchanged if each iteration hands it on; a stacked result if it is a slice of a stacked operand.
        return [
            index if index is not None and (index == consts + result or consts + carries <= index) else None
            for result, index in enumerate(handed_through(params["jaxpr"]))
        ]
    if name == "while":
        before = params["cond_nconsts"]
        return [
            before + index if index == params["body_nconsts"] + result else None
            for result, index in enumerate(handed_through(params["body_jaxpr"]))
        ]
    if name == "cond":
        branches = [handed_through(branch) for branch in params["branches"]]
        return [
            1 + one[0] if one[0] is not None and len(set(one)) == 1 else None for one in zip(*branches, strict=True)
        ]
    return [None] * len(eqn.outvars)
