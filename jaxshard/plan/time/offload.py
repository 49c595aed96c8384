"""What a remat policy moves to the host's memory and back, and how long that keeps a device waiting.

Activations leave while the forward pass computes, and come back while the backward pass does: copies that XLA runs
beside products. A device waits for what these don't cover. That they do run beside them published steps show:
llama3.1-8b on v6e-8, whose recipe offloads 22 GB of each chip, takes 3.44 seconds; without any copies it would take 3.1
at best (`benchmarks/step_times.py`), and the copies one after the other take 1.4.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxshard.cost.hardware import Chip
from jaxshard.plan.memory.graph import Region
from jaxshard.plan.time.executed import executed
from jaxshard.plan.time.product import device_bytes

PASSES = (12.0, 17.0)
"""How often what is offloaded goes through the device's memory, each way.

The copies themselves run beside products, but for them arrays are laid out anew. What that costs the estimates of the
TPU's compiler say (JAX 0.12): 13 passes for what goes into the blocks of Llama 3 70B on v5p:8x8x8 (20.98e9 cycles with
it on the host, 20.81e9 without), 17 for query, key, value and projection of 8B on v5e:16x16 (10.26e9; 9.94e9 where they
are computed again, which is 0.34e9 more work).
"""

_FORWARD = 0.25
"""The share of a step's products that the forward pass computes, at least: all of it is computed again, and the
backward pass has twice as much."""


class Offload(NamedTuple):
    """Bytes that one device moves in a step: to its host's memory, and from there."""

    out: int
    back: int


NONE = Offload(0, 0)


def offload_of(region: Region) -> Offload:
    """Count the bytes that a traced step, as a graph, moves between a device and its host."""
    moved = {True: 0.0, False: 0.0}  # to the host, and back
    for body, times in executed(region):
        for op in body.ops:
            if op.name == "device_put":
                for source, made in zip(op.ins, op.outs, strict=False):
                    moved[made.on_host] += times * device_bytes(made) * (source.on_host != made.on_host)
    return Offload(int(moved[True]), int(moved[False]))


def offload_seconds(moved: Offload, chip: Chip, products: float) -> float:
    """Return how long a device waits for its host's memory.

    Args:
      moved: in a step.
      chip: the device.
      products: seconds of the step's products.
    """
    out, back = (size / chip.host_bandwidth for size in moved)
    return max(0.0, out - _FORWARD * products) + max(0.0, back - (1 - _FORWARD) * products)


def offload_traffic(moved: Offload, chip: Chip) -> tuple[float, float]:
    """Return the seconds that the device's own memory spends on what is offloaded, at best and at worst."""
    low, high = (sum(moved) * passes / chip.hbm_bandwidth for passes in PASSES)
    return low, high
