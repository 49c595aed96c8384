"""Trace a function to a jaxpr, run parts of it, and find what those parts depend on.

A jaxpr is a list of equations over variables, each variable made by one equation or given as an argument. For

    def fn(x, w):              { lambda ; x w. let
        a = sin(x)                 a = sin x
        b = a @ w                  b = dot_general a w
        return b, a                in (b, a) }

`Program.trace(fn, x, w)` has `args == (x, w)` and `out == (b, a)`, as trees of variables, and

    needed_equations(eqns, [a], given={x})     -> ([a = sin x], {a, x})     a needs one equation, and x
    dependent_variables(eqns, [w])             -> {w, b}                    what changes with w
    program.run(a, {x: 0.5})                   -> sin(0.5)                  without making b

Variables (`jax.extend.core.Var`) are hashable and compared by identity; a constant operand of
an equation is a `Literal`, which is in no set here. This file uses only names that JAX documents; private names, and
differences between versions, are in core/compat.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from jaxshard.core.compat import dce_jaxpr, equation_context, replace_equations, without_callbacks
from jaxshard.core.types import PyTree

CALLS = {
    name: parameter
    for parameter, names in {
        "jaxpr": ("jit", "pjit", "remat2", "remat", "checkpoint"),
        "call_jaxpr": ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
        "fun_jaxpr": ("custom_vjp_call_jaxpr",),
    }.items()
    for name in names
}
"""{primitive that runs an inner jaxpr, once and on its own operands: the parameter that holds the jaxpr}."""

PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""The primitives of `CALLS` that only call the inner jaxpr, without a checkpoint or custom derivatives."""

T = TypeVar("T")

Rule = Callable[[Any, list[Any]], list[Any] | None]
"""`rule(equation, operands)` -> results to use in place of the equation, or None to evaluate the equation."""


class Program(NamedTuple):
    """A function as a jaxpr, with its arguments and results as trees of variables.

    Attributes:
      closed: the closed jaxpr.
      args: the function's arguments, a tree of variables.
      out: its results, a tree of variables. A result that is a constant number is a Literal.
    """

    closed: Any
    args: PyTree
    out: PyTree

    @classmethod
    def trace(cls, fn: Callable[..., Any], *args: PyTree) -> Program:
        """Trace `fn` on trees of arrays, or of their shapes."""
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        return cls._of(closed, jax.tree.structure(args), jax.tree.structure(shapes))

    def results(self, values: Sequence[Any]) -> PyTree:
        """Arrange the values of the function's results in the tree that the function returns.

        Args:
          values: a value for each leaf of the tree. Python numbers are converted to arrays.
        """
        arrays = (jnp.asarray(x, atom.aval.dtype) for x, atom in zip(values, jax.tree.leaves(self.out), strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.out), arrays)

    @classmethod
    def _of(cls, closed: Any, args: Any, out: Any) -> Program:
        jaxpr, _ = open_jaxpr(closed)
        return cls(closed, args.unflatten(jaxpr.invars), out.unflatten(jaxpr.outvars))

    @property
    def eqns(self) -> list[Any]:
        """The equations of the jaxpr, in the order in which they run."""
        return list(open_jaxpr(self.closed)[0].eqns)

    def inline_calls(self) -> Program:
        """Return the same program with its calls (jit, checkpoint, custom derivatives) inlined, and new variables."""
        return self.replace_closed(inline_calls(self.closed))

    def replace_closed(self, closed: Any) -> Program:
        """Return a `Program` with another closed jaxpr, whose arguments and results form the same trees as here."""
        return self._of(closed, jax.tree.structure(self.args), jax.tree.structure(self.out))

    def part(self, outs: Sequence[Any], ins: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return a function that computes the variables `outs` of the program from values for its variables `ins`.

        It runs only the equations that `outs` need.
        """
        steps, _ = needed_equations(self.eqns, outs, set(ins))
        return subprogram(self.closed, outs, ins, steps)

    def only(self, wanted: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return a function of the program's arguments that computes the variables `wanted` and nothing else.

        It leaves out callbacks whose results are not used. The compiler would keep a `jax.debug.print`, which would
        then print twice.
        """
        alone, used = results_alone(without_callbacks(self.closed), wanted)

        def compute(*args: PyTree) -> list[Any]:
            given = [x for x, needed in zip(jax.tree.leaves(args), used, strict=True) if needed]
            values = jax.core.eval_jaxpr(open_jaxpr(alone)[0], alone.consts, *given)
            return [_as_array(x, atom) for x, atom in zip(values, wanted, strict=True)]

        return compute

    def run(
        self, wanted: PyTree, given: Mapping[Any, Any], eqns: Sequence[Any] | None = None, *, effects: bool = False
    ) -> PyTree:
        """Compute variables of the program from the values of other variables.

        Args:
          wanted: a tree of variables and Literals.
          given: {variable: value}. Values that are not needed are ignored.
          eqns: the equations that may be used, by default all equations of the program.
          effects: whether equations with side effects, such as `jax.debug.print`, run as well.

        Returns:
          The values, in the tree of `wanted`.
        """
        outs: list[Any]
        tree: Any
        outs, tree = jax.tree.flatten(wanted)
        steps, free = needed_equations(self.eqns if eqns is None else eqns, outs, set(given), effects=effects)
        ins = [var for var in given if var in free]
        values = subprogram(self.closed, outs, ins, steps)(*(given[var] for var in ins))
        return tree.unflatten([_as_array(x, atom) for x, atom in zip(values, outs, strict=True)])


def trace_or_none(trace: Callable[[], T]) -> T | None:
    """Trace a user's function for shapes that it may not support; return None if it fails.

    Args:
      trace: the call that traces the function. Every exception counts as "not supported", since user code, and the
        libraries that check shapes in it, raise errors of any class.
    """
    try:
        return trace()
    except Exception:
        return None


def _as_array(x: Any, atom: Any) -> Any:
    """Convert a Python number to an array if it is the value of a Literal; return all other values unchanged."""
    aval: Any = atom.aval
    return jnp.asarray(x, aval.dtype) if isinstance(atom, Literal) else x


# Programs.


def open_jaxpr(program: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return (jaxpr, constants) of an open or a closed jaxpr; JAX 0.12 has one class for both."""
    return getattr(program, "jaxpr", program), tuple(getattr(program, "consts", ()))


def all_equations(program: Any) -> list[Any]:
    """List all equations of a jaxpr and of the jaxprs inside them, outer equations first."""
    found = []
    for equation in open_jaxpr(program)[0].eqns:
        found.append(equation)
        found += equations_inside(equation)
    return found


def equations_inside(equation: Any) -> list[Any]:
    """List all equations of the jaxprs inside an equation, such as the body of a loop."""
    return [inner for program in jaxprs_in_params(equation.params) for inner in all_equations(program)]


def eliminate_dead_code(program: Any) -> tuple[Any, list[bool]]:
    """Remove the equations of a jaxpr whose results are not used, and the inputs that are then not used.

    Returns:
      (the new jaxpr, True or False for each old input: whether it is kept).
    """
    return dce_jaxpr(open_jaxpr(program)[0])


def results_alone(program: Any, results: Sequence[Any]) -> tuple[Any, list[bool]]:
    """Cut a program down to some of its variables: keep only the equations and inputs that they need.

    Returns:
      (the closed jaxpr whose results are these variables, True or False for each old input: whether it is kept).
    """
    jaxpr, consts = open_jaxpr(program)
    steps, _ = needed_equations(jaxpr.eqns, results, set())
    alone, used = eliminate_dead_code(replace_equations(jaxpr, jaxpr.invars, results, steps))
    return ClosedJaxpr(alone, consts), used


def subprogram(program: Any, outs: Sequence[Any], ins: Sequence[Any], eqns: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return a function that computes the variables `outs` from values for the variables `ins` by the equations `eqns`.

    Args:
      program: the jaxpr, whose constants are used.
      outs: the variables to compute.
      ins: the variables whose values the function takes, in this order.
      eqns: all equations that compute `outs` from `ins`; `needed_equations` finds them.
    """
    jaxpr, consts = open_jaxpr(program)
    part = replace_equations(jaxpr, ins, outs, eqns)
    return lambda *values: list(jax.core.eval_jaxpr(part, consts, *values))


def inline_calls(program: Any) -> Any:
    """Return the closed jaxpr with all calls inlined: jit, checkpoint and functions with custom derivatives."""
    return jax.make_jaxpr(lambda *args: replay(program, args))(*open_jaxpr(program)[0].in_avals)


def replay(program: Any, args: Sequence[Any], rule: Rule = lambda equation, operands: None) -> list[Any]:
    """Evaluate a jaxpr with its calls inlined, and return its results.

    Args:
      program: the jaxpr.
      args: the values of its inputs.
      rule: `rule(equation, operands)` returns the results to use for an equation, or None to evaluate it.
    """

    def run_opened(eqn: Any, operands: list[Any]) -> list[Any] | None:
        inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
        return rule(eqn, operands) if inner is None else replay(inner, operands, rule)

    return evaluate(program, args, run_opened)


def evaluate(program: Any, args: Sequence[Any], rule: Rule) -> list[Any]:
    """Evaluate a jaxpr without inlining its calls, and return its results.

    Args:
      program: the jaxpr.
      args: the values of its inputs.
      rule: `rule(equation, operands)` returns the results to use for an equation, or None to evaluate it.
    """
    jaxpr, consts = open_jaxpr(program)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        with equation_context(eqn):
            results = rule(eqn, operands)
            if results is None:
                results = bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluate an equation on these operands and return its results."""
    made = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(made) if eqn.primitive.multiple_results else [made]


def is_checkpoint(eqn: Any) -> bool:
    """Return whether an equation is a `jax.checkpoint`."""
    return eqn.primitive.name in ("remat2", "remat", "checkpoint")


def checkpoint_again(
    eqn: Any, body: Callable[..., list[Any]], policy: Callable[..., Any] | None
) -> Callable[..., list[Any]]:
    """Wrap `body` in a `jax.checkpoint` with the options of the checkpoint equation `eqn`, except for the policy."""
    prevent_cse = bool(jax.tree.reduce(lambda a, b: a or b, eqn.params["prevent_cse"]))
    again: Callable[..., list[Any]] = jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)
    return again


# Variables.


def variables(atoms: Iterable[Any]) -> set[Any]:
    """Return the set of those atoms (operands or results of equations) that are variables, not Literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def needed_equations(
    eqns: Sequence[Any], outs: Iterable[Any], given: set[Any], *, effects: bool = False
) -> tuple[list[Any], set[Any]]:
    """Find the equations that compute `outs` from the variables `given`.

    Args:
      eqns: the equations of a program, in order.
      outs: the variables to compute.
      given: variables whose values are known. The equations that make them are left out.
      effects: True to keep equations with side effects too.

    Returns:
      (the equations, in order; the set of all variables that they read, together with `outs`).
    """
    want = variables(outs)
    found = []
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or any(var in want and var not in given for var in eqn.outvars):
            found.append(eqn)
            want |= variables(eqn.invars)
    return found[::-1], want


def dependent_variables(eqns: Sequence[Any], roots: Iterable[Any]) -> set[Any]:
    """Return all variables whose values depend on any of the variables `roots`, and `roots` themselves."""
    found = variables(roots)
    for eqn in eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            found |= set(eqn.outvars)
    return found


def assign(names: PyTree, values: PyTree) -> dict[Any, Any]:
    """Return {variable: value} from a tree of variables and a tree of values of the same structure."""
    return dict(zip(jax.tree.leaves(names), jax.tree.leaves(values), strict=True))
