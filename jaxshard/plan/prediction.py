"""The prediction of a training step: a value that prints as a table, becomes JSON, and shows itself in a notebook."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import Section, Table, page
from jaxshard.cost.hardware import Chip
from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.plan.time.network import CollectiveCost
from jaxshard.plan.time.products import ProductCost
from jaxshard.plan.time.step_time import StepTime

_SHOWN = 8
"""Arrays that the table shows; `as_dict` has 40."""

Range = tuple[float, float]
"""A low and a high estimate."""

BAND = (-0.3, 0.5)
"""The least and the most that 95 % of steps are allocated less or more than the estimate, as shares of it.

Of the steps that were compiled (docs/records/planner_table.md) 95 % are within it, with room to spare."""


@dataclass(frozen=True)
class MemoryPeak:
    """The fullest moment of a step on one device.

    Attributes:
      by_role: bytes by role, all of `ROLES` in their order.
      moment: when it is, in words: "backward pass of a block", "update", "head".
      largest: the largest arrays that are alive then, (bytes, role, shape and source in words).

    Example:
        peak = js.plan.predict(layout, loss_fn, batch, tx=tx).peak
        peak.total, peak.by_role["parameters"], peak.moment
    """

    by_role: Mapping[str, int]
    moment: str = ""
    largest: tuple[tuple[int, str, str], ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all roles together."""
        return sum(self.by_role.values())


@dataclass(frozen=True)
class Prediction:
    """The memory, communication and time that a training step will need, per device.

    `print(prediction)` is a table, `prediction.as_dict()` goes into JSON.

    Attributes:
      devices: how many there are.
      mesh: the size of each axis.
      chip: the limits of one device, or None where they are not known.
      peak: bytes at the fullest moment, by role.
      argument_bytes: of what goes into the step: parameters, optimizer state, model state, batch; in tiles on a TPU.
      usable_bytes: of the chip's memory what a program may use; None without a chip.
      verdict: the compiler's, from which `peak` is; None where that is an estimate.
      collectives: what is moved between devices, with times.
      products: FLOPs by product.
      flops: per device and step, those computed again included.
      model_flops: of all devices, those of the model alone.
      time: the seconds of a step as a range, with its parts; None where the chip is not known.
      mfu: model FLOPs utilization, low and high.
      tokens_per_second: of all devices, low and high; None where the batch has no tokens.
      price_per_billion_tokens: low and high, at the price that was given; None without one.
      offloaded_bytes: that activations take of the host's memory, for each device.
    """

    devices: int
    mesh: Mapping[str, int]
    chip: Chip | None
    peak: MemoryPeak
    argument_bytes: int
    usable_bytes: int | None = None
    verdict: Verdict | None = field(default=None, repr=False, compare=False)
    collectives: tuple[CollectiveCost, ...] = ()
    products: tuple[ProductCost, ...] = ()
    flops: float = 0.0
    model_flops: float = 0.0
    time: StepTime | None = None
    mfu: Range | None = None
    tokens_per_second: Range | None = None
    price_per_billion_tokens: Range | None = None
    offloaded_bytes: int = 0

    @property
    def judged_by(self) -> str:
        """Where `peak` is from: "compiler", "extrapolated" (`js.plan.compile_for` with `at_depth=`) or "estimate"."""
        return "estimate" if self.verdict is None else self.verdict.judged_by

    @property
    def allocated_bytes(self) -> int | None:
        """Bytes that the compiler reserves, with the gaps between arrays; None for an estimate."""
        return None if self.verdict is None else self.verdict.allocated_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of a device that are live at once when most are; of a refused step what it asked for."""
        return self.peak.total if self.verdict is None else self.verdict.live_bytes

    @property
    def fits(self) -> bool | None:
        """True if the step fits: by the compiler, or, outside of `BAND`, by the estimate; None where that is not known.

        A compiler's answer follows what is allocated, unless `chip=` set another limit than its own. None too where the
        memory of the chip is not known.
        """
        if self.usable_bytes is None:
            return None
        if self.verdict is not None:
            limited = self.verdict.usable_bytes != self.usable_bytes
            return self.verdict.allocated_bytes <= self.usable_bytes if limited else self.verdict.fits
        least, most = (self.peak.total * (1 + share) for share in BAND)
        return True if most <= self.usable_bytes else False if least > self.usable_bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON has it: dictionaries, lists and numbers."""
        return {
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "chip": None if self.chip is None else self.chip.name,
            "fits": self.fits,
            "hbm_bytes": self.usable_bytes,
            "judged_by": self.judged_by,
            "live_bytes": self.live_bytes,
            "allocated_bytes": self.allocated_bytes,
            "refusal": None if self.verdict is None else self.verdict.refusal or None,
            "by_role": dict(self.peak.by_role),
            "moment": self.peak.moment,
            "largest": [{"bytes": size, "role": role, "array": what} for size, role, what in self.peak.largest],
            "argument_bytes": self.argument_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "collectives": [_plain(one) for one in self.collectives],
            "products": [_plain(one) for one in self.products],
            "flops": self.flops,
            "model_flops": self.model_flops,
            "step_seconds": None if self.time is None else [self.time.low, self.time.high],
            "time": _plain(self.time),
            "mfu": _plain(self.mfu),
            "tokens_per_second": _plain(self.tokens_per_second),
            "price_per_billion_tokens": _plain(self.price_per_billion_tokens),
        }

    def __str__(self) -> str:
        """Write tables of memory by role, time by part, and collectives."""
        return "\n\n".join("\n".join(one.lines) for one in self._sections())

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        return page(*self._sections())

    def _sections(self) -> list[Section]:
        found = [Section("memory", self._memory())]
        if self.time is not None:
            found.append(Section("time", self._time()))
        if self.collectives:
            rows = [
                (
                    one.kind,
                    ",".join(one.axes),
                    str(one.count),
                    human_bytes(one.bytes),
                    seconds_range(one.seconds),
                    one.link,
                )
                for one in self.collectives
            ]
            head = ("collective", "axes", "count", "bytes", "time", "link")
            found.append(Section("collectives", [Table(rows, "<<>>><", head)]))
        return found

    def _memory(self) -> list[str | Table]:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        where = "" if self.chip is None else f" of {self.chip.name}"
        total = self.live_bytes
        rows = [(role, human_bytes(size), f"{size / total:.0%}") for role, size in self.peak.by_role.items() if size]
        rows.append(("live at once", human_bytes(total), "100%"))
        if self.allocated_bytes is not None:
            rows.append(("allocated", human_bytes(self.allocated_bytes), ""))
        if self.offloaded_bytes:
            rows.append(("on the host", human_bytes(self.offloaded_bytes), ""))
        return [
            f"{self.devices} devices{where} ({axes}): {self._verdict()}",
            Table(rows, "<>>", ("per device", "bytes", "share")),
            *self._largest(),
        ]

    def _verdict(self) -> str:
        """Say whether the step fits, and who says so."""
        least, most = BAND
        who = {
            "compiler": "the compiler's own figures",
            "extrapolated": "the compiler's figures of 2 and 4 blocks, extrapolated",
            "estimate": f"an estimate; 95 % of steps need {1 + least:.1f} to {1 + most:.1f} times as much",
        }[self.judged_by]
        if self.usable_bytes is None:
            return who
        fits = {True: "fits", False: "does not fit", None: "may fit, only the compiler knows"}[self.fits]
        return f"{fits}; a program may use {human_bytes(self.usable_bytes)} ({who})"

    def _largest(self) -> list[str | Table]:
        if not self.peak.largest:
            return []
        rows = [(human_bytes(size), role, what) for size, role, what in self.peak.largest[:_SHOWN]]
        return [f"largest, {self.peak.moment or 'when most is live'}:", Table(rows, "><<")]

    def _time(self) -> list[str | Table]:
        assert self.time is not None
        parts = ("compute", "memory_bound", "exposed_communication", "bubble", "host")
        rows = []
        for name in parts:
            low, high = getattr(self.time, name)
            rows.append((name.replace("_", " "), human_seconds(low), human_seconds(high)))
        rows.append(("step", human_seconds(self.time.low), human_seconds(self.time.high)))
        found: list[str | Table] = [Table(rows, "<>>", ("time of a step", "low", "high"))]
        for title, numbers in (("MFU", self.mfu), ("tokens per second", self.tokens_per_second),
                               ("price per billion tokens", self.price_per_billion_tokens)):  # fmt: skip
            if numbers is not None:
                found.append(f"{title}: {' - '.join(map(human_number, numbers))}")
        return [*found, *(f"assumed: {one}" for one in self.time.assumptions)]


def human_seconds(seconds: float) -> str:
    """Write a duration with three digits: "4.54 s", "12 ms", "32.3 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{human_number(seconds / size)} {unit}"
    return f"{human_number(seconds / 1e-6)} us" if seconds else "0 s"


def seconds_range(found: Range | None) -> str:
    """Write a range of durations as "low - high"."""
    return "" if found is None else " - ".join(map(human_seconds, found))


def human_number(value: float) -> str:
    """Write a number with three digits and no exponent: "303,000", "4.54", "0.348"."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    rounded = round(value, digits)
    text = f"{rounded:,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _plain(one) for name, one in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
