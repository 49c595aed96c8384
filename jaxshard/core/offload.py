"""`offload`: the strategy that keeps arrays in the host's memory between steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from jax.sharding import AbstractMesh, Mesh

from jaxshard.core.placement import Placement
from jaxshard.core.strategy_parts import MIN_SIZE, Strategy
from jaxshard.core.tree import Leaf
from jaxshard.core.types import Role

HOST = "pinned_host"
"""The memory kind: page-locked host memory, which devices access by DMA."""


@dataclass(frozen=True)
class Offload:
    """The strategy that keeps optimizer state in the host's memory; made by `js.offload`."""

    rank: ClassVar[int] = 5

    min_size: int

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        check_host_memory(mesh)
        small = leaf.size < self.min_size
        return placement if role != "opt" or small else replace(placement, memory=HOST)


def offload(role: Literal["opt"] = "opt", *, min_size: int = MIN_SIZE) -> Strategy:
    """Keep the optimizer's state in the host's memory between steps.

    Each device has its part of the state, as the other strategies split it, in pinned memory of its host. In the
    update, an elementwise optimizer copies a stacked array [blocks, ...] to the device block by block, and each block
    back before the next, so that the device's memory holds the state of one block. Arrays that are not stacked, and all
    arrays of an optimizer that is not elementwise, are copied as a whole. Results are the same, except for the last bit
    if the compiler fuses the operations of one block differently.

    Args:
      role: "opt", the only one so far.
      min_size: arrays with fewer elements stay on the device.

    Returns:
      A strategy, to be composed with others. Applied, it raises ValueError if the devices have no such memory.

    Raises:
      ValueError: another role, or a negative `min_size`.

    References:
      Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", section 4 (there the host computes
      the update, too).

    Example:
        layout = js.layout(js.compose(js.fsdp("data"), js.offload("opt")), mesh, init_fn, tx)
        layout.host_bytes_per_device()      # the state's bytes, which are no longer in layout.bytes_per_device()
    """
    if role != "opt":
        raise ValueError(f"offload: only optimizer state, 'opt', can be kept in the host's memory, got {role!r}")
    if min_size < 0:
        raise ValueError(f"offload: min_size must be at least 0 elements, got {min_size}")
    return Offload(min_size)


def check_host_memory(mesh: Mesh) -> None:
    """Raise ValueError unless the devices of a mesh can keep arrays in their host's pinned memory."""
    if isinstance(mesh, AbstractMesh):
        return
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"offload: {device.device_kind} devices have no memory {HOST!r}, only {', '.join(map(repr, kinds))}; leave "
            "js.offload out, or keep less state (js.optim.adam8bit)"
        )
