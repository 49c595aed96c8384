"""What the flags say about where and how a step runs: mesh, strategy and engine, and which batches divide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from jaxshard.commands.devices import choose_devices
from jaxshard.core.mesh import make_mesh
from jaxshard.core.strategy import Strategy, compose, ddp, fsdp, hsdp, pipeline, tensor, zero1, zero2
from jaxshard.engines.accumulate import Engine
from jaxshard.engines.auto import auto
from jaxshard.engines.explicit import explicit
from jaxshard.engines.pipeline.engine import pipelined
from jaxshard.plan.topology import topology_mesh
from jaxshard.schedules.named import ONE_CHUNK, full_name
from jaxshard.schedules.schedule import Schedule

StrategyName = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
EngineName = Literal["explicit", "auto", "pipelined"]
RematName = Literal["everything", "dots", "nothing"]

_ENGINES: dict[str, Callable[..., Engine]] = {"explicit": explicit, "auto": auto}

_STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "fsdp": fsdp,
    "hsdp": hsdp,
}

TURNS_PER_STAGE = 4
"""Micro-batches per device of the pipeline where nothing is said: with two chunks a bubble of an eighth at most."""


class Parallel(NamedTuple):
    """A mesh, a strategy over its axes, the engine, what the rows of a batch must be a multiple of, and a name.

    The name is that of the data strategy.
    """

    mesh: Mesh
    strategy: Strategy
    engine: Engine
    parts: int
    name: str

    @property
    def shown(self) -> dict[str, str]:
        """What runs, for the eye."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        shown = {"mesh": axes, "strategy": self.name, "engine": self.about["engine"]}
        if self.engine.reduction == "ordered":
            shown["engine"] += ", sums in one order"
        if "schedule" in self.about:
            shown["schedule"] = f"{self.about['schedule']}, {self.engine.microbatches} micro-batches"
        return shown

    @property
    def about(self) -> dict[str, Any]:
        """What ran, for results."""
        engine = type(self.engine).__name__.lower()
        made = {"strategy": self.name, "engine": engine, "microbatches": self.engine.microbatches}
        schedule = getattr(self.engine, "schedule", None)
        if schedule is None:
            return made | {"remat": self.engine.remat, "reduction": self.engine.reduction}
        name = schedule if isinstance(schedule, str) else schedule.name
        return made | {"schedule": name, "stash": getattr(self.engine, "stash", None)}


def parallel(
    *,
    mesh: str | None,
    strategy: str,
    engine: str | None,
    devices: int | None,
    microbatches: int | None,
    remat: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    topology: str | None = None,
    depth: int | None = None,
    batch: int | None = None,
    ordered: bool = False,
) -> Parallel:
    """The mesh over the chosen devices, by default all on the axis data, the strategy over its axes, and the engine.

    `strategy` names the data strategy; an axis tensor in the mesh adds tensor parallelism, an axis pipe a pipeline.
    With a `topology` the mesh is over chips that are not here: it compiles, and holds no arrays. `depth` and `batch`,
    where they are known, decide what was not said: chunks, and micro-batches of a pipeline. `ordered` adds over devices
    in one order.
    """
    usual = {"replica": 2, "data": -1} if strategy == "hsdp" else {"data": -1}
    axes = usual if mesh is None else parse_axes(mesh)
    axes = _with_data(axes, usual, mesh, strategy)
    chosen = choose_devices(devices)
    made = make_mesh(chosen, **axes) if topology is None else topology_mesh(topology, **axes)
    split = [_STRATEGIES[strategy](*usual), *([tensor()] if "tensor" in axes else [])]
    rows = 1
    for axis in usual:
        rows *= made.shape[axis]
    if ordered and (not {"tensor", "pipe"}.isdisjoint(axes) or engine not in (None, "explicit")):
        raise ValueError(
            "--ordered: only the engine explicit adds in one order, and without the axes tensor and pipe; leave out "
            f"{'--engine ' + engine if engine not in (None, 'explicit') else 'these axes'}, or --ordered"
        )
    if "pipe" not in axes:
        _check_no_pipeline(mesh, engine, schedule, chunks)
        turns = microbatches or 1
        options = {"reduction": "ordered"} if ordered else {}
        runs = _ENGINES[engine or "explicit"](microbatches=turns, remat=remat or "everything", **options)
        return Parallel(made, compose(*split), runs, rows * turns, strategy)
    if engine not in (None, "pipelined"):
        raise ValueError(
            f"--engine {engine}: a mesh with the axis pipe runs under engine pipelined; leave out the flag or the axis"
        )
    stages = made.shape["pipe"]
    table = _table(schedule, stages, microbatches, chunks)
    if table is None:
        chunks = chunks or _chunks(schedule, stages, depth)
        turns = microbatches or _turns(stages, rows, batch)
    else:
        chunks, turns = table.chunks, table.microbatches
    stash = {"nothing": "layer", None: "layer"}.get(remat, remat)
    runs = pipelined(microbatches=turns, schedule=table or schedule or "interleaved", stash=stash or "layer")
    return Parallel(made, compose(*split, pipeline("pipe", chunks=chunks)), runs, rows * turns, strategy)


def _with_data(axes: dict[str, int], usual: dict[str, int], mesh: str | None, strategy: str) -> dict[str, int]:
    """The axes with those of the data strategy, of one device where all devices are on tensor or pipe."""
    data = {name: size for name, size in axes.items() if name not in ("tensor", "pipe")}
    if not data and len(axes) > len(data):
        return dict.fromkeys(usual, 1) | axes
    if set(data) != set(usual):
        example = ",".join(f"{name}={count}" for name, count in usual.items())
        raise ValueError(
            f"--mesh {mesh}: the strategy {strategy} needs the axes {' and '.join(usual)}, and tensor and pipe if you "
            f"like; write --mesh {example} or --mesh {example},tensor=2,pipe=2, or choose another strategy"
        )
    return axes


def _check_no_pipeline(mesh: str | None, engine: str | None, schedule: str | None, chunks: int | None) -> None:
    given = {"engine": engine if engine == "pipelined" else None, "schedule": schedule, "chunks": chunks}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"--{name} {value} is for a pipeline, but --mesh {mesh or 'data=-1'} has no axis pipe; write --mesh "
                f"data=-1,pipe=2, or leave --{name} out"
            )


def _table(schedule: str | None, stages: int, microbatches: int | None, chunks: int | None) -> Schedule | None:
    """The user's own table where the schedule is a file, which then says all about itself."""
    if schedule is None or not schedule.endswith(".csv"):
        return None
    table = Schedule.from_csv(Path(schedule))
    own = {"pipe": table.stages, "microbatches": table.microbatches, "chunks": table.chunks}
    for name, given in (("pipe", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if given is not None and given != own[name]:
            raise ValueError(
                f"--schedule {schedule} is a table for {name}={own[name]}, but {name}={given} was asked for"
            )
    return table


def _chunks(schedule: str | None, stages: int, depth: int | None) -> int:
    """Chunks per device where none are said: two if the schedule can and the model has so many blocks."""
    if schedule is not None and full_name(schedule) in ONE_CHUNK:
        return 1
    return 2 if depth is not None and depth >= 2 * stages else 1


def _turns(stages: int, rows: int, batch: int | None) -> int:
    """Micro-batches where none are said: several per stage if they divide the batch."""
    wanted = [times * stages for times in (TURNS_PER_STAGE, 3, 2, 1)]
    if batch is None:
        return wanted[0]
    return next((turns for turns in wanted if batch % (rows * turns) == 0), stages)


def parse_axes(text: str) -> dict[str, int]:
    """The axes and sizes in "replica=2,data=4"."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if not name.isidentifier() or not count.removeprefix("-").isdecimal() or name in axes:
            raise ValueError(f"--mesh {text}: write each axis once, as name=size, such as data=8 or replica=2,data=4")
        axes[name] = int(count)
    return axes
