"""Estimate the time of activations that a remat policy offloads to host memory.

XLA copies activations to the host during the forward pass, and back during the backward pass, while products run. A
device waits only for the rest of the copies. Published steps show the overlap: llama3.1-8b on v6e-8, whose recipe
offloads 22 GB of each chip, takes 3.44 seconds; without any copies it would take at least 3.1
(`benchmarks/step_times.py`), and the copies alone take 1.4.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxshard.cost.hardware import Chip
from jaxshard.plan.memory.graph import Region
from jaxshard.plan.time.executed import executed
from jaxshard.plan.time.product import device_bytes

PASSES = (12.0, 17.0)
"""How often offloaded arrays go through the device's memory, each way.

The copies themselves overlap with products, but arrays change their layout for them. The estimates of the TPU's
compiler (JAX 0.12) show the cost: 13 passes for the inputs of the blocks of Llama 3 70B on v5p:8x8x8 (20.98e9 cycles
with them on the host, 20.81e9 without), 17 for query, key, value and projection of 8B on v5e:16x16 (10.26e9; 9.94e9 if
they are recomputed, which is 0.34e9 more work).
"""

_FORWARD = 0.25
"""The smallest share of a step's products in the forward pass: with recomputation the forward pass runs twice, and the
backward pass has twice the products of a forward pass."""


class Offload(NamedTuple):
    """The bytes that one device copies in a step: `out` to host memory, and `back` from it."""

    out: int
    back: int


NONE = Offload(0, 0)


def offload_of(region: Region) -> Offload:
    """Count the bytes that a step copies between a device and host memory, by the graph of the traced step."""
    moved = {True: 0.0, False: 0.0}  # to the host, and back
    for body, times in executed(region):
        for op in body.ops:
            if op.name == "device_put":
                for source, made in zip(op.ins, op.outs, strict=False):
                    moved[made.on_host] += times * device_bytes(made) * (source.on_host != made.on_host)
    return Offload(int(moved[True]), int(moved[False]))


def offload_seconds(moved: Offload, chip: Chip, products: float) -> float:
    """Return the seconds that a device waits for copies to and from host memory.

    Args:
      moved: the bytes that the device moves in a step.
      chip: the chip of the device.
      products: the seconds of the step's matrix products.
    """
    out, back = (size / chip.host_bandwidth for size in moved)
    return max(0.0, out - _FORWARD * products) + max(0.0, back - (1 - _FORWARD) * products)


def offload_traffic(moved: Offload, chip: Chip) -> tuple[float, float]:
    """Return the seconds in which copies to and from the host occupy the device's own memory, at best and at worst."""
    low, high = (sum(moved) * passes / chip.hbm_bandwidth for passes in PASSES)
    return low, high
