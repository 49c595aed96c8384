"""Find means that are wrong if a batch is computed in parts: `js.Mean(nats.sum(), 32)` has the weight 32 for any part.

The loss is traced for all rows and for one of n equal parts of the rows, and `Positions` follows both traces, with rows
in the place of positions. So for every total and weight it finds what the values of n parts add up to, in multiples of
the value for all rows:

    total, weight                            n parts add up to          the mean of the parts is
    nats.sum(), nats.size or mask.sum()      1 and 1 times as much      right
    nats.mean(), 1 or penalty(params), 1     n and n times as much      right: a mean of means, or a penalty
    nats.sum(), 32                           1 and n times as much      too small by 1 / n
    nats.mean(), nats.size                   n and 1 times as much      too large by n

Nothing is known about a value that an operation has computed from several rows, and it is not refused, since a right
loss must never be refused. `js.parity` compares the numbers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxshard.adapt.positionwise.facts import LOST, SAME, Fact, Kind, Mixes, along, guess
from jaxshard.adapt.positionwise.prove import returning_loss
from jaxshard.adapt.positionwise.rules import has_rule
from jaxshard.adapt.positionwise.shares import is_share
from jaxshard.adapt.positionwise.walk import Positions
from jaxshard.core.jaxpr import open_jaxpr, results_alone, trace_or_none
from jaxshard.core.loss import Loss, Mean, explain_weight
from jaxshard.core.types import PyTree
from jaxshard.proofs.walk import Place

_ROW_BY_ROW = frozenset({"iota", "random_bits", "random_split", "random_gamma", "rng_bit_generator", "gather"})
"""Primitives that number rows, draw random numbers for rows, or look something up (`log_p[jnp.arange(rows), labels]`).

Their results differ between parts of the rows, but a sum over n times as many rows is a sum of n times as many terms.
"""


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

_COLLECTIVES = frozenset(
    {
        "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced",
        "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter", "all_to_all", "ragged_all_to_all", "ppermute",
    }
)  # fmt: skip
"""Collectives in the user's code, such as a psum of a total. What their results add up to is unknown."""


class _Rows(Positions):
    """The proof `Positions`, applied to the rows of a batch in place of sequence positions; it refuses no operation.

    Instead, a value computed by an operation that mixes rows is LOST (unknown), and no findings are recorded.
    """

    def rule(self, place: Place, facts: list[Fact]) -> list[Fact] | None:
        """Return LOST (unknown) for the results of a collective in the user's loss; otherwise call `Positions.rule`."""
        if place.name in _COLLECTIVES and any(fact != SAME for fact in facts):
            return place.joined(LOST)
        return super().rule(place, facts)

    def after_refusal(self, place: Place, facts: Sequence[Fact]) -> list[Fact]:
        """Return facts about the results of an operation that `Positions` refuses or has no rule for.

        Operations that number rows, draw random numbers, or look something up by the index of a row are taken to treat
        every row independently. The results of all other operations are LOST (unknown).
        """
        pair = self.pair(place)
        made = [guess(*pair.out_shapes(index), self.parts) for index in range(len(place.equation.outvars))]
        counted = any(fact.degree for fact in facts)
        if place.name in _COMPARISONS or (place.name == "add" and _is_integer(place.equation)):
            trusted = True  # of numbers of rows and how many there are
        else:
            trusted = not counted and (place.name in _ROW_BY_ROW or not has_rule(place.name))
        known = not any(is_share(fact) or fact.kind is Kind.LOST for fact in facts)
        if trusted and known and all(fact.kind is Kind.ALONG for fact in made):
            return made
        return place.joined(LOST)

    def guess(self, one: Sequence[int], two: Sequence[int]) -> Fact:
        """Return LOST (unknown) for a result of a refused operation; `Positions` would guess from its shapes."""
        return LOST

    def value(self, values: Sequence[Any], place: Place) -> Fact:
        """Return the fact about a constant: integers and booleans whose size is the number of rows vary by row.

        For example `np.arange(rows)`.

        Args:
          values: the values of the constant in the traces for all rows and for a part of the rows.
          place: the equation that reads it.
        """
        shapes = [np.shape(x) for x in values]
        if shapes[0] != shapes[1] and values[0].dtype.kind in "iub":
            found = guess(shapes[0], shapes[1], self.parts)
            if found.kind is Kind.ALONG:
                return found
        return super().value(values, place)

    def note(self, place: Place, refusal: Mixes) -> None:
        """Do nothing: this class reports a `js.Mean` whose weight is wrong, and no equation without a rule."""

    def check_backward(self, place: Place, facts: list[Fact], results: list[Fact]) -> None:
        """Do nothing: only means are checked here, and the loss computes them in the forward pass."""


def find_unequal_means(
    loss_fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    has_rows: Sequence[bool],
    parts: int,
    *,
    manual: Mapping[str, int] | None = None,
) -> list[str]:
    """Find each `js.Mean` of a loss or its metrics that is wrong if parts of the batch are computed separately.

    For example, `js.Mean(nats.sum(), 32)` has the weight 32 for any part of the batch, so that the mean is too small.
    The loss is traced twice, for all rows and for a part of them; nothing is computed. An empty list is no proof that
    all means are right.

    Args:
      loss_fn: returns a `js.Mean`, a `js.Loss` or, in an evaluation, metrics by name.
      args: the arguments of the loss for one part of the rows, trees of shapes.
      has_rows: for each leaf of `args`, True if its first dimension is the rows of the batch.
      parts: the number of parts of the batch, such as micro-batches or devices.
      manual: the sizes of mesh axes whose names the loss may use in collectives.

    Returns:
      A sentence for each wrong mean, which says how to correct it.
    """
    leaves, tree = jax.tree.flatten(args)
    rows = next((x.shape[0] for x, found in zip(leaves, has_rows, strict=True) if found), 0)
    if parts == 1 or not rows:
        return []
    size = max(rows, 2)  # of one row alone, sizes of 1 are dropped and repeated as others are not

    def trace(rows: int) -> tuple[Any, Any]:
        shapes = [(rows, *x.shape[1:]) if found else x.shape for x, found in zip(leaves, has_rows, strict=True)]
        made = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, leaves, strict=True)]
        env = list((manual or {}).items())
        traced = jax.make_jaxpr(returning_loss(loss_fn), axis_env=env, return_shape=True)
        program, loss = trace_or_none(lambda: traced(*jax.tree.unflatten(tree, made))) or (None, None)
        return program, jax.tree.structure(loss)

    two, structure = trace(size)
    if two is None:
        return []
    with_rows = [var for var, found in zip(open_jaxpr(two)[0].invars, has_rows, strict=True) if found]
    if all_count_rows(two, structure.unflatten(open_jaxpr(two)[0].outvars), with_rows):
        return []
    one, other = trace(size * parts)
    if one is None or structure != other:
        return []
    domain = _Rows(size * parts, parts)
    facts = _means(structure.unflatten(domain.walk(one, two, [along(0) if found else SAME for found in has_rows])))
    means = _means(structure.unflatten(open_jaxpr(one)[0].outvars))
    return [name + text for name, mean in facts.items() for text in _explain(mean, _numbers(one, means[name]), parts)]


def all_count_rows(program: Any, loss: Loss, rows: Sequence[Any]) -> bool:
    """Return True if a jaxpr alone shows that all means of a loss and its metrics are right for parts of a batch.

    A mean is right if one of these is true: its weight is computed from the rows; its weight is a constant, equal to
    the number of terms in the sum that is its total; its weight is 1 and its total does not depend on the rows, as for
    a penalty. If any mean is of another form, return False: the jaxprs for a part and for the full batch must be
    compared.

    Args:
      program: the jaxpr of the loss for a part of the rows.
      loss: the result of the loss, with variables of the jaxpr in place of arrays.
      rows: the input variables that have rows.
    """

    def is_right(total: Any, weight: Any, number: float | None) -> bool:
        if _reads(program, weight, rows):
            return True
        if number is None:
            return False
        if not _reads(program, total, rows):
            return number == 1 and _number(program, total) is None
        return number in _fitting_weights(program, total, rows[0].aval.shape[0])

    return all(
        is_right(*one)
        for mean in _means(loss).values()
        for one in zip(mean.totals, mean.weights, _numbers(program, mean), strict=True)
    )


def _means(loss: Any) -> dict[str, Mean]:
    found = {"": loss.value} | {f"the metric {name!r}: ": metric for name, metric in loss.metrics.items()}
    return {name: mean for name, mean in found.items() if isinstance(mean, Mean)}


def _is_integer(eqn: Any) -> bool:
    return bool(np.issubdtype(eqn.outvars[0].aval.dtype, np.integer))


def _reads(program: Any, atom: Any, rows: Sequence[Any]) -> bool:
    jaxpr, _ = open_jaxpr(program)
    if isinstance(atom, Literal):
        return False
    _, used = results_alone(program, [atom])
    return any(found and var in rows for var, found in zip(jaxpr.invars, used, strict=True))


def _fitting_weights(program: Any, total: Any, rows: int) -> set[float]:
    """Return the constants that are right weights of a `js.Mean` with this total (a variable of the jaxpr).

    If the total is a sum: the number of rows, and the number of terms. If it is a sum divided by the number of its
    terms: 1. If the jaxpr does not show how it is computed: the empty set.
    """
    factor, divisor, eqn = 1.0, 1.0, _maker(program, total)
    while eqn is not None and eqn.primitive.name != "reduce_sum":
        operands = sorted(eqn.invars, key=lambda atom: isinstance(atom, Literal))
        number = _number(program, operands[-1])
        if eqn.primitive.name == "mul" and number is not None:
            factor *= number
        elif eqn.primitive.name == "div" and number is not None and operands == eqn.invars:
            divisor *= number
        elif eqn.primitive.name not in ("neg", "convert_element_type"):
            return set()
        eqn = _maker(program, operands[0])
    if eqn is None:
        return set()
    entries = math.prod(eqn.invars[0].aval.shape)
    if divisor == entries:
        return {1.0}
    # A factor may be 1 / entries too.
    return set() if divisor != 1 or math.isclose(factor * entries, 1, rel_tol=1e-6) else {float(rows), float(entries)}


def _number(program: Any, atom: Any) -> float | None:
    """Return the value of a jaxpr's variable if it is a constant or a sum such as `jnp.ones(5).sum()`; else None."""
    jaxpr, consts = open_jaxpr(program)
    value = atom.val if isinstance(atom, Literal) else dict(zip(jaxpr.constvars, consts, strict=True)).get(atom)
    if value is not None:
        return None if isinstance(value, jax.core.Tracer) else float(np.asarray(value))
    eqn = _maker(program, atom)
    if eqn is None or eqn.primitive.name != "reduce_sum":
        return None
    repeated = _maker(program, eqn.invars[0])
    if repeated is None or repeated.primitive.name != "broadcast_in_dim" or repeated.invars[0].aval.shape:
        return None
    one = _number(program, repeated.invars[0])
    return None if one is None else one * math.prod(eqn.invars[0].aval.shape)


def _numbers(program: Any, mean: Mean) -> list[float | None]:
    """Return for each weight of a mean its value if it is a constant, else None."""
    return [_number(program, weight) for weight in mean.weights]


def _maker(program: Any, atom: Any) -> Any | None:
    """Return the equation of a jaxpr that computes a variable; None for an argument or a constant."""
    return next((eqn for eqn in open_jaxpr(program)[0].eqns for var in eqn.outvars if var is atom), None)


def _explain(facts: Any, numbers: Sequence[float | None], parts: int) -> Iterator[str]:
    for total, weight, number in zip(facts.totals, facts.weights, numbers, strict=True):
        known = all(fact.kind in (Kind.SAME, Kind.SUM) and not math.isnan(fact.degree) for fact in (total, weight))
        if not known or total.zero or weight.zero or total.shares == weight.shares:
            continue
        if (total.shares, weight.shares) == (0, 1):
            value = ("w", f"{parts} w") if number is None else (f"{number:.6g}", f"{parts * number:.6g}")
            yield explain_weight(value[0], parts, value[1])
        elif (total.shares, weight.shares) == (1, 0):
            yield (
                "the total of js.Mean is no sum over rows, but its weight is: those of the "
                f"{parts} parts of a batch add up to {parts} times that of the whole batch; if it is the same for all "
                "rows, or a mean over them, write js.Mean(value, 1), and add that to other means"
            )
