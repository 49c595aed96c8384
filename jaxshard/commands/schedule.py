"""`jaxshard schedule`: the table of a pipeline's schedule, the idle time of its devices, and what they store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import check_files, check_positive
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console
from jaxshard.core.file_errors import naming
from jaxshard.core.local_path import local_path
from jaxshard.schedules.chart import WIDTH
from jaxshard.schedules.file import COLUMNS
from jaxshard.schedules.named import NAMES, full_name, named
from jaxshard.schedules.plot import plot_schedule
from jaxshard.schedules.schedule import Schedule
from jaxshard.schedules.stats import Costs, Stats


def run(
    name: str,
    *,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    plot: Path | None,
    json: Path | None,
) -> None:
    """Print a schedule and its figures, and draw it if it was asked for; the arguments are the flags."""
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_positive(stages=stages, microbatches=microbatches, chunks=chunks)
        check_files(plot=plot, json=json)
        the_schedule = _load_or_make(name, stages, microbatches, chunks)
    stats = the_schedule.stats()
    console.print(the_schedule.chart(width=console.width if console.is_terminal else WIDTH))
    console.print()
    facts(console, stats.facts)
    write_json(json, _result(the_schedule, stats))
    if plot is not None:  # last: without matplotlib there is still the table
        with usage_errors(), naming(plot):
            plot_schedule(the_schedule, plot)


def _load_or_make(name: str, stages: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    """Read the schedule from a file, whose sizes the flags must not contradict, or make the one of that name."""
    file = local_path(name)
    if file.suffix == ".csv" and not file.is_file():
        raise ValueError(f"{name}: there is no such file; give the path of a CSV file, or one of {', '.join(NAMES)}")
    if file.is_file():
        loaded = Schedule.from_csv(name)
        for size, number in {"stages": stages, "microbatches": microbatches, "chunks": chunks}.items():
            if number not in (None, getattr(loaded, size)):
                raise ValueError(f"--{size} {number}: {name} has {getattr(loaded, size)}; leave --{size} out")
        return loaded
    full_name(name)
    if stages is None or microbatches is None:
        raise ValueError(f"the schedule {name} needs --stages and --microbatches, such as --stages 4 --microbatches 16")
    return named(name, stages, microbatches, chunks=chunks)


def _result(schedule: Schedule, stats: Stats) -> dict[str, Any]:
    sizes = {name: getattr(schedule, name) for name in ("name", "stages", "microbatches", "chunks")}
    table = [dict(zip(COLUMNS, op)) for op in schedule.ops]
    return sizes | asdict(stats) | {"costs": {"F": Costs().F, "B": Costs().B}, "table": table}
