"""Draw a schedule as text: ticks from left to right, a line per device and kind of operation.

zero_bubble: 2 stages, 3 micro-batches; a cell is micro-batch
tick       0 1 2 3 4 5
device 0 F 0 1 2
         B       0 1 2
         W       0 1 2
device 1 F   0 1 2
         B     0 1 2
         W       0 1 2
"""

from __future__ import annotations

from jaxshard.schedules.table import KINDS, Op, Table

WIDTH = 120
"""The default number of characters in a line."""


def draw_chart(schedule: Table, *, width: int = WIDTH) -> str:
    """Return the table as lines of at most `width` characters: the ticks that fit, and how many more there are.

    A cell contains the micro-batch, or "chunk.micro-batch" if a device has several chunks.
    """
    cells = {(op.device, op.kind, op.tick): _cell(op, schedule) for op in schedule.ops}
    kinds = KINDS if schedule.splits_backward else KINDS[:2]
    label = len(f"device {schedule.stages - 1} F")
    column = 1 + max(len(str(schedule.ticks - 1)), *map(len, cells.values()))
    shown = min(schedule.ticks, max(1, (width - label) // column))
    lines = [_title(schedule), "tick".ljust(label) + "".join(str(tick).rjust(column) for tick in range(shown))]
    for device in range(schedule.stages):
        for kind in kinds:
            name = f"device {device} {kind}" if kind == "F" else kind
            row = (cells.get((device, kind, tick), "").rjust(column) for tick in range(shown))
            lines.append((name.rjust(label) + "".join(row)).rstrip())
    if shown < schedule.ticks:
        lines.append(f"... and {schedule.ticks - shown} more ticks")
    return "\n".join(lines)


def _cell(op: Op, schedule: Table) -> str:
    return str(op.microbatch) if schedule.chunks == 1 else f"{op.chunk}.{op.microbatch}"


def _title(schedule: Table) -> str:
    sizes = (schedule.stages, "stage"), (schedule.chunks, "chunk"), (schedule.microbatches, "micro-batch")
    stages, chunks, microbatches = (f"{n} {name}{_plural(n, name)}" for n, name in sizes)
    cell = "micro-batch" if schedule.chunks == 1 else "chunk.micro-batch"
    per_device = "" if schedule.chunks == 1 else f" of {chunks} each"
    return f"{schedule.name}: {stages}{per_device}, {microbatches}; a cell is {cell}"


def _plural(count: int, name: str) -> str:
    return "" if count == 1 else "es" if name.endswith("ch") else "s"
