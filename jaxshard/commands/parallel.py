"""How a step runs, resolved from the flags: `Parallel` holds the mesh, the strategy over its axes, and the engine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import jax
from jax.sharding import Mesh

from jaxshard.adapt.remat import Kept, RematPolicy, offloaded
from jaxshard.commands.devices import choose_devices, describe
from jaxshard.commands.flags import PrecisionName, ShardingFlags, check_positive, refuse
from jaxshard.commands.outer import parse_outer
from jaxshard.commands.wire import parse_wire
from jaxshard.core.context import context
from jaxshard.core.local import local, local_of
from jaxshard.core.mesh import axis_size, make_mesh, mesh_str
from jaxshard.core.strategy import Strategy, compose, ddp, expert, fsdp, hsdp, pipeline, tensor, zero1, zero2
from jaxshard.core.strategy_parts import context_of
from jaxshard.core.wire import Scaled
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.engines.explicit import explicit
from jaxshard.engines.pipeline.engine import pipelined
from jaxshard.plan.topology import topology_mesh
from jaxshard.schedules.named import ONE_CHUNK, full_name
from jaxshard.schedules.schedule import Schedule

_ENGINES: dict[str, Callable[..., Engine]] = {"explicit": explicit, "auto": auto}

_STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": ddp, "zero1": zero1, "zero2": zero2, "fsdp": fsdp, "hsdp": hsdp
}  # fmt: skip

DEFAULT_STRATEGY = "fsdp"

_REMAT_NAMES = "everything", "dots", "nothing"

CONTEXT_AXES = ("context", "context_heads")
"""Axes in --mesh that split rows. The second is for --context usp, which exchanges heads over it."""

_MICROBATCHES_PER_STAGE = 4
"""Of a pipeline where --microbatches is not given: with two chunks the bubble is an eighth at most."""


class Parallel(NamedTuple):
    """The mesh, strategy and engine of a step.

    Attributes:
      mesh: the mesh over the chosen devices.
      strategy: the data strategy, composed with those of the axes context, expert, tensor and pipe.
      engine: how the gradient is computed.
      rows_multiple: the number that the rows of a batch must be a multiple of: micro-batches times data shards.
      seq_multiple: the same for the tokens in a row: two chunks for each device of the context.
      strategy_name: the name of the data strategy.
      devices: the devices in words.
    """

    mesh: Mesh
    strategy: Strategy
    engine: Engine
    rows_multiple: int
    seq_multiple: int
    strategy_name: str
    devices: str

    @property
    def shown(self) -> dict[str, str]:
        """The facts that a command prints, by name."""
        about = self.about
        engine = about["engine"] + (", sums in one order" if about.get("reduction", "native") != "native" else "")
        engine += f", computes and reduces gradients in {dtype}" if (dtype := about.get("compute_dtype")) else ""
        for what, sent in (("gradients", self.engine.reduce_dtype), ("weights", self.engine.gather_dtype)):
            engine += f", {what} travel as {sent.name}" if isinstance(sent, Scaled) else ""
        shown = {"devices": self.devices, "mesh": mesh_str(self.mesh), "strategy": self.strategy_name, "engine": engine}
        if replicas := local_of(self.strategy):
            alike = f"; alike in the first {replicas.warmup}" if replicas.warmup else ""
            shown["replicas"] = f"synchronised every {replicas.every} steps{alike}"
        if context := context_of(self.strategy):
            shown["context"] = f"{context.how} over {' x '.join(context.axis)}"
        if "schedule" in about:
            shown["schedule"] = f"{about['schedule']}, {self.engine.microbatches} micro-batches"
        return shown

    @property
    def about(self) -> dict[str, Any]:
        """The facts that a command writes into its JSON object."""
        mesh = {"mesh": dict(self.mesh.shape), "devices": self.mesh.size}
        context = context_of(self.strategy)
        form: dict[str, Any] = {"context": context.how} if context else {}
        if replicas := local_of(self.strategy):
            form |= {"sync_every": replicas.every, "sync_warmup": replicas.warmup}
        return mesh | {"strategy": self.strategy_name} | form | self.engine.describe()


class Topology(NamedTuple):
    """Chips that are not here: the name, such as "v5e:2x4", how many slices, and the function that makes the mesh.

    A `topology_mesh` compiles and holds no arrays; a `planned_mesh` needs no compiler.
    """

    name: str
    slices: int = 1
    make: Callable[..., Mesh] = topology_mesh

    def mesh(self, axes: dict[str, int]) -> Mesh:
        """Make the mesh."""
        return self.make(self.name, num_slices=self.slices, **axes)

    def __str__(self) -> str:
        """Write "v5e:2x4", of several slices "2 x v5e:2x4"."""
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"


def make_parallel(
    flags: ShardingFlags,
    *,
    remat: str | None = None,
    precision: PrecisionName | None = None,
    ordered: bool = False,
    topology: Topology | None = None,
    depth: int | None = None,
    batch: int | None = None,
) -> Parallel:
    """Resolve the flags; without --mesh all devices are on the axis data.

    Args:
      flags: what was asked for. An axis tensor in the mesh adds tensor parallelism, an axis pipe a pipeline. An axis
        context splits rows and an axis expert spreads the experts of a model that has some: their devices also share
        what the data strategy splits.
      remat: what the forward pass keeps, as `parse_remat` takes it; by default what the model states, or nothing in a
        pipeline.
      precision: of weights where they are used, and of the sums of gradients; by default f32.
      ordered: add over devices in one fixed order.
      topology: make the mesh of chips that are not here.
      depth: the number of blocks where it is known, to choose the chunks of a pipeline.
      batch: the rows of a step where they are known, to choose the micro-batches of a pipeline.

    Raises:
      ValueError: flags that do not fit together, or not to the devices.
    """
    check_positive(microbatches=flags.microbatches)
    policy = None if remat is None else parse_remat(remat)
    name = flags.strategy or DEFAULT_STRATEGY
    _check_synchronisation(flags, name)
    data_axes = {"replica": 2, "data": -1} if name == "hsdp" or flags.sync_every else {"data": -1}
    axes = _with_data_axes(flags, name, data_axes)
    if topology is None:
        devices = choose_devices(flags.devices)
        _check_count(flags, axes, devices)
        mesh, where = make_mesh(devices, **axes), describe(devices)
    else:
        refuse("is for the devices that are here, and --topology names others; leave one out", devices=flags.devices)
        mesh, where = topology.mesh(axes), str(topology)
    split = _context_axes(flags, axes)
    *replicas, data = data_axes
    rows_over = (*(_parts_of(data, axes) or (data,)), *(("expert",) if "expert" in axes else ()))
    shared = (*rows_over, *split)
    if flags.sync_every:
        strategy = compose(
            _STRATEGIES[name](shared if len(shared) > 1 else shared[0]),
            local(
                "replica",
                every=flags.sync_every,
                outer=parse_outer(flags.outer),
                warmup=flags.sync_warmup or 0,
            ),
        )
    else:
        strategy = _STRATEGIES[name](*replicas, shared if len(shared) > 1 else shared[0])
    if split:
        strategy = compose(strategy, context(split, how=flags.context or "gather"))
    if "expert" in axes:
        strategy = compose(strategy, expert())
    if "tensor" in axes:
        strategy = compose(strategy, tensor())
    if ordered:
        _check_ordered(flags, axes)
    shards = axis_size(mesh, (*replicas, *rows_over))
    engine: Engine
    wire = _read_wire(flags, axes, ordered)
    if "pipe" in axes:
        make, chunks = _plan_pipeline(flags, mesh.shape["pipe"], shards, policy=policy, depth=depth, batch=batch)
        engine = make(precision=precision, **wire)
        strategy = compose(strategy, pipeline("pipe", chunks=chunks))
    else:
        _check_no_pipeline(flags)
        options: dict[str, Any] = {"reduction": "ordered"} if ordered else {}
        engine = _ENGINES[flags.engine or "explicit"](
            microbatches=flags.microbatches or 1, remat=policy, precision=precision, **options, **wire
        )
    parts = axis_size(mesh, split)
    return Parallel(
        mesh,
        strategy,
        engine,
        shards * engine.microbatches,
        2 * parts if parts > 1 else 1,
        name,
        where,
    )


def _check_count(flags: ShardingFlags, axes: dict[str, int], devices: Sequence[jax.Device]) -> None:
    """Raise ValueError for a mesh of another number of devices than there are."""
    needed = math.prod(axes.values())
    if -1 in axes.values() or needed == len(devices) or min(axes.values()) < 1:
        return
    more = needed > len(devices) and devices[0].platform != "cpu"
    way = "" if more else f", or give --devices {needed}"
    raise ValueError(
        f"--mesh {flags.mesh} needs {needed} devices, but there are {len(devices)}; set one size to -1, which takes "
        f"what the others leave{way}"
    )


def _check_synchronisation(flags: ShardingFlags, name: str) -> None:
    check_positive(sync_every=flags.sync_every, sync_warmup=flags.sync_warmup)
    of_meetings = {"--sync-warmup": flags.sync_warmup, "--outer": flags.outer}
    for flag, value in of_meetings.items():
        if value and not flags.sync_every:
            raise ValueError(f"{flag} {value} is about how --sync-every synchronises; add --sync-every N")
    if flags.sync_every and name == "hsdp":
        raise ValueError(
            f"--sync-every {flags.sync_every}: hsdp reduces gradients over the axis replica in every step; use "
            "--strategy fsdp, which splits parameters within each replica"
        )


def _with_data_axes(flags: ShardingFlags, name: str, data_axes: dict[str, int]) -> dict[str, int]:
    """The axes in --mesh with those of the data strategy, of size 1 where all devices are on other axes."""
    if flags.mesh is None:
        return data_axes
    axes = parse_axes(flags.mesh)
    given = [name for name in axes if name not in ("expert", "tensor", "pipe", *CONTEXT_AXES)]
    if not given:
        return dict.fromkeys(data_axes, 1) | axes
    *replicas, data = data_axes
    if set(given) not in (set(data_axes), {*replicas, *_parts_of(data, axes)}):
        example = ",".join(f"{name}={count}" for name, count in data_axes.items())
        raise ValueError(
            f"--mesh {flags.mesh}: the strategy {name} needs the axes {' and '.join(data_axes)}, and tensor, "
            f"pipe, context and expert if you like; write --mesh {example} or --mesh {example},tensor=2,pipe=2, or "
            "choose another strategy"
        )
    return axes


def _parts_of(data: str, axes: dict[str, int]) -> tuple[str, ...]:
    """The axes in --mesh that one data axis is divided into, one for each dimension of a torus: data0, data1, ..."""
    return tuple(name for name in axes if re.fullmatch(rf"{data}\d+", name))


def _context_axes(flags: ShardingFlags, axes: dict[str, int]) -> tuple[str, ...]:
    """The axes in --mesh that split rows; ValueError where --context is for others."""
    found = tuple(name for name in CONTEXT_AXES if name in axes)
    wanted = CONTEXT_AXES if flags.context == "usp" else CONTEXT_AXES[:1] if flags.context or found else ()
    if found != wanted:
        form = flags.context or "gather"
        example = ",".join(f"{name}=2" for name in (CONTEXT_AXES if form == "usp" else CONTEXT_AXES[:1]))
        raise ValueError(
            f"--context {form} needs in --mesh {' and '.join(wanted)}, which has {' and '.join(found) or 'neither'}; "
            f"write --mesh data=-1,{example}" + ("" if form == "usp" else ", or --context usp for two axes")
        )
    return found


def _check_ordered(flags: ShardingFlags, axes: dict[str, int]) -> None:
    engine, form = flags.engine, flags.context or "gather"
    other_engine = engine not in (None, "explicit")
    if "context" in axes and form in ("gather", "usp"):
        raise ValueError(
            f"--ordered: --context {form} gathers keys and values, whose gradients the hardware sums in its own order; "
            "use --context ulysses, or leave out --ordered"
        )
    if other_engine or not {"expert", "tensor", "pipe"}.isdisjoint(axes):
        raise ValueError(
            "--ordered: only the engine explicit adds in one order, and without the axes tensor, pipe and expert; "
            f"leave out {f'--engine {engine}' if other_engine else 'these axes'}, or --ordered"
        )


def _read_wire(flags: ShardingFlags, axes: dict[str, int], ordered: bool) -> dict[str, Any]:
    """The arguments of the engine that --wire stands for; ValueError beside flags that it does not go with."""
    if flags.wire is None:
        return {}
    arguments = parse_wire(flags.wire)
    if flags.engine == "auto":
        raise ValueError(f"--wire {flags.wire}: under --engine auto the compiler sends what it likes; leave one out")
    scaled = isinstance(arguments.get("reduce_dtype"), Scaled)
    if ordered and scaled:
        raise ValueError(
            f"--ordered: --wire {flags.wire} adds gradients in one order by itself; leave out --ordered, or gradients="
        )
    if "pipe" in axes and "scatter" in arguments:
        raise ValueError(f"--wire {flags.wire}: a pipeline keeps no residuals of gradients; leave out feedback=on")
    return arguments


def _check_no_pipeline(flags: ShardingFlags) -> None:
    mesh = flags.mesh or "data=-1"
    refuse(
        f"is for a pipeline, but --mesh {mesh} has no axis pipe; write --mesh data=-1,pipe=2, or leave the flag out",
        engine="pipelined" if flags.engine == "pipelined" else None,
        schedule=flags.schedule,
        chunks=flags.chunks,
    )


def _plan_pipeline(
    flags: ShardingFlags, stages: int, shards: int, *, policy: RematPolicy | None, depth: int | None, batch: int | None
) -> tuple[Callable[..., Engine], int]:
    """What makes the engine of a pipeline, and its chunks per device."""
    if flags.engine not in (None, "pipelined"):
        raise ValueError(
            f"--engine {flags.engine}: a mesh with the axis pipe runs under engine pipelined; leave out the flag or "
            "the axis"
        )
    table = _read_table(flags, stages)
    given = table or flags
    chunks = given.chunks or _default_chunks(flags.schedule, stages, depth)
    microbatches = given.microbatches or _default_microbatches(stages, shards, batch)
    if names := offloaded(policy):
        raise ValueError(
            f"--remat: a pipeline keeps activations on the devices, so {', '.join(names)} can't be offloaded; take "
            "save, or a mesh without the axis pipe"
        )
    stash = "layer" if policy in (None, "nothing") else policy  # a block's input, from which it is recomputed
    schedule = table or flags.schedule or "interleaved"
    return partial(pipelined, microbatches=microbatches, schedule=schedule, stash=stash), chunks


def _read_table(flags: ShardingFlags, stages: int) -> Schedule | None:
    """The user's own table where --schedule is a file; ValueError where other flags contradict it."""
    if flags.schedule is None or not flags.schedule.endswith(".csv"):
        return None
    table = Schedule.from_csv(Path(flags.schedule))
    for name, own, asked in (
        ("pipe", table.stages, stages),
        ("microbatches", table.microbatches, flags.microbatches),
        ("chunks", table.chunks, flags.chunks),
    ):
        if asked not in (None, own):
            raise ValueError(
                f"--schedule {flags.schedule} is a table for {name}={own}, but {name}={asked} was asked for"
            )
    return table


def _default_chunks(schedule: str | None, stages: int, depth: int | None) -> int:
    """Two chunks per device if the schedule can have them and the model has a block for each."""
    if schedule is not None and full_name(schedule) in ONE_CHUNK:
        return 1
    return 2 if depth is not None and depth >= 2 * stages else 1


def _default_microbatches(stages: int, shards: int, batch: int | None) -> int:
    """Several micro-batches per stage if they divide the batch."""
    wanted = [times * stages for times in (_MICROBATCHES_PER_STAGE, 3, 2, 1)]
    return next((count for count in wanted if batch is None or batch % (shards * count) == 0), stages)


def parse_axes(text: str) -> dict[str, int]:
    """Parse the value of --mesh.

        >>> parse_axes("replica=2,data=-1")
        {'replica': 2, 'data': -1}

    Raises:
      ValueError: an axis that is not name=size, or a name that comes twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if not name.isidentifier() or not count.removeprefix("-").isdecimal() or name in axes:
            raise ValueError(f"--mesh {text}: write each axis once, as name=size, such as data=8 or replica=2,data=4")
        axes[name] = int(count)
    return axes


def parse_remat(text: str) -> RematPolicy:
    """Parse the value of --remat: a policy by its name, or what is done with each named activation.

        >>> parse_remat("dots")
        'dots'
        >>> parse_remat("attention_out=save,block_in=offload")
        {'attention_out': 'save', 'block_in': 'offload'}

    Raises:
      ValueError: something else, or an activation that comes twice.
    """
    if text in _REMAT_NAMES:
        return text
    policy: dict[str, Kept] = {}
    for part in text.split(","):
        name, _, kept = part.strip().partition("=")
        if not name or kept not in get_args(Kept) or name in policy:
            raise ValueError(
                f"--remat {text}: write {', '.join(_REMAT_NAMES)}, or each activation once with "
                f"{', '.join(get_args(Kept))}, such as attention_out=save,block_in=offload"
            )
        policy[name] = cast(Kept, kept)
    return policy
