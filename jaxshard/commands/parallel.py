"""Make the mesh, strategy and engine of a step from flags: `Parallel`."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from jaxshard.engines.engine import Engine
from jaxshard.optim.layout import layout
from jaxshard.optim.local import local, local_of

_STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": ddp, "zero1": zero1, "zero2": zero2, "fsdp": fsdp, "hsdp": hsdp
}  # fmt: skip

CONTEXT_AXES = ("context", "context_heads")
"""Axes in --mesh that shard the tokens of a row. The second is for --context usp, which exchanges heads over it."""

_OUTER = "write average, or rate=1,momentum=0.4 for SGD with Nesterov momentum, or rate= alone for SGD"

_FATES: dict[str, Fate] = {"tensor": "split", "replicated": "whole", "whole": "whole"}
"""The values of --rule, as `js.tensor` calls them."""


class Parallel(NamedTuple):
    """The mesh, strategy and engine of a step.

    Attributes:
      mesh: the mesh over the chosen devices.
      strategy: the data strategy, composed with the strategies of the axes context, expert, tensor and pipe.
      engine: the engine, which computes gradients.
      rows_multiple: the rows of a batch must be a multiple of this number, micro-batches times data shards.
      seq_multiple: the tokens in a row must be a multiple of this number, twice the devices of the context axes.
      strategy_name: the name of the data strategy.
    """

    mesh: Mesh
    strategy: Strategy
    engine: Engine
    rows_multiple: int
    seq_multiple: int
    strategy_name: str

    def layout(self, init_fn: InitFn, tx: optax.GradientTransformation | None = None) -> Layout:
        """Make the layout of a model and an optimizer; raise ValueError for a --rule that matches no parameter."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "tensor: rules without effect")
            try:
                return layout(self.strategy, self.mesh, init_fn, tx)
            except UserWarning as unused:
                raise ValueError(f"--rule: {unused}") from unused

    @property
    def shown(self) -> dict[str, str]:
        """The lines about mesh, strategy and engine that a command prints, by name."""
        about = self.about
        names = ("reduction", "compute_dtype", "reduce_dtype", "gather_dtype")
        choices = [f"{name} {about[name]}" for name in names if about.get(name, "native") != "native"]
        shown = {
            "devices": describe(list(self.mesh.devices.flat)),
            "mesh": mesh_str(self.mesh),
            "strategy": self.strategy_name,
            "engine": ", ".join([about["engine"], *choices]),
        }
        if replicas := local_of(self.strategy):
            alike = f"; gradients averaged in the first {replicas.warmup}" if replicas.warmup else ""
            shown["replicas"] = f"synchronised every {replicas.every} steps{alike}"
        if form := part_of(self.strategy, Context):
            shown["context"] = f"{form.how} over {' x '.join(form.axis)}"
        if "schedule" in about:
            shown["schedule"] = f"{about['schedule']}, {self.engine.microbatches} micro-batches"
        return shown

    @property
    def shown_of_step(self) -> dict[str, str]:
        """The lines of `shown` for a command that looks at one step, which say which engine Python takes by default."""
        shown = self.shown
        if (name := self.about["engine"]) in ("auto", "explicit"):
            default = "the default of js.make_step" if name == "auto" else "js.make_step takes auto by default"
            shown["engine"] += f" ({default})"
        return shown

    @property
    def about(self) -> dict[str, Any]:
        """The entries about mesh, strategy and engine that a command writes into its JSON object."""
        about = {"mesh": dict(self.mesh.shape), "devices": self.mesh.size, "strategy": self.strategy_name}
        if form := part_of(self.strategy, Context):
            about["context"] = form.how
        if replicas := local_of(self.strategy):
            about |= {"sync_every": replicas.every, "sync_warmup": replicas.warmup}
        return about | self.engine.describe()


def make_parallel(
    flags: Sharding,
    *,
    remat: str | None = None,
    precision: PrecisionName | None = None,
    ordered: bool = False,
    topology: Callable[..., Mesh] | None = None,
    depth: int | None = None,
    batch: int | None = None,
) -> Parallel:
    """Make mesh, strategy and engine from flags; without --mesh all devices are on the axis data.

    Args:
      flags: the flags. An axis tensor in --mesh adds tensor parallelism, and an axis pipe a pipeline. An axis context
        splits the tokens of rows, and an axis expert splits the experts of a mixture-of-experts model; the strategy,
        such as fsdp, shards arrays over the axes data, context and expert together.
      remat: the value of --remat; by default the model's own policy, or "nothing" in a pipeline.
      precision: the dtype of weights where they are used and of the sums of gradients; by default f32.
      ordered: sum over devices in one fixed order.
      topology: a function that makes a mesh of chips that are not attached from the sizes of axes; None for a mesh of
        attached or simulated devices.
      depth: the number of blocks if known, from which the stages per device of a pipeline are chosen.
      batch: the rows of a step if known, from which the micro-batches of a pipeline are chosen.

    Raises:
      ValueError: flags contradict each other, or do not match the devices.
    """
    name = flags.strategy or "fsdp"
    _check_synchronisation(flags, name)
    groups = ("replica",) if name == "hsdp" or flags.sync_every else ()
    axes = _mesh_axes(flags, name, groups)
    if topology is None:
        size = math.prod(axes.values()) if min(axes.values()) > 0 else None
        mesh = make_mesh(choose_devices(flags.devices, size), **axes)
    else:
        refuse("is for the devices that are here, and --topology names others; leave one out", devices=flags.devices)
        mesh = topology(**axes)
    over_rows = (*_data_axes(axes), *(["expert"] if "expert" in axes else []))
    split, shards = _context_axes(flags, axes), axis_size(mesh, (*groups, *over_rows))
    plan = Plan(mesh.shape, shards, depth, batch)
    engine, chunks = make_engine(flags, plan, remat=remat, precision=precision, ordered=ordered)
    parts = [_data_strategy(flags, name, (*over_rows, *split))]
    parts += [context(split, how=flags.context or "gather")] if split else []
    parts += [expert()] if "expert" in axes else []
    rules = [_read_rule(text, axes, is_known=depth is not None) for text in flags.rule]
    parts += [tensor([*rules, *RULES])] if "tensor" in axes else []
    parts += [pipeline("pipe", chunks=chunks)] if chunks else []
    over = axis_size(mesh, split)
    return Parallel(mesh, compose(*parts), engine, shards * engine.microbatches, 2 * over if over > 1 else 1, name)


def read_axes(text: str) -> dict[str, int]:
    """Convert the value of --mesh to sizes of mesh axes.

        >>> read_axes("replica=2,data=-1")
        {'replica': 2, 'data': -1}

    Raises:
      ValueError: an axis is not written as name=size, or a name occurs twice.
    """
    syntax = "write each axis once, as name=size, such as data=8 or replica=2,data=4"
    axes = read_pairs("--mesh", text, read_number(int, -1, "the number of devices, or -1 for what is left"), syntax)
    if wrong := [name for name in axes if not name.isidentifier()]:
        raise ValueError(f"--mesh {text}: {wrong[0]!r} is no name; {syntax}")
    return axes


def read_outer(text: str | None) -> optax.GradientTransformation | None:
    """Make the outer optimizer of `js.local` from the value of --outer; None stands for its default, an average.

        >>> read_outer("rate=0.7,momentum=0.9") is not None
        True

    Raises:
      ValueError: `text` is not understood, or a number is out of range.
    """
    if text is None or text == "average":
        return None if text is None else optax.sgd(1.0)
    of_momentum = read_number(float, 0, "a momentum from 0 to below 1")
    given = read_pairs("--outer", text, {"rate": read_rate, "momentum": of_momentum}, _OUTER)
    if "rate" not in given or given.get("momentum", 0) >= 1:
        raise ValueError(f"--outer {text}: give a rate, and a momentum from 0 to below 1; {_OUTER}")
    momentum = given.get("momentum") or None
    return optax.sgd(given["rate"], momentum, nesterov=momentum is not None)


def _check_synchronisation(flags: Sharding, name: str) -> None:
    if not flags.sync_every:
        why = "is about how --sync-every synchronises; add --sync-every N"
        refuse(why, sync_warmup=flags.sync_warmup, outer=flags.outer)
    elif name == "hsdp":
        raise ValueError(
            f"--sync-every {flags.sync_every}: hsdp reduces gradients over the axis replica in every step; use "
            "--strategy fsdp, which shards parameters within each replica"
        )


def _data_strategy(flags: Sharding, name: str, shared: tuple[str, ...]) -> Strategy:
    """Make the data strategy `name`, such as "fsdp", over the axes `shared`, and over the axis replica if used."""
    axis = shared if len(shared) > 1 else shared[0]
    if not flags.sync_every:
        return _STRATEGIES[name](*(["replica"] if name == "hsdp" else []), axis)
    outer, warmup = read_outer(flags.outer), flags.sync_warmup or 0
    return compose(_STRATEGIES[name](axis), local("replica", every=flags.sync_every, outer=outer, warmup=warmup))


def _read_rule(text: str, axes: Mapping[str, int], *, is_known: bool) -> Rule:
    """Convert a value of --rule to a rule of `js.tensor`; for a ready-made model (`is_known`) check the axis name."""
    name, _, axis = (one.strip() for one in text.rpartition("="))
    if not name or axis not in _FATES or (axis == "tensor" and not name.isidentifier()):
        near = "" if axis in _FATES else f"; {did_you_mean(axis, _FATES)}".removesuffix("; ")
        raise ValueError(
            f"--rule {text}: write a logical axis and tensor, the mesh axis that shards it, or replicated, such as "
            f"vocab=replicated{near}"
        )
    names = [key for key, fate in RULES if key.isidentifier() and isinstance(fate, str)]
    if is_known and name.isidentifier() and name not in names:
        raise ValueError(f"--rule {text}: ready-made models have no axis {name}; {one_of(name, names)}")
    if "tensor" not in axes:
        raise ValueError(f"--rule {text} is about the axis tensor; add it to --mesh, such as data=-1,tensor=2")
    return (name, _FATES[axis])


def _mesh_axes(flags: Sharding, name: str, groups: tuple[str, ...]) -> dict[str, int]:
    """Return {axis: size} of --mesh; if it has no axis of the data strategy, add these axes with size 1."""
    wanted = dict.fromkeys(groups, 2) | {"data": -1}
    if flags.mesh is None:
        return wanted
    axes = read_axes(flags.mesh)
    given = {name for name in axes if name not in ("expert", "tensor", "pipe", *CONTEXT_AXES)}
    if not given:
        return dict.fromkeys(wanted, 1) | axes
    if given not in (set(wanted), {*groups, *_data_axes(axes)}):
        example = ",".join(f"{name}={count}" for name, count in wanted.items())
        raise ValueError(
            f"--mesh {flags.mesh}: the strategy {name} needs the axes {' and '.join(wanted)}, and tensor, pipe, "
            f"context and expert if you like; write --mesh {example} or --mesh {example},tensor=2,pipe=2, or choose "
            "another strategy"
        )
    return axes


def _data_axes(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return ("data",), or ("data0", "data1", ...) for a mesh with one data axis per dimension of a torus."""
    return tuple(name for name in axes if re.fullmatch(r"data\d+", name)) or ("data",)


def _context_axes(flags: Sharding, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes in --mesh that split the tokens of rows; raise ValueError if --context needs other axes."""
    found = tuple(name for name in CONTEXT_AXES if name in axes)
    form = flags.context or ("gather" if found else None)
    wanted = CONTEXT_AXES[: 0 if form is None else 2 if form == "usp" else 1]
    if found != wanted:
        raise ValueError(
            f"--context {form} needs in --mesh {' and '.join(wanted)}, which has {' and '.join(found) or 'neither'}; "
            f"write --mesh data=-1,{','.join(f'{name}=2' for name in wanted)}"
            + ("" if form == "usp" else ", or --context usp for two axes")
        )
    return found
