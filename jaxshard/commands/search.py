"""`jaxshard search`: layouts of a model on chips that are not here, ranked, with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, check_files, check_positive
from jaxshard.commands.program import Program, program_of
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working
from jaxshard.core.tree import abstract
from jaxshard.plan.planned import planned_devices
from jaxshard.plan.search.search import search

_COMMANDS = 3
"""Plans that are printed as commands."""


def run(
    target: str,
    *,
    topology: str,
    slices: int | None,
    change: str | None,
    batch: int | None,
    seq: int | None,
    precision: PrecisionName | None,
    price: float | None,
    compile: int | None,
    json: Path | None,
) -> None:
    """Search, and print the ranking; the arguments are the flags."""
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_files(json=json)
        check_positive(slices=slices, batch=batch, seq=seq, price=price, compile=compile or None)
        devices = len(planned_devices(topology, num_slices=slices or 1))
    program = program_of(target, change=change, rows=batch, seq=seq, seed=None)
    facts(console, {"model": program.name, "devices": f"{devices} of {slices or 1} x {topology}"})
    with working(console, "searching") as say, refusals(), usage_errors():
        ranking = search(
            program.init_fn,
            program.loss_fn,
            program.tx,
            _with_targets(program),
            topology,
            num_slices=slices or 1,
            precision=precision,
            price=price,
            compile=3 if compile is None else compile,
            progress=say,
        )
    console.print(f"\n{ranking}", soft_wrap=True, highlight=False, markup=False)
    sizes = "".join(
        f" --{name} {value}" for name, value in (("batch", batch), ("seq", seq), ("change", change)) if value
    )
    for number, plan in enumerate(ranking.plans[:_COMMANDS], 1):
        words = f"{target}{sizes} {' '.join(plan.candidate.words)}"
        where = f" --topology {topology}" + f" --slices {slices}" * bool(slices)
        console.print(f"\n{number}. jaxshard plan {words}{where}\n   jaxshard train {words}", soft_wrap=True,
                      highlight=False, markup=False)  # fmt: skip
    write_json(json, {"model": program.name, "slices": slices or 1, "devices": devices} | ranking.as_dict())


def _with_targets(program: Program) -> Any:
    """The batch as shapes; a ready-made decoder's labels stand beside its tokens, so that rows can be split."""
    batch = abstract(program.batch)
    if ":" in program.name or set(batch) != {"tokens"}:
        return batch
    rows, length = batch["tokens"].shape
    tokens = jax.ShapeDtypeStruct((rows, length - 1), batch["tokens"].dtype)
    return {"tokens": tokens, "targets": tokens}
