"""`EarlyStopping`: a rule that ends training when the metrics of evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxshard.core.counts import check_count


@dataclass
class EarlyStopping:
    """A rule for the end of training, for `js.fit(stop=...)` or a loop of your own.

    Call it with the metrics of each evaluation: it remembers them, and returns True if training should stop because of
    any of `patience`, `max_worse` and `min_update` that was given.

    After a restart `js.fit` with a `js.Checkpointer` first tells it the evaluations of the earlier process. In a loop
    of your own keep the metrics of the evaluations, and call it with each of them again.

    Args:
      patience: stop after this number of evaluations in a row without an improvement.
      min_delta: a difference must be larger than this to count as an improvement, in the metric's unit.
      metric: the name of the metric.
      mode: "min" if a lower value is better, "max" if a higher value is.
      max_worse: stop as soon as the metric is worse than the best value by more than this.
      min_update: stop as soon as "update_norm", the 2-norm of the last step's change of all parameters, is below this.

    Attributes:
      reason: why training should stop, as a sentence; "" as long as it should go on.
      best: the metrics of the best evaluation so far; {} before the first.
      last: the metrics of the last evaluation.
      waited: the number of evaluations since the last improvement.

    Raises:
      ValueError: no rule, or a rule with an invalid number; by a call, a metric that a rule needs is missing.

    Example:
        stop = js.EarlyStopping(patience=3, min_delta=1e-3)
        run = js.fit(run, step, batches, steps=10_000, evaluate=evaluate, eval_every=100, stop=stop)
        print(stop.reason, stop.best["loss"])
    """

    patience: int | None = None
    min_delta: float = 0.0
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    max_worse: float | None = None
    min_update: float | None = None
    reason: str = field(default="", init=False)
    best: dict[str, float] = field(default_factory=dict, init=False)
    last: dict[str, float] = field(default_factory=dict, init=False)
    waited: int = field(default=0, init=False)
    _mark: float = field(default=math.nan, init=False)  # the value at the last improvement, best or not

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping: mode must be "min" or "max", got {self.mode!r}')
        check_count("EarlyStopping", patience=self.patience)
        if self.patience is None and self.max_worse is None and self.min_update is None:
            raise ValueError("EarlyStopping: give it a rule: patience=, max_worse= or min_update=")
        for name in ("min_delta", "max_worse", "min_update"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"EarlyStopping: {name} must be a finite number of at least 0, got {value}")

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of an evaluation; return True if training should stop."""
        needed = [self.metric] if self.judges_evaluations else []
        needed += ["update_norm"] if self.min_update is not None else []
        if missing := [name for name in needed if name not in metrics]:
            raise ValueError(
                f"EarlyStopping needs {' and '.join(map(repr, missing))} among the metrics, got {sorted(metrics)}"
            )
        first, self.last = not self.last, {name: float(value) for name, value in metrics.items()}
        value = self.last.get(self.metric, math.nan)
        if self._gain(value, self.best.get(self.metric, math.nan)) > 0:
            self.best = self.last
        # Measured from the last improvement, so that several small gains can add up to an improvement.
        if improved := self._gain(value, self._mark) > self.min_delta:
            self._mark = value
        self.waited = 0 if first or improved else self.waited + 1
        self.reason = self._reason()
        return bool(self.reason)

    @property
    def judges_evaluations(self) -> bool:
        """True if a rule reads the metric of evaluations (`patience`, `max_worse`), not only "update_norm"."""
        return self.patience is not None or self.max_worse is not None

    def _gain(self, value: float, other: float) -> float:
        """Return by how much `value` is better than `other`; -inf if `value` is NaN, inf if only `other` is NaN."""
        if math.isnan(value) or math.isnan(other):
            return -math.inf if math.isnan(value) else math.inf
        return other - value if self.mode == "min" else value - other

    def _reason(self) -> str:
        if self.best and self.max_worse is not None:
            loss = -self._gain(self.last[self.metric], self.best[self.metric])
            if loss > self.max_worse:
                values = f"{self.last[self.metric]:.6g} after a best of {self.best[self.metric]:.6g}"
                return f"{self.metric} {values} is worse by {loss:.4g}, more than {self.max_worse:g}"
        if self.patience is not None and self.waited >= self.patience:
            than = "any number" if math.isnan(self._mark) else f"{self._mark:.6g}"
            more = f" by more than {self.min_delta:g}" if self.min_delta else ""
            often = "1 evaluation" if self.waited == 1 else f"{self.waited} evaluations"
            return f"{self.metric} {self.last[self.metric]:.6g}: not better than {than}{more} for {often}"
        if self.min_update is not None and self.last["update_norm"] < self.min_update:
            return (
                f"the last step changed the parameters by {self.last['update_norm']:.4g}, less than {self.min_update:g}"
            )
        return ""
