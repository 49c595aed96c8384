"""The ways to train a model on a number of devices: axes that multiply to it, what is split, and how a step runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxshard.core.context import context
from jaxshard.core.strategy import Strategy, compose, ddp, expert, fsdp, hsdp, pipeline, tensor, zero1, zero2
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.engines.explicit import explicit
from jaxshard.engines.pipeline.engine import pipelined
from jaxshard.plan.search.facts import Facts
from jaxshard.plan.search.policies import Policy, remat_of

_STRATEGIES: dict[str, Any] = {"fsdp": fsdp, "hsdp": hsdp, "zero2": zero2, "zero1": zero1, "ddp": ddp}
_SCHEDULES = (("interleaved", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 2))
_TURNS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """One way to train: everything that `js.layout` and `js.make_step` are told.

    Attributes:
      axes: the sizes of the mesh's axes, in the mesh's order.
      data: the data strategy: "fsdp", "hsdp", "zero2", "zero1" or "ddp"; the other axes add theirs.
      engine_name: "explicit", "auto" or "pipelined".
      microbatches: into how many turns the rows of a device are cut.
      policy: what the forward pass of a block keeps; None where no remat policy applies.
      schedule: of a pipeline, with `chunks` stages per device.
      chunks: see `schedule`.
      precision: as for `js.explicit`.
    """

    axes: tuple[tuple[str, int], ...]
    data: str
    engine_name: str = "explicit"
    microbatches: int = 1
    policy: Policy | None = None
    schedule: str | None = None
    chunks: int = 1
    precision: str | None = None

    def size(self, axis: str) -> int:
        """The size of an axis; 1 if there is none."""
        return dict(self.axes).get(axis, 1)

    @property
    def row_shards(self) -> int:
        """The number of parts that the rows of a batch are in."""
        return self.size("replica") * self.size("data") * self.size("expert")

    @property
    def pieces(self) -> float:
        """A count of the things to think of: axes, turns, strategies beside fsdp, names of activations."""
        named = 0.0 if self.policy is None or self.policy.is_plain else 0.5
        return len(self.axes) + math.log2(self.microbatches) / 2 + (self.data not in ("fsdp", "ddp")) / 2 + named

    @property
    def remat(self) -> str | None:
        """The policy as `--remat` takes it."""
        return None if self.policy is None else self.policy.text

    def strategy(self) -> Strategy:
        """Make the strategy."""
        over = ("data", *(axis for axis in ("expert", "context") if self.size(axis) > 1))
        shards = over if len(over) > 1 else "data"
        made: Strategy = _STRATEGIES[self.data](*(("replica",) if self.data == "hsdp" else ()), shards)
        if self.size("context") > 1:
            made = compose(made, context(("context",)))
        if self.size("expert") > 1:
            made = compose(made, expert())
        if self.size("tensor") > 1:
            made = compose(made, tensor())
        if self.size("pipe") > 1:
            made = compose(made, pipeline("pipe", chunks=self.chunks))
        return made

    def engine(self) -> Engine:
        """Make the engine."""
        precision: Any = self.precision
        if self.engine_name == "pipelined":
            stash = "layer" if self.remat in (None, "nothing") else self.remat
            assert self.schedule is not None
            return pipelined(
                microbatches=self.microbatches, schedule=self.schedule, stash=stash or "layer", precision=precision
            )
        make = auto if self.engine_name == "auto" else explicit
        remat = None if self.remat is None else remat_of(self.remat)
        return make(microbatches=self.microbatches, remat=remat, precision=precision)

    @property
    def words(self) -> tuple[str, ...]:
        """The flags of `jaxshard plan`, `audit` and `train` that ask for it."""
        given = ["--mesh", ",".join(f"{axis}={size}" for axis, size in self.axes), "--strategy", self.data]
        given += ["--engine", "auto"] if self.engine_name == "auto" else []
        given += [] if self.remat is None else ["--remat", self.remat]
        given += ["--microbatches", str(self.microbatches)] if self.microbatches > 1 else []
        if self.schedule is not None:
            given += ["--schedule", self.schedule, "--chunks", str(self.chunks)]
        return (*given, *(("--precision", self.precision) if self.precision else ()))

    def __str__(self) -> str:
        """Write it in a few words: "fsdp on data=64, tensor=4, remat dots"."""
        parts = [f"{self.data} on {', '.join(f'{axis}={size}' for axis, size in self.axes)}"]
        if self.schedule is not None:
            parts.append(f"{self.schedule} with {self.chunks} chunk{'s' * (self.chunks > 1)} a device")
        parts += [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        parts += [] if self.remat is None else [f"remat {self.remat}"]
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "mesh": dict(self.axes),
            "strategy": self.data,
            "engine": self.engine_name,
            "microbatches": self.microbatches,
            "remat": self.remat,
            "schedule": self.schedule,
            "chunks": self.chunks if self.schedule else None,
            "precision": self.precision,
            "flags": " ".join(self.words),
        }


def candidates(facts: Facts, devices: int, *, num_slices: int = 1, precision: str | None = None) -> Iterator[Candidate]:
    """List the ways to train a model that its shapes allow.

    Every axis divides what it splits: data and expert the rows of the batch, tensor and expert what the model's
    dimensions of those names have, context the positions, pipe the blocks.

    Args:
      facts: of the model and its batch.
      devices: the sizes multiply to it.
      num_slices: where there are several, no axis but replica, data and pipe crosses them.
      precision: of all of them.
    """
    for tensors in _dividing(devices, facts.tensor_sizes):
        for experts in _dividing(devices // tensors, facts.expert_sizes):
            for parts in _dividing(devices // tensors // experts, facts.context_sizes):
                for stages in _dividing(devices // tensors // experts // parts, facts.pipe_sizes):
                    left = devices // tensors // experts // parts // stages
                    # What crosses slices: replica, data and pipe; the others stay within one.
                    if num_slices > 1 and (devices // num_slices) % (tensors * experts * parts):
                        continue
                    others = {"expert": experts, "context": parts, "pipe": stages, "tensor": tensors}
                    for axes, data in _data_axes(left, others, num_slices):
                        yield from _ways(facts, axes, data, stages, precision)


def _data_axes(
    left: int, others: Mapping[str, int], num_slices: int
) -> Iterator[tuple[tuple[tuple[str, int], ...], str]]:
    given = tuple((axis, size) for axis, size in others.items() if size > 1)
    shards = left * others["expert"] * others["context"]
    for data in ("fsdp", "zero2", "zero1", "ddp") if shards > 1 else ("ddp",):
        yield (("data", left), *given), data
    groups = {2**k for k in range(1, 12)} | {num_slices}
    for replicas in sorted(groups):
        if 1 < replicas < left and left % replicas == 0 and replicas % num_slices == 0:
            yield (("replica", replicas), ("data", left // replicas), *given), "hsdp"


def _ways(
    facts: Facts, axes: tuple[tuple[str, int], ...], data: str, stages: int, precision: str | None
) -> Iterator[Candidate]:
    first = Candidate(axes, data, precision=precision)
    if facts.rows % first.row_shards:
        return
    rows = facts.rows // first.row_shards
    policies = facts.policies or (None,)
    if stages == 1:
        for turns in _TURNS:
            if rows % turns == 0:
                for policy in policies:
                    yield Candidate(axes, data, facts.engine, turns, policy, precision=precision)
        return
    for schedule, chunks in _SCHEDULES:
        if facts.depth is None or facts.depth % (stages * chunks):
            continue
        for turns in (stages, 2 * stages, 4 * stages, 8 * stages):
            if rows % turns == 0:
                for policy in policies:
                    if policy is None or policy.is_plain:  # a pipeline keeps activations in rings on the device
                        yield Candidate(axes, data, "pipelined", turns, policy, schedule, chunks, precision)


def _dividing(devices: int, sizes: tuple[int, ...]) -> Iterator[int]:
    """The sizes that divide the devices, 1 first."""
    yield from (size for size in (1, *sizes) if devices % size == 0)
