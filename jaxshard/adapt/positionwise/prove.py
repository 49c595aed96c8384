"""Prove that a loss treats every position independently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxshard.adapt.model_state import is_declared
from jaxshard.adapt.positionwise.facts import SAME, Fact, Kind, along
from jaxshard.adapt.positionwise.report import FIXES, Finding, locate
from jaxshard.adapt.positionwise.walk import Positions
from jaxshard.core.loss import Loss, Max, Mean, Sum, as_loss
from jaxshard.core.marks import show_marks
from jaxshard.core.tree import path_str
from jaxshard.core.types import PyTree


def find_mixing(
    loss_fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    dims: Sequence[int | None],
    parts: int,
    *,
    axes: tuple[str, ...] = (),
    manual: Mapping[str, int] | None = None,
) -> list[Finding]:
    """Find the operations of a loss that give wrong results if each device runs the loss on a part of the positions.

    An empty list is a proof: for any order of the positions and any split into equal parts, the totals, loss weights,
    metrics and gradients of the parts combine to the totals, loss weights, metrics and gradients for all positions.
    (The proof trusts that `jax.custom_vjp` and `jax.custom_jvp` rules are derivatives, and that `js.attention` and
    `js.positions` see all positions.)

    Args:
      loss_fn: returns a `js.Mean`, a `js.Loss` or, in an evaluation, metrics by name.
      args: the arguments of the loss for all positions, trees of shapes.
      dims: for each leaf of `args`, the dimension of its positions, or None.
      parts: the number of parts; it must divide the number of positions.
      axes: the mesh axes that split the positions.
      manual: the sizes of mesh axes whose names the loss may use in collectives.

    Raises:
      ValueError: arrays have different numbers of positions, or `parts` does not divide them.
    """
    tree: Any
    leaves, tree = jax.tree.flatten(args)
    length = _common_length(args, dims, parts)

    def shrink(x: Any, dim: int | None) -> Any:
        shape = [size // parts if at == dim else size for at, size in enumerate(x.shape)]
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    whole = tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    part = tree.unflatten([shrink(x, dim) for x, dim in zip(leaves, dims, strict=True)])
    env = list((manual or {}).items())
    with show_marks(length):
        one, out = jax.make_jaxpr(returning_loss(loss_fn), axis_env=env, return_shape=True)(*whole)
        two, other = jax.make_jaxpr(returning_loss(loss_fn), axis_env=env, return_shape=True)(*part)
    results: Any = jax.tree.structure(out)
    if results != jax.tree.structure(other):
        return [Finding("the loss", "returns other metrics on a part of the positions", "the loss", "", "", "")]
    positions = Positions(length, parts, axes)
    facts = [SAME if dim is None else along(dim) for dim in dims]
    found = results.unflatten(positions.walk(one, two, facts))
    if not positions.findings:  # after a finding the facts about the results are guesses
        _check_results(positions, found)
    return positions.findings


def returning_loss(loss_fn: Callable[..., Any]) -> Callable[..., Loss]:
    """Wrap a loss function that may return a `js.Mean` or a dict of metrics, so that it returns a `js.Loss`."""

    def run(*args: Any) -> Loss:
        output = loss_fn(*args)
        # An evaluation returns metrics by name, including "loss", which as_loss would refuse as a metric's name.
        return Loss(Mean(0.0, 1.0), metrics=output) if isinstance(output, dict) else as_loss(output)

    return run


def _common_length(args: PyTree, dims: Sequence[int | None], parts: int) -> int:
    paths = jax.tree_util.tree_leaves_with_path(args)
    lengths = {path_str(path): x.shape[dim] for (path, x), dim in zip(paths, dims, strict=True) if dim is not None}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"arrays must have the same number of positions, got {lengths or 'none with positions'}")
    length: int = next(iter(lengths.values()))
    if length % parts:
        raise ValueError(f"{length} positions are not divisible by {parts}")
    return length


def _check_results(positions: Positions, loss: Any) -> None:
    """Add a finding (an operation to report) for every result of the loss that can't be combined over devices.

    Args:
      positions: the proof, to whose findings they are added.
      loss: a `js.Loss` that has, in place of each array, the fact how this array depends on the positions.
    """
    for name, metric in ({"the loss": loss.value} | loss.metrics).items():
        for text, facts in _why_not_combined(metric):
            cause = next((fact.cause for fact in facts if fact.cause is not None), None)
            where, via = ("the loss", "") if cause is None else locate([cause.pair.one, *reversed(cause.calls)])
            fix = FIXES["sum"]
            positions.findings.append(
                Finding(name if name == "the loss" else f"the metric {name!r}", text, where, via, "", fix)
            )
    for path, fact in jax.tree_util.tree_leaves_with_path(loss.state, is_leaf=_is_state):
        if is_declared(fact):
            for text, _ in _why_not_combined(fact):
                positions.findings.append(
                    Finding(f"the state {path_str(path)}", text, "the loss", "", "", FIXES["sum"])
                )
        elif fact.kind is not Kind.LOST and not (
            fact.kind in (Kind.SAME, Kind.SUM) and (fact.zero or fact.shares == 1)
        ):
            text = "is not the mean of its values on all devices"
            positions.findings.append(Finding(f"the state {path_str(path)}", text, "the loss", "", "", ""))


def _is_fact(x: Any) -> bool:
    return isinstance(x, Fact)


def _is_state(x: Any) -> bool:
    return _is_fact(x) or is_declared(x)


def _why_not_combined(metric: Any) -> Iterator[tuple[str, tuple[Fact, ...]]]:
    leaves = jax.tree.leaves(metric, is_leaf=_is_fact)
    if isinstance(metric, Mean):
        half = len(leaves) // 2
        for total, weight in zip(leaves[:half], leaves[half:], strict=True):
            kinds = {total.kind, weight.kind}
            if Kind.LOST in kinds or total.zero or weight.zero:
                continue
            if not kinds <= {Kind.SAME, Kind.SUM}:
                yield "is a js.Mean of a value that is not a sum over the positions", (total, weight)
            elif math.isnan(total.degree + weight.degree):
                yield "depends on how many positions there are", (total, weight)
            elif total.shares != weight.shares:
                text = (
                    f"adds up over n devices to n**{total.shares:g} times the total and n**{weight.shares:g} times the "
                    "weight of all positions"
                )
                yield text, (total, weight)
    elif isinstance(metric, Sum):
        for fact in leaves:
            is_sum = fact.kind in (Kind.SAME, Kind.SUM) and fact.shares == 0
            if fact.kind is not Kind.LOST and not fact.zero and not is_sum:
                yield "is a js.Sum of a value that is not a sum over the positions", (fact,)
    elif isinstance(metric, Max):
        for fact in leaves:
            if fact.kind not in (Kind.LOST, Kind.MAX) and not (fact.kind is Kind.SAME and fact.degree == 0):
                yield "is a js.Max of a value that is not a maximum over the positions", (fact,)
