"""The memory of a step at its fullest moment, by role."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jaxshard.plan.memory.graph import Region, Value, build, dtype_bits, every_op
from jaxshard.plan.memory.liveness import Live, Liveness, Moment
from jaxshard.plan.memory.tiles import tiled_bytes
from jaxshard.plan.memory.trace import Traced


def temporary_bytes(value: Value, *, tiled: bool, free: bool = False) -> int:
    """Count the bytes of a temporary on one device.

    In tiles its last dimension lies along the lanes, because kernels read arrays so. Where the layout is `free`, as of
    weights and their gradients and in programs without kernels, the compiler takes the one that needs least.
    """
    bits = dtype_bits(value.dtype)
    shape = tuple(size for size in value.shard if size != 1)
    if not tiled or 0 in value.shard or bits == 0 or len(shape) < 2:
        return math.prod(value.shard) * bits // 8
    if free or shape[-1] < 32:
        return tiled_bytes(shape, value.dtype)
    packed = max(1, 32 // bits)
    lanes = -(-shape[-1] // 128) * 128

    def sublanes(size: int) -> int:
        tile = max(packed, min(1 << (size - 1).bit_length(), 8))
        return -(-size // tile) * tile

    rest = math.prod(shape[:-1])
    usual = rest // shape[-2] * sublanes(shape[-2])
    best = min(rest // size * sublanes(size) for size in shape[:-1])
    return (usual if usual <= 1.125 * best else best) * lanes * bits // 8


def step_peak(traced: Traced, sizes: Mapping[str, int], *, tiled: bool, fast: int = 0) -> tuple[Region, Moment]:
    """Return the graph of a traced step and its fullest moment, what is live beside its arguments."""
    region = build(traced.closed, traced.arguments, sizes)

    kernels = any(op.name == "pallas_call" for op in every_op(region))
    weights = {shape for one in region.inputs if one.role == "parameters" for shape in _forms(one)}

    def size(value: Value) -> int:
        free = not kernels or _plain(value.shape) in weights or _plain(value.shard) in weights
        return temporary_bytes(value, tiled=tiled, free=free)

    # The run that goes in is donated: what comes out is written into its arrays.
    return region, Liveness(region, size, fast, set(region.outputs), narrow_products=tiled).peak()


def _forms(parameter: Value) -> Iterator[tuple[int, ...]]:
    """The shapes in which a parameter appears: whole or a shard, of all blocks or of one."""
    for shape in (parameter.shape, parameter.shard):
        yield _plain(shape)
        yield _plain(shape[1:])


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def role_of(one: Live, moment: Moment) -> str:
    """Return the role of a value that the step computes."""
    path = one.value.path
    if one.note == "stacked" and "transpose" not in path:
        return "kept activations"
    if one.note == "stacked":
        return "gradients"
    return "temporaries"


def moment_str(moment: Moment) -> str:
    """Say when the fullest moment is: which operation runs, and whether in the forward or the backward pass."""
    return "" if moment.op is None else moment.op.path
