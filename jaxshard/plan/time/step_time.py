"""Estimate the time of a step as a range, with its parts, and from it utilization, tokens per second and price.

    step = products + memory traffic + exposed communication + bubble + host

Products run at the rate that large products reach in public measurements (`Chip.reached`). The range covers what is
unknown before a training run: memory traffic between products (`TRAFFIC` in `products`), the bandwidth that collectives
reach (`EFFICIENCY` in `network`), and how much communication the compiler overlaps with products. At best it overlaps
all communication that no product waits for, at worst none: TPU compilers overlap gathers of weights in a loop over
blocks, but not the sums over a full torus in the programs that were read (benchmarks/README.md, "synchronous").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxshard.core.layout import Layout, human_bytes
from jaxshard.cost.hardware import Chip
from jaxshard.plan.time.network import CollectiveCost, Range
from jaxshard.plan.time.offload import NONE, Offload, offload_seconds, offload_traffic
from jaxshard.plan.time.products import TRAFFIC, ProductCost

HOST: Range = (0.0, 2e-3)
"""Seconds of a step in which devices wait for their host: it dispatches ahead, so at best none."""


_SHORT = {"bfloat16": "bf16", "float16": "f16"}
"""How the text calls dtypes."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, each at best and at worst.

    Attributes:
      compute: matrix products, at the rate that large products reach.
      memory_bound: memory traffic of operations between products, the optimizer's update and offloaded arrays.
      exposed_communication: collectives and copies to and from host memory that do not overlap with products.
      bubble: idle time of a pipeline.
      host: waiting for the host.
      assumptions: the assumptions of the range, in sentences.

    Example:
        mesh = js.plan.planned_mesh("v5e:2x4", data=8)
        time = js.plan.predict(js.layout(js.fsdp(), mesh, init_fn, tx), loss_fn, batch, tx=tx, estimate=True).time
        time.low, time.high, time.exposed_communication
    """

    compute: Range
    memory_bound: Range = (0.0, 0.0)
    exposed_communication: Range = (0.0, 0.0)
    bubble: Range = (0.0, 0.0)
    host: Range = HOST
    assumptions: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, Range]:
        """The seconds of each part at best and at worst, by its name, such as "compute"."""
        names = ("compute", "memory_bound", "exposed_communication", "bubble", "host")
        return {name: getattr(self, name) for name in names}

    @property
    def low(self) -> float:
        """The seconds of a step at best: the sum of all parts."""
        return sum(part[0] for part in self.parts.values())

    @property
    def high(self) -> float:
        """The seconds of a step at worst: the sum of all parts."""
        return sum(part[1] for part in self.parts.values())

    @property
    def middle(self) -> float:
        """The seconds of a step, halfway between low and high."""
        return (self.low + self.high) / 2


def step_time(
    products: Sequence[ProductCost],
    collectives: Sequence[CollectiveCost],
    chip: Chip,
    *,
    update: int = 0,
    bubble: float = 0.0,
    offload: Offload = NONE,
) -> StepTime:
    """Estimate the time of a step from its products and collectives.

    Args:
      products: the result of `product_costs`, with the same chip.
      collectives: the result of `collective_costs`. Collectives of weights and gradients may overlap with
        products; products wait for all others (sums of activations, exchanges of tokens).
      chip: the chip of the mesh.
      update: bytes that the optimizer's update moves (`update_bytes`).
      bubble: the idle share of a pipeline's schedule (`bubble_of`), which is a part of the time of `products`.
      offload: bytes to host memory and back (`plan/time/offload.py`); the copies overlap with products.

    Example:
        mesh, chip = js.plan.planned_mesh("v5e:2x4", data=8), js.plan.chip("TPU v5e")
        layout = js.layout(js.fsdp(), mesh, init_fn, tx)
        costs = collective_costs(js.plan.promise(layout, js.explicit(), loss_fn, batch), mesh, chip)
        step_time((), costs, chip, update=update_bytes(layout)).middle   # if nothing but the update were computed
    """
    busy = sum(one.compute for one in products)
    spent = _sum(one.seconds for one in products)
    between = _sum(one.seconds for one in collectives if _role(one) == "between")
    gathers = _sum(one.seconds for one in collectives if _role(one) == "gather")
    reductions = _sum(one.seconds for one in collectives if _role(one) == "reduce")
    copies = [offload_seconds(offload, chip, seconds) for seconds in spent]
    layouts = offload_traffic(offload, chip)
    exposed = (
        between[0] + max(0.0, gathers[0] + reductions[0] - spent[0]) + copies[0],
        between[1] + reductions[1] + gathers[1] + copies[1],
    )
    updating = update / chip.hbm_bandwidth
    assumptions = [
        f"products run at {chip.reached:.0%} of {chip.name}'s peak, {_peak_str(products, chip)}",
        f"their operands and results go through the memory {TRAFFIC[0]:g} to {TRAFFIC[1]:g} times",
        "at best all communication of weights and gradients overlaps with products, at worst none",
    ]
    if offload.out:
        assumptions.append(f"{human_bytes(offload.out)} go to the host's memory and back while products run")
    if bubble:
        assumptions.append(f"the schedule idles {bubble:.1%} of the time")
    traffic = [(seconds - busy) * (1 - bubble) for seconds in spent]
    return StepTime(
        compute=(busy * (1 - bubble), busy * (1 - bubble)),
        memory_bound=(traffic[0] + updating + layouts[0], traffic[1] + 2 * updating + layouts[1]),
        exposed_communication=exposed,
        bubble=(bubble * spent[0], bubble * spent[1]),
        assumptions=tuple(assumptions),
    )


def update_bytes(layout: Layout) -> int:
    """Return the bytes that an optimizer's update moves through the memory of one device.

    The update reads gradients, parameters and optimizer state, and writes parameters and optimizer state.
    """
    total = 0
    for one in layout.placed():
        size = one.placement.bytes_per_device(layout.mesh, one.leaf.dtype)
        total += {"param": 2, "grad": 1, "opt": 2}.get(one.role, 0) * size
    return total


def mfu_range(model_flops: float, time: StepTime, chip: Chip, devices: int) -> Range:
    """Return the model FLOPs utilization, at worst and at best.

    Args:
      model_flops: the FLOPs of a step on all devices (`train_flops`).
      time: the time of the step.
      chip: the chip of the mesh.
      devices: the number of devices.
    """
    peak = chip.peak_flops * devices
    return model_flops / time.high / peak, model_flops / time.low / peak


def price_range(tokens: int, time: StepTime, devices: int, price: float) -> Range:
    """Return the price of a billion tokens, at best and at worst.

    Args:
      tokens: the tokens of a batch.
      time: the time of the step.
      devices: the number of devices.
      price: the price of one device for an hour, in any currency.

    Example:
      >>> from jaxshard.plan.time.step_time import StepTime
      >>> price_range(1_000_000, StepTime((1.0, 1.0), host=(0.0, 0.0)), 36, 1.0)
      (10.0, 10.0)
    """
    hours = 1e9 / tokens / 3600 * devices * price
    return time.low * hours, time.high * hours


def _role(one: CollectiveCost) -> str:
    """Return "gather" for weights and all permutes, "reduce" for gradients and updates, "between" for activations."""
    word = one.what.split(" ")[0]
    if word == "weight":
        return "gather"
    if one.kind == "collective-permute":  # from stage to stage, or around a ring: the next is there before it is used
        return "gather"
    return "reduce" if word in ("gradient", "parameter", "new") else "between"


def _peak_str(products: Sequence[ProductCost], chip: Chip) -> str:
    """Write the peak for the dtype in which most FLOPs of a step are computed, such as "989 TFLOP/s in bf16"."""
    dtype = max(products, key=lambda one: one.flops).dtype if products else "bfloat16"
    peak = f"{chip.rate(dtype) / 1e12:.4g} TFLOP/s in"
    if dtype == "float32":
        return f"{peak} {'bf16' if chip.mxu else 'TF32'}, in which it multiplies f32: the step computes in f32"
    return f"{peak} {_SHORT.get(dtype, dtype)}"


def _sum(ranges: Iterable[Range]) -> Range:
    found = list(ranges)
    return sum(low for low, _ in found), sum(high for _, high in found)
