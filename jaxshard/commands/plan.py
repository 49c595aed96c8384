"""`jaxshard plan`: the memory, communication and time of a step that is only planned, and the compiler's own answer."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, ShardingFlags, check_files, check_positive, refuse
from jaxshard.commands.parallel import Topology
from jaxshard.commands.prepared import Prepared, prepare
from jaxshard.commands.result import write_json
from jaxshard.commands.terminal import facts, make_console, working
from jaxshard.cost.hardware import Chip
from jaxshard.plan.planned import chip_named, planned_mesh
from jaxshard.plan.predict import predict


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
    ask = partial(
        prepare, target, change=change, sharding=sharding, batch=batch, seq=seq, remat=remat, precision=precision
    )
    started = time.perf_counter()
    prepared = ask(topology=None if topology is None else Topology(topology, slices or 1, planned_mesh))
    facts(console, prepared.how.shown | {"model": prepared.program.name})
    with working(console, "predicting"), refusals():
        prediction = _predict(prepared, limits, price)
    seconds = time.perf_counter() - started
    console.print(f"\n{prediction}")
    result = {"model": prepared.program.name, "topology": topology, "slices": slices or 1} | prepared.how.about
    result |= prediction.as_dict() | {"predict_seconds": seconds}
    if compile and topology is not None:
        result |= _compile(console, ask(topology=Topology(topology, slices or 1)))
    write_json(json, result)


def _predict(prepared: Prepared, chip: Chip | None, price: float | None) -> Any:
    program = prepared.program
    return predict(
        prepared.layout, program.loss_fn, prepared.rows, prepared.how.engine, tx=program.tx, chip=chip, price=price
    )


def _compile(console: Any, prepared: Prepared) -> dict[str, Any]:
    """Ask the TPU's compiler; where it refuses, for how much it asked."""
    step = prepared.step()
    started = time.perf_counter()
    try:
        with working(console, "compiling"), refusals():
            memory: Any = step.compile(prepared.rows).memory_analysis()
        answer = {"compiled_peak_bytes": memory.peak_memory_in_bytes, "fits": True}
    except jax.errors.JaxRuntimeError as error:
        asked = re.search(r"\(([\d.]+)([KMG])\) exceeds available", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or asked is None:
            raise
        size = int(float(asked[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[asked[2]])
        answer = {"compiled_peak_bytes": size, "fits": False, "refusal": " ".join(str(error).split())[:2000]}
    verdict = "fits" if answer["fits"] else "the compiler refuses it"
    console.print(f"\ncompiled: {answer['compiled_peak_bytes'] / 2**30:.2f} GiB, {verdict}")
    return answer | {"compile_seconds": time.perf_counter() - started}
