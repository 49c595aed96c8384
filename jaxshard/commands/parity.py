"""`jaxshard parity`: a sharded training step against the same step on one device."""

from __future__ import annotations

import time
from typing import Annotated, Any

import tyro
from rich.text import Text

from jaxshard.checks.difference import Difference
from jaxshard.checks.parity import DIFFERS, Parity
from jaxshard.checks.parity import parity as compare
from jaxshard.commands.devices import describe
from jaxshard.commands.doctor import versions
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import Count, File, Words, check_files, check_positive
from jaxshard.commands.parallel import EngineName, StrategyName, parallel
from jaxshard.commands.program import Program, depth_of, program_of
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console
from jaxshard.models.sizes import SIZES
from jaxshard.training.metrics import finite

_ROWS, _SEQ = 16, 32
"""Of the batch of a ready-made size: at most 512 tokens, since long sums lose digits."""


def parity(
    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]],
    /,
    *,
    mesh: Words = None,
    strategy: StrategyName = "fsdp",
    engine: EngineName | None = None,
    schedule: Words = None,
    chunks: Count = None,
    devices: Count = None,
    batch: Count = None,
    microbatches: Count = None,
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    json: File = None,
) -> int:
    """Run one training step sharded and on one device, and compare all arrays; status 1 if one differs.

    Everything is computed in f32. Without an accelerator, 8 devices are simulated.

    Args:
      target: a ready-made size such as gpt-1m, or path/to/file.py:function or package.module:function, a function
        without arguments that returns (init_fn, loss_fn, tx, batch).
      mesh: axes and sizes, such as data=8, replica=2,data=4 or data=2,tensor=2,pipe=2; one size may be -1. An axis
        tensor splits the layers themselves, an axis pipe puts them in stages.
      strategy: what is split over the axis data: ddp nothing, zero1 the optimizer state, zero2 gradients too, fsdp
        parameters too; hsdp is fsdp within each group of an axis replica.
      engine: explicit issues the collectives itself, auto leaves them to the compiler; with an axis pipe it is
        pipelined.
      schedule: of a pipeline: interleaved, zero_bubble, one_f_one_b, gpipe, or a table's .csv file.
      chunks: stages per device of a pipeline; by default two for a ready-made size with enough blocks, else one.
      devices: use so many devices; simulated ones where there is no accelerator.
      batch: rows of a step over all devices, for a ready-made size; by default about 16.
      microbatches: compute a batch in so many turns and add their gradients; in a pipeline by default four per device.
      seed: of the parameters, the tokens of a ready-made size, and what the loss draws.
      json: write the result as one JSON object; - is standard output, and then nothing else goes there.
    """
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_positive(microbatches=microbatches, batch=batch)
        check_files(json=json)
        how = parallel(
            mesh=mesh, strategy=strategy, engine=engine, devices=devices, microbatches=microbatches, schedule=schedule,
            chunks=chunks, depth=depth_of(target), batch=batch,
        )  # fmt: skip
    the_mesh = how.mesh
    program = _program(target, batch, seed, how.parts)
    about = {"model": program.name} | how.about
    shown = {"model": program.name} | how.shown
    facts(console, {"devices": describe(list(the_mesh.devices.flat))} | shown)
    started = time.perf_counter()
    with console.status("running both"), refusals():
        report = compare(
            program.init_fn, program.loss_fn, program.tx, how.strategy, the_mesh, program.batch, engine=how.engine,
            key=seed,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    for line in ("", *map(_styled, report.table()), "", *report.remarks, _verdict(report)):
        console.print(line)
    result = about | {
        "mesh": dict(the_mesh.shape),
        "devices": the_mesh.size,
        "seed": seed,
    }
    write_json(json, result | _numbers(report) | {"seconds": seconds, "versions": versions()})
    return 0 if report.ok else 1


def _program(target: str, batch: int | None, seed: int, parts: int) -> Program:
    """The program; a small batch for a ready-made size."""
    if target not in SIZES:
        return program_of(target, rows=batch)
    shape = SIZES[target].shape
    return program_of(target, rows=batch or _ROWS + -_ROWS % parts, seq=min(_SEQ, shape["seq"]), seed=seed, parts=parts)


def _styled(line: str) -> Text:
    """A line of the table: what differs stands out. Never cut or wrapped, whatever the width: it names a leaf."""
    return Text(line, "bold red" if line.endswith(DIFFERS) else "")


def _verdict(report: Parity) -> Text:
    """The last line: what was compared and the outcome."""
    if report.ok:
        return Text(report.headline)
    names = ", ".join(one.name for one in report.failures)
    return Text(f"{report.headline}: {names}", "bold red")


def _numbers(report: Parity) -> dict[str, Any]:
    losses = [finite(loss) for loss in report.losses]
    return {
        "ok": report.ok,
        "loss": {"sharded": losses[0], "one_device": losses[1]},
        "arrays": [_array(one) for one in report.differences],
        "failures": [one.name for one in report.failures],
        "why": list(report.why),
        "notes": list(report.notes),
    }


def _array(one: Difference) -> dict[str, Any]:
    return {
        "what": one.what,
        "leaf": one.leaf,
        "difference": finite(one.error),
        "allowed": one.allowed,
        "ok": one.ok,
    }
