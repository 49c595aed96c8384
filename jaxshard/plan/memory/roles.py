"""The memory of a step at its fullest moment, by role."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxshard.plan.memory.graph import Region, Value, build, dtype_bits
from jaxshard.plan.memory.liveness import Live, Liveness, Moment
from jaxshard.plan.memory.tiles import tiled_bytes
from jaxshard.plan.memory.trace import Traced


def temporary_bytes(value: Value, *, tiled: bool) -> int:
    """Count the bytes of a temporary; in tiles its last dimension that is not 1 lies along the lanes."""
    bits = dtype_bits(value.dtype)
    shape = tuple(size for size in value.shard if size != 1)
    if not tiled or 0 in value.shard or bits == 0 or len(shape) < 2:
        return math.prod(value.shard) * bits // 8
    packed = max(1, 32 // bits)
    lanes = -(-shape[-1] // 128) * 128

    def sublanes(size: int) -> int:
        tile = max(packed, min(1 << (size - 1).bit_length(), 8))
        return -(-size // tile) * tile

    rest = math.prod(shape[:-1])
    best = min(rest // size * sublanes(size) for size in shape[:-1])
    if shape[-1] < 32:
        return min(best * lanes * bits // 8, tiled_bytes(value.shard, value.dtype))
    return best * lanes * bits // 8


def step_peak(traced: Traced, sizes: Mapping[str, int], *, tiled: bool, fast: int = 0) -> tuple[Region, Moment]:
    """Return the graph of a traced step and its fullest moment, what is live beside its arguments."""
    region = build(traced.closed, traced.arguments, sizes)

    def size(value: Value) -> int:
        return temporary_bytes(value, tiled=tiled)

    # The run that goes in is donated: what comes out is written into its arrays.
    return region, Liveness(region, size, fast, set(region.outputs), narrow_products=tiled).peak()


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
