"""The result of a search: plans, the best first, each with a sentence that says why it stands where it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxshard.core.layout import human_bytes
from jaxshard.core.strategy import Strategy
from jaxshard.core.text_table import Table, page
from jaxshard.engines.engine import Engine
from jaxshard.plan.prediction import Prediction, seconds_range
from jaxshard.plan.search.candidates import Candidate

_SHOWN = 12
_NOTHING = "nothing fits: take more chips, a smaller batch, or a smaller model"


@dataclass(frozen=True)
class Plan:
    """One way to train that fits, or may fit.

    Attributes:
      candidate: the axes, strategy, engine, micro-batches and remat, in words and as flags.
      seconds: of a step, low and high.
      parts: the seconds of its parts by name, in the middle of their ranges.
      prediction: its memory, communication and time.
      compiled: the compiler's verdict, or None where it was not asked.
      reason: one sentence.

    Example:
        best = js.plan.search(model.init, model.loss, tx, batch, "v5e:2x4").best
        layout = js.layout(best.strategy, js.make_mesh(**best.axes), model.init, tx)
    """

    candidate: Candidate
    seconds: tuple[float, float]
    parts: Mapping[str, float]
    prediction: Prediction
    compiled: Any = None
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
    def fits(self) -> bool | None:
        """True or False by the compiler where it was asked, else by the prediction; None where that is not sure."""
        return self.prediction.fits if self.compiled is None else self.compiled.fits

    @property
    def peak_bytes(self) -> int:
        """Bytes on a device: allocated by the compiler if it was asked, else the estimate of live bytes."""
        return self.prediction.peak.total if self.compiled is None else int(self.compiled.allocated_bytes)

    @property
    def middle(self) -> float:
        """The middle of the range of seconds."""
        return sum(self.seconds) / 2

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        compiled = {} if self.compiled is None else {
            "live_bytes": self.compiled.live_bytes, "allocated_bytes": self.compiled.allocated_bytes
        }  # fmt: skip
        return self.candidate.as_dict() | {
            "fits": self.fits,
            "step_seconds": list(self.seconds),
            "parts": dict(self.parts),
            "estimated_bytes": self.prediction.peak.total,
            "by_role": dict(self.prediction.peak.by_role),
            "mfu": None if self.prediction.mfu is None else list(self.prediction.mfu),
            "reason": self.reason,
        } | compiled  # fmt: skip


@dataclass(frozen=True)
class Ranking:
    """Plans for a model on a topology, the best first; `print` it, or take `ranking.best`.

    Attributes:
      topology: the chips, such as "v5e:16x16".
      plans: those that fit by the compiler or the prediction, the fastest first, then those that only the compiler can
        decide; what does not fit is left out.
      listed: how many ways there were.
      too_large: how many of them can't fit by arithmetic alone.
      predicted: how many were predicted.
      refused: reasons for which ways were left out, each with how many of them.
      usable_bytes: of a device's memory what a program may use.
      seconds: that the search took.
    """

    topology: str
    plans: tuple[Plan, ...]
    listed: int
    too_large: int
    predicted: int
    refused: Mapping[str, int] = field(default_factory=dict)
    usable_bytes: int | None = None
    seconds: float = 0.0

    @property
    def best(self) -> Plan | None:
        """The first plan; None where nothing fits."""
        return self.plans[0] if self.plans else None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "topology": self.topology,
            "hbm_bytes": self.usable_bytes,
            "plans": [plan.as_dict() for plan in self.plans],
            "listed": self.listed,
            "too_large": self.too_large,
            "predicted": self.predicted,
            "refused": dict(self.refused),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        """Write the table, then a sentence for each plan."""
        why = "".join(f"\n{one}" for one in self._left_out())
        if not self.plans:
            return f"{self._headline()}\n{_NOTHING}{why}"
        return "\n".join([self._headline(), "", *self._table().lines, "", *self._sentences()]) + why

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        if not self.plans:
            return page(self._headline(), _NOTHING, *self._left_out())
        return page(self._headline(), self._table(), *self._sentences(), *self._left_out())

    def _sentences(self) -> list[str]:
        return [f"{number}. {plan.reason}" for number, plan in enumerate(self.plans[:_SHOWN], 1)]

    def _headline(self) -> str:
        tried = f"{self.listed} ways, {self.too_large} too large by arithmetic, {self.predicted} predicted"
        return f"{self.topology}: {tried}, in {self.seconds:.0f} s"

    def _left_out(self) -> list[str]:
        return [f"left out, {count} times: {reason}" for reason, count in self.refused.items()]

    def _table(self) -> Table:
        rows = []
        for number, plan in enumerate(self.plans[:_SHOWN], 1):
            verdict = {True: "yes", False: "no", None: "unsure"}[plan.fits]
            verdict += " (estimate)" if plan.compiled is None else " (compiler)"
            seconds = seconds_range(plan.seconds)
            rows.append((str(number), str(plan.candidate), seconds, human_bytes(plan.peak_bytes), verdict))
        return Table(rows, "><>><", ("", "layout", "time of a step", "memory", "fits"))
