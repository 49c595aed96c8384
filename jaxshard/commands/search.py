"""`jaxshard search`: rank the layouts of a model on absent chips, with reasons."""

from __future__ import annotations

from typing import Any

import jax

from jaxshard.commands.compiler import load_compiler
from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import Search
from jaxshard.commands.json_object import write_json
from jaxshard.commands.program import Program, program_of
from jaxshard.commands.terminal import facts, start, working
from jaxshard.compiler.planned import planned_devices
from jaxshard.core.tree import abstract
from jaxshard.plan.search.search import search

_COMMANDS = 3
"""Plans that are printed as commands."""


def run(flags: Search) -> None:
    """Run `jaxshard search`: rank the layouts of a model on a topology, and print the ranking."""
    console = start(flags)
    slices = flags.slices or 1
    with usage_errors():
        devices = len(planned_devices(flags.topology, num_slices=slices))
    program = program_of(flags.target, flags.change, lora=flags.lora, rows=flags.batch, seq=flags.seq, seed=None)
    facts(console, {"model": program.name, "devices": f"{devices} of {slices} x {flags.topology}"})
    with working(console, "searching") as say, refusals(), usage_errors():
        if flags.compile:
            load_compiler(flags.topology, slices)
        ranking = search(
            program.init_fn,
            program.loss_fn,
            program.tx,
            _with_targets(program),
            flags.topology,
            num_slices=slices,
            precision=flags.precision,
            price=flags.price,
            compile=flags.compile,
            progress=say,
        )
    console.print(f"\n{ranking}", soft_wrap=True, highlight=False, markup=False)
    given = {"batch": flags.batch, "seq": flags.seq, "change": flags.change, "lora": flags.lora}
    sizes = "".join(f" --{name} {value}" for name, value in given.items() if value)
    for number, plan in enumerate(ranking.plans[:_COMMANDS], 1):
        words = f"{flags.target}{sizes} {' '.join(plan.candidate.words)}"
        where = f" --topology {flags.topology}" + f" --slices {slices}" * bool(flags.slices)
        console.print(f"\n{number}. jaxshard plan {words}{where}\n   jaxshard train {words}", soft_wrap=True,
                      highlight=False, markup=False)  # fmt: skip
    write_json(flags.json, {"model": program.name, "slices": slices, "devices": devices} | ranking.as_dict())


def _with_targets(program: Program) -> Any:
    """Return the shapes of the batch, in a form whose tokens a context axis can split.

    For a ready-made decoder {"tokens": [rows, seq + 1]} becomes {"tokens": [rows, seq], "targets": [rows, seq]}.
    """
    batch = abstract(program.batch)
    if ":" in program.name or set(batch) != {"tokens"}:
        return batch
    rows, length = batch["tokens"].shape
    tokens = jax.ShapeDtypeStruct((rows, length - 1), batch["tokens"].dtype)
    return {"tokens": tokens, "targets": tokens}
