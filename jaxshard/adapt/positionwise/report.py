"""Report findings: the operation, its line in the user's code, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxshard.adapt.positionwise.facts import Mixes
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.core.compat import equation_frames
from jaxshard.core.our_code import is_jaxshard_file, package_folder, short_path

_MODELS = package_folder("jaxshard.models")
_PROOF = package_folder("jaxshard.adapt.positionwise")

FIXES = {
    "attention": "attend by js.attention, which brings the keys and values of other devices",
    "positions": "take the indices of positions from js.positions(T), such as table[js.positions(T)]",
    "shift": "have the shifted array in the batch, such as tokens and targets",
    "sum": "return js.Mean(total, weight) of plain sums over the positions",
    "number": "count by a sum over the positions, such as mask.sum()",
    "choice": "choose it outside of the loss, by the length of full rows",
    "random": "draw for each position with its own key, folded with js.positions(T)",
    "gather": "take along the last dimension, by jnp.take_along_axis",
    "experts": "route by js.moe",
    "blocks": "leave the positions in one dimension (js.head_loss computes a loss in chunks)",
    "mark": "keep the positions where it expects them",
    "auto": "",
}
"""{kind of mistake: what the user should write instead}."""


class Cause:
    """An equation to blame in an error message, and the calls that lead to it; compared by identity.

    Attributes:
      pair: the equation, in the traces for all positions and for one device's positions.
      calls: the equations (calls, loops, branches) whose jaxprs contain the blamed equation, the outermost first.
    """

    def __init__(self, pair: Pair, calls: tuple[Any, ...]):
        self.pair, self.calls = pair, calls


class Finding(NamedTuple):
    """An operation that gives a wrong result if each device computes it from its own sequence positions.

    Attributes:
      operation: the name of the primitive.
      what: the predicate of a sentence whose subject is the operation, such as "reverses the positions".
      where: file:line in the user's code.
      via: file:line of the operation in a library that the user's line calls; "" if the user's code has the operation.
      shapes: the shapes of operands and results, such as "f32[2,8] -> f32[2]".
      fix: what to write instead, or "".
    """

    operation: str
    what: str
    where: str
    via: str
    shapes: str
    fix: str

    def __str__(self) -> str:
        via = f" (in {self.via})" if self.via else ""
        fix = f": {self.fix}" if self.fix else ""
        return f"{self.where}{via}: {self.operation} {self.shapes} {self.what}{fix}"


def make_finding(pair: Pair, refusal: Mixes, calls: Sequence[Any]) -> Finding:
    """Make a finding (an operation to report, with its line in the user's code) from an equation that a rule refused.

    Args:
      pair: the refused equation.
      refusal: the exception that the rule raised. If it has a `cause`, this other equation is reported in place of
        `pair`.
      calls: the equations (calls, loops, branches) whose jaxprs contain the blamed equation, the outermost first.
    """
    cause = refusal.cause or Cause(pair, tuple(calls))
    where, via = locate([cause.pair.one, *reversed(cause.calls)])
    return Finding(cause.pair.name, refusal.what, where, via, _shapes(cause.pair), FIXES[refusal.fix])


def _shapes(pair: Pair) -> str:
    """Format the shapes of an equation's operands and results, such as "f32[2,8] -> f32[2]".

    Show at most three shapes on each side; if some depend on the number of positions, show only these.
    """

    def texts(side: str) -> str:
        both = list(zip(getattr(pair.one, side), getattr(pair.two, side), strict=False))
        grown = [x for x, y in both if x.aval.shape != y.aval.shape] or [x for x, _ in both]
        shown = [x.aval.str_short(short_dtypes=True) for x in grown[:3]]
        return ", ".join(shown + ["..."] * (len(grown) > 3))

    operands, results = texts("invars"), texts("outvars")
    return f"{operands} -> {results}" if operands else results


def locate(equations: Sequence[Any]) -> tuple[str, str]:
    """Find the source lines of an equation: (line in the user's code, line in a library that the user's line calls).

    Both have the form file:line. The second is "" if the user's code made the equation itself.

    Args:
      equations: the equation, and the calls around it, the innermost first.
    """
    via = ""
    for eqn in equations:
        for file, line in own_frames(eqn):
            if not _is_library(file):
                return f"{short_path(file)}:{line}", via
            via = via or f"{short_path(file)}:{line}"
    return via or "the loss", ""


def own_frames(eqn: Any) -> list[tuple[str, int]]:
    """List (file, line) of the stack frames in which an equation was traced, the innermost first, without JAX's frames.

    The list ends at the function whose tracing made the jaxpr that contains the equation. JAX caches the jaxprs of
    jitted functions, so frames further out belong to the first caller of the function, which need not be the caller
    here.
    """
    found = []
    for file, line, function in equation_frames(eqn):
        path = file.replace("\\", "/")
        if path.endswith("interpreters/partial_eval.py") and "trace_to_jaxpr" in function:
            break
        ours = file.startswith(str(_PROOF))
        if "/jax/" not in path and not path.startswith("<") and not ours:
            found.append((file, line))
    return found


def _is_library(file: str) -> bool:
    if is_jaxshard_file(file):
        return not file.startswith(str(_MODELS))
    return any(f"/site-packages/{name}/" in file.replace("\\", "/") for name in ("flax", "optax", "jaxtyping"))


def explain(findings: Sequence[Finding], axes: Sequence[str]) -> str:
    """Make the error message of `js.context` for a loss with operations that mix sequence positions.

    Args:
      findings: the operations.
      axes: the mesh axes that split positions.
    """
    lines = "\n".join(f"  {finding}" for finding in findings)
    return (
        f"js.context over {list(axes)}: each device runs the loss on its own positions, which is right if everything "
        f"but js.attention treats them one by one. It does not:\n{lines}\nOr use js.auto(), under which the loss sees "
        "full rows."
    )
