"""`js.plan.search`: the layouts of a model on a topology, ranked by predicted time, the best ones compiled."""

from __future__ import annotations

import dataclasses
import math
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
from jaxshard.engines.engine import precision_dtypes
from jaxshard.plan.arrange import arrange
from jaxshard.plan.compiled.compile_for import compile_for
from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.plan.planned import planned_devices
from jaxshard.plan.predict import predict
from jaxshard.plan.prediction import Prediction
from jaxshard.plan.search.candidates import Candidate, candidates
from jaxshard.plan.search.estimate import TOO_LARGE, Estimator
from jaxshard.plan.search.facts import facts_of
from jaxshard.plan.search.judged import distinct, judged
from jaxshard.plan.search.ranking import Plan, Ranking
from jaxshard.plan.search.reasons import reason_for
from jaxshard.plan.search.refusals import is_refusal
from jaxshard.plan.search.trials import Pair, Trials, may_fit_surely, varied
from jaxshard.plan.time.network import Group, group_of
from jaxshard.plan.topology import Target, has_compiler
from jaxshard.training.step import make_step

_WANTED = 8
"""As many plans are looked for; those above `_PREDICTED` are not predicted any more."""
_PREDICTED = 32
_PER_PIECE = 0.004
"""A plan is preferred to one with an axis more unless it is slower by this share: no prediction is so exact."""
_PER_MEMORY = 0.1
"""A plan that takes all memory of a device is preferred to one that takes none if it is faster by this share, one that
takes a half more by half of it. Times are predicted with a median error of 8 %: a smaller gain is none that anyone can
count on, and memory that is left is rows or positions more."""
_ALIKE = 3
"""Of candidates that differ in sizes or in what they keep alone so many are predicted."""


def search(
    init_fn: InitFn,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: PyTree,
    topology: str,
    *,
    num_slices: int = 1,
    precision: Literal["bf16", "bfloat16"] | None = None,
    chip: Chip | None = None,
    price: float | None = None,
    seconds: float = 90.0,
    compile: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Ranking:
    """Find how to split a model over a topology: axes, strategy, schedule, micro-batches and remat.

    All ways that the shapes of the model and its batch allow are listed: sizes of the axes data, replica, tensor,
    context, expert and pipe that multiply to the devices, strategies ddp to fsdp and hsdp, what blocks save or offload
    for their backward pass, micro-batches and the schedules of pipelines. Arithmetic on weights and on what one block
    keeps leaves out those that can't fit and puts the others in order. The best are estimated (`js.plan.predict`), and
    then the compiler is asked about the best of these (`js.plan.compile_for`) until enough of them fit. The search does
    not change the model, the batch or the numerics: what it proposes computes the same.

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
      seconds: begin no estimate after so many of processor time.
      compile: as many plans as the compiler shall find to fit, where it is installed; 0 asks no compiler.
      progress: a function that is told in words how far the search is.

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
    precision_dtypes(precision, None, None)  # which refuses others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layouts that are only tried
        ranking, faults = _search(
            init_fn,
            loss_fn,
            tx,
            abstract(batch),
            topology,
            num_slices,
            precision and "bf16",
            chip,
            price,
            seconds,
            compile,
            progress or (lambda words: None),
        )
    if faults:
        warnings.warn(
            f"js.plan.search: {len(faults)} layouts could not be predicted because of a fault in the model or in "
            f"jaxshard, and are left out; the first is {faults[0]}",
            stacklevel=2,
        )
    return ranking


def _search(
    init_fn: InitFn, loss_fn: LossFn, tx: optax.GradientTransformation, batch: PyTree, topology: str, num_slices: int,
    precision: str | None, chip: Chip | None, price: float | None, seconds: float, compile: int,
    progress: Callable[[str], None],
) -> tuple[Ranking, list[str]]:  # fmt: skip
    """Search; return the ranking, and what failed in words."""
    faults: list[str] = []
    started, busy = time.perf_counter(), time.process_time()
    devices = planned_devices(topology, num_slices=num_slices)
    limits = chip or chip_of(devices[0].device_kind, num_cores=devices[0].num_cores)
    if limits is None:
        raise ValueError(f"js.plan.search: the chip of {topology} is not known; give chip=")
    facts = facts_of(init_fn, loss_fn, tx, batch, len(devices), precision)
    mesh_of = cache(lambda axes: arrange(topology, devices, num_slices, dict(axes)))
    estimator = Estimator(facts, limits, _groups(mesh_of, limits))
    listed = list(candidates(facts, len(devices), num_slices=num_slices, precision=precision))
    fitting, refused = _fitting(estimator, listed)
    if not listed:
        refused[f"{facts.rows} rows can't be split over {len(devices)} devices"] += 1

    def ask(one: Candidate) -> Prediction | None:
        """Predict a candidate; None where the library refuses it, or where it fails, which is noted."""
        try:
            layout = make_layout(one.strategy(), mesh_of(one.axes), init_fn, tx)
            return predict(layout, loss_fn, batch, one.engine(), tx=tx, chip=chip, price=price, estimate=True)
        except (ValueError, TypeError, NotImplementedError) as error:
            words = " ".join(str(error).split())[:200]
            if not is_refusal(error):
                words = f"failed, {type(error).__name__}: {words}"
                faults.append(f"{one}: {words}")
            trials.refused[words] += 1
            return None

    progress(f"{len(listed)} ways, of which {len(fitting)} may fit; estimating the best")
    trials = Trials(ask, limits.usable_bytes, busy + seconds, _PREDICTED, refused=refused)
    fitting.sort(key=lambda pair: _urgency(pair, limits))
    trials.run(varied(fitting, _ALIKE), _WANTED)
    if trials.plans:
        # What the best layout keeps for its backward pass is cheap to vary, and changes memory most.
        best = min(trials.plans, key=lambda plan: _rank(plan, limits)).candidate
        same = [pair for pair in fitting if dataclasses.replace(pair[0], policy=best.policy) == best]
        trials.run(same, len(same))
    plans = sorted(trials.plans, key=lambda plan: _rank(plan, limits))
    if compile and has_compiler(Target(topology, num_slices)):

        def judge(plan: Plan) -> Verdict:
            layout = make_layout(plan.strategy, mesh_of(plan.candidate.axes), init_fn, tx)
            step = make_step(loss_fn, tx, layout, engine=plan.engine)
            return compile_for(step, batch, topology, num_slices=num_slices)

        plans = judged(plans, compile, judge, lambda plan: _rank(plan, limits), progress)
    plans = distinct(plans)
    named = [dataclasses.replace(plan, reason=reason_for(plan, plans, limits.usable_bytes)) for plan in plans]
    whole = f"{num_slices} x {topology}" if num_slices > 1 else topology
    ranking = Ranking(
        whole, tuple(named), len(listed), len(listed) - len(fitting), trials.predicted, dict(trials.refused),
        limits.usable_bytes, time.perf_counter() - started,
    )  # fmt: skip
    return ranking, faults


def _fitting(estimator: Estimator, listed: Sequence[Candidate]) -> tuple[list[Pair], Counter[str]]:
    """Estimate candidates; return those that may fit, and why the others can't, each with how many of them."""
    fitting: list[Pair] = []
    refused: Counter[str] = Counter()
    least = math.inf
    for one in listed:
        found = estimator.estimate(one)
        if not (why := estimator.why_too_large(found)):
            fitting.append((one, found))
            continue
        refused[why] += 1
        least = min(least, found.bytes) if why == TOO_LARGE else least
    if count := refused.pop(TOO_LARGE, 0):
        usable = estimator.chip.usable_bytes
        refused[f"{TOO_LARGE}: {human_bytes(int(least))} or more of {human_bytes(usable)}"] = count
    return fitting, refused


def _groups(mesh_of: Callable[[Any], Mesh], chip: Chip) -> Callable[[Any, Any], Group | None]:
    """What lies between the devices of axes, for every mesh once."""

    @cache
    def group(axes: tuple[tuple[str, int], ...], over: tuple[str, ...]) -> Group | None:
        return None if chip.network is None else group_of(mesh_of(axes), over, chip.network)

    return group


def _rank(plan: Plan, chip: Chip) -> tuple[bool, float, int]:
    return plan.fits is not True, _weighed(plan.middle, plan.peak_bytes, plan.candidate, chip), plan.peak_bytes


def _urgency(pair: Pair, chip: Chip) -> tuple[tuple[bool, bool], float, int]:
    """The order of predictions: plain data parallelism, which others are measured by, then by the estimated time.

    What only a compiler could confirm comes last, as in the ranking.
    """
    one, found = pair
    doubtful = not may_fit_surely(found.bytes, chip.usable_bytes)
    many = len(one.axes) > 1 or one.microbatches > 1
    return (doubtful, many), _weighed(found.seconds, found.bytes, one, chip), found.bytes


def _weighed(seconds: float, size: int, one: Candidate, chip: Chip) -> float:
    """Seconds, a little more for every piece that a plan is made of, and for the memory that it takes."""
    return seconds * (1 + _PER_PIECE * one.pieces + _PER_MEMORY * size / chip.usable_bytes)
