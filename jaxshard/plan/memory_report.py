"""Report the memory of a step on each device: `MemoryReport`, the base class of predictions and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxshard.checks.programs.live import LiveArray
from jaxshard.core.layout import human_bytes
from jaxshard.core.pictures.style import ROLES
from jaxshard.core.text_table import Section, Table, page
from jaxshard.cost.hardware import Chip

BAND = (-0.3, 1.1)
"""The band of the estimate's error, relative to the estimate: 95 % of steps are allocated memory within it.

It was measured on the compiled steps of docs/records/planner_table.md, and rounded outwards."""
LIKELY = 1.5
"""Nine of ten of the steps behind `BAND` are allocated at most so many times the estimate."""
NEAR = 0.05
"""The distance from the limit, as a share of it, within which an extrapolated size does not tell whether a step fits.

Close to the limit a compiler saved 4 % by another schedule (docs/records/decisions.md)."""
_SHOWN = 12
"""The number of arrays in the table; `as_dict` has 40."""
_JUDGES = {
    "compiler": "the compiler's own figures",
    "extrapolated": "extrapolated from the compiler's figures for 2 and 4 blocks",
    "estimate": f"an estimate; 95 % of steps need {1 + BAND[0]:.1f} to {1 + BAND[1]:.1f} times as much",
}


def sections_text(sections: Iterable[Section]) -> str:
    """Write the sections of a report as text, with an empty line between them."""
    return "\n\n".join("\n".join([f"{one.title}:"] * bool(one.title) + one.lines) for one in sections)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a step on each device: live and allocated bytes, and the arrays at the peak.

    Attributes:
      mesh: the size of each axis.
      chip: the limits of one device, or None if they are not known.
      judged_by: the origin of the figures: "compiler", "extrapolated" (`js.plan.compile_for` with `at_depth=`) or
        "estimate".
      live_bytes: bytes that are live at once at the peak; for a refused step the bytes that it asked for.
      allocated_bytes: bytes that the compiler reserves, with the gaps between arrays; None for an estimate.
      argument_bytes: bytes of the arguments, which are the TrainState and the batch; in tiles on a TPU.
      arrays: the arrays that are live at the peak, arguments included, the largest first.
      moment: the time of the peak in words, such as "backward pass".
      usable_bytes: the bytes that a program may use; None if that is not known.
      refusal: the compiler's message if it refused the step for lack of memory; "" otherwise.
    """

    mesh: Mapping[str, int]
    chip: Chip | None
    judged_by: str
    live_bytes: int
    allocated_bytes: int | None
    argument_bytes: int
    arrays: tuple[LiveArray, ...] = ()
    moment: str = ""
    usable_bytes: int | None = None
    refusal: str = ""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    @property
    def by_role(self) -> dict[str, int]:
        """Live bytes per device by role: {"parameters": ..., "gradients": ..., "optimizer state": ...}."""
        return {role: sum(one.bytes for one in self.arrays if one.role == role) for role in ROLES}

    @property
    def fits(self) -> bool | None:
        """True if the step fits, False if it does not, None if that is not known.

        The allocated bytes must fit: TPU compilers refuse a step otherwise, GPU compilers enforce nothing. An
        extrapolated size near the limit gives None, because near the limit the compiler schedules a step for less
        memory. An estimate gives None if the limit is within the estimate's range of error (`BAND`).
        """
        if self.refusal or self.usable_bytes is None:
            return False if self.refusal else None
        if self.allocated_bytes is None:
            least, most = (self.live_bytes * (1 + share) for share in BAND)
        else:
            near = NEAR if self.judged_by == "extrapolated" else 0.0
            least, most = self.allocated_bytes / (1 + near), self.allocated_bytes / (1 - near)
        return True if most <= self.usable_bytes else False if least > self.usable_bytes else None

    @property
    def is_likely_to_fit(self) -> bool:
        """True if the step fits; if estimated, True if nine of ten steps with this estimate fit (`LIKELY`)."""
        if self.fits is None and self.allocated_bytes is None and self.usable_bytes is not None:
            return self.live_bytes * LIKELY <= self.usable_bytes
        return self.fits is True

    def memory(self) -> dict[str, Any]:
        """Return the fields of `MemoryReport` by name, as keyword arguments for a subclass that has more fields."""
        return {one.name: getattr(self, one.name) for one in fields(MemoryReport)}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        return {
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "chip": None if self.chip is None else self.chip.name,
            "fits": self.fits,
            "hbm_bytes": self.usable_bytes,
            "judged_by": self.judged_by,
            "live_bytes": self.live_bytes,
            "allocated_bytes": self.allocated_bytes,
            "refusal": self.refusal or None,
            "by_role": self.by_role,
            "moment": self.moment,
            "largest": [{"bytes": one.bytes, "role": one.role, "array": str(one)} for one in self.arrays[:40]],
            "argument_bytes": self.argument_bytes,
        }

    def __str__(self) -> str:
        """Write the headline and all tables."""
        return f"{self._headline()}\n\n{sections_text(self.sections())}"

    def _repr_html_(self) -> str:
        """Format the report as HTML for a notebook."""
        return page(self._headline(), *self.sections())

    def sections(self) -> list[Section]:
        """Return the sections of the report, each a title with tables or text; subclasses add their own."""
        rows = [
            (role, human_bytes(size), f"{size / self.live_bytes:.0%}") for role, size in self.by_role.items() if size
        ]
        rows.append(("live at once", human_bytes(self.live_bytes), "100%"))
        if self.allocated_bytes is not None:
            rows.append(("allocated", human_bytes(self.allocated_bytes), ""))
        table = Table(rows, "<>>", ("per device", "bytes", "share"))
        largest = Table([(human_bytes(one.bytes), one.role, str(one)) for one in self.arrays[:_SHOWN]], "><<")
        title = f"largest, {self.moment or 'when most is live'}"
        return [Section("", [table])] + [Section(title, [largest])] * bool(self.arrays)

    @property
    def where(self) -> str:
        """The devices in words: "256 devices of TPU v5e (data=256)"."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{self.devices} devices{f' of {self.chip.name}' if self.chip else ''} ({axes})"

    def _headline(self) -> str:
        """Write one line: the devices, whether the step fits, and whether a compiler or an estimate says so."""
        if self.usable_bytes is None:
            return f"{self.where}: {_JUDGES[self.judged_by]}"
        fits = {True: "fits", False: "does not fit", None: "may fit, only the compiler knows"}[self.fits]
        return f"{self.where}: {fits}; a program may use {human_bytes(self.usable_bytes)} ({_JUDGES[self.judged_by]})"
