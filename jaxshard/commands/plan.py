"""`jaxshard plan`: predict memory, communication and time of a step on absent chips."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxshard.commands.compiler import load_compiler
from jaxshard.commands.errors import UsageError, refusals, refuse, usage_errors
from jaxshard.commands.flags import Plan, StrategyName
from jaxshard.commands.json_object import write_json
from jaxshard.commands.low_rank import bytes_saved_by_bf16
from jaxshard.commands.prepared import Prepared, prepare
from jaxshard.commands.terminal import facts, start, working
from jaxshard.compiler.planned import chip_named, planned_mesh
from jaxshard.core.file_errors import naming
from jaxshard.core.layout import human_bytes
from jaxshard.core.pictures.canvas import write_picture
from jaxshard.core.tree import path_str
from jaxshard.cost.hardware import Chip
from jaxshard.engines.pipeline.engine import Pipelined
from jaxshard.plan.compiled.compile_for import compile_for
from jaxshard.plan.pictures.memory import memory_figure
from jaxshard.plan.pictures.roofline import roofline_figure
from jaxshard.plan.pictures.tiles import sharding_figure
from jaxshard.plan.predict import predict
from jaxshard.plan.prediction import Prediction
from jaxshard.schedules.plot import plot_schedule

_SOME = "v5e:16x16 (TPUs) or h100:8x4 (4 hosts of 8 GPUs)"
_COMPARED: tuple[StrategyName, ...] = ("ddp", "zero1", "zero2", "fsdp")
"""Strategies over the same mesh, whose memory a picture compares."""


def run(flags: Plan) -> None:
    """Run `jaxshard plan`: predict a step, and print its memory, communication and time."""
    console = start(flags)
    with usage_errors():
        limits = None if flags.chip is None else chip_named(flags.chip)
        if flags.topology is None:
            refuse("is of a TPU topology; add --topology, such as v5e:16x16", slices=flags.slices)
            refuse("asks the compiler of other devices; add --topology, such as v5e:16x16", codegen=flags.codegen)
        if flags.estimate:
            refuse("asks the compiler, and --estimate does without; leave one out", codegen=flags.codegen)
    started = time.perf_counter()
    slices = flags.slices or 1
    topology = None if flags.topology is None else partial(planned_mesh, flags.topology, num_slices=slices)
    prepared = prepare(flags, topology)
    if flags.topology is None and flags.chip is None:
        raise UsageError(f"for which chips? Add --topology, such as {_SOME}, or --chip for devices like these")
    shown = {} if flags.topology is None else {"topology": f"{slices} x {flags.topology}"}
    shown |= prepared.how.shown_of_step | {"model": prepared.program.name, "batch": _sizes(prepared.rows)}
    facts(console, shown)
    words = "estimating" if flags.estimate else "asking the compiler, where there is one"
    with working(console, words), refusals():
        if flags.topology is not None and not flags.estimate:
            load_compiler(flags.topology, slices)
        prediction = _predict(prepared, flags, limits)
    seconds = time.perf_counter() - started
    console.print(f"\n{prediction}")
    if flags.lora is not None and (saved := bytes_saved_by_bf16(prepared.layout)):
        console.print(f"\nnote: the frozen matrices are kept in f32; --lora base=bf16 saves {human_bytes(saved)}")
    result = {"model": prepared.program.name, "topology": flags.topology, "slices": slices} | prepared.how.about
    result |= prediction.as_dict() | {"predict_seconds": seconds}
    if flags.codegen and flags.topology is not None:
        result |= {"compiled": _compile(console, prepared, flags.topology, slices)}
    write_json(flags.json, result)
    if flags.plot is not None:  # last: without matplotlib there are still the tables
        with working(console, "drawing"), usage_errors():
            own = prepared.how.strategy_name
            compared = {own: prediction}
            for name in _COMPARED if own in _COMPARED else ():
                if name != own:
                    compared[name] = _predict(prepare(replace(flags, strategy=name), topology), flags, limits)
            files = _draw(flags.plot, prepared, prediction, compared)
        console.print(f"\ndrawn: {', '.join(map(str, files))}")


def _draw(plot: Path, prepared: Prepared, prediction: Prediction, compared: dict[str, Prediction]) -> list[Path]:
    """Draw memory by strategy into the file `plot`, and shards, roofline and schedule into "plot-shards" and so on.

    Returns:
      The files that were written.
    """
    figures: dict[str, Callable[[Path], None]] = {
        "": lambda file: write_picture(memory_figure(compared, title=prepared.program.name), file),
        "-shards": lambda file: write_picture(sharding_figure(prepared.layout), file),
    }
    if prediction.products and prediction.chip is not None:
        figures["-roofline"] = lambda file: write_picture(roofline_figure(prediction), file)
    if isinstance(prepared.how.engine, Pipelined):
        table = prepared.how.engine.table(prepared.layout)
        figures["-schedule"] = lambda file: plot_schedule(table, file)
    files = [plot.with_stem(plot.stem + part) for part in figures]
    for file, draw in zip(files, figures.values(), strict=True):
        with naming(file):
            draw(file)
    return files


def _predict(prepared: Prepared, flags: Plan, chip: Chip | None) -> Prediction:
    program = prepared.program
    return predict(
        prepared.layout, program.loss_fn, prepared.rows, prepared.how.engine, tx=program.tx, chip=chip,
        price=flags.price, estimate=flags.estimate,
    )  # fmt: skip


def _sizes(rows: Any) -> str:
    """Write the global shapes of a batch in words: "tokens [256, 8193]"."""
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    return ", ".join(f"{path_str(path)} {list(x.shape)}".strip() for path, x in leaves)


def _compile(console: Console, prepared: Prepared, topology: str, slices: int) -> dict[str, Any]:
    """Compile the step to the end for a topology; print the compiler's verdict and return it for the JSON object."""
    with working(console, "compiling"), refusals():
        verdict = compile_for(prepared.step(), prepared.rows, topology, num_slices=slices, codegen=True)
    console.print(f"\n{verdict}", soft_wrap=True, highlight=False, markup=False)
    return verdict.as_dict()
