"""`js.plan.compile_for`: a training step through the compiler of a TPU topology or of GPUs that are not here."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxshard.checks.collectives.compare import Comparison, compare
from jaxshard.checks.collectives.found import Collective, collectives
from jaxshard.checks.collectives.instructions import rematerialized
from jaxshard.checks.collectives.promise import promise
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.settings import own_settings
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.cost.hardware import chip as chip_of
from jaxshard.plan.compiled.cycles import estimated_cycles
from jaxshard.plan.compiled.dump import Assignment, program_text, read_assignment
from jaxshard.plan.compiled.live import live_arrays, moment_words
from jaxshard.plan.compiled.refusal import Refusal, parse_refusal
from jaxshard.plan.compiled.savings import savings
from jaxshard.plan.compiled.target import step_for
from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.plan.predict import predict
from jaxshard.plan.prediction import Prediction
from jaxshard.training.step import Step


def compile_for(
    step: Step, batch: PyTree, topology: str, *, num_slices: int = 1, prediction: Prediction | None = None
) -> Verdict:
    """Compile a step for a TPU topology or for GPUs that are not here, and say what the compiler found.

    Works on shapes alone: nothing is allocated on any device, and a run of any size compiles on a laptop. The step may
    have been made for any mesh of as many devices as the topology has: simulated CPU devices, `js.plan.planned_mesh`,
    `js.plan.topology_mesh`. It is made again on a `topology_mesh` of the same axes and sizes. A loss function that
    itself names a mesh has to name that one.

    A program that needs more memory than there is, is no error: the verdict says how much it asked for, which arrays
    of which lines of the model need it, and what would save how much. Several processes may compile at once.

    Args:
      step: what `js.make_step` returned.
      batch: a tree of global arrays or `jax.ShapeDtypeStruct`.
      topology: version and shape, "v5e:16x16", "v5p:4x4x8"; or GPUs of a host and hosts, "h100:8", "h100:8x4".
      num_slices: that many TPU slices, connected by the data center's network.
      prediction: `js.plan.predict` of this step if it is there already; otherwise made here.

    Returns:
      The verdict; `print` it.

    Raises:
      ImportError: the compiler is not installed; has the command that installs it.
      ValueError: no such topology (lists near ones), or one with another number of devices than the mesh of the step.
      jax.errors.JaxRuntimeError: the compiler refuses the program for another reason than memory.

    Example:
        step = js.make_step(loss_fn, tx, js.layout(js.fsdp(), js.plan.planned_mesh("v5e:4x4", data=16), init_fn, tx))
        verdict = js.plan.compile_for(step, batch, "v5e:4x4")
        print(verdict)
        verdict.fits, verdict.peak_bytes, verdict.cycles
    """
    batch = abstract(as_arrays("the batch", batch))
    step = step_for(step, topology, num_slices)
    layout = step.layout
    if prediction is None:
        prediction = predict(layout, step.loss_fn, batch, step.engine, tx=step.tx)
    with tempfile.TemporaryDirectory(prefix="jaxshard-compile-") as folder:
        compiled, refused, seconds = _compile(step, batch, folder)
        assignment, text = read_assignment(Path(folder)), program_text(Path(folder))
    device = layout.mesh.devices.flat[0]
    chip = chip_of(device.device_kind, num_cores=getattr(device, "num_cores", None))
    usable = None if chip is None else chip.usable_bytes
    refusal, message = refused
    if refusal is not None:
        usable = refusal.usable
    if compiled is not None:
        text = compiled.as_text() or ""
    peak, arguments = _sizes(compiled, assignment, refusal)
    arrays = live_arrays(assignment, text, layout) if assignment else ()
    found = collectives(compiled or text, layout.mesh) if text else ()
    return Verdict(
        topology=f"{num_slices} x {topology}" if num_slices > 1 else topology,
        devices=layout.mesh.size,
        device_kind=device.device_kind,
        mesh=dict(layout.mesh.shape),
        fits=False if refusal else None if usable is None else peak <= usable,
        usable_bytes=usable,
        peak_bytes=peak,
        argument_bytes=arguments,
        refusal=message,
        moment=moment_words(assignment, text) if assignment else "",
        arrays=arrays,
        savings=savings(arrays, layout, step.engine, batch, peak),
        collectives=found,
        comparison=_compare(step, batch, found) if text else None,
        rematerialized=rematerialized(text) if text else (),
        cycles=None if compiled is None else estimated_cycles(text),
        compile_seconds=seconds,
        prediction=prediction,
    )


def _compile(
    step: Step, batch: PyTree, folder: str
) -> tuple[jax.stages.Compiled | None, tuple[Refusal | None, str], float]:
    """Compile with a dump; (program or None, refusal and the compiler's words, seconds)."""
    lowered = step.lower(batch)
    started = time.perf_counter()
    options: Any = {"xla_dump_to": folder}
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        refusal = parse_refusal(str(error))
        if refusal is None:
            raise
        return None, (refusal, str(error).splitlines()[0]), time.perf_counter() - started
    return compiled, (None, ""), time.perf_counter() - started


def _compare(step: Step, batch: PyTree, found: Sequence[Collective]) -> Comparison:
    with own_settings(step.layout.mesh):
        promised = promise(step.layout, step.engine, step.loss_fn, batch)
    return compare(promised, found)


def _sizes(
    compiled: jax.stages.Compiled | None, assignment: Assignment | None, refusal: Refusal | None
) -> tuple[int, int]:
    """(Peak, arguments) in bytes; of a refused program what it asked for."""
    if assignment is not None:
        arguments = sum(assignment.arguments.values())
        # The peak of `memory_analysis()` counts on-chip memory of a TPU too, where a small program has most of it.
        return (assignment.peak if refusal is None else arguments + assignment.temporaries), arguments
    if compiled is not None:
        memory: Any = compiled.memory_analysis()
        return memory.peak_memory_in_bytes, memory.argument_size_in_bytes
    assert refusal is not None
    return refusal.asked, 0
