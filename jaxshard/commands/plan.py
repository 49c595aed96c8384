"""`jaxshard plan`: the memory, communication and time of a step that is only planned, and the compiler's own answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, ShardingFlags, check_files, check_positive, refuse
from jaxshard.commands.parallel import Topology
from jaxshard.commands.prepared import Prepared, prepare
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working
from jaxshard.cost.hardware import Chip
from jaxshard.plan.compiled.compile_for import compile_for
from jaxshard.plan.planned import chip_named, planned_mesh
from jaxshard.plan.predict import predict
from jaxshard.plan.prediction import Prediction


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
    compile: bool,
    plot: Path | None,
    json: Path | None,
) -> None:
    """Predict a step, compile it if asked, and print what it needs; the arguments are the flags."""
    console = make_console(stderr=str(json) == "-")
    with usage_errors():
        check_files(json=json, plot=plot)
        check_positive(slices=slices, price=price)
        limits = None if chip is None else chip_named(chip)
        if topology is None:
            refuse("is of a TPU topology; add --topology, such as v5e:16x16", slices=slices)
            refuse("asks the compiler of other devices; add --topology, such as v5e:16x16", compile=compile)
    started = time.perf_counter()
    chips = None if topology is None else Topology(topology, slices or 1, planned_mesh)
    prepared = prepare(
        target, change=change, sharding=sharding, batch=batch, seq=seq, remat=remat, precision=precision, topology=chips
    )
    facts(console, prepared.how.shown | {"model": prepared.program.name})
    with working(console, "predicting"), refusals():
        prediction = _predict(prepared, limits, price)
    seconds = time.perf_counter() - started
    console.print(f"\n{prediction}")
    result = {"model": prepared.program.name, "topology": topology, "slices": slices or 1} | prepared.how.about
    result |= prediction.as_dict() | {"predict_seconds": seconds}
    if compile and topology is not None:
        result |= _compile(console, prepared, Topology(topology, slices or 1), prediction)
    write_json(json, result)


def _predict(prepared: Prepared, chip: Chip | None, price: float | None) -> Prediction:
    program = prepared.program
    return predict(
        prepared.layout, program.loss_fn, prepared.rows, prepared.how.engine, tx=program.tx, chip=chip, price=price
    )


def _compile(console: Any, prepared: Prepared, topology: Topology, prediction: Prediction) -> dict[str, Any]:
    """Ask the compiler, also why it refuses."""
    with working(console, "compiling"), refusals():
        verdict = compile_for(
            prepared.step(), prepared.rows, topology.name, num_slices=topology.slices, prediction=prediction
        )
    console.print(f"\n{verdict}", soft_wrap=True, highlight=False, markup=False)
    found = verdict.as_dict()
    chosen = {key: found[key] for key in ("fits", "compiled_peak_bytes", "refusal", "compile_seconds")}
    return chosen | {"compiled": found}
