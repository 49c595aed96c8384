"""Candidates that are predicted, one after the other, until enough of them fit or time is over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxshard.plan.memory_report import BAND
from jaxshard.plan.prediction import Prediction
from jaxshard.plan.search.candidates import Candidate
from jaxshard.plan.search.estimate import Estimate
from jaxshard.plan.search.ranking import Plan

Pair = tuple[Candidate, Estimate]


@dataclass
class Trials:
    """The predictions made so far, and the limits within which more are made.

    Attributes:
      predict: makes the prediction of a candidate; None where the library refuses it.
      usable_bytes: of a device's memory what a program may use.
      until: no prediction begins later, by `time.process_time`: what else the machine does changes no ranking.
      most: predictions.
      plans: those that fit, or may fit.
      refused: why others are left out, each with how many of them.
    """

    predict: Callable[[Candidate], Prediction | None]
    usable_bytes: int
    until: float
    most: int
    plans: list[Plan] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    predicted: int = 0
    # Bytes that predictions of equal shapes add to bounds, at least.
    _beside: dict[Any, int] = field(default_factory=dict)
    _done: set[Candidate] = field(default_factory=set)

    def run(self, pairs: Sequence[Pair], wanted: int) -> None:
        """Predict candidates in this order, until so many more fit; last those that only a compiler could confirm."""
        fit = 0
        for last in (False, True):
            for one, found in pairs:
                if fit >= wanted or self.predicted >= self.most or time.process_time() > self.until:
                    return
                least = found.bytes + self._beside.get(_shapes_of(one), 0)
                if one in self._done or (not last and not may_fit_surely(least, self.usable_bytes)):
                    continue
                self._done.add(one)
                if least > self.usable_bytes:
                    self.refused["does not fit beside what others of its shapes compute with"] += 1
                    continue
                fit += self._try(one, found)

    def _try(self, one: Candidate, found: Estimate) -> bool:
        self.predicted += 1
        if (prediction := self.predict(one)) is None:
            return False
        shapes, beside = _shapes_of(one), max(0, prediction.live_bytes - found.bytes)
        self._beside[shapes] = min(beside, self._beside.get(shapes, beside))
        if prediction.fits is False:
            self.refused["does not fit by its prediction"] += 1
            return False
        self.plans.append(Plan(one, *_times(prediction, found), prediction))
        return prediction.fits is True


def may_fit_surely(least: int, usable: int) -> bool:
    """Tell whether a prediction could call so many bytes at least a sure fit, which plans are ranked by first."""
    return least * (1 + BAND[1]) <= usable


def varied(ordered: Sequence[Pair], alike: int) -> list[Pair]:
    """Of candidates that differ in sizes alone the best few: the first of every kind, then the second of each."""
    turns: list[list[Pair]] = [[] for _ in range(alike)]
    seen: Counter[Any] = Counter()
    for one, found in ordered:
        if seen[kind_of(one)] < alike:
            turns[seen[kind_of(one)]].append((one, found))
        seen[kind_of(one)] += 1
    return [pair for turn in turns for pair in turn]


def kind_of(one: Candidate) -> Any:
    """Return what a candidate has in common with those of other sizes, and of other remat policies."""
    axes = frozenset(axis for axis, size in one.axes if size > 1)
    return one.data, axes - {"replica", "data"}, one.schedule is not None


def _shapes_of(one: Candidate) -> Any:
    """Return what decides the shapes of temporaries: two candidates that have it in common need about the same."""
    parts = one.size("tensor"), one.size("context"), one.size("expert"), one.row_shards * one.microbatches
    return kind_of(one), parts, one.chunks


def _times(found: Prediction, estimate: Estimate) -> tuple[tuple[float, float], dict[str, float]]:
    """The seconds of a plan and of its parts: predicted, with what a promise leaves open by arithmetic."""
    if found.time is None:
        return (estimate.seconds, estimate.seconds), dict(estimate.parts)
    names = ("compute", "memory_bound", "exposed_communication", "bubble", "host")
    parts = {name: sum(getattr(found.time, name)) / 2 for name in names}
    open_axes = {"tensor", "expert", "context"} - {axis for one in found.collectives for axis in one.axes}
    extra = estimate.parts["between"] if open_axes & set(found.mesh) else 0.0
    return (found.time.low + extra, found.time.high + extra), parts | {"between": extra}
