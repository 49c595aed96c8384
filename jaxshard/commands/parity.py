"""`jaxshard parity`: a sharded training step against the same step on one device."""

from __future__ import annotations

import time
from typing import Any

from rich.text import Text

from jaxshard.checks.difference import Difference
from jaxshard.checks.parity import DIFFERS, Parity, parity
from jaxshard.commands.doctor import versions
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import Parity as ParityFlags
from jaxshard.commands.parallel import make_parallel
from jaxshard.commands.program import Program, depth_of, is_known, named_size, program_of, read_changes
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, start, working
from jaxshard.training.metrics import finite

_ROWS, _SEQ = 16, 32
"""The batch of a ready-made size: at most 512 tokens, since long sums lose digits."""


def run(flags: ParityFlags) -> int:
    """Compare a sharded step with the same step on one device.

    Returns:
      1 if an array differs, else 0.
    """
    console = start(flags)
    with usage_errors():
        how = make_parallel(flags, depth=depth_of(flags.target, flags.change), batch=flags.batch)
    program = _small_program(flags, how.rows_multiple)
    facts(console, how.shown | {"model": program.name})
    started = time.perf_counter()
    with working(console, "running both"), refusals():
        report = parity(
            program.init_fn,
            program.loss_fn,
            program.tx,
            how.strategy,
            how.mesh,
            program.batch,
            engine=how.engine,
            key=flags.seed,
        )
    seconds = time.perf_counter() - started
    last = report.headline if report.ok else f"{report.headline}: {', '.join(one.name for one in report.failures)}"
    for line in ("", *map(_style, report.table()), "", *report.remarks, Text(last, "" if report.ok else "bold red")):
        console.print(line)
    about = {"model": program.name, "seed": flags.seed} | how.about
    write_json(flags.json, about | _numbers(report) | {"seconds": seconds, "versions": versions()})
    return 0 if report.ok else 1


def _small_program(flags: ParityFlags, rows_multiple: int) -> Program:
    """The program; a ready-made size has a small batch."""
    target, change = flags.target, flags.change
    if not is_known(target):
        return program_of(target, change, rows=flags.batch)
    with usage_errors():
        seq = None if "seq" in read_changes(target, change) else min(_SEQ, named_size(target).shape["seq"])
    rows = flags.batch or _ROWS + -_ROWS % rows_multiple
    return program_of(target, change, rows=rows, seq=seq, seed=flags.seed, rows_multiple=rows_multiple)


def _style(line: str) -> Text:
    """A line of the table; one about an array that differs stands out."""
    return Text(line, "bold red" if line.endswith(DIFFERS) else "")


def _numbers(report: Parity) -> dict[str, Any]:
    losses = [finite(loss) for loss in report.losses]
    return {
        "ok": report.ok,
        "loss": {"sharded": losses[0], "one_device": losses[1]},
        "arrays": [_array(one) for one in report.differences],
        "failures": [one.name for one in report.failures],
    } | {name: list(getattr(report, name)) for name in ("why", "notes", "batches")}


def _array(one: Difference) -> dict[str, Any]:
    about = {name: getattr(one, name) for name in ("what", "leaf", "allowed", "ok")}
    return about | {"difference": finite(one.error)}
