"""A traced function run again with some of its equations changed, found by the source lines that made them.

An equation is named by its `Site`: the user's line, and which of that line's equations it is, in the order of the
program. Of

    40    hidden = jnp.tanh(x @ params["up"])      Site("model.py:40", 0, "dot_general"), Site("model.py:40", 1, "tanh")

a change that wraps the second one's result in a constraint makes the program that the user would have written as
`js.constrain(jnp.tanh(...), ...)`, derivatives included, without touching the file. Equations inside loops, branches
and `jax.checkpoint` are found too; functions with derivatives of their own count as one equation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxshard.core.compat import equation_frames, scan_counts
from jaxshard.core.jaxpr import bind, evaluate, open_jaxpr
from jaxshard.core.our_code import users_frame

_CONSTRAINT = "sharding_constraint"
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_REMAT = ("remat2", "remat", "checkpoint")


class Site(NamedTuple):
    """The place of an equation in a traced function.

    Attributes:
      line: `file:line` of the user's code.
      number: which of that line's equations it is, from 0 on, in the order of the program.
      primitive: the equation's primitive.
    """

    line: str
    number: int
    primitive: str


Change = Callable[[list[Any], Callable[[], list[Any]]], list[Any]]
"""`change(operands, run) -> results`: what an equation is to give instead; `run()` gives what it gave."""


def list_sites(program: Any) -> dict[Site, Any]:
    """Return the equations of the user's lines by site, nested ones included; of None there are none.

    An equation inside of a call that bears no line of the user's has that of the call. Of several programs, by name,
    lines that stand in more than one of them are left out: which of a line's equations one is would depend on where.
    """
    if isinstance(program, dict):
        each = [list_sites(one) for one in program.values()]
        shared = Counter(line for sites in each for line in {site.line for site in sites})
        return {site: eqn for sites in each for site, eqn in sites.items() if shared[site.line] == 1}
    numbers: Counter[str] = Counter()
    found = {}
    for eqn, line in () if program is None else _walk(program):
        if line:
            found[Site(line, numbers[line], eqn.primitive.name)] = eqn
            numbers[line] += 1
    return found


def is_users_constraint(eqn: Any) -> bool:
    """Return True for a constraint that stands in the user's code, not in a layer of this library."""
    frames = [frame for frame in _frames(eqn) if not _makes_constraints(frame)]
    return is_constraint(eqn) and bool(frames) and frames[0] == users_frame(frames)


def is_constraint(eqn: Any) -> bool:
    """Return True for a constraint on where an array lives: JAX's own, or that of `js.constrain`."""
    name = eqn.primitive.name
    if name == _CONSTRAINT:
        return True
    inner = eqn.params.get("call_jaxpr") if name.startswith("custom_vjp_call") else None
    if inner is None:
        return False
    eqns = open_jaxpr(inner)[0].eqns
    return len(eqns) == 1 and eqns[0].primitive.name == _CONSTRAINT


def leave_out(operands: list[Any], run: Callable[[], list[Any]]) -> list[Any]:
    """Hand on the operand of an equation that changes no value, such as a constraint."""
    return operands[:1]


def run_changed(program: Any, args: Sequence[Any], changes: Mapping[Site, Change]) -> list[Any]:
    """Evaluate a program with changed equations; a site that it does not have changes nothing."""
    sites = list_sites(program)
    changed = {id(sites[site]): change for site, change in changes.items() if site in sites}
    return _run(program, args, changed)


def _run(program: Any, args: Sequence[Any], changed: Mapping[int, Change]) -> list[Any]:
    def rule(eqn: Any, operands: list[Any]) -> list[Any] | None:
        inside = any(id(one) in changed for inner in bodies(eqn) for one, _ in _walk(inner))
        run = partial(_run_opened, eqn, operands, changed) if inside else partial(bind, eqn, operands)
        return changed[id(eqn)](operands, run) if id(eqn) in changed else run()

    return evaluate(program, args, rule)


def _run_opened(eqn: Any, operands: list[Any], changed: Mapping[int, Change]) -> list[Any]:
    """The results of an equation whose body has changed equations."""
    name, params = eqn.primitive.name, eqn.params
    if name in _REMAT:
        body = jax.checkpoint(
            lambda *args: _run(params["jaxpr"], args, changed),
            prevent_cse=params["prevent_cse"],
            policy=params["policy"],
        )
        return list(body(*operands))
    if name == "scan":
        return _run_scan(params, operands, changed)
    if name == "cond":
        index, *rest = operands
        branches = [lambda *args, b=branch: _run(b, args, changed) for branch in params["branches"]]
        return list(jax.lax.switch(index, branches, *rest))
    return _run(params[_INLINED[name]], operands, changed)


def _run_scan(params: Mapping[str, Any], operands: list[Any], changed: Mapping[int, Change]) -> list[Any]:
    consts, carries = scan_counts(dict(params))
    fixed, start, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(params["jaxpr"], [*fixed, *carry, *x], changed)
        return results[:carries], results[carries:]

    last, ys = jax.lax.scan(
        body, start, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*last, *ys]


def bodies(eqn: Any) -> list[Any]:
    """Return the programs inside an equation, but for those with derivatives of their own."""
    name = eqn.primitive.name
    if name == "cond":
        return list(eqn.params["branches"])
    key = "jaxpr" if name in (*_REMAT, "scan") else _INLINED.get(name)
    return [] if key is None else [eqn.params[key]]


def _walk(program: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
    """The equations of a program, nested ones included, each with the line of the user's that made it."""
    for eqn in open_jaxpr(program)[0].eqns:
        line = users_frame(_frames(eqn)) or outer
        yield eqn, line
        for inner in bodies(eqn):
            yield from _walk(inner, line)


def _frames(eqn: Any) -> list[str]:
    return [f"{file}:{line}" for file, line, _ in equation_frames(eqn)]


def _makes_constraints(frame: str) -> bool:
    """True for JAX and other installed libraries, and for the file of `js.constrain`."""
    file = Path(frame.rpartition(":")[0])
    return "site-packages" in file.parts or file.parts[-2:] == ("core", "constrain.py")
