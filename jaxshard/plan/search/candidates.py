"""List the candidates of a search: mesh axes that multiply to the devices, strategy, engine, micro-batches, remat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
_MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """One way to train a model: the strategy, the mesh axes and the engine for `js.layout` and `js.make_step`.

    Attributes:
      axes: (name, size) of each axis of the mesh, in order.
      data: the strategy over the data axis: "fsdp", "hsdp", "zero2", "zero1" or "ddp". Other axes add `js.tensor`,
        `js.expert`, `js.context` and `js.pipeline`.
      engine_name: "explicit", "auto" or "pipelined".
      microbatches: the number of micro-batches into which a device's rows are cut.
      policy: the remat policy of a block; None for a loss function that jaxshard can't look into.
      schedule: the pipeline schedule; None without a pipeline.
      chunks: the number of pipeline stages per device.
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
        """Return the size of a mesh axis; 1 if the mesh has no such axis."""
        return dict(self.axes).get(axis, 1)

    @property
    def row_shards(self) -> int:
        """The number of shards of the rows of a batch, over the axes replica, data and expert."""
        return self.size("replica") * self.size("data") * self.size("expert")

    @property
    def weight_shards(self) -> int:
        """The number of shards into which ZeRO or FSDP splits an array of parameters, gradients or optimizer state."""
        return self.size("data") * self.size("expert") * self.size("context")

    @property
    def pieces(self) -> float:
        """A penalty for complexity: it grows with mesh axes, micro-batches, unusual strategies and remat policies."""
        named = 0.0 if self.policy is None or self.policy.is_plain else 0.5
        return len(self.axes) + math.log2(self.microbatches) / 2 + (self.data not in ("fsdp", "ddp")) / 2 + named

    @property
    def remat(self) -> str | None:
        """The remat policy as the text that `--remat` takes; None without a policy."""
        return None if self.policy is None else self.policy.text

    def strategy(self) -> Strategy:
        """Make the strategy for `js.layout`."""
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
        """Make the engine for `js.make_step`."""
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
        """The flags of `jaxshard plan`, `audit` and `train` that select this candidate."""
        given = ["--mesh", ",".join(f"{axis}={size}" for axis, size in self.axes), "--strategy", self.data]
        given += ["--engine", "auto"] if self.engine_name == "auto" else []
        given += [] if self.remat is None else ["--remat", self.remat]
        given += ["--microbatches", str(self.microbatches)] if self.microbatches > 1 else []
        if self.schedule is not None:
            given += ["--schedule", self.schedule, "--chunks", str(self.chunks)]
        return (*given, *(("--precision", self.precision) if self.precision else ()))

    def __str__(self) -> str:
        """Write the candidate in a few words: "fsdp on data=64, tensor=4, remat dots"."""
        parts = [f"{self.data} on {', '.join(f'{axis}={size}' for axis, size in self.axes)}"]
        if self.schedule is not None:
            parts.append(f"{self.schedule} with {self.chunks} chunk{'s' * (self.chunks > 1)} a device")
        parts += [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        parts += [] if self.remat is None else [f"remat {self.remat}"]
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate as values that JSON can represent."""
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
    """List the candidates that the shapes of a model and its batch allow.

    The sizes of the axes data and expert divide the rows of the batch. The sizes of tensor and expert divide the
    dimensions of the model that `js.tensor` and `js.expert` split. The size of context divides the positions, and the
    size of pipe the blocks.

    Args:
      facts: the facts of the model and its batch.
      devices: the number of devices, the product of the sizes of the axes.
      num_slices: the number of TPU slices; only the axes replica, data and pipe cross them.
      precision: the precision of all candidates, as for `js.explicit`.
    """
    given = (facts.tensor_share, facts.expert_sizes, facts.context_sizes, facts.pipe_sizes)
    for tensors, experts, parts, stages in itertools.product(*((1, *sizes) for sizes in given)):
        if devices % (tensors * experts * parts * stages):
            continue
        if num_slices > 1 and (devices // num_slices) % (tensors * experts * parts):
            continue
        others = {"expert": experts, "context": parts, "pipe": stages, "tensor": tensors}
        for axes, data in _data_axes(devices // math.prod(others.values()), others, num_slices):
            yield from _ways(facts, Candidate(axes, data, precision=precision))


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


def _ways(facts: Facts, first: Candidate) -> Iterator[Candidate]:
    """Yield copies of a candidate: one for each possible schedule, number of micro-batches and remat policy."""
    if facts.rows % first.row_shards:
        return
    rows, stages = facts.rows // first.row_shards, first.size("pipe")
    for schedule, chunks in _SCHEDULES if stages > 1 else ((None, 1),):
        if schedule and (facts.depth is None or facts.depth % (stages * chunks)):
            continue
        name = facts.engine if schedule is None else "pipelined"
        for count in (stages * many for many in _MICROBATCHES):
            for policy in (facts.policies or (None,)) if rows % count == 0 else ():
                if schedule is None or policy is None or policy.is_plain:  # pipelines keep activations on the device
                    yield replace(
                        first, engine_name=name, microbatches=count, policy=policy, schedule=schedule, chunks=chunks
                    )
