"""Find collectives that can deadlock: inside a `cond` or `while` whose predicate may differ between their devices.

A collective returns once all devices of its axes have called it. Inside a `lax.cond` whose predicate differs over these
axes, some devices call it and others do not. No compiler refuses that: simulated devices abort after 40 seconds,
accelerators wait forever.

    lax.cond(rows.sum() > 0, lambda: lax.psum(x, "data"), ...)          may hang: rows differ over "data"
    lax.cond(lax.psum(rows.sum(), "data") > 0, ...)                     safe: the sum is equal over "data"
    lax.cond(lax.axis_index("pipe") == 0, lambda: lax.psum(x, "data"))  safe: the devices of one "data" group agree
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.core.compat import equation_frames, newly_manual_axes
from jaxshard.core.jaxpr import all_equations, open_jaxpr
from jaxshard.core.our_code import package_folder, users_frame
from jaxshard.proofs.equal import Axes, Difference, Differences, axes_named, collective_of
from jaxshard.proofs.walk import Around, Place, walk

CHOICES = {"cond": "which branch lax.cond takes", "while": "how often lax.while_loop iterates"}
"""Primitives on which devices may decide differently, and how an error message names the decision."""

_PAIRWISE = frozenset({"ppermute", "psend", "precv"})
"""Collectives between pairs of devices. Compilers make all devices of the mesh take part in them."""

_LAYERS = {
    package_folder("jaxshard.layers.moe"): "js.moe, ",
    package_folder("jaxshard.layers.attention"): "js.attention, ",
    package_folder("jaxshard.layers") / "head_loss.py": "a chunk of js.head_loss, ",
}
_ENGINES = package_folder("jaxshard.engines")


class Parting(NamedTuple):
    """A collective that some of its devices may never reach, so that the others would wait forever.

    Attributes:
      branch: the `cond` or `while` equation that contains the collective and whose predicate may differ between
        devices; if there are several, the outermost.
      differ: the mesh axes over which the predicate may differ.
      collective: the equation of the collective.
      axes: the mesh axes over which the collective communicates.
    """

    branch: Any
    differ: Axes
    collective: Any
    axes: Axes


class Choice(NamedTuple):
    """A `cond` or `while` that devices may decide differently, and into which the compiler may insert collectives.

    Attributes:
      line: `file:line` of the user's code.
      differ: the mesh axes over which the predicate may differ.
    """

    line: str
    differ: Axes


class Reading(NamedTuple):
    """The result of `read_partings`: the collectives of a jaxpr that may hang, and branches to check after compilation.

    Attributes:
      partings: the collectives that some of their devices may not reach, in the order of the program.
      choices: other branches and loops whose predicate may differ between devices. They are outside of any `shard_map`
        or in one with Auto axes, where the compiler may insert collectives; the jaxpr does not show whether it will.
    """

    partings: list[Parting]
    choices: tuple[Choice, ...]


def read_partings(program: Any) -> Reading:
    """Find the collectives in a jaxpr that may hang, since not all of their devices may reach them.

    A collective hangs in a branch or loop that only some of its devices enter, such as `lax.psum` in a `lax.cond` whose
    predicate depends on the rows of the device.

    Args:
      program: a jaxpr of global arrays, closed or not, such as `jitted.trace(*args).jaxpr`.
    """
    reader = _Reader()
    if any(equation.primitive.name in CHOICES for equation in all_equations(program)):  # most programs have none
        jaxpr, _ = open_jaxpr(program)
        walk(program, [Difference()] * len(jaxpr.invars), reader)
    return Reading(reader.partings, tuple(reader.choices))


class _Reader(Differences):
    """Collect collectives inside branches and loops whose predicates may differ between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.partings: list[Parting] = []
        self.choices: dict[Choice, None] = {}

    def conclude(self, place: Place, operands: list[Difference], results: list[Difference]) -> list[Difference]:
        decisive = [one for one in place.around if one.choice is not None and one.choice.over]
        if place.settled and decisive:
            self.read(place, decisive)
        return results

    def read(self, place: Place, decisive: list[Around]) -> None:
        """Record the equation at `place`: a collective as a `Parting`; else the branch around it as a `Choice`.

        Args:
          place: the equation, and the equations that contain it.
          decisive: the branches and loops around the equation whose predicates may differ between devices.
        """
        sizes, manual = _mesh_around(place)
        kind = collective_of(place.equation)
        if kind is None:
            if manual < sizes.keys() or not _maps_around(place):
                self.choices[Choice(_line(decisive[-1].equation), decisive[-1].choice.over)] = None
            return
        axes = frozenset(sizes) if kind in _PAIRWISE else axes_named(place.equation) & sizes.keys()
        # Report only the outermost branch that may separate devices of this collective.
        for one in decisive:
            if differ := one.choice.over & axes:
                self.partings.append(Parting(one.equation, differ, place.equation, axes_named(place.equation)))
                break


def check_together(program: Any, what: str) -> tuple[Choice, ...]:
    """Raise if a traced program may hang: some devices may never reach a collective in which others wait.

    Args:
      program: a jaxpr of global arrays, closed or not, such as `jitted.trace(*args).jaxpr`.
      what: the subject of the message, such as "the step".

    Returns:
      The branches and loops into which the compiler may insert collectives that hang: check these in the compiled
      program.

    Raises:
      ValueError: there is such a collective; the message names the line of each branch and the collectives in it.
    """
    partings, choices = read_partings(program)
    if not partings:
        return choices
    branches: dict[str, list[Parting]] = {}
    for one in partings:
        branches.setdefault(_line(one.branch), []).append(one)
    axes = sorted(frozenset().union(*(one.differ for one in partings)))
    listed = "".join(f"\n  - {_describe_branch(line, found)}" for line, found in branches.items())
    raise ValueError(
        f"{what} could hang: some devices may never reach a collective in which others wait for them:{listed}\n"
        "Compute what communicates before the branch, on all devices, and choose afterwards, by jnp.where or a weight "
        f"of zero. Or decide for all devices together: jax.lax.pmax(predicate, {tuple(axes)}). Or use js.auto(), under "
        "which the loss, outside of any shard_map, sees all rows and takes one branch."
    )


def _maps_around(place: Place) -> list[dict[str, Any]]:
    """Return the parameters of each `shard_map` equation that contains the equation at `place`, the outermost first."""
    return [one.equation.params for one in place.around if one.equation.primitive.name == "shard_map"]


def _mesh_around(place: Place) -> tuple[dict[str, int], Axes]:
    """Return ({mesh axis: size}, the manual axes) of the `shard_map` around an equation, without axes of size 1."""
    maps = _maps_around(place)
    sizes = {axis: size for axis, size in dict(maps[-1]["mesh"].shape).items() if size > 1} if maps else {}
    return sizes, frozenset().union(*map(newly_manual_axes, maps)) & sizes.keys()


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
    """Describe a collective, for example "all_gather of a weight, f32[2,16] over ['data'] (net.py:20)"."""
    operand = ", ".join(x.aval.str_short(short_dtypes=True) for x in equation.invars[:1])
    line = users_frame(_frames(equation))
    where = f" ({line})" if line else ""
    return f"{collective_of(equation)} of {_whose(equation)}{operand} over {sorted(axes_named(equation))}{where}"


def _whose(equation: Any) -> str:
    """Return who issued a collective, as text such as "js.moe, " or "a weight, "; "" for the user's own code."""
    frames = _frames(equation)
    for frame in frames[: frames.index(users_frame(frames)) if users_frame(frames) else None]:
        path = Path(frame.rpartition(":")[0])
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
    """Return the `file:line` of the user's code that made an equation, or else of the innermost code outside of JAX."""
    frames = _frames(equation)
    return users_frame(frames) or next((one for one in frames if "/jax/" not in one), "a line that is not known")
