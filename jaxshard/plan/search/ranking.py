"""Rank the plans that a search found, the best first, each with a sentence that explains its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxshard.core.layout import human_bytes
from jaxshard.core.strategy import Strategy
from jaxshard.core.text_table import Section, Table, page
from jaxshard.engines.engine import Engine
from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.plan.memory_report import MemoryReport, sections_text
from jaxshard.plan.prediction import Prediction, seconds_range
from jaxshard.plan.search.candidates import Candidate

_SHOWN = 12
_NOTHING = "nothing fits: take more chips, a smaller batch, or a smaller model"


@dataclass(frozen=True)
class Plan:
    """A layout and an engine that fit, or may fit, with their memory and step time.

    Attributes:
      candidate: the axes, strategy, engine, micro-batches and remat policy.
      prediction: the estimated memory, communication and time.
      compiled: the compiler's verdict, or None if it was not asked.
      reason: a sentence that explains its rank.

    Example:
        best = js.plan.search(model.init, model.loss, tx, batch, "v5e:2x4").best
        layout = js.layout(best.strategy, js.make_mesh(**best.axes), model.init, tx)
    """

    candidate: Candidate
    prediction: Prediction
    compiled: Verdict | None = None
    reason: str = ""

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh's axes: `js.make_mesh(**plan.axes)`."""
        return dict(self.candidate.axes)

    @property
    def strategy(self) -> Strategy:
        """The strategy, for `js.layout`."""
        return self.candidate.strategy()

    @property
    def engine(self) -> Engine:
        """The engine, for `js.make_step`."""
        return self.candidate.engine()

    @property
    def memory(self) -> MemoryReport:
        """The compiler's verdict, or the prediction if the compiler was not asked."""
        return self.compiled or self.prediction

    @property
    def is_likely_to_fit(self) -> bool:
        """True if the step fits, or is likely to fit by its estimate; such plans are ranked first."""
        return self.memory.is_likely_to_fit

    @property
    def fits(self) -> bool | None:
        """True if the step fits, by the compiler or else by the estimate; False if not; None if that is uncertain."""
        return self.memory.fits

    @property
    def peak_bytes(self) -> int:
        """Bytes per device: allocated by the compiler, or the estimated live bytes if no compiler was asked."""
        return self.memory.allocated_bytes or self.memory.live_bytes

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds of a step, low and high."""
        return (self.prediction.time.low, self.prediction.time.high) if self.prediction.time else (0.0, 0.0)

    @property
    def middle(self) -> float:
        """The estimated seconds of a step, halfway between low and high."""
        return sum(self.seconds) / 2

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of a step, such as "compute", halfway between low and high."""
        ranges = self.prediction.time.parts if self.prediction.time else {}
        return {name: sum(seconds) / 2 for name, seconds in ranges.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values that JSON can represent."""
        return self.candidate.as_dict() | {
            "fits": self.fits,
            "step_seconds": self.seconds,
            "parts": self.parts,
            "live_bytes": self.memory.live_bytes,
            "allocated_bytes": self.memory.allocated_bytes,
            "estimated_bytes": self.prediction.live_bytes,
            "by_role": self.prediction.by_role,
            "mfu": self.prediction.mfu,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Ranking:
    """Plans for a model on a topology, the best first; `print` it, or take `ranking.best`.

    Attributes:
      topology: the chips, such as "v5e:16x16".
      plans: the plans that fit by the compiler or the prediction, the fastest first, then plans about which only the
        compiler can decide; plans that do not fit are left out.
      listed: the number of candidates.
      too_large: the number of candidates that can't fit by arithmetic alone.
      predicted: the number of candidates that were predicted.
      refused: the number of candidates that were left out, by reason.
      usable_bytes: the bytes of a device's memory that a program may use.
      seconds: the duration of the search.
    """

    topology: str
    plans: tuple[Plan, ...]
    listed: int
    too_large: int
    predicted: int
    refused: Mapping[str, int]
    usable_bytes: int
    seconds: float

    @property
    def best(self) -> Plan | None:
        """The plan of the first rank; None if no plan fits."""
        return self.plans[0] if self.plans else None

    def as_dict(self) -> dict[str, Any]:
        """Return the ranking as values that JSON can represent."""
        return vars(self) | {"plans": [plan.as_dict() for plan in self.plans], "hbm_bytes": self.usable_bytes}

    def __str__(self) -> str:
        """Write the table, then a sentence for each plan."""
        return sections_text(self._sections())

    def _repr_html_(self) -> str:
        """Format the ranking as HTML for a notebook."""
        return page(*self._sections())

    def _sections(self) -> list[Section]:
        tried = f"{self.listed} ways, {self.too_large} too large by arithmetic, {self.predicted} predicted"
        found = [Section("", [f"{self.topology}: {tried}, in {self.seconds:.0f} s"])]
        rows = []
        for number, plan in enumerate(self.plans[:_SHOWN], 1):
            fits = {True: "yes", False: "no", None: "unsure"}[plan.fits]
            who = "estimate" if plan.compiled is None else "compiler"
            size = human_bytes(plan.peak_bytes)
            rows.append((str(number), str(plan.candidate), seconds_range(plan.seconds), size, f"{fits} ({who})"))
        if rows:
            found.append(Section("", [Table(rows, "><>><", ("", "layout", "time of a step", "memory", "fits"))]))
        reasons = [f"{number}. {plan.reason}" for number, plan in enumerate(self.plans[:_SHOWN], 1)]
        left_out = [f"left out, {count} times: {reason}" for reason, count in self.refused.items()]
        return [*found, Section("", reasons or [_NOTHING]), *[Section("", left_out)] * bool(left_out)]
