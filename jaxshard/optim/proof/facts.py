"""The abstract domain of the elementwise proof: facts about a value, and the join of two facts.

The question is: does an optimizer compute the same updates if its arrays are sharded, padded with zeros or reshaped?
The proof derives a `Fact` about every value of the jaxpr. From the strongest to the weakest:

    kind          claim, for all values of the arrays                         examples
    UNIFORM       a scalar that is equal on all devices, for any sharding     the count, the rate, zeros_like(g)
    INDEPENDENT   an array that is equal on all devices, for any sharding     jnp.arange(3.0), the last ten losses
    ELEMENTWISE   element i is f(element i of one parameter's arrays), and    g, b1 * mu + (1 - b1) * g
                  f is the same for every i
    PARTIAL_SUM   this device's term of a sum, whose total is UNIFORM         jnp.sum(g**2) of this device's shard
    MIXED         none                                                        g.T, jnp.cumsum(g), g + another gradient

where `g`, `mu` are the gradient and the first moment of a parameter. Every claim implies the claims above it in the
diagram below. If one of two facts holds for a value, but it is not known which, `join` returns the lowest fact in the
diagram that is above both:

                             MIXED
               /               |              \\
         INDEPENDENT      ELEMENTWISE      PARTIAL_SUM         (ELEMENTWISE and PARTIAL_SUM: one for each parameter)
               \\               |
                            UNIFORM

A UNIFORM value is not a PARTIAL_SUM: summed over n devices it would count n times (unless it is zero).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from jaxshard.core.compat import equation_frames
from jaxshard.core.jaxpr import CALLS
from jaxshard.core.our_code import short_path
from jaxshard.core.text_table import first_words
from jaxshard.proofs.walk import Place


class Kind(IntEnum):
    """The kind of claim about a value of an optimizer's program, from the strongest to the weakest.

        UNIFORM        a number that is equal on all devices
        INDEPENDENT    an array that is equal on all devices
        ELEMENTWISE    an array whose element i depends only on element i of one parameter's arrays
        PARTIAL_SUM    a device's term of a sum over all devices
        MIXED          anything: nothing is known

    The three kinds in the middle are not ordered among each other; their integers only sort facts.
    """

    UNIFORM = 0
    INDEPENDENT = 1
    ELEMENTWISE = 2
    PARTIAL_SUM = 3
    MIXED = 4


class Origin(NamedTuple):
    """Why a value is MIXED (nothing is known about it): the equation or array to blame, for an error message.

    As text, for example:

        clip_by_global_norm: reduce_sum at optax/transforms/_clipping.py:97 mixes elements of w

    Attributes:
      primitive: the name of the equation's primitive, or of the array.
      text: the end of the sentence, such as "mixes elements of w".
      transform: the name of the optax transform; "" if unknown.
      where: file:line of the equation; "" if unknown.
    """

    primitive: str
    text: str
    transform: str = ""
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.transform}: {self.primitive} at {self.where}" if self.where else self.primitive
        return f"{place} {self.text}"


class Fact(NamedTuple):
    """A claim about one value of an optimizer's program, such as "element i depends only on element i of w".

    Attributes:
      kind: The claim, such as ELEMENTWISE; see `Kind`.
      param: For ELEMENTWISE, the parameter on whose elements the value depends, as an index into `Context.names`.
      influences: The parameters on whose arrays the value depends in any way.
      padding: The value of a UNIFORM scalar; for an ELEMENTWISE array its value in the padding, where parameter and
        gradient are zero. None if it is unknown or not finite. A sum over a padded array equals the sum over the array
        only if this value is 0.
      summed: For PARTIAL_SUM, the parameters whose elements are all summed. It may differ from `influences`: the sum of
        `a * global_norm` is influenced by all parameters, but sums only over `a`.
      why: The equation to blame if the claim is too weak.
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
    """The parameters of an optimizer's program and the mesh axes that split them, to which facts and messages refer.

    Attributes:
      names: The path of each parameter.
      shapes: The two shapes of each parameter: the program is traced for both, to detect what depends on shapes.
      axes: The mesh axes that split the arrays; a sum over a shard and then over all of these axes is equal on all
        devices.
      stop_file: The file of this package that traces the transform: only the calls that start from it are the
        transform's.
      totals: True if a sum over all elements of all parameters counts as a number that is equal on all devices, without
        any axes. This is right for global arrays, which are padded, reshaped or stacked, but not split.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    axes: tuple[str, ...]
    stop_file: str
    totals: bool = False

    def some_names(self, params: Iterable[int]) -> str:
        """Return the paths of parameters, given by index, as text for a message; only the first three are named."""
        return first_words([self.names[param] for param in sorted(params)])


def all_influences(facts: Iterable[Fact]) -> frozenset[int]:
    """Return the union of `influences`: the parameters on which at least one of the values depends."""
    return frozenset().union(*(fact.influences for fact in facts))


def mixed(influences: Iterable[int], why: Origin | None) -> Fact:
    """Return the fact that claims nothing about a value, except on which parameters it depends."""
    return Fact(Kind.MIXED, influences=frozenset(influences), why=why)


def join(place: Place, one: Fact, other: Fact, context: Context) -> Fact:
    """Return the strongest fact that is true whichever of two facts holds, as for the results of two branches.

    The result has the influences of both facts, but no padding value and no summed parameter that only one of them
    claims.
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
    return mixed(influences, origin_of(place, context, f"mixes {context.some_names(influences)}"))


def origin_of(place: Place, context: Context, text: str) -> Origin:
    """Find the optax transform and the line of code that made an equation, for an error message.

    The transform is the innermost `update` or `init` function in the equation's traceback that is not JAX's own. Its
    name comes from the function's qualified name, such as "scale_by_adam.<locals>.update_fn".

    Args:
      place: the equation, and the equations that contain it.
      context: the parameters and files of the traced program.
      text: the end of the message, such as "mixes elements of w".
    """
    primitive = "a constant" if place.equation is None else place.name
    # JAX caches jaxprs of jitted functions with the traceback of their first caller, so the outermost call around an
    # equation identifies the transform more reliably than the equation itself.
    calls = [one.equation for one in place.around if one.equation.primitive.name in CALLS]
    for candidate in (*calls[:1], *place.equations[:1]):
        frames = equation_frames(candidate)
        end = next((i for i, (file, _, _) in enumerate(frames) if file == context.stop_file), len(frames))
        frames = [frame for frame in frames[:end] if "/jax/" not in frame[0].replace("\\", "/")]
        for file, line, function in frames:
            parts = function.replace(".<locals>", "").split(".")
            if len(parts) > 1 and parts[-1].lstrip("_").startswith(("update", "init")):
                return Origin(primitive, text, parts[-2], f"{short_path(file)}:{line}")
        if frames:
            file, line, function = frames[0]
            return Origin(primitive, text, function.replace(".<locals>", ""), f"{short_path(file)}:{line}")
    return Origin(primitive, text)
