"""`jaxshard schedule`: print the table of a pipeline schedule, its idle time and its memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxshard.commands.engine import check_table
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Schedule as ScheduleFlags
from jaxshard.commands.json_object import write_json
from jaxshard.commands.terminal import facts, start
from jaxshard.core.file_errors import naming
from jaxshard.core.local_path import local_path
from jaxshard.schedules.chart import WIDTH
from jaxshard.schedules.file import COLUMNS
from jaxshard.schedules.named import NAMES, full_name, named
from jaxshard.schedules.plot import plot_schedule
from jaxshard.schedules.schedule import Schedule
from jaxshard.schedules.stats import Costs, Stats


def run(flags: ScheduleFlags) -> None:
    """Run `jaxshard schedule`: print a pipeline schedule, its idle time and memory; draw it with --plot."""
    console = start(flags)
    with usage_errors():
        schedule = _load_or_make(flags)
    stats = schedule.stats()
    console.print(schedule.chart(width=console.width if console.is_terminal else WIDTH))
    console.print()
    facts(console, stats.facts)
    write_json(flags.json, _result(schedule, stats))
    if flags.plot is not None:  # last: without matplotlib there is still the table
        with usage_errors(), naming(flags.plot):
            plot_schedule(schedule, flags.plot)


def _load_or_make(flags: ScheduleFlags) -> Schedule:
    """Read the pipeline schedule from a CSV file, or make the schedule of a name such as "interleaved"."""
    name, file = flags.name, local_path(flags.name)
    if file.suffix == ".csv" and not file.is_file():
        raise ValueError(f"{name}: there is no such file; give the path of a CSV file, or one of {', '.join(NAMES)}")
    if file.is_file():
        loaded = Schedule.from_csv(name)
        check_table(loaded, name, {size: getattr(flags, size) for size in ("stages", "microbatches", "chunks")})
        return loaded
    full_name(name)
    if flags.stages is None or flags.microbatches is None:
        raise ValueError(f"the schedule {name} needs --stages and --microbatches, such as --stages 4 --microbatches 16")
    return named(name, flags.stages, flags.microbatches, chunks=flags.chunks)


def _result(schedule: Schedule, stats: Stats) -> dict[str, Any]:
    sizes = {name: getattr(schedule, name) for name in ("name", "stages", "microbatches", "chunks")}
    table = [dict(zip(COLUMNS, op)) for op in schedule.ops]
    return sizes | asdict(stats) | {"costs": {"F": Costs().F, "B": Costs().B}, "table": table}
