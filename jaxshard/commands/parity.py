"""`jaxshard parity`: compare a sharded training step with the same step on one device."""

from __future__ import annotations

import time

from rich.text import Text

from jaxshard.checks.parity import DIFFERS, parity
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import Parity as ParityFlags
from jaxshard.commands.json_object import write_json
from jaxshard.commands.named_model import NamedModel
from jaxshard.commands.packages import versions
from jaxshard.commands.parallel import make_parallel
from jaxshard.commands.program import Program, program_of
from jaxshard.commands.terminal import facts, start
from jaxshard.training.progress_views import view_on

_ROWS, _SEQ = 16, 32
"""The batch of a ready-made size: at most 512 tokens, because long sums lose digits."""


def run(flags: ParityFlags) -> int:
    """Run `jaxshard parity`: compare a sharded step with the same step on one device.

    Returns:
      The exit status: 1 if an array differs, else 0.
    """
    console = start(flags)
    with usage_errors():
        named = NamedModel(flags.target, flags.change)
        how = make_parallel(flags, depth=named.depth, batch=flags.batch)
    program = _small_program(flags, named, how.rows_multiple)
    facts(console, how.shown_of_step | {"model": program.name})
    started = time.perf_counter()
    with refusals():
        report = parity(
            program.init_fn,
            program.loss_fn,
            program.tx,
            how.strategy,
            how.mesh,
            program.batch,
            engine=how.engine,
            key=flags.seed,
            progress=view_on(console),
        )
    seconds = time.perf_counter() - started
    rows = (Text(line, "bold red" if line.endswith(DIFFERS) else "") for line in report.table())
    last = report.headline if report.ok else f"{report.headline}: {', '.join(one.name for one in report.failures)}"
    for line in ("", *rows, "", *report.remarks, Text(last, "" if report.ok else "bold red")):
        console.print(line)
    about = {"model": program.name, "seed": flags.seed} | how.about
    write_json(flags.json, about | report.as_dict() | {"seconds": seconds, "versions": versions()})
    return 0 if report.ok else 1


def _small_program(flags: ParityFlags, named: NamedModel, rows_multiple: int) -> Program:
    """Make the program (model, loss, optimizer, batch); a ready-made size gets a small batch, to run fast."""
    if not named.is_known:
        return program_of(*named, rows=flags.batch)
    with usage_errors():
        seq = None if "seq" in named.changes else min(_SEQ, named.size.shape["seq"])
    rows = flags.batch or _ROWS + -_ROWS % rows_multiple
    return program_of(*named, rows=rows, seq=seq, seed=flags.seed)
