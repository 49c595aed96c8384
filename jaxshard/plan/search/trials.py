"""Predict the candidates of a search one after the other, until enough of them fit or the time is over."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxshard.core.layout import human_bytes
from jaxshard.core.unsuited import Unsuited
from jaxshard.plan.memory_report import LIKELY
from jaxshard.plan.prediction import Prediction
from jaxshard.plan.search.candidates import Candidate
from jaxshard.plan.search.estimate import TOO_LARGE, Estimate, Estimator
from jaxshard.plan.search.ranking import Plan

Pair = tuple[Candidate, Estimate]
_PREDICTED = 32
"""The most candidates that are predicted."""


@dataclass
class Trials:
    """Predicts candidates until a limit of time or number is reached, and collects the results.

    Attributes:
      predict: predicts a candidate; raises an error if the library refuses the candidate.
      usable_bytes: the bytes of a device's memory that a program may use.
      until: the `time.process_time` after which no prediction begins. It is processor time, so that other load of the
        machine does not change the ranking.
      plans: the plans that fit, or may fit.
      refused: the number of candidates that are left out, by reason.
      faults: descriptions of predictions that failed.
    """

    predict: Callable[[Candidate], Prediction]
    usable_bytes: int
    until: float
    plans: list[Plan] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    predicted: int = 0
    # Bytes that predictions of equal shapes add to bounds, at least.
    _temporaries: dict[Any, int] = field(default_factory=dict)
    _done: set[Candidate] = field(default_factory=set)

    def bound(self, listed: Sequence[Candidate], estimator: Estimator) -> list[Pair]:
        """Return (candidate, estimate) for each candidate that may fit by arithmetic; count all others in `refused`."""
        fitting: list[Pair] = []
        least = math.inf
        for one in listed:
            found = estimator.estimate(one)
            if not (why := estimator.why_too_large(found)):
                fitting.append((one, found))
                continue
            self.refused[why] += 1
            least = min(least, found.bytes) if why == TOO_LARGE else least
        if count := self.refused.pop(TOO_LARGE, 0):
            sizes = f"{human_bytes(int(least))} or more of {human_bytes(self.usable_bytes)}"
            self.refused[f"{TOO_LARGE}: {sizes}"] = count
        return fitting

    def run(self, pairs: Sequence[Pair], wanted: int) -> None:
        """Predict candidates in order until `wanted` of them are likely to fit; add all that may fit to `plans`.

        Candidates that are not likely to fit, by their lower bound of memory, come last.
        """
        fit = 0
        for last in (False, True):
            for one, found in pairs:
                if fit >= wanted or self.predicted >= _PREDICTED or time.process_time() > self.until:
                    return
                least = found.bytes + self._temporaries.get(_shapes_of(one), 0)
                if one in self._done or (not last and not may_be_likely(least, self.usable_bytes)):
                    continue
                self._done.add(one)
                if least > self.usable_bytes:
                    self.refused["does not fit with the temporaries of candidates of equal shapes"] += 1
                    continue
                fit += self._try(one, found)

    def _try(self, one: Candidate, found: Estimate) -> bool:
        """Predict a candidate, and add it to `plans` or count it in `refused`; return True if it is likely to fit."""
        self.predicted += 1
        try:
            prediction = self.predict(one)
        except (ValueError, TypeError, NotImplementedError) as error:
            words = " ".join(str(error).split())[:200]
            # Checks raise ValueErrors and `Unsuited`. The search makes layouts and engines itself, so that no check of
            # types refuses them: another TypeError is a fault, raised by Python or JAX in the middle of a computation.
            if not isinstance(error, ValueError | Unsuited):
                words = f"failed, {type(error).__name__}: {words}"
                self.faults.append(f"{one}: {words}")
            self.refused[words] += 1
            return False
        shapes, temporaries = _shapes_of(one), max(0, prediction.live_bytes - found.bytes)
        self._temporaries[shapes] = min(temporaries, self._temporaries.get(shapes, temporaries))
        if prediction.fits is False:
            self.refused["does not fit by its prediction"] += 1
        else:
            self.plans.append(Plan(one, prediction))
        return prediction.is_likely_to_fit


def may_be_likely(least: int, usable: int) -> bool:
    """Return False if a step with at least `least` bytes can't be rated as likely to fit, else True."""
    return least * LIKELY <= usable


def varied(ordered: Sequence[Pair], alike: int) -> list[Pair]:
    """Order candidates so that their kinds alternate, with at most `alike` of each kind (strategy and mesh axes)."""
    seen: Counter[Any] = Counter()
    rounds: list[list[Pair]] = [[] for _ in range(alike)]
    for one, found in ordered:
        kind = _kind_of(one)
        if seen[kind] < alike:
            rounds[seen[kind]].append((one, found))
            seen[kind] += 1
    return [pair for pairs in rounds for pair in pairs]


def _kind_of(one: Candidate) -> Any:
    """Return the kind of a candidate: its strategy, its axes without their sizes, and whether it has a pipeline."""
    axes = frozenset(axis for axis, size in one.axes if size > 1)
    return one.data, axes - {"replica", "data"}, one.schedule is not None


def _shapes_of(one: Candidate) -> Any:
    """Return a key: candidates with equal keys have temporaries of equal shapes."""
    parts = one.size("tensor"), one.size("context"), one.size("expert"), one.row_shards * one.microbatches
    return _kind_of(one), parts, one.chunks
