"""`Record`: the metrics of an optimizer step. `Reader` copies them to the host without delaying a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from jaxshard.cost.hardware import mfu
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.training.non_finite import Bad

Metrics = dict[str, Any]


class Record(NamedTuple):
    """The metrics of one optimizer step, on the host.

    Attributes:
      step: the number of this step, counted from 1 over the training run: `run.step` after it.
      metrics: "loss", "grad_norm", "update_norm" and the step's other metrics, as Python floats. "bad" is 1.0 if the
        loss, a gradient or a new parameter was not finite, else 0.0. For a batch that `js.Rollback` left out "bad" is
        1.0, and "loss" and the norms are NaN.
      seconds: wall time since the step before, evaluation excluded. The first step of a `fit` may include compilation.
      speed: "tokens_per_second" or "rows_per_second" over all devices; if known, "flops_per_second" over all devices
        and "mfu", the model FLOPs utilisation: the fraction of the chips' peak FLOPs, from 0 to 1.
      evaluation: the result of `evaluate` after this step; None for steps without an evaluation.

    Example:
        def show(record):
            print(record.step, record.metrics["loss"], record.seconds)

        run = js.fit(run, step, batches, steps=100, callbacks=[show])
    """

    step: int
    metrics: dict[str, float]
    seconds: float
    speed: dict[str, float]
    evaluation: dict[str, float] | None = None


class Reader:
    """A queue of metrics that are still on devices, from which `read` copies them to the host.

    On a CPU the metrics of a step are read at once. On accelerators they are read after the next step was started,
    because reading waits for the step, and the device must stay busy meanwhile.

    Attributes:
      bad: {step: `Bad`} of the bad steps that were read and not yet handled.
    """

    def __init__(self, devices: Collection[jax.Device], *, tokens: int | None, flops: float | None):
        self._device, self._devices = next(iter(devices)), len(devices)
        self._late = self._device.platform != "cpu"
        self._tokens, self._flops = tokens, flops
        self._unread: deque[tuple[int, Metrics, int]] = deque()
        self.bad: dict[int, Bad] = {}
        self._mark = time.perf_counter()

    def add(self, step: int, metrics: Metrics, rows: int) -> None:
        """Queue the metrics of a started step, for a batch with `rows` rows."""
        self._unread.append((step, metrics, rows))

    @waits_for_devices
    def read(self, *, all: bool) -> list[Record]:
        """Wait for queued steps and return their records; on accelerators the latest step stays queued unless `all`."""
        records = []
        while len(self._unread) > (self._late and not all):
            step, metrics, rows = self._unread.popleft()
            metrics = jax.device_get(metrics)
            numbers = {name: float(x) for name, x in metrics.items()}
            bad = metrics.get("bad")
            if isinstance(bad, Bad) and bad:
                self.bad[step] = bad
            seconds = time.perf_counter() - self._mark
            self._mark += seconds
            records.append(Record(step, numbers, seconds, self._speed(seconds, rows)))
        return records

    def forget(self) -> None:
        """Drop queued metrics, the flags in `bad` and the time since the last read, since a rollback repeats steps."""
        self._unread.clear()
        self.bad.clear()
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last `read`, such as the time of an evaluation, from the next record's seconds."""
        self._mark = time.perf_counter()

    def _speed(self, seconds: float, rows: int) -> dict[str, float]:
        unit, count = ("rows", rows) if self._tokens is None else ("tokens", self._tokens)
        speed = {f"{unit}_per_second": count / seconds}
        if self._flops is not None:
            rate = speed["flops_per_second"] = self._flops / seconds
            cores = getattr(self._device, "num_cores", None)
            share = mfu(rate, self._device.device_kind, self._devices, num_cores=cores)
            speed |= {} if share is None else {"mfu": share}
        return speed


def call_with_records(callbacks: Sequence[Callable[[Record], Any]], records: Sequence[Record]) -> None:
    """Call every callback with every record, in order."""
    for record in records:
        for callback in callbacks:
            callback(record)


def mean_speed(records: Collection[Record], name: str) -> float | None:
    """Return the mean of the speed `name`, weighted by the records' seconds; None if no record has this speed."""
    seconds = sum(record.seconds for record in records)
    known = [record.speed[name] * record.seconds / seconds for record in records if name in record.speed]
    return sum(known) if known else None
