"""The flags of sharding as values: `Parallel` holds the mesh, the strategy over its axes, and the engine."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jaxshard.commands.devices import choose_devices, describe
from jaxshard.commands.engine import Plan, make_engine
from jaxshard.commands.errors import refuse
from jaxshard.commands.flags import PrecisionName, Sharding
from jaxshard.commands.pairs import read_pairs
from jaxshard.commands.values import read_number, read_rate
from jaxshard.core.context import context
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size, make_mesh, mesh_str
from jaxshard.core.near_words import did_you_mean, one_of
from jaxshard.core.rules import RULES, Fate, Rule
from jaxshard.core.strategy import Strategy, compose, ddp, expert, fsdp, hsdp, pipeline, tensor, zero1, zero2
from jaxshard.core.strategy_parts import Context, part_of
from jaxshard.core.types import InitFn
from jaxshard.core.wire import Format
from jaxshard.engines.engine import Engine
from jaxshard.optim.layout import layout
from jaxshard.optim.local import local, local_of
from jaxshard.plan.topology import topology_mesh

_STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": ddp, "zero1": zero1, "zero2": zero2, "fsdp": fsdp, "hsdp": hsdp
}  # fmt: skip

CONTEXT_AXES = ("context", "context_heads")
"""Axes in --mesh that shard rows. The second is for --context usp, which exchanges heads over it."""

_OUTER = "write average, or rate=1,momentum=0.4 for SGD with Nesterov momentum, or rate= alone for SGD"

_FATES: dict[str, Fate] = {"tensor": "split", "replicated": "whole", "whole": "whole"}
"""The values of --rule by the words of `js.tensor`."""


class Parallel(NamedTuple):
    """The mesh, strategy and engine of a step.

    Attributes:
      mesh: the mesh over the chosen devices.
      strategy: the data strategy, composed with those of the axes context, expert, tensor and pipe.
      engine: computes the gradient.
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

    def layout(self, init_fn: InitFn, tx: optax.GradientTransformation | None = None) -> Layout:
        """Make the layout of a model and an optimizer; ValueError for a --rule that no parameter has."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "tensor: rules without effect")
            try:
                return layout(self.strategy, self.mesh, init_fn, tx)
            except UserWarning as unused:
                raise ValueError(f"--rule: {unused}") from unused

    @property
    def shown(self) -> dict[str, str]:
        """The facts that a command prints, by name."""
        about = self.about
        engine = about["engine"] + (", sums in one order" if about.get("reduction", "native") != "native" else "")
        engine += f", computes and reduces gradients in {dtype}" if (dtype := about.get("compute_dtype")) else ""
        for what, sent in (("gradients", self.engine.reduce_dtype), ("weights", self.engine.gather_dtype)):
            engine += f", {what} travel as {sent.name}" if isinstance(sent, Format) else ""
        shown = {"devices": self.devices, "mesh": mesh_str(self.mesh), "strategy": self.strategy_name, "engine": engine}
        if replicas := local_of(self.strategy):
            alike = f"; alike in the first {replicas.warmup}" if replicas.warmup else ""
            shown["replicas"] = f"synchronised every {replicas.every} steps{alike}"
        if form := part_of(self.strategy, Context):
            shown["context"] = f"{form.how} over {' x '.join(form.axis)}"
        if "schedule" in about:
            shown["schedule"] = f"{about['schedule']}, {self.engine.microbatches} micro-batches"
        return shown

    @property
    def about(self) -> dict[str, Any]:
        """The facts that a command writes into its JSON object."""
        about = {"mesh": dict(self.mesh.shape), "devices": self.mesh.size, "strategy": self.strategy_name}
        if form := part_of(self.strategy, Context):
            about["context"] = form.how
        if replicas := local_of(self.strategy):
            about |= {"sync_every": replicas.every, "sync_warmup": replicas.warmup}
        return about | self.engine.describe()


class Topology(NamedTuple):
    """Chips that are not here: the name, such as "v5e:2x4", how many slices, and the function that makes the mesh.

    A `topology_mesh` compiles and holds no arrays; a `planned_mesh` needs no compiler.
    """

    name: str
    slices: int = 1
    make: Callable[..., Mesh] = topology_mesh

    def mesh(self, axes: Mapping[str, int]) -> Mesh:
        """Make the mesh."""
        return self.make(self.name, num_slices=self.slices, **axes)

    def __str__(self) -> str:
        """Write "v5e:2x4", of several slices "2 x v5e:2x4"."""
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"


def make_parallel(
    flags: Sharding,
    *,
    remat: str | None = None,
    precision: PrecisionName | None = None,
    ordered: bool = False,
    topology: Topology | None = None,
    depth: int | None = None,
    batch: int | None = None,
) -> Parallel:
    """Make mesh, strategy and engine; without --mesh all devices are on the axis data.

    Args:
      flags: the flags. An axis tensor in the mesh adds tensor parallelism, an axis pipe a pipeline. An axis context
        shards rows and an axis expert the experts of a model that has some: their devices also share what the data
        strategy shards.
      remat: the value of --remat; by default what the model states, or nothing in a pipeline.
      precision: of weights where they are used, and of the sums of gradients; by default f32.
      ordered: add over devices in one fixed order.
      topology: make the mesh of chips that are not here.
      depth: the number of blocks where it is known, to choose the chunks of a pipeline.
      batch: the rows of a step where they are known, to choose the micro-batches of a pipeline.

    Raises:
      ValueError: flags that do not fit together, or not to the devices.
    """
    name = flags.strategy or "fsdp"
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
    *replicas, data = data_axes
    rows_over = (*(_parts_of(data, axes) or (data,)), *(("expert",) if "expert" in axes else ()))
    split = _context_axes(flags, axes)
    shards = axis_size(mesh, (*replicas, *rows_over))
    engine, chunks = make_engine(
        flags, Plan(mesh.shape, shards, depth, batch), remat=remat, precision=precision, ordered=ordered
    )
    parts = [_data_strategy(flags, name, (*rows_over, *split))]
    parts += [context(split, how=flags.context or "gather")] if split else []
    parts += [expert()] if "expert" in axes else []
    rules = [_read_rule(text, axes, depth is not None) for text in flags.rule]
    parts += [tensor([*rules, *RULES])] if "tensor" in axes else []
    parts += [pipeline("pipe", chunks=chunks)] if chunks else []
    over = axis_size(mesh, split)
    seq_multiple = 2 * over if over > 1 else 1
    return Parallel(mesh, compose(*parts), engine, shards * engine.microbatches, seq_multiple, name, where)


def read_axes(text: str) -> dict[str, int]:
    """Read the value of --mesh.

        >>> read_axes("replica=2,data=-1")
        {'replica': 2, 'data': -1}

    Raises:
      ValueError: an axis that is not name=size, or a name that comes twice.
    """
    syntax = "write each axis once, as name=size, such as data=8 or replica=2,data=4"
    axes = read_pairs("--mesh", text, read_number(int, -1, "the number of devices, or -1 for what is left"), syntax)
    if wrong := [name for name in axes if not name.isidentifier()]:
        raise ValueError(f"--mesh {text}: {wrong[0]!r} is no name; {syntax}")
    return axes


def read_outer(text: str | None) -> optax.GradientTransformation | None:
    """Read the value of --outer: the outer optimizer of `js.local`; None for its default.

        >>> read_outer("rate=0.7,momentum=0.9") is not None
        True

    Raises:
      ValueError: it is not understood, or a number is out of range.
    """
    if text is None or text == "average":
        return None if text is None else optax.sgd(1.0)
    of_momentum = read_number(float, 0, "a momentum from 0 to below 1")
    given = read_pairs("--outer", text, {"rate": read_rate, "momentum": of_momentum}, _OUTER)
    if "rate" not in given or given.get("momentum", 0) >= 1:
        raise ValueError(f"--outer {text}: give a rate, and a momentum from 0 to below 1; {_OUTER}")
    momentum = given.get("momentum") or None
    return optax.sgd(given["rate"], momentum, nesterov=momentum is not None)


def _data_strategy(flags: Sharding, name: str, shared: tuple[str, ...]) -> Strategy:
    """Make the strategy over the axes of the data, and over the axis replica where there is one."""
    axis = shared if len(shared) > 1 else shared[0]
    if not flags.sync_every:
        return _STRATEGIES[name](*(["replica"] if name == "hsdp" else []), axis)
    replicas = local(
        "replica",
        every=flags.sync_every,
        outer=read_outer(flags.outer),
        warmup=flags.sync_warmup or 0,
    )
    return compose(_STRATEGIES[name](axis), replicas)


def _read_rule(text: str, axes: Mapping[str, int], is_known: bool) -> Rule:
    """Read a value of --rule as a rule of `js.tensor`; of a known model the names are known, too."""
    name, _, axis = (one.strip() for one in text.rpartition("="))
    is_name = name.isidentifier()
    if not name or axis not in _FATES or (axis == "tensor" and not is_name):
        near = "" if axis in _FATES else f"; {did_you_mean(axis, _FATES)}".removesuffix("; ")
        raise ValueError(
            f"--rule {text}: write a logical axis and tensor, the mesh axis that shards it, or replicated, such as "
            f"vocab=replicated{near}"
        )
    names = [key for key, fate in RULES if key.isidentifier() and isinstance(fate, str)]
    if is_known and is_name and name not in names:
        raise ValueError(f"--rule {text}: ready-made models have no axis {name}; {one_of(name, names)}")
    if "tensor" not in axes:
        raise ValueError(f"--rule {text} is about the axis tensor; add it to --mesh, such as data=-1,tensor=2")
    return (name, _FATES[axis])


def _check_count(flags: Sharding, axes: Mapping[str, int], devices: Sequence[jax.Device]) -> None:
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


def _check_synchronisation(flags: Sharding, name: str) -> None:
    if not flags.sync_every:
        refuse(
            "is about how --sync-every synchronises; add --sync-every N",
            sync_warmup=flags.sync_warmup,
            outer=flags.outer,
        )
    elif name == "hsdp":
        raise ValueError(
            f"--sync-every {flags.sync_every}: hsdp reduces gradients over the axis replica in every step; use "
            "--strategy fsdp, which shards parameters within each replica"
        )


def _with_data_axes(flags: Sharding, name: str, data_axes: dict[str, int]) -> dict[str, int]:
    """The axes in --mesh with those of the data strategy, of size 1 where all devices are on other axes."""
    if flags.mesh is None:
        return data_axes
    axes = read_axes(flags.mesh)
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


def _parts_of(data: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes in --mesh that one data axis is divided into, one for each dimension of a torus: data0, data1, ..."""
    return tuple(name for name in axes if re.fullmatch(rf"{data}\d+", name))


def _context_axes(flags: Sharding, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes in --mesh that shard rows; ValueError where --context is for others."""
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
