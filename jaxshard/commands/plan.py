"""`jaxshard plan`: the memory, communication and time of a step on chips that are not here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxshard.commands.errors import UsageError, refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, ShardingFlags, StrategyName, check_files, check_positive, refuse
from jaxshard.commands.parallel import Topology
from jaxshard.commands.prepared import Prepared, prepare
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working
from jaxshard.core.file_errors import naming
from jaxshard.core.pictures.canvas import write_picture
from jaxshard.core.tree import path_str
from jaxshard.cost.hardware import Chip
from jaxshard.engines.pipeline.engine import Pipelined
from jaxshard.plan.compiled.compile_for import compile_for
from jaxshard.plan.pictures.memory import memory_figure
from jaxshard.plan.pictures.roofline import roofline_figure
from jaxshard.plan.pictures.tiles import sharding_figure
from jaxshard.plan.planned import chip_named, planned_mesh
from jaxshard.plan.predict import predict
from jaxshard.plan.prediction import Prediction
from jaxshard.schedules.plot import plot_schedule

_SOME = "v5e:16x16 (TPUs) or h100:8x4 (4 hosts of 8 GPUs)"
_COMPARED: tuple[StrategyName, ...] = ("ddp", "zero1", "zero2", "fsdp")
"""Strategies over the same mesh, whose memory a picture shows beside that of the one that was asked for."""


def run(
    target: str,
    *,
    change: str | None,
    sharding: ShardingFlags,
    batch: int | None,
    seq: int | None,
    remat: str | None,
    precision: PrecisionName | None,
    topology: str | None,
    slices: int | None,
    chip: str | None,
    price: float | None,
    estimate: bool,
    codegen: bool,
    plot: Path | None,
    json: Path | None,
) -> None:
    """Predict a step and print what it needs; the arguments are the flags."""
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_files(json=json, plot=plot)
        check_positive(slices=slices, price=price)
        limits = None if chip is None else chip_named(chip)
        if topology is None:
            refuse("is of a TPU topology; add --topology, such as v5e:16x16", slices=slices)
            refuse("asks the compiler of other devices; add --topology, such as v5e:16x16", codegen=codegen)
        if estimate:
            refuse("asks the compiler, and --estimate does without; leave one out", codegen=codegen)
    started = time.perf_counter()
    chips = None if topology is None else Topology(topology, slices or 1, planned_mesh)
    prepared = prepare(
        target, change=change, sharding=sharding, batch=batch, seq=seq, remat=remat, precision=precision, topology=chips
    )
    if topology is None and chip is None:
        raise UsageError(f"for which chips? Add --topology, such as {_SOME}, or --chip for devices like these")
    facts(console, prepared.how.shown | {"model": prepared.program.name, "batch": _sizes(prepared.rows)})
    words = "estimating" if estimate else "asking the compiler, where there is one"
    with working(console, words), refusals():
        prediction = _predict(prepared, limits, price, estimate)
    seconds = time.perf_counter() - started
    console.print(f"\n{prediction}")
    result = {"model": prepared.program.name, "topology": topology, "slices": slices or 1} | prepared.how.about
    result |= prediction.as_dict() | {"predict_seconds": seconds}
    if codegen and topology is not None:
        result |= {"compiled": _compile(console, prepared, Topology(topology, slices or 1))}
    write_json(json, result)
    if plot is not None:  # last: without matplotlib there are still the tables
        with working(console, "drawing"), usage_errors():
            chosen = prepared.how.strategy_name
            others = [] if chosen == "hsdp" else [name for name in _COMPARED if name != chosen]
            asked = partial(
                prepare, target, change=change, batch=batch, seq=seq, remat=remat, precision=precision, topology=chips
            )
            compared: dict[str, Prediction] = {
                name: _predict(asked(sharding=replace(sharding, strategy=name)), limits, price, estimate)
                for name in others
            }
            files = _draw(plot, prepared, prediction, {chosen: prediction} | compared)
        console.print(f"\ndrawn: {', '.join(map(str, files))}")


def _draw(plot: Path, prepared: Prepared, prediction: Prediction, compared: dict[str, Prediction]) -> list[Path]:
    """Draw memory across strategies into the file, and beside it the roofline, the shards and the schedule."""
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


def _predict(prepared: Prepared, chip: Chip | None, price: float | None, estimate: bool) -> Prediction:
    program = prepared.program
    return predict(
        prepared.layout, program.loss_fn, prepared.rows, prepared.how.engine, tx=program.tx, chip=chip, price=price,
        estimate=estimate,
    )  # fmt: skip


def _sizes(rows: Any) -> str:
    """Write the shapes of a batch: "tokens [256, 8193]"."""
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    return ", ".join(f"{path_str(path)} {list(x.shape)}".strip() for path, x in leaves)


def _compile(console: Any, prepared: Prepared, topology: Topology) -> dict[str, Any]:
    """Compile to the end, for the estimated cycles; print and return the verdict."""
    with working(console, "compiling"), refusals():
        verdict = compile_for(prepared.step(), prepared.rows, topology.name, num_slices=topology.slices, codegen=True)
    console.print(f"\n{verdict}", soft_wrap=True, highlight=False, markup=False)
    return verdict.as_dict()
