"""List the matrix products that each device computes in a step, recomputation included, from its traced program.

A traced step has `shard_map`s with the shapes of one device along manual axes, scans over blocks, and in the backward
pass the recomputed forward pass of blocks. So the FLOPs here are those of the hardware, not of the model:

    dot_general [24576, 4096] x [4096, 14336] in a scan of 32 blocks     32 times 2 * 24576 * 4096 * 14336 FLOPs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxshard.core.compat import equation_frames
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.our_code import is_jaxshard_file
from jaxshard.cost.hardware import Chip
from jaxshard.layers.attention.attention import SCOPE
from jaxshard.plan.memory.graph import Op, Region
from jaxshard.plan.time.executed import executed
from jaxshard.plan.time.network import Range
from jaxshard.plan.time.pipeline import Ticks
from jaxshard.plan.time.product import Product, product_of
from jaxshard.proofs.walk import Domain, Place, walk

_LIBRARIES = {"jax", "flax", "optax"}

TRAFFIC: Range = (2.1, 4.1)
"""How often the operands and results of a product go through the memory, at best and at worst.

Once for the product itself; the rest is for the operations between two products (norms, gates, rotations, casts,
copies), whose traffic is proportional to it. The middle, 3.1, is the only calibrated number: by least squares of the
relative errors on two published step times, Llama 3.1 8B on 8 chips of v6e and AXLearn's 7B on 1,024 of v5e
(`benchmarks/step_times.py --calibrate`). The range, a third to both sides, is assumed.
"""


@dataclass(frozen=True)
class ProductCost:
    """The FLOPs, bytes and seconds of equal matrix products of a step, on one device.

    Attributes:
      where: the user's source line, such as "llama.py:236", or the kernel's name.
      shapes: the shapes of the operands, such as "[24576, 4096] x [4096, 14336]".
      dtype: the dtype of the operand with more bits.
      count: executions per step.
      flops: FLOPs of all executions, two for every multiply-add.
      bytes: bytes of the operands and results of all executions, each counted once.
      compute: seconds of the matrix unit for all executions; 0 on an unknown chip.
      seconds: seconds of all executions, memory traffic included, at best and at worst; (0, 0) on an unknown chip.

    Example:
        longest = js.plan.predict(layout, loss_fn, batch, tx=tx, estimate=True).products[0]
        longest.where, longest.shapes, longest.flops
    """

    where: str
    shapes: str
    dtype: str
    count: int
    flops: float
    bytes: float
    compute: float
    seconds: Range


def product_costs(
    region: Region, program: Any, chip: Chip | None = None, *, gpu: bool = False, ticks: Ticks | None = None
) -> tuple[ProductCost, ...]:
    """Estimate FLOPs, bytes and seconds of the matrix products of a step on each device, the longest first.

    Args:
      region: the step as a graph (`plan/memory/peak.step_graph`).
      program: the jaxpr from which `region` was made, which has the constants.
      chip: the chip of the mesh; None leaves out the times.
      gpu: True for planned GPUs. Attention runs there as one kernel. The matrix products of attention in the traced
        program then count no bytes, because their results stay on the chip.
      ticks: the ticks of a pipeline's program (`ticks_of`).

    Returns:
      One cost for all equal products of one source line.
    """
    constants = _constants(program)
    found: dict[tuple[Any, ...], list[tuple[float, Product]]] = {}
    for body, times in executed(region, ticks):
        for op in body.ops:
            if (product := product_of(op, _visited(op, constants))) is None:
                continue
            if gpu and SCOPE in op.path and not product.kernel:
                product = product._replace(bytes=0.0)
            where = product.kernel or _where(op.outs[0].equations)
            found.setdefault((where, product.shapes, product.dtype, product.passes), []).append((times, product))
    costs = [_cost(where, ones, chip) for (where, *_), ones in found.items()]
    return tuple(sorted(costs, key=lambda one: (-one.seconds[1], -one.flops)))


def compute_seconds(chip: Chip, flops: float, dtype: str, *, passes: int = 1, fill: float = 1.0) -> float:
    """Return the seconds that a chip's matrix unit needs for a product, at the rate that large products reach.

    Args:
      chip: the chip.
      flops: the FLOPs of the product.
      dtype: the dtype of the operand with more bits.
      passes: the number of bf16 passes that a TPU needs at the product's precision.
      fill: the share of the matrix unit that the product fills.
    """
    return flops / (chip.rate(dtype, passes) * chip.reached * fill)


def _cost(where: str, ones: Sequence[tuple[float, Product]], chip: Chip | None) -> ProductCost:
    first, compute, memory = ones[0][1], 0.0, 0.0
    flops, size = sum(times * one.flops for times, one in ones), sum(times * one.bytes for times, one in ones)
    if chip is not None:
        compute = compute_seconds(chip, flops, first.dtype, passes=first.passes, fill=first.fill(chip.mxu))
        memory = size / chip.hbm_bandwidth
    seconds = (compute + TRAFFIC[0] * memory, compute + TRAFFIC[1] * memory)
    count = round(sum(times for times, _ in ones))
    return ProductCost(where, first.shapes, first.dtype, count, flops, size, compute, seconds)


def _constants(program: Any) -> dict[int, Sequence[Any]]:
    """Return the constant operands of the equations of a jaxpr, by the id of the equation's `params`.

    For each operand there is its array if it is a constant, else None.
    """
    constants = _Constants()
    walk(program, [None] * len(open_jaxpr(program)[0].invars), constants)
    return constants.found


class _Constants(Domain[int | None]):
    """Notes which constant arrays each equation of a jaxpr reads; the fact about a constant is the id of its array."""

    def __init__(self) -> None:
        self.arrays: dict[int, Any] = {}
        self.found: dict[int, Sequence[Any]] = {}

    def value(self, values: Sequence[Any], place: Place) -> int | None:
        (value,) = values
        if not np.ndim(value):
            return None
        self.arrays[id(value)] = value
        return id(value)

    def join(self, place: Place, facts: Sequence[int | None]) -> None:
        return None

    def rule(self, place: Place, facts: list[int | None]) -> list[int | None] | None:
        return None if place.name == "shard_map" else place.joined(None)

    def conclude(self, place: Place, operands: list[int | None], results: list[int | None]) -> list[int | None]:
        if place.settled:
            constants = [None if fact is None else self.arrays[fact] for fact in operands]
            self.found.setdefault(id(place.equation.params), constants)
        return results


def _visited(op: Op, constants: dict[int, Sequence[Any]]) -> float:
    """Return the share of a kernel's grid that is computed; splash attention skips blocks that are fully masked.

    The second scalar operand of that kernel is an array with 0 for each skipped block.
    """
    name = str(op.params.get("name")) if op.name == "pallas_call" else ""
    if name.startswith("splash") and op.params["grid_mapping"].num_index_operands > 1:
        mask = constants[id(op.params)][1]
        if mask is not None and mask.size and np.issubdtype(mask.dtype, np.integer):
            return float(np.count_nonzero(mask) / mask.size)
    return 1.0


def _where(equations: Sequence[Any]) -> str:
    """Return the source line of an equation, such as "llama.py:236", in the model if possible, else in jaxshard.

    Args:
      equations: the equation, and the calls that contain it, the innermost first.
    """
    frames = [frame for one in equations for frame in equation_frames(one)]
    lines = [(file, line) for file, line, _ in frames if not _LIBRARIES & set(Path(file).parts)]
    own = [
        (file, line) for file, line in lines if not is_jaxshard_file(file) or "/models/" in file or "/layers/" in file
    ]
    for file, line in own or lines:
        return f"{Path(file).name}:{line}"
    return str(equations[0].primitive.name)
