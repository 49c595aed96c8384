"""The prediction of a training step, as a table, as JSON and in a notebook."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import Section, Table
from jaxshard.plan.memory_report import MemoryReport
from jaxshard.plan.time.network import CollectiveCost, Range
from jaxshard.plan.time.products import ProductCost
from jaxshard.plan.time.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class Prediction(MemoryReport):
    """The predicted memory, communication and time of a training step, per device.

    `print(prediction)` is a table, `prediction.as_dict()` goes into JSON. It has the attributes of `MemoryReport`, and:

    Attributes:
      collectives: the collectives of a step, with their times.
      products: the matrix products of a step, with their FLOPs and times.
      flops: FLOPs per device and step, recomputation included.
      model_flops: FLOPs of the model per step on all devices together, without recomputation.
      time: the seconds of a step, at best and at worst, with their parts; None if the chip is not known.
      mfu: model FLOPs utilization, low and high; None if the chip is not known.
      tokens_per_second: tokens per second of all devices, low and high; None if the batch has no tokens.
      price_per_billion_tokens: low and high, from the price of a device and hour; None without a price.
      offloaded_bytes: bytes of activations in the host's memory, for each device.

    Example:
        prediction = js.plan.predict(layout, loss_fn, batch, tx=tx)
        prediction.live_bytes, prediction.by_role["parameters"], prediction.fits
    """

    collectives: tuple[CollectiveCost, ...] = ()
    products: tuple[ProductCost, ...] = ()
    flops: float = 0.0
    model_flops: float = 0.0
    time: StepTime | None = None
    mfu: Range | None = None
    tokens_per_second: Range | None = None
    price_per_billion_tokens: Range | None = None
    offloaded_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as values that JSON can represent."""
        return super().as_dict() | {
            "offloaded_bytes": self.offloaded_bytes,
            "collectives": [asdict(one) for one in self.collectives],
            "products": [asdict(one) for one in self.products],
            "flops": self.flops,
            "model_flops": self.model_flops,
            "step_seconds": None if self.time is None else (self.time.low, self.time.high),
            "time": None if self.time is None else asdict(self.time),
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "price_per_billion_tokens": self.price_per_billion_tokens,
        }

    def sections(self) -> list[Section]:
        """Return the sections of the report: memory by role, time by part, and collectives."""
        found = super().sections()
        if self.offloaded_bytes:
            found.append(Section("", [f"on the host: {human_bytes(self.offloaded_bytes)} of activations"]))
        if self.time is not None:
            found.append(Section("", self._time(self.time)))
        rows = [
            (one.kind, ",".join(one.axes), str(one.count), human_bytes(one.bytes), seconds_range(one.seconds), one.link)
            for one in self.collectives
        ]
        head = ("collective", "axes", "count", "bytes", "time", "link")
        return found + [Section("", [Table(rows, "<<>>><", head)])] * bool(rows)

    def _time(self, time: StepTime) -> list[str | Table]:
        ranges = time.parts | {"step": (time.low, time.high)}
        rows = [(name.replace("_", " "), *map(human_seconds, seconds)) for name, seconds in ranges.items()]
        figures = {
            "MFU": self.mfu,
            "tokens per second": self.tokens_per_second,
            "price per billion tokens": self.price_per_billion_tokens,
        }
        return [
            Table(rows, "<>>", ("time of a step", "low", "high")),
            *(f"{title}: {' - '.join(map(human_number, one))}" for title, one in figures.items() if one is not None),
            *(f"assumed: {one}" for one in time.assumptions),
        ]


def human_seconds(seconds: float) -> str:
    """Format a duration with three digits: "4.54 s", "12 ms", "32.3 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{human_number(seconds / size)} {unit}"
    return f"{human_number(seconds / 1e-6)} us" if seconds else "0 s"


def seconds_range(found: Range) -> str:
    """Format a range of seconds: "4.54 s - 5.1 s"."""
    return " - ".join(map(human_seconds, found))


def human_number(value: float) -> str:
    """Format a number with three digits and no exponent: "303,000", "4.54", "0.348"."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    rounded = round(value, digits)
    text = f"{rounded:,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
