"""Compile a training step for a TPU topology or GPUs without the hardware: `js.plan.compile_for`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import jax

from jaxshard.compiler.judge import judge
from jaxshard.compiler.planned import topology_name
from jaxshard.compiler.topology import Target
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.settings import own_settings
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.plan.compiled.depth import extrapolate
from jaxshard.plan.compiled.target import step_for
from jaxshard.plan.compiled.verdict import Verdict, verdict_of
from jaxshard.training.step import Step


def compile_for(
    step: Step,
    batch: PyTree,
    topology: str,
    *,
    num_slices: int = 1,
    codegen: bool = False,
    at_depth: Callable[[int], Step] | None = None,
) -> Verdict:
    """Compile a step for a TPU topology or GPUs, without the hardware, and report its memory and collectives.

    Works on shapes alone: nothing is allocated on a device, and a model of any size compiles on a laptop. The step may
    have been made for any mesh with as many devices as the topology: simulated CPU devices, `js.plan.planned_mesh`,
    `js.plan.topology_mesh`. It is made again on a `topology_mesh` of the same axes and sizes. A loss function that
    itself names a mesh has to name this `topology_mesh`.

    The compiler runs in a child process (0.4 to 0.9 GB), which is ended as soon as memory is assigned. This takes
    seconds; a full compilation takes minutes. Answers are cached in `$XDG_CACHE_HOME/jaxshard/compiled`.

    A program that needs too much memory is no error: the verdict has the bytes that it asked for, the arrays and lines
    of the model that need them, and the changes that would save memory. Several processes and threads may compile at
    once.

    Args:
      step: the step of `js.make_step`.
      batch: a tree of global arrays or `jax.ShapeDtypeStruct`.
      topology: version and shape, "v5e:16x16", "v5p:4x4x8", or "v5p-256"; or GPUs of a host and hosts, "h100:8",
        "h100:8x4".
      num_slices: the number of TPU slices, connected by the data center's network.
      codegen: also compile to the end, in this process, which sets `verdict.cycles` and `verdict.compiled`.
      at_depth: a function that makes the same step with a given number of blocks, for models whose blocks run in a
        Python loop, where compile time grows with depth. A step of more than 32 blocks is compiled with 2 and 4 blocks,
        and its memory is extrapolated, linear in the number of blocks (`verdict.judged_by` is "extrapolated").

    Returns:
      The verdict; `print` it.

    Raises:
      ImportError: the compiler is not installed; has the command that installs it.
      ValueError: no such topology (lists similar ones), or another number of devices than the mesh of the step.
      jax.errors.JaxRuntimeError: the compiler refuses the program for another reason than memory.
      TimeoutError: the compiler has assigned no memory after half an hour.

    Example:
        step = js.make_step(loss_fn, tx, js.layout(js.fsdp(), js.plan.planned_mesh("v5e:4x4", data=16), init_fn, tx))
        verdict = js.plan.compile_for(step, batch, "v5e:4x4")
        print(verdict)
        verdict.fits, verdict.live_bytes, verdict.allocated_bytes
    """
    target, batch = Target(topology_name(topology), num_slices), abstract(as_arrays("the batch", batch))
    step = step_for(step, target)
    verdict = judge_step(step, batch, target, step.trace(batch), None if codegen else at_depth)
    if not codegen or verdict.refusal:
        return verdict
    started = time.perf_counter()
    compiled = step.compile(batch)
    seconds = verdict.compile_seconds + time.perf_counter() - started
    return replace(verdict, compiled=compiled, text=compiled.as_text() or "", compile_seconds=seconds)


def judge_step(
    step: Step, batch: PyTree, target: Target, traced: jax.stages.Traced,
    at_depth: Callable[[int], Step] | None = None,
) -> Verdict:  # fmt: skip
    """Compile a traced step for a topology; with `at_depth`, extrapolate a deep step from 2 and 4 blocks."""

    def ask(step: Step, traced: jax.stages.Traced) -> Verdict:
        with own_settings(step.layout.mesh):
            return verdict_of(target, step, batch, judge(traced.lower(), target))

    def ask_at(step: Step) -> Verdict:
        step = step_for(step, target)
        return ask(step, step.trace(batch))

    found = None if at_depth is None else extrapolate(ask_at, step, at_depth)
    return ask(step, traced) if found is None else found
