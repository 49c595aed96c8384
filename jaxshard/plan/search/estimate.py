"""Bounds of a candidate from arithmetic alone: memory that it needs at least, and about how long a step takes.

Memory is a lower bound, so what it refuses can't fit: parameters, optimizer state and gradients where they rest, what
the blocks keep for the backward pass, and one block's gathered weights. Time orders candidates, so that the best are
predicted first; a prediction replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxshard.cost.hardware import Chip
from jaxshard.plan.search.candidates import Candidate
from jaxshard.plan.search.facts import Facts
from jaxshard.plan.time.network import Group, collective_seconds
from jaxshard.plan.time.offload import Offload, offload_seconds, offload_traffic

_PRODUCTS = 0.7
"""The share of a chip's peak that products reach."""
_TRAFFIC = 3.1
"""How often what products read goes through the memory, as in `plan/time/step_time.py`."""
_SUMS = 4
"""All-reduces of a block's output over a tensor axis, forward and backward; half of them again under remat nothing."""
TOO_LARGE = "too large"
"""Why a candidate is left out that no device can hold."""
_HOST = 0.5
"""The share of a host's memory that activations may take: data and checkpoints are there too."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on a device at least, about the seconds of a step, and the seconds of its parts by name.

    `offloaded` are bytes in the host's memory for each device.
    """

    bytes: int
    seconds: float
    parts: Mapping[str, float]
    offloaded: int = 0


class Estimator:
    """Estimates candidates; keeps which devices each axis of a mesh joins, by the axes.

    Args:
      facts: of the model.
      chip: the limits of a device.
      groups: makes, for the axes of a candidate, {axes: the devices that a collective over them joins}.
    """

    def __init__(self, facts: Facts, chip: Chip, groups: Any):
        self.facts, self.chip, self._groups = facts, chip, groups

    def estimate(self, one: Candidate) -> Estimate:
        """Estimate one candidate."""
        facts, stages = self.facts, one.size("pipe")
        weights = self._weights(one)
        split = one.size("data") * one.size("expert") * one.size("context")
        of_role = {
            "param": split if one.data in ("fsdp", "hsdp") else 1,
            # A pipeline adds up whole gradients, and scatters them at the end.
            "grad": split if one.data in ("fsdp", "hsdp", "zero2") and stages == 1 else 1,
            "opt": split if one.data != "ddp" else 1,
        }
        resting = sum(
            size * times / max(1, of_role[role] // (one.size("expert") if experts else 1))
            for (_, experts), size in weights.items()
            for role, times in (("param", 1.0), ("grad", 1.0), ("opt", facts.opt_ratio))
        )
        in_blocks = sum(size for (blocks, _), size in weights.items() if blocks)
        block = in_blocks * stages / (facts.depth or 1) * facts.itemsize / 4 if of_role["param"] > 1 else 0
        parts = self._times(one, weights)
        kept, moved = self._kept(one)
        return Estimate(int(resting + block + kept), sum(parts.values()), parts, int(moved))

    def why_too_large(self, found: Estimate) -> str:
        """Say which memory a candidate can't have; "" where there is none."""
        if found.bytes > self.chip.usable_bytes:
            return TOO_LARGE
        full = self.chip.host_bytes and found.offloaded > _HOST * self.chip.host_bytes
        return f"offloads more than {_HOST:.0%} of the host's memory" if full else ""

    def _weights(self, one: Candidate) -> dict[tuple[bool, bool], float]:
        """Bytes of stored parameters that a device computes with, by (in blocks, split by experts)."""
        share = self.facts.tensor_share.get(one.size("tensor"), 1.0)
        return {
            (blocks, experts): size
            * share
            / (one.size("pipe") if blocks else 1)
            / (one.size("expert") if experts else 1)
            for (blocks, experts), size in self.facts.weights.items()
        }

    def _kept(self, one: Candidate) -> tuple[float, float]:
        """Bytes that blocks keep for the backward pass of the rows on their way: on the device, and on the host."""
        facts, stages = self.facts, one.size("pipe")
        if facts.depth is None or one.policy is None:
            return 0.0, 0.0
        rows = facts.rows / one.row_shards / one.microbatches
        running = min(one.microbatches, stages) if stages > 1 else 1
        many = rows * running / one.size("context") * facts.depth / stages
        # What goes into a block is whole over a tensor axis, what is computed in it split.
        into = facts.block_input * (not one.policy.moved)
        kept = into + max(0, one.policy.kept - into) / one.size("tensor")
        whole = min(one.policy.moved, facts.block_input)
        moved = whole + (one.policy.moved - whole) / one.size("tensor")
        return kept * many, moved * many

    def _times(self, one: Candidate, weights: Mapping[tuple[bool, bool], float]) -> dict[str, float]:
        facts, chip = self.facts, self.chip
        devices = math.prod(size for _, size in one.axes)
        again = one.policy.again if one.policy is not None else 0.0
        rate = (chip.peak_flops if facts.itemsize == 2 else chip.peak_f32 or chip.peak_flops) * _PRODUCTS
        compute = facts.flops * (1 + again) / devices / rate
        passes = one.microbatches if one.size("pipe") == 1 else 1
        over = tuple(axis for axis in ("data", "expert", "context") if one.size(axis) > 1)
        dense = sum(size for (_, experts), size in weights.items() if not experts) * facts.itemsize / 4
        expert = sum(size for (_, experts), size in weights.items() if experts) * facts.itemsize / 4
        gathers = reductions = 0.0
        for moved, axes in ((dense, over), (expert, tuple(axis for axis in over if axis != "expert"))):
            if not axes or not moved:
                continue
            gather = self._seconds(one, "all-gather", axes, moved)
            scatter = self._seconds(one, "reduce-scatter", axes, moved)
            if one.data in ("fsdp", "hsdp"):  # gathered forward and backward
                gathers, reductions = gathers + 2 * passes * gather, reductions + passes * scatter
            else:
                reductions += scatter * (passes if one.data == "zero2" else 1) + gather
            if one.data == "hsdp":
                reductions += self._seconds(one, "all-reduce", ("replica",), moved / max(1, one.size("data")))
        between, moved = self._between(one), int(self._kept(one)[1])
        away = Offload(passes * moved, passes * moved)
        stages = one.size("pipe")
        idle = (stages - 1) / one.chunks / one.microbatches * (0.5 if one.schedule == "zero_bubble" else 1.0)
        update = sum(weights.values()) * (3 + 2 * facts.opt_ratio) / chip.hbm_bandwidth
        split = 1 if one.data == "ddp" else one.size("data") * one.size("expert") * one.size("context")
        update /= split
        busy = compute + between
        # Every pass over the blocks reads their weights, forward and twice backward.
        memory = 3 * passes * (dense + expert) * _TRAFFIC / chip.hbm_bandwidth
        # Every turn but the first adds its gradients to those of the others.
        update += (passes - 1) * 2 * sum(weights.values()) / split / chip.hbm_bandwidth
        return {
            "compute": compute,
            "memory_bound": memory,
            "between": between,
            # At best all of it runs beside products, at worst none, as in `step_time`.
            "weights": (max(0.0, gathers + reductions - compute) + gathers + reductions) / 2,
            "idle": busy * idle if stages > 1 else 0.0,
            "update": update,
            "offload": offload_seconds(away, chip, compute) + sum(offload_traffic(away, chip)) / 2,
        }

    def _between(self, one: Candidate) -> float:
        """Seconds of what stands between products: sums over tensor, tokens to experts, keys, the pipe's permutes."""
        facts = self.facts
        if facts.depth is None or not facts.block_input:
            return 0.0
        stages = one.size("pipe")
        x = facts.block_input * facts.rows / one.row_shards / one.size("context")  # of one block's output
        turns = facts.depth / stages
        again = 1.5 if one.remat not in ("dots", "everything") else 1.0
        total = 0.0
        if one.size("tensor") > 1:
            total += _SUMS * again * turns * self._seconds(one, "all-reduce", ("tensor",), x)
        if one.size("expert") > 1:
            total += 8 * again * turns * self._seconds(one, "all-to-all", ("expert",), x)
        if one.size("context") > 1:
            total += 1.5 * again * turns * self._seconds(one, "all-gather", ("context",), x * one.size("context") / 2)
        if stages > 1:
            total += 4 * one.chunks * self._seconds(one, "collective-permute", ("pipe",), x)
        return total

    def _seconds(self, one: Candidate, kind: str, axes: tuple[str, ...], size: float) -> float:
        group: Group | None = self._groups(one.axes, axes)
        if group is None or self.chip.network is None:
            return 0.0
        return sum(collective_seconds(kind, size, group, self.chip.network)) / 2
