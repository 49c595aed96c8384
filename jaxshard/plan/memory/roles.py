"""The memory of a step at its fullest moment, by role."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxshard.cost.hardware import Chip
from jaxshard.plan.memory.accumulated import scatter_behind_loops
from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.casts import cancel_casts
from jaxshard.plan.memory.donated import gathered_apart
from jaxshard.plan.memory.gathered import gathered_along, gathered_bytes
from jaxshard.plan.memory.graph import Region, Value, dtype_bits, every_op, skip_round_trips
from jaxshard.plan.memory.hybrid import scatter_early
from jaxshard.plan.memory.lent import cut_parts_first, values_in_parameters
from jaxshard.plan.memory.liveness import Live, Moment
from jaxshard.plan.memory.onchip import values_on_chip
from jaxshard.plan.memory.order import gather_late, join_scatters, scatter_on_sparse_cores, scatter_whole
from jaxshard.plan.memory.recompute import Recomputing
from jaxshard.plan.memory.stacks import sum_beside_products, sum_within_turns
from jaxshard.plan.memory.tables import tables_by_rows
from jaxshard.plan.memory.tiles import padded_bytes, tiled_bytes
from jaxshard.plan.memory.trace import Traced
from jaxshard.plan.memory.windowed import sum_in_windows
from jaxshard.plan.memory.zeros import share_zeros


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


class Peak(NamedTuple):
    """The fullest moment of a step, and what roles are told by.

    Attributes:
      region: the step as a graph.
      moment: what is live then beside the arguments.
      weights: the shapes in which parameters and their gradients appear.
      vocab: sizes of dimensions that parameters call "vocab", whole and split.
    """

    region: Region
    moment: Moment
    weights: frozenset[tuple[int, ...]]
    vocab: frozenset[int]


def step_peak(
    traced: Traced,
    sizes: Mapping[str, int],
    *,
    tiled: bool,
    vocab: frozenset[int] = frozenset(),
    folded: frozenset[str] = frozenset(),
    joins_gathers: bool = False,
    chip: Chip | None = None,
    room: int | None = None,
) -> Peak:
    """Find the fullest moment of a traced step.

    Args:
      traced: the step.
      sizes: of the mesh's axes.
      tiled: arrays lie in the tiles of a TPU.
      vocab: sizes of vocabularies, by which logits are known.
      folded: the mesh's axes that cover several dimensions of a TPU's torus.
      joins_gathers: a gather is one operation with what the chip computes meanwhile, as on TPUs without SparseCores.
      chip: a TPU, on which values lie that take nothing of the device's memory; None for other devices.
      room: bytes beside the arguments that the compiler brings a step below, by computing values again.
    """
    region = build(traced.closed, traced.arguments, sizes, folded)
    relaid: dict[Value, tuple[int, int]] = {}
    if tiled:
        cut_parts_first(region)
        skip_round_trips(region)
        scatter_behind_loops(region)
        join_scatters(region, sums_apart=joins_gathers)
        scatter_whole(region)
        scatter_early(region, beside=not joins_gathers)
        gather_late(region)
        sum_within_turns(region)
        relaid = sum_in_windows(region, sizes, chip=chip, folded=folded)
        sum_beside_products(region)
        relaid |= tables_by_rows(region)
    else:
        cancel_casts(region)
        join_scatters(region, elements=True)
        share_zeros(region)
    if tiled and not joins_gathers:
        scatter_on_sparse_cores(region)
    kernels = any(op.name == "pallas_call" for op in every_op(region))
    parameters = [one for one in region.inputs if one.role == "parameters"]
    weights = frozenset(shape for one in parameters for shape in _forms(one))

    gathered = gathered_along(region) if tiled else {}

    def size(value: Value) -> int:
        if value.on_host:
            return 0
        if value in relaid:
            return padded_bytes(value.shard, value.dtype, *relaid[value])
        if value in gathered:
            return gathered_bytes(value, gathered[value])
        free = not kernels or _plain(value.shape) in weights or _plain(value.shard) in weights
        return temporary_bytes(value, tiled=tiled, free=free)

    # The run that goes in is donated: what comes out is written into its arrays.
    in_place = set(region.outputs) - (gathered_apart(region) if joins_gathers else set())
    liveness = Recomputing(region, size, in_place, narrow_products=tiled, stacks_first=tiled and joins_gathers)
    if tiled:
        on_chip = set[Value]()
        if chip is not None and chip.vmem_bytes:
            on_chip = values_on_chip(liveness, chip, sums_in_hbm=not joins_gathers)
        liveness.keep_on_chip(on_chip | values_in_parameters(liveness, on_chip))
    moment = liveness.peak() if room is None else liveness.peak_within(room)
    parts = {count // split for count in vocab for split in sizes.values() if count % split == 0}
    return Peak(region, moment, weights, vocab | parts)


def _forms(parameter: Value) -> Iterator[tuple[int, ...]]:
    """The shapes in which a parameter appears: whole or a shard, of all blocks or of one."""
    for shape in (parameter.shape, parameter.shard):
        yield _plain(shape)
        yield _plain(shape[1:])


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def role_of(one: Live, peak: Peak) -> str:
    """Return the role of a value that the step computes.

    An array in the shape of a parameter is a gathered weight in the forward pass and in what is computed again, and a
    gradient in the rest of the backward pass. What the forward pass made and the backward pass still needs is kept.
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
    """Return the name stack of the operation that runs at a moment."""
    return "" if moment.op is None else moment.op.path


def moment_str(moment: Moment) -> str:
    """Say when the fullest moment is: in which pass, and in which part of the model."""
    path = moment_path(moment)
    where = "update" if "jvp" not in path else "backward pass" if "transpose" in path else "forward pass"
    parts = [re.sub(r"^(?:\w+\()*|\)*$", "", part) for part in path.split("/")]
    named = [part for part in parts if part and part not in ("jvp", "transpose", "rematted_computation", "checkpoint")]
    return f"{where}: {'/'.join(named[-3:])}" if named and where != "update" else where
