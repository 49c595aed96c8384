"""`js.plan.predict`: the needs of a training step, from its traced program, without compiling and without a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr

from jaxshard.checks.collectives.parameters import tensor_axes
from jaxshard.checks.collectives.promise import promise
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.jaxpr import eliminate_dead_code, open_jaxpr
from jaxshard.core.layout import Layout, join_model
from jaxshard.core.tree import abstract
from jaxshard.core.types import LossFn, PyTree
from jaxshard.cost.flops import train_flops
from jaxshard.cost.hardware import Chip
from jaxshard.cost.hardware import chip as chip_of
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.plan.compiled.compile_for import judge_step
from jaxshard.plan.compiled.target import step_for
from jaxshard.plan.compiled.verdict import Verdict
from jaxshard.plan.memory.graph import Region
from jaxshard.plan.memory.peak import moment_str, role_of, step_graph, step_peak, traced_step
from jaxshard.plan.memory.tiles import tiled_bytes
from jaxshard.plan.prediction import MemoryPeak, Prediction
from jaxshard.plan.roles import ROLES
from jaxshard.plan.time.activations import activation_costs, exchange_costs
from jaxshard.plan.time.network import collective_costs
from jaxshard.plan.time.offload import offload_of
from jaxshard.plan.time.pipeline import ticks_of
from jaxshard.plan.time.products import product_costs
from jaxshard.plan.time.step_time import mfu_range, price_per_billion_tokens, step_time, tokens_per_second
from jaxshard.plan.topology import has_compiler, target_of
from jaxshard.training.step import Step, make_step


def predict(
    layout: Layout,
    loss_fn: LossFn,
    batch: PyTree,
    engine: Engine | None = None,
    *,
    tx: optax.GradientTransformation | None = None,
    chip: Chip | None = None,
    price: float | None = None,
    estimate: bool = False,
    at_depth: Callable[[int], Step] | None = None,
) -> Prediction:
    """Predict memory, communication and time of the step that `make_step(loss_fn, tx, layout, engine=engine)` makes.

    Only shapes are needed, and nothing is allocated on any device. On the mesh of a topology (`js.plan.planned_mesh`,
    `js.plan.topology_mesh`) whose compiler is installed, memory is what the compiler assigns, as by
    `js.plan.compile_for`; otherwise it is estimated from the traced program. `prediction.judged_by` says which.

    Args:
      layout: where the arrays live.
      loss_fn: as for `js.make_step`.
      batch: a tree of global arrays or `jax.ShapeDtypeStruct`.
      engine: as for `js.make_step`; `js.auto()` by default.
      tx: the optimizer that the layout was made with.
      chip: the limits of a device; by default those of the mesh's devices, where they are known.
      price: of one device for an hour, in any currency.
      estimate: estimate memory also where the compiler could be asked: faster by some seconds.
      at_depth: as for `js.plan.compile_for`.

    Returns:
      The prediction, of one device.

    Raises:
      TypeError: `tx` is missing.
      ValueError: the layout has replicas that train by themselves (`js.local`).
      jax.errors.JaxRuntimeError: the compiler refuses the program for another reason than memory.

    Example:
        mesh = js.plan.planned_mesh("v5e:2x4", data=8)
        prediction = js.plan.predict(js.layout(js.fsdp(), mesh, init_fn, tx), loss_fn, batch, js.explicit(), tx=tx)
        print(prediction)
        prediction.live_bytes, prediction.fits, prediction.judged_by
    """
    if tx is None:
        raise TypeError("js.plan.predict needs the optimizer that the layout was made with: tx=")
    if layout.local is not None:
        raise ValueError(
            "predict: replicas that train by themselves (js.local) are not predicted; predict the layout inside a "
            "replica, without js.local; step.compile on a js.plan.topology_mesh tells what all of it needs"
        )
    engine, batch = engine or auto(), abstract(as_arrays("the batch", batch))
    step = make_step(loss_fn, tx, layout, engine=engine)
    target = None if estimate else target_of(layout.mesh)
    if target is not None and not has_compiler(target):
        target = None
    if target is not None:
        step = step_for(step, target.name, target.num_slices)
    layout, mesh = step.layout, step.layout.mesh
    device = mesh.devices.flat[0]
    if chip is None:
        chip = chip_of(device.device_kind, num_cores=getattr(device, "num_cores", None))
    program = step.trace(batch)
    traced = traced_step(program.jaxpr, layout, engine, batch)
    region = step_graph(traced, dict(mesh.shape), tpu=device.platform == "tpu")
    arguments = _argument_bytes(layout, engine, batch)
    verdict = None if target is None else judge_step(step, batch, target, program, at_depth)
    peak = _estimated(region, arguments, layout) if verdict is None else _assigned(verdict)
    promised = promise(layout, engine, loss_fn, batch)
    ticks = ticks_of(engine, layout)
    collectives = (
        *collective_costs(promised, mesh, chip),
        *activation_costs(region, mesh, frozenset(tensor_axes(layout)), chip),
        *exchange_costs(traced.closed, promised, mesh, chip, ticks),
    )
    # With micro-batches an engine traces the loss once more for its weight alone; compilers drop the rest of it.
    alive = ClosedJaxpr(eliminate_dead_code(traced.closed)[0], open_jaxpr(traced.closed)[1])
    products = product_costs(alive, mesh, chip, ticks=ticks)
    offload = offload_of(region)
    flops, tokens = _model_flops(layout, loss_fn, batch), _tokens(batch)
    prediction = Prediction(
        devices=mesh.size,
        mesh=dict(mesh.shape),
        chip=chip,
        peak=peak,
        argument_bytes=sum(arguments.values()),
        usable_bytes=None if chip is None else chip.usable_bytes or chip.hbm_bytes,
        verdict=verdict,
        collectives=collectives,
        products=products,
        flops=sum(one.flops for one in products),
        model_flops=flops,
        offloaded_bytes=offload.out // engine.microbatches,
    )
    if chip is None:
        return prediction
    time = step_time(products, collectives, chip, layout=layout, engine=engine, offload=offload)
    a_billion = None if price is None or not tokens else price_per_billion_tokens(tokens, time, mesh.size, price)
    return replace(
        prediction,
        time=time,
        mfu=mfu_range(flops, time, chip, mesh.size) if flops else None,
        tokens_per_second=tokens_per_second(tokens, time) if tokens else None,
        price_per_billion_tokens=a_billion,
    )


def _assigned(verdict: Verdict) -> MemoryPeak:
    """The peak that the compiler assigned, with the lines of the largest arrays."""
    largest = []
    for one in verdict.arrays:
        times = f"{one.count} x " if one.count > 1 else ""
        shape = ", ".join(map(str, one.shape))
        place = f"{one.what} at {one.source}" if one.source else one.what
        largest.append((one.bytes, one.role, f"{times}{one.dtype}[{shape}] {place}"))
    return MemoryPeak(verdict.by_role, verdict.moment, tuple(largest[:40]))


def _estimated(region: Region, arguments: dict[str, int], layout: Layout) -> MemoryPeak:
    """The peak that the traced program is estimated to have."""
    names = [(one.leaf.names or (), one.leaf.shape) for one in layout.placed() if one.role == "param"]
    vocab = {size for dims, shape in names for name, size in zip(dims, shape, strict=False) if name == "vocab"}
    tpu = layout.mesh.devices.flat[0].platform == "tpu"
    peak = step_peak(region, dict(layout.mesh.shape), tpu=tpu, vocab=frozenset(vocab))
    by_role = dict.fromkeys(ROLES, 0) | arguments
    largest = []
    for one in peak.moment.live:
        role = role_of(one, peak)
        by_role[role] += one.bytes
        shape = ", ".join(map(str, one.value.shard))
        largest.append((one.bytes, role, f"{one.value.dtype}[{shape}] {one.note} {one.value.path}"))
    return MemoryPeak(by_role, moment_str(peak.moment), tuple(sorted(largest, reverse=True)[:40]))


def _model_flops(layout: Layout, loss_fn: LossFn, batch: PyTree) -> float:
    """Count the FLOPs of the model's step over all devices; 0 where the loss can't be counted."""
    shapes = layout.shapes
    try:
        return float(train_flops(loss_fn, join_model(shapes.params, shapes.state), abstract(batch), shapes.key))
    except ValueError:  # a kernel or loop that does not say what it costs
        return 0.0


def _tokens(batch: PyTree) -> int:
    """Count the tokens of a batch: the elements of its widest array of integers with positions; 0 without one."""
    found = [x for x in jax.tree.leaves(batch) if jnp.issubdtype(x.dtype, jnp.integer) and len(x.shape) == 2]
    return max((int(x.shape[0]) * (int(x.shape[1]) - 1) for x in found), default=0)


def _argument_bytes(layout: Layout, engine: Engine, batch: PyTree) -> dict[str, int]:
    """Count the bytes of the step's arguments on one device by role, in tiles on a TPU; without those on the host."""
    mesh = layout.mesh
    tiled = mesh.devices.flat[0].platform == "tpu"

    def size(shape: tuple[int, ...], dtype: Any) -> int:
        if tiled:
            return tiled_bytes(shape, dtype)
        one = jax.eval_shape(lambda: jnp.zeros(shape, dtype))
        return int(one.size * one.dtype.itemsize)

    found = dict.fromkeys(("parameters", "optimizer state", "model state", "batch"), 0)
    roles = {"param": "parameters", "opt": "optimizer state", "state": "model state"}
    for one in layout.placed():
        if one.role != "grad" and not one.placement.memory:
            found[roles[one.role]] += size(one.placement.shard_shape(mesh), one.leaf.dtype)
    for placement, x in zip(jax.tree.leaves(layout.batch_placements(batch)), jax.tree.leaves(batch), strict=True):
        found["batch"] += size(placement.shard_shape(mesh), x.dtype)
    if residuals := jax.tree.leaves(engine.residuals(layout)):
        found["gradients"] = sum(size(placement.shard_shape(mesh), jnp.float32) for placement in residuals)
    return found
