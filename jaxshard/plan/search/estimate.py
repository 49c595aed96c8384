"""Bound the memory of a candidate from below, and estimate its step time, by arithmetic alone.

The bound on memory has stored parameters, optimizer state and gradients, the activations that blocks keep for the
backward pass, and one block's gathered weights: a candidate above the limit can't fit. The time decides which
candidates are predicted first; a prediction replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxshard.cost.hardware import Chip
from jaxshard.plan.search.candidates import Candidate
from jaxshard.plan.search.facts import Facts
from jaxshard.plan.time.network import Group, collective_seconds
from jaxshard.plan.time.offload import Offload, offload_seconds, offload_traffic
from jaxshard.plan.time.products import TRAFFIC

_PRODUCTS = 0.7
"""The share of a chip's peak FLOP/s that products reach."""
_SUMS = 4
"""The all-reduces of a block's output over a tensor axis in a step; if the block is recomputed, half of them more."""
TOO_LARGE = "too large"
"""The reason for leaving out a candidate that needs more memory than a device has."""
_HOST = 0.5
"""The share of a host's memory that activations may take: data and checkpoints need the rest."""

Weights = dict[tuple[bool, bool], float]
"""Bytes of stored parameters by (True if in blocks, True if split over an axis of experts)."""
Groups = Callable[[tuple[tuple[str, int], ...], tuple[str, ...]], Group | None]
"""`groups(axes of a mesh, axes of a collective) -> the devices that the collective joins`."""


@dataclass(frozen=True)
class Estimate:
    """The least bytes of memory per device, the seconds of a step, and the bytes in host memory per device."""

    bytes: int
    seconds: float
    offloaded: int = 0


@dataclass(frozen=True)
class Estimator:
    """Bounds of memory and estimates of time for the candidates of one model.

    Attributes:
      facts: the facts of the model.
      chip: the limits of a device.
      groups: from the mesh axes of a candidate and of a collective, returns how its devices are connected (`Group`), or
        None if the network is not known.
    """

    facts: Facts
    chip: Chip
    groups: Groups

    def estimate(self, one: Candidate) -> Estimate:
        """Estimate the memory and step time of one candidate."""
        weights = self._weights(one)
        kept, moved = self._kept(one)
        return Estimate(int(self._stored(one, weights) + kept), self._step_seconds(one, weights), int(moved))

    def why_too_large(self, found: Estimate) -> str:
        """Explain which memory limit an estimate exceeds; "" if it exceeds none."""
        if found.bytes > self.chip.usable_bytes:
            return TOO_LARGE
        full = self.chip.host_bytes and found.offloaded > _HOST * self.chip.host_bytes
        return f"offloads more than {_HOST:.0%} of the host's memory" if full else ""

    def _weights(self, one: Candidate) -> Weights:
        """Return the bytes of parameters per device, split by tensor, pipe and expert axes but not by ZeRO or FSDP."""
        share = self.facts.tensor_share.get(one.size("tensor"), 1.0)
        return {
            (blocks, experts): size * share / (one.size("pipe") ** blocks * one.size("expert") ** experts)
            for (blocks, experts), size in self.facts.weights.items()
        }

    def _stored(self, one: Candidate, weights: Weights) -> float:
        """Return the bytes per device of parameters, gradients, optimizer state, and one block's gathered weights."""
        stages, gathered = one.size("pipe"), one.data in ("fsdp", "hsdp")
        parts = {
            "param": one.weight_shards if gathered else 1,
            # A pipeline accumulates full gradients, and scatters them at the end.
            "grad": one.weight_shards if (gathered or one.data == "zero2") and stages == 1 else 1,
            "opt": one.weight_shards if one.data != "ddp" else 1,
        }
        times = {"param": 1.0, "grad": 1.0, "opt": self.facts.opt_ratio}
        stored = sum(
            size * times[role] / max(1, parts[role] // (one.size("expert") if experts else 1))
            for (_, experts), size in weights.items()
            for role in parts
        )
        in_blocks = sum(size for (blocks, _), size in weights.items() if blocks)
        block = in_blocks * stages / (self.facts.depth or 1) * self.facts.itemsize / 4
        return stored + (block if parts["param"] > 1 else 0)

    def _kept(self, one: Candidate) -> tuple[float, float]:
        """Return (bytes on the device, bytes on the host) of activations that blocks keep for the backward pass."""
        facts, stages = self.facts, one.size("pipe")
        if facts.depth is None or one.policy is None:
            return 0.0, 0.0
        rows = facts.rows / one.row_shards / one.microbatches
        running = min(one.microbatches, stages) if stages > 1 else 1
        many = rows * running / one.size("context") * facts.depth / stages
        # The input of a block is replicated over a tensor axis, the activations inside it are split.
        into = facts.block_input * (not one.policy.moved)
        kept = into + max(0, one.policy.kept - into) / one.size("tensor")
        input_moved = min(one.policy.moved, facts.block_input)
        moved = input_moved + (one.policy.moved - input_moved) / one.size("tensor")
        return kept * many, moved * many

    def _step_seconds(self, one: Candidate, weights: Weights) -> float:
        """Estimate the seconds of a step as the sum of its parts, such as products and communication."""
        facts, chip, stages = self.facts, self.chip, one.size("pipe")
        again = one.policy.again if one.policy is not None else 0.0
        rate = (chip.peak_flops if facts.itemsize == 2 else chip.peak_f32 or chip.peak_flops) * _PRODUCTS
        compute = facts.flops * (1 + again) / math.prod(size for _, size in one.axes) / rate
        passes = one.microbatches if stages == 1 else 1
        stored, split = sum(weights.values()), 1 if one.data == "ddp" else one.weight_shards
        # Every pass over the blocks reads their weights, forward and twice backward.
        memory = 3 * passes * stored * facts.itemsize / 4 * sum(TRAFFIC) / 2
        # The update reads and writes; every micro-batch but the first adds its gradients to those of the others.
        memory += stored / split * (3 + 2 * facts.opt_ratio + (passes - 1) * 2)
        between = self._between(one)
        idle = (stages - 1) / one.chunks / one.microbatches * (0.5 if one.schedule == "zero_bubble" else 1.0)
        moving = self._moving(one, weights, passes)
        moved = passes * int(self._kept(one)[1])
        away = Offload(moved, moved)
        return sum((
            compute,
            between,
            memory / chip.hbm_bandwidth,
            (max(0.0, moving - compute) + moving) / 2,  # the middle of all of it hidden by products, and none
            (compute + between) * idle,
            offload_seconds(away, chip, compute) + sum(offload_traffic(away, chip)) / 2,
        ))  # fmt: skip

    def _moving(self, one: Candidate, weights: Weights, passes: int) -> float:
        """Return the seconds of gathering weights and reducing gradients in a step of `passes` micro-batches."""
        over = tuple(axis for axis in ("data", "expert", "context") if one.size(axis) > 1)
        total = 0.0
        for experts, axes in ((False, over), (True, tuple(axis for axis in over if axis != "expert"))):
            size = sum(size for (_, of_experts), size in weights.items() if of_experts == experts)
            size *= self.facts.itemsize / 4
            if not axes or not size:
                continue
            gather, scatter = (self._seconds(one, kind, axes, size) for kind in ("all-gather", "reduce-scatter"))
            if one.data in ("fsdp", "hsdp"):  # gathered forward and backward
                total += passes * (2 * gather + scatter)
            else:
                total += scatter * (passes if one.data == "zero2" else 1) + gather
            if one.data == "hsdp":
                total += self._seconds(one, "all-reduce", ("replica",), size / max(1, one.size("data")))
        return total

    def _between(self, one: Candidate) -> float:
        """Return the seconds of communication of activations, during which no product runs.

        It consists of sums over the tensor axis, all-to-alls of tokens over the expert axis, gathers of keys and values
        over the context axis, and permutes between pipeline stages.
        """
        facts, stages = self.facts, one.size("pipe")
        if facts.depth is None or not facts.block_input:
            return 0.0
        x = facts.block_input * facts.rows / one.row_shards / one.size("context")  # bytes of one block's output
        blocks = facts.depth / stages * (1.5 if one.remat not in ("dots", "everything") else 1.0)
        moved = (
            ("all-reduce", "tensor", _SUMS * blocks, x),
            ("all-to-all", "expert", 8 * blocks, x),
            ("all-gather", "context", 1.5 * blocks, x * one.size("context") / 2),
            ("collective-permute", "pipe", 4 * one.chunks, x),
        )
        return sum(
            count * self._seconds(one, kind, (axis,), size) for kind, axis, count, size in moved if one.size(axis) > 1
        )

    def _seconds(self, one: Candidate, kind: str, axes: tuple[str, ...], size: float) -> float:
        group = self.groups(one.axes, axes)
        if group is None or self.chip.network is None:
            return 0.0
        return sum(collective_seconds(kind, size, group, self.chip.network)) / 2
