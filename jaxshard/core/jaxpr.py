"""A traced function of which parts can be run: what only some results need, and what depends on an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.core.compat import Literal, open_jaxpr, piece
from jaxshard.core.types import PyTree


class Program(NamedTuple):
    """The equations of a function; `args` and `out` are trees of their variables, `out` of numbers as well."""

    made: Any
    eqns: list[Any]
    args: PyTree
    out: PyTree

    @classmethod
    def of(cls, fn: Callable[..., Any], *args: PyTree) -> Program:
        """`fn` traced on arrays, or on their shapes."""
        made, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr, _ = open_jaxpr(made)
        structure: Any = jax.tree.structure(args)
        results: Any = jax.tree.structure(shapes)
        return cls(made, list(jaxpr.eqns), structure.unflatten(jaxpr.invars), results.unflatten(jaxpr.outvars))

    def run(self, wanted: PyTree, given: dict[Any, Any], eqns: Sequence[Any] | None = None) -> PyTree:
        """The values of a tree of variables, from those given, by the equations that it takes (of `eqns`, if given)."""
        outs: list[Any]
        tree: Any
        outs, tree = jax.tree.flatten(wanted)
        steps, free = needed(self.eqns if eqns is None else eqns, outs, set(given))
        ins = [var for var in given if var in free]
        values = piece(self.made, outs, ins, steps)(*(given[var] for var in ins))
        # Results that are numbers in the program come back as such.
        return tree.unflatten([_array(x, var) if isinstance(var, Literal) else x for var, x in zip(outs, values)])


def _array(number: Any, atom: Any) -> jax.Array:
    return jnp.asarray(number, atom.aval.dtype)


def needed(eqns: Sequence[Any], outs: Iterable[Any], given: set[Any]) -> tuple[list[Any], set[Any]]:
    """(the equations that the variables `outs` depend on, the variables that those need), where some are given."""
    want = variables(outs)
    found = []
    for eqn in reversed(eqns):
        if any(var in want and var not in given for var in eqn.outvars):
            found.append(eqn)
            want |= variables(eqn.invars)
    return found[::-1], want


def depending(eqns: Sequence[Any], roots: Iterable[Any]) -> set[Any]:
    """The variables that depend on some of the roots, these included."""
    found = variables(roots)
    for eqn in eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            found |= set(eqn.outvars)
    return found


def variables(atoms: Iterable[Any]) -> set[Any]:
    """Those that are no numbers."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def pairs(names: PyTree, values: PyTree) -> dict[Any, Any]:
    """The values of the variables in a tree of the same structure."""
    return dict(zip(jax.tree.leaves(names), jax.tree.leaves(values), strict=True))
