"""Rank the layouts of a model on a topology by predicted time, and compile the best ones: `js.plan.search`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

import optax

from jaxshard.compiler.arrange import arrange
from jaxshard.compiler.planned import chip_named, parse_topology, planned_devices
from jaxshard.compiler.topology import Target, has_compiler
from jaxshard.core.layout import Layout
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.tree import abstract
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.cost.hardware import Chip
from jaxshard.engines.engine import precision_dtypes
from jaxshard.plan.compiled.compile_for import compile_for
from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.plan.predict import predict
from jaxshard.plan.prediction import Prediction
from jaxshard.plan.search.candidates import Candidate, candidates
from jaxshard.plan.search.estimate import Estimator
from jaxshard.plan.search.facts import facts_of
from jaxshard.plan.search.judged import distinct, judged
from jaxshard.plan.search.ranking import Plan, Ranking
from jaxshard.plan.search.reasons import reason_for
from jaxshard.plan.search.trials import Pair, Trials, may_be_likely, varied
from jaxshard.plan.time.network import group_of
from jaxshard.training.step import make_step

_WANTED = 8
"""The number of likely plans after which the search stops predicting."""
_PER_PIECE = 0.004
"""The relative gain in time that justifies one more mesh axis; predictions are not exact enough for less."""
_PER_MEMORY = 0.1
"""The relative gain in time that justifies taking all memory of a device instead of none; half the memory, half the
gain. Predicted times have a median error of 8 %, so smaller gains are not reliable, and free memory has room for more
rows or positions."""
_ALIKE = 3
"""The number of candidates predicted first from each group that differs only in axis sizes and remat policy."""


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
    """Find the fastest layouts of a model on a topology: axes, strategy, schedule, micro-batches and remat.

    All candidates that the shapes of the model and its batch allow are listed: sizes of the axes data, replica, tensor,
    context, expert and pipe that multiply to the devices, strategies from ddp to fsdp and hsdp, remat policies that
    save or offload activations, micro-batches and pipeline schedules. Arithmetic on weights and activations leaves out
    candidates that can't fit and sorts the rest. The best are estimated (`js.plan.predict`), and the best of these are
    compiled (`js.plan.compile_for`) until enough of them fit. The search does not change the model, the batch or the
    numerics: all plans compute the same.

    Args:
      init_fn: as for `js.layout`. Pipelines are tried for the `init` and `loss` of a `js.Stacked`.
      loss_fn: as for `js.make_step`. A loss that returns a scalar runs under `js.auto`.
      tx: the optimizer.
      batch: a tree of global arrays or `jax.ShapeDtypeStruct`. Axes that split positions are tried if labels are an
        array of their own ({"tokens": [B, T], "targets": [B, T]}).
      topology: as for `js.plan.planned_mesh`, such as "v5e:16x16" or "h100:8x4".
      num_slices: the number of TPU slices.
      precision: as for `js.explicit`.
      chip: the limits of a device; by default the limits of the topology's chip.
      price: the price of one device for an hour, for `prediction.price_per_billion_tokens`.
      seconds: the processor time after which no further estimate begins.
      compile: the number of plans that must fit by the compiler, if it is installed; 0 asks no compiler.
      progress: a function that is called with messages on the progress.

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
    started, until = time.perf_counter(), time.process_time() + seconds
    batch, say = abstract(batch), progress or (lambda words: None)
    devices = planned_devices(topology, num_slices=num_slices)
    limits = chip or chip_named(parse_topology(topology).version)
    mesh_of = cache(lambda axes: arrange(topology, devices, num_slices, dict(axes)))
    groups = cache(lambda axes, over: group_of(mesh_of(axes), over, limits.network) if limits.network else None)

    def layout_of(one: Candidate) -> Layout:
        return make_layout(one.strategy(), mesh_of(one.axes), init_fn, tx)

    def ask(one: Candidate) -> Prediction:
        return predict(layout_of(one), loss_fn, batch, one.engine(), tx=tx, chip=chip, price=price, estimate=True)

    def judge(plan: Plan) -> Verdict:
        step = make_step(loss_fn, tx, layout_of(plan.candidate), engine=plan.engine)
        return compile_for(step, batch, topology, num_slices=num_slices)

    def rank(plan: Plan) -> tuple[bool, float, int]:
        weighed = _weighed(plan.middle, plan.peak_bytes, plan.candidate, limits)
        return not plan.is_likely_to_fit, weighed, plan.peak_bytes

    trials = Trials(ask, limits.usable_bytes, until)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layouts that are only tried
        facts = facts_of(init_fn, loss_fn, tx, batch, len(devices), precision and "bf16")
        listed = list(candidates(facts, len(devices), num_slices=num_slices, precision=precision and "bf16"))
        if not listed:
            trials.refused[f"{facts.rows} rows can't be split over {len(devices)} devices"] += 1
        fitting = trials.bound(listed, Estimator(facts, limits, groups))
        say(f"{len(listed)} ways, of which {len(fitting)} may fit; estimating the best")
        fitting.sort(key=lambda pair: _urgency(pair, limits))
        trials.run(varied(fitting, _ALIKE), _WANTED)
        if trials.plans:
            # Vary the remat policy of the best layout: that is cheap, and changes memory most.
            best = min(trials.plans, key=rank).candidate
            same = [pair for pair in fitting if replace(pair[0], policy=best.policy) == best]
            trials.run(same, len(same))
        plans = sorted(trials.plans, key=rank)
        target = Target(topology, num_slices)
        if compile and has_compiler(target):
            plans = judged(plans, compile, judge, rank, say)
    if trials.faults:
        warnings.warn(
            f"js.plan.search: {len(trials.faults)} layouts could not be predicted because of a fault in the model or "
            f"in jaxshard, and are left out; the first is {trials.faults[0]}",
            stacklevel=2,
        )
    plans = distinct(plans)
    return Ranking(
        topology=str(target),
        plans=tuple(replace(plan, reason=reason_for(plan, plans, limits.usable_bytes)) for plan in plans),
        listed=len(listed),
        too_large=len(listed) - len(fitting),
        predicted=trials.predicted,
        refused=dict(trials.refused),
        usable_bytes=limits.usable_bytes,
        seconds=time.perf_counter() - started,
    )


def _urgency(pair: Pair, chip: Chip) -> tuple[tuple[bool, bool], float, int]:
    """Return the key that sorts candidates for prediction: plain data parallelism first, then by estimated time.

    Candidates that are not likely to fit come last, as in the ranking.
    """
    one, found = pair
    doubtful = not may_be_likely(found.bytes, chip.usable_bytes)
    many = len(one.axes) > 1 or one.microbatches > 1
    return (doubtful, many), _weighed(found.seconds, found.bytes, one, chip), found.bytes


def _weighed(seconds: float, size: int, one: Candidate, chip: Chip) -> float:
    """Return the seconds of a step, increased by a few percent for complexity and memory, which decide near ties."""
    return seconds * (1 + _PER_PIECE * one.pieces + _PER_MEMORY * size / chip.usable_bytes)
