"""The matrix products that each device computes in a step, from its traced program, what is computed again included.

A traced step has `shard_map`s, in which shapes are those of one device along the manual axes, scans over blocks, and in
the backward pass the blocks' forward pass once more. So the FLOPs here are those of the hardware, not of the model:

    dot_general [24576, 4096] x [4096, 14336] in a scan of 32 blocks     32 times 2 * 24576 * 4096 * 14336 FLOPs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxshard.core.compat import equation_frames
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.our_code import is_jaxshard_file
from jaxshard.cost.hardware import Chip
from jaxshard.layers.attention.attention import SCOPE
from jaxshard.plan.memory.graph import Op, Region
from jaxshard.plan.time.executed import executed
from jaxshard.plan.time.pipeline import Ticks
from jaxshard.plan.time.product import Product, product_of
from jaxshard.proofs.walk import Domain, Place, walk

Range = tuple[float, float]

_LIBRARIES = {"jax", "flax", "optax"}

TRAFFIC: Range = (2.1, 4.1)
"""How often the operands and results of a product go through the memory, beside its multiplications.

Once each for the product itself; the rest stands for what is done to them between two products (norms, gates,
rotations, casts, copies), which is proportional to them. The middle, 3.1, is the one number that is calibrated: on the
published step times of Llama 3.1 8B on 8 chips of v6e and of AXLearn's 7B on 1,024 of v5e, by least squares of the two
relative errors (`benchmarks/step_times.py --calibrate`). The range, a third to both sides, is assumed.
"""


@dataclass(frozen=True)
class ProductCost:
    """Equal products of a step, on one device.

    Attributes:
      where: the user's line that asks for it, such as "llama.py:236", or the kernel's name.
      shapes: of the operands, such as "[24576, 4096] x [4096, 14336]".
      dtype: of the wider operand.
      count: how often it runs in a step.
      flops: of all of them, two for every multiply-add.
      bytes: of operands and results of all of them, through the memory once each.
      compute: seconds in which the matrix unit is busy with all of them; 0 on an unknown chip.
      seconds: of all of them, at best and at worst, with what the memory moves for them; (0, 0) on an unknown chip.

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


class _Source(NamedTuple):
    """An equation, and its operands as far as they are constant arrays of the program."""

    equation: Any
    constants: Sequence[Any]


def product_costs(
    region: Region, program: Any, chip: Chip | None = None, *, gpu: bool = False, ticks: Ticks | None = None
) -> tuple[ProductCost, ...]:
    """Return the products of a step on each device, those that take longest first.

    Args:
      region: the step as a graph (`plan/memory/peak.step_graph`).
      program: the jaxpr of which that is the graph; it has the source lines.
      chip: of the mesh, or None, which leaves out the times.
      gpu: attention is one kernel, whose logits never leave the chip, although the program shows their products: what
        is traced for GPUs that are not here.
      ticks: of a pipeline's program (`ticks_of`).

    Returns:
      One for all equal products of one line.
    """
    sources = _sources(program)
    found: dict[tuple[Any, ...], list[tuple[float, Product]]] = {}
    for body, times in executed(region, ticks):
        for op in body.ops:
            if (product := product_of(op, _visited(op, sources))) is None:
                continue
            if gpu and SCOPE in op.path and not product.kernel:
                product = product._replace(bytes=0.0)
            where = product.kernel or _where(sources[id(op.params)].equation)
            found.setdefault((where, product.shapes, product.dtype, product.passes), []).append((times, product))
    costs = [_cost(where, ones, chip) for (where, *_), ones in found.items()]
    return tuple(sorted(costs, key=lambda one: (-one.seconds[1], -one.flops)))


def compute_seconds(chip: Chip, flops: float, dtype: str, *, passes: int = 1, fill: float = 1.0) -> float:
    """Return how long a chip's matrix unit is busy with a product, at the rate that large products reach.

    Args:
      chip: that computes it.
      flops: of it.
      dtype: of the wider operand.
      passes: as for `Chip.rate`.
      fill: the share of the matrix unit that its dimensions fill.
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


def _sources(program: Any) -> dict[int, _Source]:
    """The equations of a program by the identity of their parameters, which operations of its graph keep."""
    constants = _Constants()
    walk(program, [None] * len(open_jaxpr(program)[0].invars), constants)
    return constants.found


class _Constants(Domain[int | None]):
    """Finds the equations that read constant arrays of a program; a fact is the id of such an array."""

    def __init__(self) -> None:
        self.arrays: dict[int, Any] = {}
        self.found: dict[int, _Source] = {}

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
            self.found.setdefault(id(place.equation.params), _Source(place.equation, constants))
        return results


def _visited(op: Op, sources: dict[int, _Source]) -> float:
    """The share of a kernel's grid that it computes: of splash attention the blocks that its mask does not empty.

    Its second scalar operand says for each block whether it is empty (0), partly or completely visible.
    """
    name = str(op.params.get("name")) if op.name == "pallas_call" else ""
    if name.startswith("splash") and op.params["grid_mapping"].num_index_operands > 1:
        mask = sources[id(op.params)].constants[1]
        if mask is not None and mask.size and np.issubdtype(mask.dtype, np.integer):
            return float(np.count_nonzero(mask) / mask.size)
    return 1.0


def _where(equation: Any) -> str:
    """The line of the user's model, or of a ready-made one, that asks for an equation; else that of our code."""
    lines = [(file, line) for file, line, _ in equation_frames(equation) if not _LIBRARIES & set(Path(file).parts)]
    own = [
        (file, line) for file, line in lines if not is_jaxshard_file(file) or "/models/" in file or "/layers/" in file
    ]
    for file, line in own or lines:
        return f"{Path(file).name}:{line}"
    return str(equation.primitive.name)
