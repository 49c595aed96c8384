"""`js.plan.predict`: the needs of a training step, from its traced program, without compiling and without a device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.layout import Layout
from jaxshard.core.tree import abstract
from jaxshard.core.types import LossFn, PyTree
from jaxshard.cost.hardware import Chip
from jaxshard.cost.hardware import chip as chip_of
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.plan.memory.roles import role_of, step_peak
from jaxshard.plan.memory.tiles import tiled_bytes
from jaxshard.plan.memory.trace import trace_step
from jaxshard.plan.prediction import ROLES, MemoryPeak, Prediction


def predict(
    layout: Layout,
    loss_fn: LossFn,
    batch: PyTree,
    engine: Engine | None = None,
    *,
    tx: optax.GradientTransformation | None = None,
    chip: Chip | None = None,
    price: float | None = None,
) -> Prediction:
    """Predict memory, communication and time of the step that `make_step(loss_fn, tx, layout, engine=engine)` makes.

    The step is traced and never compiled; only shapes are needed, and nothing is allocated on any device.

    Args:
      layout: where the arrays live.
      loss_fn: as for `js.make_step`.
      batch: a tree of global arrays or `jax.ShapeDtypeStruct`.
      engine: as for `js.make_step`; `js.auto()` by default.
      tx: the optimizer that the layout was made with.
      chip: the limits of a device; by default those of the mesh's devices, where they are known.
      price: of one device for an hour, in any currency.

    Returns:
      The prediction, of one device.
    """
    engine = engine or auto()
    device = layout.mesh.devices.flat[0]
    if chip is None:
        chip = chip_of(device.device_kind, num_cores=getattr(device, "num_cores", None))
    if tx is None:
        raise TypeError("js.plan.predict needs the optimizer that the layout was made with: tx=")
    arguments = _argument_bytes(layout, abstract(batch))
    traced = trace_step(layout, loss_fn, tx, engine, batch)
    _, moment = step_peak(traced, dict(layout.mesh.shape), tiled=device.platform == "tpu")
    by_role = dict.fromkeys(ROLES, 0) | arguments
    largest = []
    for one in moment.live:
        role = role_of(one, moment)
        by_role[role] += one.bytes
        shape = ", ".join(map(str, one.value.shard))
        largest.append((one.bytes, role, f"{one.value.dtype}[{shape}] {one.note} {one.value.path}"))
    return Prediction(
        devices=layout.mesh.size,
        mesh=dict(layout.mesh.shape),
        chip=chip,
        peak=MemoryPeak(
            by_role, "" if moment.op is None else moment.op.path, tuple(sorted(largest, reverse=True)[:40])
        ),
        argument_bytes=sum(arguments.values()),
        usable_bytes=None if chip is None else chip.hbm_bytes,
    )


def _argument_bytes(layout: Layout, batch: PyTree) -> dict[str, int]:
    """Count the bytes of the step's arguments on one device by role, in tiles on a TPU."""
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
        if one.role != "grad":
            found[roles[one.role]] += size(one.placement.shard_shape(mesh), one.leaf.dtype)
    for placement, x in zip(jax.tree.leaves(layout.batch_placements(batch)), jax.tree.leaves(batch), strict=True):
        found["batch"] += size(placement.shard_shape(mesh), x.dtype)
    return found
