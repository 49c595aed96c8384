"""`js.plan.search`: the layouts of a model on a topology, ranked by predicted time, the best ones compiled."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from jaxshard.core.layout import human_bytes
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.tree import abstract
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.cost.hardware import Chip
from jaxshard.cost.hardware import chip as chip_of
from jaxshard.plan.arrange import arrange
from jaxshard.plan.compiled.compile_for import compile_for
from jaxshard.plan.planned import planned_devices
from jaxshard.plan.predict import predict
from jaxshard.plan.prediction import Prediction
from jaxshard.plan.search.candidates import Candidate, candidates
from jaxshard.plan.search.estimate import Estimate, Estimator
from jaxshard.plan.search.facts import facts_of
from jaxshard.plan.search.ranking import Plan, Ranking
from jaxshard.plan.search.reasons import reason_for
from jaxshard.plan.time.network import Group, group_of
from jaxshard.training.step import make_step

_WANTED = 8
"""As many plans are looked for; those above `_PREDICTED` are not predicted any more."""
_PREDICTED = 32
_PER_PIECE = 0.004
"""A plan is preferred to one with an axis more unless it is slower by this share: no prediction is so exact."""
_ALIKE = 2
"""Of candidates that differ in sizes alone so many are predicted."""


def search(
    init_fn: InitFn,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: PyTree,
    topology: str,
    *,
    num_slices: int = 1,
    precision: Literal["bf16"] | None = None,
    chip: Chip | None = None,
    price: float | None = None,
    seconds: float = 90.0,
    compile: int = 0,
) -> Ranking:
    """Find how to split a model over a topology: axes, strategy, schedule, micro-batches and remat.

    All ways that the shapes of the model and its batch allow are listed: sizes of the axes data, replica, tensor,
    context, expert and pipe that multiply to the devices, strategies ddp to fsdp and hsdp, what blocks keep for their
    backward pass, micro-batches and the schedules of pipelines. Arithmetic on weights and on what one block keeps
    refuses those that can't fit and puts the others in order. The best are predicted (`js.plan.predict`), until enough
    of them fit. The search does not change the model, the batch or the numerics: what it proposes computes the same.

    Args:
      init_fn: as for `js.layout`. Pipelines are tried for the `init` and `loss` of a `js.Stacked`.
      loss_fn: as for `js.make_step`. One that returns a scalar runs under `js.auto`.
      tx: the optimizer.
      batch: a tree of global arrays or `jax.ShapeDtypeStruct`. Axes that split positions are tried where labels stand
        beside the inputs ({"tokens": [B, T], "targets": [B, T]}).
      topology: as for `js.plan.planned_mesh`, such as "v5e:16x16" or "h100:8x4".
      num_slices: that many TPU slices.
      precision: as for `js.explicit`.
      chip: the limits of a device; by default those of the topology.
      price: of one device for an hour, for `prediction.price_per_billion_tokens`.
      seconds: begin no prediction after so many.
      compile: ask the compiler of the topology about so many of the best (`js.plan.compile_for`), until as many fit.

    Returns:
      The ranking: `print(ranking)`, `ranking.best.axes`, `.strategy`, `.engine`.

    Raises:
      ValueError: no such topology, or a batch without rows.

    Example:
        ranking = js.plan.search(model.init, model.loss, tx, batch, "v5e:16x16", precision="bf16")
        print(ranking)
        plan = ranking.best
        layout = js.layout(plan.strategy, js.make_mesh(**plan.axes), model.init, tx)
        step = js.make_step(model.loss, tx, layout, engine=plan.engine)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layouts that are only tried
        return _search(
            init_fn, loss_fn, tx, abstract(batch), topology, num_slices, precision, chip, price, seconds, compile
        )  # fmt: skip


def _search(
    init_fn: InitFn, loss_fn: LossFn, tx: optax.GradientTransformation, batch: PyTree, topology: str, num_slices: int,
    precision: str | None, chip: Chip | None, price: float | None, seconds: float, compile: int,
) -> Ranking:  # fmt: skip
    started = time.perf_counter()
    devices = planned_devices(topology, num_slices=num_slices)
    limits = chip or chip_of(devices[0].device_kind, num_cores=devices[0].num_cores)
    if limits is None:
        raise ValueError(f"js.plan.search: the chip of {topology} is not known; give chip=")
    facts = facts_of(init_fn, loss_fn, tx, batch, len(devices), precision)
    mesh_of = cache(lambda axes: arrange(topology, devices, num_slices, dict(axes)))
    estimator = Estimator(facts, limits, _groups(mesh_of, limits))
    listed = list(candidates(facts, len(devices), num_slices=num_slices, precision=precision))
    estimated = [(one, estimator.estimate(one)) for one in listed]
    fitting = [(one, found) for one, found in estimated if found.bytes <= limits.usable_bytes]
    refused: Counter[str] = Counter()
    if not listed:
        refused[f"{facts.rows} rows can't be split over {len(devices)} devices"] += 1
    if too_large := len(estimated) - len(fitting):
        least = min(found.bytes for _, found in estimated if found.bytes > limits.usable_bytes)
        refused[f"too large: {human_bytes(least)} or more of {human_bytes(limits.usable_bytes)}"] = too_large

    def ask(one: Candidate) -> Prediction | None:
        """Predict a candidate; None where the library refuses it."""
        try:
            layout = make_layout(one.strategy(), mesh_of(one.axes), init_fn, tx)
            return predict(layout, loss_fn, batch, one.engine(), tx=tx, chip=chip, price=price)
        except (ValueError, TypeError, NotImplementedError) as error:
            refused[" ".join(str(error).split())[:200]] += 1
            return None

    plans: list[Plan] = []
    predicted = 0
    shortest: dict[Any, float] = {}  # how far predictions of a kind are above their bounds, at least
    for one, found in _varied(sorted(fitting, key=_urgency)):
        late = time.perf_counter() - started > seconds
        if late or predicted >= _PREDICTED or sum(plan.fits is True for plan in plans) >= _WANTED:
            break
        if found.bytes * shortest.get(_kind(one), 1.0) > limits.usable_bytes:
            refused["does not fit as others of its kind"] += 1
            continue
        predicted += 1
        if (prediction := ask(one)) is None:
            continue
        above = prediction.peak.total / found.bytes
        shortest[_kind(one)] = min(above, shortest.get(_kind(one), above))
        if prediction.fits is False:
            refused["does not fit by its prediction"] += 1
        else:
            plans.append(Plan(one, *_times(prediction, found), prediction))
    plans.sort(key=_rank)
    if compile:
        plans = _compiled(plans, compile, init_fn, loss_fn, tx, batch, topology, num_slices, mesh_of)
    named = [dataclasses.replace(plan, reason=reason_for(plan, plans[0], limits.usable_bytes)) for plan in plans]
    whole = f"{num_slices} x {topology}" if num_slices > 1 else topology
    return Ranking(
        whole, tuple(named), len(listed), too_large, predicted, dict(refused), limits.usable_bytes,
        time.perf_counter() - started,
    )  # fmt: skip


def _varied(ordered: Sequence[tuple[Candidate, Estimate]]) -> list[tuple[Candidate, Estimate]]:
    """Of candidates that differ in sizes alone the best few: the first of every kind, then the second of each."""
    turns: list[list[tuple[Candidate, Estimate]]] = [[] for _ in range(_ALIKE)]
    seen: Counter[Any] = Counter()
    for one, found in ordered:
        if seen[_kind(one)] < _ALIKE:
            turns[seen[_kind(one)]].append((one, found))
        seen[_kind(one)] += 1
    return [pair for turn in turns for pair in turn]


def _kind(one: Candidate) -> Any:
    """What a candidate has in common with those of other sizes."""
    axes = frozenset(axis for axis, size in one.axes if size > 1)
    return one.data, axes - {"replica", "data"}, one.remat, one.schedule is not None


def _groups(mesh_of: Callable[[Any], Mesh], chip: Chip) -> Callable[[Any, Any], Group | None]:
    """What lies between the devices of axes, for every mesh once."""

    @cache
    def group(axes: tuple[tuple[str, int], ...], over: tuple[str, ...]) -> Group | None:
        return None if chip.network is None else group_of(mesh_of(axes), over, chip.network)

    return group


def _times(found: Prediction, estimate: Estimate) -> tuple[tuple[float, float], dict[str, float]]:
    """The seconds of a plan and of its parts: predicted, with what a promise leaves open by arithmetic."""
    if found.time is None:
        return (estimate.seconds, estimate.seconds), dict(estimate.parts)
    names = ("compute", "memory_bound", "exposed_communication", "bubble", "host")
    parts = {name: sum(getattr(found.time, name)) / 2 for name in names}
    open_axes = {"tensor", "expert", "context"} - {axis for one in found.collectives for axis in one.axes}
    extra = estimate.parts["between"] if open_axes & set(found.mesh) else 0.0
    return (found.time.low + extra, found.time.high + extra), parts | {"between": extra}


def _rank(plan: Plan) -> tuple[bool, float, int]:
    return plan.fits is not True, _weighed(plan.middle, plan.candidate), plan.peak_bytes


def _urgency(pair: tuple[Candidate, Estimate]) -> tuple[bool, float, int]:
    """The order of predictions: plain data parallelism, which others are measured by, then by the estimated time."""
    one, found = pair
    return one.pieces > 1, _weighed(found.seconds, one), found.bytes


def _weighed(seconds: float, one: Candidate) -> float:
    """Seconds, a little more for every piece that a plan is made of."""
    return seconds * (1 + _PER_PIECE * one.pieces)


def _compiled(
    plans: Sequence[Plan], wanted: int, init_fn: InitFn, loss_fn: LossFn, tx: optax.GradientTransformation,
    batch: PyTree, topology: str, num_slices: int, mesh_of: Callable[[Any], Mesh],
) -> list[Plan]:  # fmt: skip
    """Compile the best plans, until so many fit; those that the compiler refuses go."""
    done: list[Plan] = []
    rest = sorted(plans, key=lambda plan: _rank(plan)[1:])
    while rest and sum(plan.compiled is not None for plan in done) < wanted:
        plan = rest.pop(0)
        layout = make_layout(plan.strategy, mesh_of(plan.candidate.axes), init_fn, tx)
        step = make_step(loss_fn, tx, layout, engine=plan.engine)
        verdict = compile_for(step, batch, topology, num_slices=num_slices, prediction=plan.prediction)
        if verdict.fits is not False:
            done.append(dataclasses.replace(plan, compiled=verdict))
    return [*done, *sorted(rest, key=_rank)]
