"""`Record`: the metrics of an optimizer step. `Reader` copies them to the host without delaying a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from jaxshard.core.compat import is_ready
from jaxshard.cost.hardware import mfu
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.training.goodput import Ledger
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
      speed: "rows_per_second" over all devices; "tokens_per_second", if `fit` was told the tokens; if known,
        "flops_per_second" over all devices, "mfu" (the model FLOPs utilisation: the fraction of the chips' peak FLOPs,
        from 0 to 1) and "memory_bytes" (the peak so far of one device of this process); and "goodput", the share of all
        wall time so far that was spent in steps; see `js.Goodput`.
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

    Args:
      devices: the devices of the run.
      ledger: tells the goodput of a record.
      tokens: the tokens of a batch, or None.

    Attributes:
      bad: {step: `Bad`} of the bad steps that were read and not yet handled.
      flops: the model FLOPs of a step over all devices; None if not known.
    """

    def __init__(self, devices: Collection[jax.Device], ledger: Ledger, *, tokens: int | None):
        own = [device for device in devices if device.process_index == jax.process_index()]
        self._device, self._devices = (own or list(devices))[0], len(devices)
        self._late = self._device.platform != "cpu"
        self._tells_memory = bool(own) and peak_bytes(self._device) is not None
        self._tokens, self._ledger = tokens, ledger
        self.flops: float | None = None
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

    @property
    def is_busy(self) -> bool:
        """True if a device still computes the last step that was started."""
        return bool(self._unread) and not all(map(is_ready, jax.tree.leaves(self._unread[-1][1])))

    def forget(self) -> None:
        """Drop queued metrics, the flags in `bad` and the time since the last read, since a rollback repeats steps."""
        self._unread.clear()
        self.bad.clear()
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last `read`, such as the time of an evaluation, from the next record's seconds."""
        self._mark = time.perf_counter()

    def _speed(self, seconds: float, rows: int) -> dict[str, float]:
        speed = {} if self._tokens is None else {"tokens_per_second": self._tokens / seconds}
        speed["rows_per_second"] = rows / seconds
        if self.flops is not None:
            rate = speed["flops_per_second"] = self.flops / seconds
            cores = getattr(self._device, "num_cores", None)
            share = mfu(rate, self._device.device_kind, self._devices, num_cores=cores)
            speed |= {} if share is None else {"mfu": share}
        if self._tells_memory and (peak := peak_bytes(self._device)) is not None:
            speed["memory_bytes"] = peak
        speed["goodput"] = self._ledger.share
        return speed


def peak_bytes(device: jax.Device) -> int | None:
    """Return the largest number of bytes that were in use on a device of this process; None if it does not tell."""
    stats = device.memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")


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
