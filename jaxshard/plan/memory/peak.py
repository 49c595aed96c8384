"""Find the peak memory of a training step from its traced program, and the role of each array live at the peak."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxshard.core.compat import equation_frames
from jaxshard.core.layout import Layout
from jaxshard.core.our_code import short_path, users_frame, users_line
from jaxshard.core.tree import abstract, path_str
from jaxshard.core.types import PyTree
from jaxshard.engines.engine import Engine
from jaxshard.plan.memory.graph import Op, Region, Value, build, dtype_bits
from jaxshard.plan.memory.liveness import CUT, Live, Liveness, Moment, Size
from jaxshard.plan.memory.shards import Split, spec_split
from jaxshard.plan.memory.tiles import tiled_bytes
from jaxshard.training.state import TrainState, run_shapes


class Traced(NamedTuple):
    """A traced step.

    Attributes:
      closed: the closed jaxpr of `step(run, batch) -> (run, metrics)`.
      arguments: for each argument of the step the mesh axes that split its dimensions, its role and its path.
    """

    closed: Any
    arguments: tuple[tuple[Split, str, str], ...]


class Peak(NamedTuple):
    """The moment of a step's peak memory, and the shapes by which `role_of` recognises gathered weights and logits.

    Attributes:
      moment: the values that are live at the peak, without the arguments of the step.
      weights: the shapes in which parameters and their gradients appear, without dimensions of size 1.
      vocab: the sizes of dimensions that are named "vocab", global and on one device.
    """

    moment: Moment
    weights: frozenset[tuple[int, ...]]
    vocab: frozenset[int]


_ROLES = {"params": "parameters", "opt_state": "optimizer state", "state": "model state", "residuals": "gradients"}


def traced_step(closed: Any, layout: Layout, engine: Engine, batch: PyTree) -> Traced:
    """Combine the jaxpr of a step (`step.trace(batch).jaxpr`) with the sharding, role and path of each argument."""
    run = run_shapes(layout, engine.residuals(layout))
    return Traced(closed, tuple(_arguments(layout, run, abstract(batch))))


def _arguments(layout: Layout, run: TrainState, batch: PyTree) -> list[tuple[Split, str, str]]:
    axes = frozenset(axis for axis, size in layout.mesh.shape.items() if size > 1)
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(run):
        name = path_str(path)
        role = next((role for field, role in _ROLES.items() if name.startswith(field)), "batch")
        found.append((spec_split(x.sharding.spec, len(x.shape), axes), role, name))
    placements = jax.tree.leaves(layout.batch_placements(batch))
    for (path, x), placement in zip(jax.tree_util.tree_leaves_with_path(batch), placements, strict=True):
        found.append((spec_split(placement.store, len(x.shape), axes), "batch", f"batch/{path_str(path)}"))
    return found


def step_graph(traced: Traced, sizes: Mapping[str, int], *, tpu: bool) -> Region:
    """Make the graph of a traced step on one device of a mesh; `sizes` has the size of each mesh axis."""
    region = build(traced.closed, traced.arguments, sizes)
    if tpu:
        cut_parts_first(region)
    return region


def step_peak(region: Region, sizes: Mapping[str, int], *, tpu: bool, vocab: frozenset[int] = frozenset()) -> Peak:
    """Find the moment of a step at which the most bytes are live on a device.

    Args:
      region: the step as a graph.
      sizes: the size of each mesh axis.
      tpu: True for a TPU, which stores arrays in tiles and fuses elementwise operations into matrix products.
      vocab: the sizes of vocabularies, by which logits are recognised.
    """
    # The TrainState is donated: every new array is written into the memory of the old one.
    donated = dict(zip(region.outputs, region.inputs, strict=False)) if tpu else {}
    moment = Liveness(region, sizes_of(tpu), tpu=tpu, elsewhere=set(region.outputs), donated=donated).peak()
    parameters = [one for one in region.inputs if one.role == "parameters"]
    # The shape of the full array or of a shard, for all blocks or for a single block.
    weights = {_plain(shape[i:]) for one in parameters for shape in (one.shape, one.shard) for i in (0, 1)}
    parts = {count // split for count in vocab for split in sizes.values() if count % split == 0}
    return Peak(moment, frozenset(weights), vocab | parts)


def sizes_of(tpu: bool) -> Size:
    """Return a function from a value to its bytes on one device, padded to tiles if `tpu`; 0 for values on the host."""

    @functools.cache
    def count(shard: tuple[int, ...], dtype: Any) -> int:
        shape, bits = _plain(shard), dtype_bits(dtype)
        if not tpu or len(shape) < 2 or 0 in shape or not bits:
            return math.prod(shard) * bits // 8
        return tiled_bytes(shape, dtype)

    def size(value: Value, dtype: Any = None) -> int:
        return 0 if value.on_host else count(value.shard, value.dtype if dtype is None else dtype)

    return size


def cut_parts_first(region: Region) -> None:
    """Remove the `optimization_barrier`s of ZeRO from a graph, in place, so that operations read parameters directly.

    Under ZeRO-1 and ZeRO-2 a step begins by slicing out the shard of each parameter that the device updates, and passes
    the parameter and this shard through a barrier. The operations that slice are renamed to `CUT`.
    """
    makers = {one: op for op in region.ops for one in op.outs}
    same: dict[Value, Value] = {}
    barriers: set[Op] = set()
    for op in region.ops:
        if op.name != "optimization_barrier" or len(op.ins) != 2 or op.ins[0].role != "parameters":
            continue
        cut = makers.get(op.ins[1])
        if cut is not None and cut.name == "sharding_constraint" and _count(cut.outs[0]) < _count(op.ins[0]):
            cut.name = CUT
            same |= dict(zip(op.outs, op.ins, strict=True))
            barriers.add(op)
    region.ops = [op for op in region.ops if op not in barriers]
    for op in region.ops:
        op.ins = [same.get(one, one) for one in op.ins]
    region.outputs = [same.get(one, one) for one in region.outputs]


def _count(value: Value) -> int:
    return math.prod(value.shard)


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def role_of(one: Live, peak: Peak) -> str:
    """Return the role of a live value that the step computes, such as "gradients" or "kept activations".

    An array in the shape of a parameter counts as a gathered weight in the forward pass and in recomputation, and as a
    gradient in the rest of the backward pass. Kept activations are forward results that the backward pass needs.
    """
    value, path = one.value, one.value.path
    backward, again = "transpose" in path, "rematted" in path
    if one.note == "converted" or value.role == "parameters":
        return "gathered weights"
    if len(value.shard) > 1 and (_plain(value.shape) in peak.weights or _plain(value.shard) in peak.weights):
        return "gradients" if backward and not again else "gathered weights"
    if peak.vocab & set(value.shard[-2:]) and len(_plain(value.shard)) > 1:
        return "logits"
    later = "transpose" in moment_path(peak.moment)
    if one.note == "stacked" and not backward:
        return "kept activations"
    return "kept activations" if later and "jvp" in path and not backward else "temporaries"


def moment_path(moment: Moment) -> str:
    """Return JAX's name stack of the operation that runs at the peak; "" if nothing is live."""
    return "" if moment.op is None else moment.op.path


def moment_str(moment: Moment) -> str:
    """Name the pass and the part of the model that run at the peak, such as "backward pass: Block/mlp"."""
    path = moment_path(moment)
    where = "update" if "jvp" not in path else "backward pass" if "transpose" in path else "forward pass"
    named = _names_in(path)
    return f"{where}: {'/'.join(named[-3:])}" if named and where != "update" else where


def name_and_source(value: Value) -> tuple[str, str]:
    """Return (JAX's name stack of a computed value, ""), or if it names nothing (operation, source line).

    A name stack such as "/jvp()" has no module or function. If no line is the user's, the operation is shown with the
    parameter that it copies: ("all_gather of params/head", ""). Without an equation the result is ("unnamed", "").
    """
    if _names_in(value.path):
        return value.path, ""
    if not value.equations:
        return "unnamed", ""
    operation = str(value.equations[0].primitive.name)
    frames = [f"{file}:{line}" for one in value.equations for file, line, _ in equation_frames(one)]
    if not users_frame(frames) and value.parameter:
        return f"{operation} of {value.parameter}", ""
    return operation, short_path(users_line(frames)) if frames else ""


def _names_in(path: str) -> list[str]:
    """Return the names of modules and functions in a name stack, without those of JAX's transformations."""
    parts = [re.sub(r"^(?:\w+\()*|\)*$", "", part) for part in path.split("/")]
    return [part for part in parts if part and part not in ("jvp", "transpose", "rematted_computation", "checkpoint")]
