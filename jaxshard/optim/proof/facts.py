"""What the proof can know of one value in the program of a transform: the abstract domain, and how two facts join.

The proof asks one question: does an optimizer give the same updates when its arrays are cut into parts, padded with
zeros or reshaped? It derives a `Fact` about every value of the program. From the most to the least that can be known:

    kind          claim, for every content of the arrays                      examples
    UNIFORM       one number, on all devices and however the arrays are cut   the count, the rate, zeros_like(g)
    INDEPENDENT   an array of its own, which no cutting changes               jnp.arange(3.0), the last ten losses
    ELEMENTWISE   element i is f(element i of one parameter's arrays), and    g, b1 * mu + (1 - b1) * g
                  f is the same for every i
    PARTIAL_SUM   this device's term of a sum that is UNIFORM once complete   jnp.sum(g**2) of this device's part
    MIXED         nothing                                                     g.T, jnp.cumsum(g), g + another gradient

where `g`, `mu` are the gradient and the first moment of a parameter. Every claim implies those above it in the diagram,
so that a value of which either of two facts holds may be given the lowest one above both (`join`):

                             MIXED
               /               |              \\
         INDEPENDENT      ELEMENTWISE      PARTIAL_SUM         (ELEMENTWISE and PARTIAL_SUM: one for each parameter)
               \\               |
                            UNIFORM

A UNIFORM value is no PARTIAL_SUM: summed over n devices it would count n times (unless it is zero).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from jaxshard.core.compat import equation_frames
from jaxshard.core.text_table import first_words


class Kind(IntEnum):
    """The strength of what is known of a value, from UNIFORM, the strongest claim, to MIXED, which claims nothing.

    INDEPENDENT, ELEMENTWISE and PARTIAL_SUM cannot be compared (see the diagram at the top of the file): the numbers
    only sort facts, so that `join` has fewer cases.
    """

    UNIFORM = 0
    INDEPENDENT = 1
    ELEMENTWISE = 2
    PARTIAL_SUM = 3
    MIXED = 4


class Origin(NamedTuple):
    """The equation that made a value MIXED, with the transform and the line behind it, or an array without them.

    `text` completes the sentence: "clip_by_global_norm: reduce_sum at optax/transforms/_clipping.py:97" "mixes
    elements of w".
    """

    primitive: str
    text: str
    transform: str = ""
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.transform}: {self.primitive} at {self.where}" if self.where else self.primitive
        return f"{place} {self.text}"


class Fact(NamedTuple):
    """The facts about one value of the program.

    Attributes:
      kind: The claim.
      param: The parameter on whose elements an ELEMENTWISE value depends, as an index into `Context.names`.
      influences: The parameters whose arrays have any influence on the value.
      padding: The finite number that a UNIFORM value is, or that the elements of an ELEMENTWISE value are where the
        parameter and its gradient are zero padding; None where it is not known. A sum over a padded array is the sum
        over the array only where this is 0.
      summed: The parameters all of whose elements a PARTIAL_SUM adds up. Not the same as `influences`:
        `sum(a * norm_of_everything)` is influenced by all parameters, but is a sum over `a` alone.
      why: What is to blame where the value is not what it should be.
    """

    kind: Kind
    param: int | None = None
    influences: frozenset[int] = frozenset()
    padding: float | None = None
    summed: frozenset[int] = frozenset()
    why: Origin | None = None

    @property
    def is_zero(self) -> bool:
        return self.kind is Kind.UNIFORM and self.padding == 0


class Context(NamedTuple):
    """The surroundings of the program that is analysed.

    Attributes:
      names: The path of each parameter.
      shapes: The shapes of each parameter in the two traces.
      axes: The mesh axes that split the arrays; a sum over parts and then over all of these axes is UNIFORM.
      stop_file: The file whose frames end the part of a traceback that belongs to the transform.
      totals: Whether a sum over all elements of all parameters counts as UNIFORM, without any axes. That is so for
        global arrays, which are padded, reshaped or stacked, but not cut.
      call: The outermost call around the program. Traces of jitted functions are cached and keep the traceback of
        their first caller, so that this call tells the transform and they may not.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    axes: tuple[str, ...]
    stop_file: str
    totals: bool = False
    call: Any = None

    def some_names(self, params: Iterable[int]) -> str:
        """The paths of some parameters, the first three in full."""
        return first_words([self.names[param] for param in sorted(params)])


def all_influences(facts: Iterable[Fact]) -> frozenset[int]:
    """The parameters that have an influence on any of the values."""
    return frozenset().union(*(fact.influences for fact in facts))


def mixed(influences: Iterable[int], why: Origin | None) -> Fact:
    """The fact that claims nothing."""
    return Fact(Kind.MIXED, influences=frozenset(influences), why=why)


def join(equation: Any, one: Fact, other: Fact, context: Context) -> Fact:
    """Return the strongest fact that holds of a value of which either of two facts holds.

    It is sound because it only forgets: the kind is at least as high in the diagram as both, influences are united, and
    a padding or a completed sum that only one of both claims is dropped.
    """
    influences = one.influences | other.influences
    padding = one.padding if one.padding == other.padding else None
    low, high = sorted((one, other), key=lambda fact: fact.kind)
    if one.kind is other.kind and one.param == other.param:
        return one._replace(influences=influences, padding=padding, summed=one.summed & other.summed)
    if high.kind is Kind.MIXED or (low.kind is Kind.UNIFORM and high.kind is Kind.INDEPENDENT):
        return high._replace(influences=influences)
    if low.kind is Kind.UNIFORM and high.kind is Kind.ELEMENTWISE:
        return high._replace(influences=influences, padding=padding)
    if low.kind is Kind.INDEPENDENT:
        return mixed(influences, low.why)
    return mixed(influences, origin_of(equation, context, f"mixes {context.some_names(influences)}"))


def origin_of(equation: Any, context: Context, text: str) -> Origin:
    """Name the transform and the line behind an equation: the innermost update or init function that is not JAX's.

    Inner functions have qualified names such as "scale_by_adam.<locals>.update_fn", which is how the transform that an
    `update_fn` belongs to gets its name. `equation` may be None, for a constant.
    """
    primitive = "a constant" if equation is None else equation.primitive.name
    for candidate in (context.call, equation):
        frames = [] if candidate is None else equation_frames(candidate)
        end = next((i for i, (file, _, _) in enumerate(frames) if file == context.stop_file), len(frames))
        frames = [frame for frame in frames[:end] if "/jax/" not in frame[0].replace("\\", "/")]
        for file, line, function in frames:
            parts = function.replace(".<locals>", "").split(".")
            if len(parts) > 1 and parts[-1].lstrip("_").startswith(("update", "init")):
                return Origin(primitive, text, parts[-2], f"{_short(file)}:{line}")
        if frames:
            file, line, function = frames[0]
            return Origin(primitive, text, function.replace(".<locals>", ""), f"{_short(file)}:{line}")
    return Origin(primitive, text)


def _short(file: str) -> str:
    path = file.replace("\\", "/")
    return path.split("site-packages/")[-1] if "site-packages/" in path else "/".join(path.split("/")[-2:])
