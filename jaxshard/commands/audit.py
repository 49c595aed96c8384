"""`jaxshard audit`: what a compiled step communicates, against what the strategy promises."""

from __future__ import annotations

import time
from typing import Annotated, Any

import tyro

from jaxshard.checks.collectives.compare import Comparison
from jaxshard.checks.collectives.compare import audit as audit_step
from jaxshard.commands.devices import describe
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Count, File, Words, check_files, check_positive
from jaxshard.commands.parallel import EngineName, RematName, StrategyName, parallel
from jaxshard.commands.program import depth_of, program_of
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console
from jaxshard.core.layout import layout as make_layout
from jaxshard.core.tree import abstract
from jaxshard.training.step import check_batch, make_step


def audit(
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
    seq: Count = None,
    microbatches: Count = None,
    remat: RematName | None = None,
    topology: Words = None,
    json: File = None,
) -> int:
    """Compile a training step and name every collective that the strategy does not promise; status 1 if there is one.

    Nothing is trained, and no array is made.

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
      batch: rows of a step over all devices, for a ready-made size; by default what suits it.
      seq: tokens in a row, for a ready-made size; by default what suits it.
      microbatches: compute a batch in so many turns and add their gradients; in a pipeline by default four per device.
      remat: what the forward pass of a block saves for the backward pass; by default everything, nothing in a
        pipeline.
      topology: compile for TPUs that are not here, such as v5e:2x4; needs libtpu.
      json: write the result as one JSON object; - is standard output, and then nothing else goes there.
    """
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_positive(microbatches=microbatches)
        check_files(json=json)
        how = parallel(
            mesh=mesh, strategy=strategy, engine=engine, devices=devices, microbatches=microbatches, remat=remat,
            schedule=schedule, chunks=chunks, topology=topology, depth=depth_of(target), batch=batch,
        )  # fmt: skip
    the_mesh = how.mesh
    program = program_of(target, rows=batch, seq=seq, parts=how.parts)
    rows = abstract(program.batch)
    with usage_errors():
        layout = make_layout(how.strategy, the_mesh, program.init_fn, program.tx)
        check_batch(layout, rows, how.engine.microbatches)
        step = make_step(program.loss_fn, program.tx, layout, engine=how.engine)
    about = {"model": program.name} | how.about
    shown = {"model": program.name} | how.shown
    facts(console, {"devices": topology or describe(list(the_mesh.devices.flat))} | shown)
    started = time.perf_counter()
    with console.status("compiling"):
        comparison = audit_step(step, rows)
    seconds = time.perf_counter() - started
    console.print(f"\n{comparison}\n\n{_verdict(comparison)}")
    result = about | {"mesh": dict(the_mesh.shape), "devices": the_mesh.size, "topology": topology}
    write_json(json, result | _numbers(comparison) | {"compile_seconds": seconds})
    return 0 if comparison.ok else 1


def _verdict(comparison: Comparison) -> str:
    count = len(comparison.surprises)
    return f"{count} surprise{'s' * (count > 1)}" if count else "as promised"


def _numbers(comparison: Comparison) -> dict[str, Any]:
    return {
        "ok": comparison.ok,
        "collectives": comparison.rows(),
        "surprises": [surprise.as_dict() for surprise in comparison.surprises],
        "missing": list(comparison.missing),
        "tolerated_bytes": comparison.tolerated,
    }
