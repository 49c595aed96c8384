"""Collectives that some devices may never reach: inside a branch, or a loop, on which devices may decide differently.

A collective returns when all devices of its axes have called it. Inside `lax.cond` on a value that differs over these
axes some devices call it and the others go on, which no compiler refuses: simulated devices are aborted after 40
seconds, accelerators wait for ever.

    lax.cond(rows.sum() > 0, lambda: lax.psum(x, "data"), ...)          may part: rows differ over "data"
    lax.cond(lax.psum(rows.sum(), "data") > 0, ...)                     together: the sum is the same on all of "data"
    lax.cond(lax.axis_index("pipe") == 0, lambda: lax.psum(x, "data"))  together: all of one "data" group agree
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params

from jaxshard.core.compat import equation_frames
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.our_code import package_folder, users_frame
from jaxshard.proofs.equal import Axes, Difference, axes_named, collective_of, differences
from jaxshard.proofs.walk import Place, walk

CHOICES = {"cond": "which branch lax.cond takes", "while": "how often lax.while_loop iterates"}
"""Primitives that run their programs for some devices only, or not as often on all of them, and what differs then."""

_PAIRWISE = frozenset({"ppermute", "psend", "precv"})
"""Collectives in which pairs of devices are named: compilers have all devices of the mesh take part in them."""

_LAYERS = {
    package_folder("jaxshard.layers.moe"): "js.moe, ",
    package_folder("jaxshard.layers.attention"): "js.attention, ",
    package_folder("jaxshard.layers") / "head_loss.py": "a chunk of js.head_loss, ",
}
_ENGINES = package_folder("jaxshard.engines")


class Parting(NamedTuple):
    """A collective that some of its devices may not reach.

    Attributes:
      branch: the equation, a `cond` or `while`, in whose program it is: the outermost of those that may part devices.
      differ: the mesh axes over which its predicate may differ.
      collective: the equation of the collective.
      axes: the mesh axes over which it communicates.
    """

    branch: Any
    differ: Axes
    collective: Any
    axes: Axes


def find_partings(program: Any) -> list[Parting]:
    """Find the collectives of a traced program that some of their devices may not reach, in the program's order.

    Args:
      program: a jaxpr of global arrays, closed or not, such as `jitted.trace(*args).jaxpr`.
    """
    if not _has_collectives_in_choices(program, {}):
        return []
    found = []

    def visit(place: Place, facts: list[Difference]) -> None:
        kind = collective_of(place.equation)
        if kind is None:
            return
        sizes = _mesh_sizes(place)
        named = frozenset(sizes) if kind in _PAIRWISE else axes_named(place.equation)
        axes = frozenset(axis for axis in named if sizes.get(axis, 2) > 1)
        for one in place.around:
            differ = one.choice.over & axes if one.choice is not None else None
            if differ:
                found.append(Parting(one.equation, differ, place.equation, axes_named(place.equation)))
                break

    jaxpr, _ = open_jaxpr(program)
    walk(program, [Difference()] * len(jaxpr.invars), differences(), visit)
    return found


def check_together(program: Any, what: str) -> None:
    """Refuse a traced program in which some devices may not reach a collective that others wait in.

    Args:
      program: as `find_partings` takes it.
      what: the beginning of the message, such as "the step".

    Raises:
      ValueError: there is such a collective; names the line of each branch, and what is in it.
    """
    branches: dict[str, list[Parting]] = {}
    for one in find_partings(program):
        branches.setdefault(_line(one.branch), []).append(one)
    if branches:
        axes = sorted(frozenset().union(*(one.differ for found in branches.values() for one in found)))
        listed = "".join(f"\n  - {_describe_branch(line, found)}" for line, found in branches.items())
        raise ValueError(
            f"{what} could hang: some devices may never reach a collective in which others wait for them:{listed}\n"
            "Compute what communicates before the branch, on all devices, and choose afterwards, by jnp.where or a "
            f"weight of zero (a module that gathers its own weights: leave its class out of units=). Or decide for all "
            f"devices together: jax.lax.pmax(predicate, {tuple(axes)}). Or use js.auto(), under which the loss, "
            "outside of any shard_map, sees all rows and takes one branch."
        )


def _has_collectives_in_choices(program: Any, known: dict[int, bool], *, inside: bool = False) -> bool:
    """Whether a `cond` or `while` of a program has a collective in it; with `inside` whether the program has one.

    Most programs have none, and need not be walked.
    """
    if inside and id(program) in known:
        return known[id(program)]
    found = False
    for equation in open_jaxpr(program)[0].eqns:
        within = inside or equation.primitive.name in CHOICES
        found = (inside and collective_of(equation) is not None) or any(
            _has_collectives_in_choices(one, known, inside=within) for one in jaxprs_in_params(equation.params)
        )
        if found:
            break
    if inside:
        known[id(program)] = found
    return found


def _mesh_sizes(place: Place) -> Mapping[str, int]:
    """The sizes of the axes of the mesh of the innermost `shard_map` around."""
    inner = (one.equation for one in reversed(place.around) if one.equation.primitive.name == "shard_map")
    return next((dict(equation.params["mesh"].shape) for equation in inner), {})


# Messages.


def _describe_branch(line: str, found: list[Parting]) -> str:
    differ = sorted(frozenset().union(*(one.differ for one in found)))
    inside = dict.fromkeys(_describe_collective(one.collective) for one in found)
    *_, kind = (CHOICES[one.branch.primitive.name] for one in found)
    return f"{line}: {kind} may differ over {differ}, and inside is: {_some(inside)}"


def _some(texts: Iterable[str]) -> str:
    first, more = list(texts)[:3], len(list(texts)) - 3
    return "; ".join(first) + (f"; and {more} more" if more > 0 else "")


def _describe_collective(equation: Any) -> str:
    """Say what communicates, and for whom, such as "all_gather of a weight, f32[2,16] over ['data'] (net.py:20)"."""
    operand = ", ".join(x.aval.str_short(short_dtypes=True) for x in equation.invars[:1])
    line = users_frame(_frames(equation))
    where = f" ({line})" if line else ""
    return f"{collective_of(equation)} of {_whose(equation)}{operand} over {sorted(axes_named(equation))}{where}"


def _whose(equation: Any) -> str:
    """Whose collective it is: of a layer of ours, of BatchNorm, of a weight that an engine gathers, or the user's."""
    for file, _, _ in equation_frames(equation):
        path = Path(file)
        for place, name in _LAYERS.items():
            if path.is_relative_to(place):
                return name
        if path.name == "normalization.py" and "flax" in path.parts:
            return "BatchNorm(axis_name), "
        if path.is_relative_to(_ENGINES):
            return "a weight, " if collective_of(equation) == "all_gather" else "a weight or its gradient, "
    return ""


def _frames(equation: Any) -> list[str]:
    return [f"{file}:{line}" for file, line, _ in equation_frames(equation)]


def _line(equation: Any) -> str:
    """The user's line of an equation; the innermost outside of JAX where it has none."""
    frames = _frames(equation)
    return users_frame(frames) or next((one for one in frames if "/jax/" not in one), "a line that is not known")
