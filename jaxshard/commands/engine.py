"""The engine of a step by its flags: `--engine`, `--microbatches`, `--remat`, `--wire`, `--schedule` and `--chunks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxshard.adapt.remat import Kept, RematPolicy, offloaded
from jaxshard.commands.errors import refuse
from jaxshard.commands.flags import PrecisionName, Sharding
from jaxshard.commands.pairs import read_pairs, readers_of
from jaxshard.commands.values import read_choice
from jaxshard.core.layout import Layout
from jaxshard.core.wire import Format, fp8, int8
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.engines.explicit import explicit
from jaxshard.engines.pipeline.engine import pipelined
from jaxshard.schedules.named import ONE_CHUNK, full_name
from jaxshard.schedules.schedule import Schedule
from jaxshard.training.state import TrainState

_ENGINES: dict[str, Callable[..., Engine]] = {"explicit": explicit, "auto": auto}

_REMAT_NAMES = "everything", "dots", "nothing"

_MICROBATCHES_PER_STAGE = 4, 3, 2, 1
"""The default of --microbatches in a pipeline: the first of these that divides the batch; 4 idles an eighth at most."""

_FORMATS: dict[str, Callable[..., Any]] = {"int8": int8, "fp8": fp8, "bf16": lambda **options: jnp.bfloat16}

_WIRE = (
    "write gradients=int8 or weights=int8, or both, each with int8, fp8 or bf16, and if you like block=128, and "
    "feedback=on, which makes up for the errors of gradients"
)


class Plan(NamedTuple):
    """The sizes that an engine is chosen by.

    Attributes:
      axes: the axes of the mesh with their sizes.
      shards: the devices that share the rows of a batch.
      depth: the number of blocks of the model, or None where it is not known.
      batch: the rows of a step, or None where they are not known.
    """

    axes: Mapping[str, int]
    shards: int
    depth: int | None
    batch: int | None


def make_engine(
    flags: Sharding, plan: Plan, *, remat: str | None, precision: PrecisionName | None, ordered: bool
) -> tuple[Engine, int | None]:
    """Make the engine.

    Returns:
      The engine, and the chunks per device of a pipeline; None without one.

    Raises:
      ValueError: flags that do not fit together.
    """
    policy = None if remat is None else read_remat(remat)
    if ordered:
        _check_ordered(flags, plan.axes)
    wire = {} if flags.wire is None else read_wire(flags.wire)
    _check_wire(flags, wire, ordered, "pipe" in plan.axes)
    if "pipe" in plan.axes:
        return _make_pipelined(flags, plan, policy, precision=precision, **wire)
    refuse(
        f"is for a pipeline, but --mesh {flags.mesh or 'data=-1'} has no axis pipe; write --mesh data=-1,pipe=2, or "
        "leave the flag out",
        engine="pipelined" if flags.engine == "pipelined" else None,
        schedule=flags.schedule,
        chunks=flags.chunks,
    )
    order = {"reduction": "ordered"} if ordered else {}
    make = _ENGINES[flags.engine or "explicit"]
    return make(microbatches=flags.microbatches or 1, remat=policy, precision=precision, **order, **wire), None


def _make_pipelined(flags: Sharding, plan: Plan, policy: RematPolicy | None, **options: Any) -> tuple[Engine, int]:
    if flags.engine not in (None, "pipelined"):
        raise ValueError(
            f"--engine {flags.engine}: a mesh with the axis pipe runs under engine pipelined; leave out the flag or "
            "the axis"
        )
    if names := offloaded(policy):
        raise ValueError(
            f"--remat: a pipeline keeps activations on the devices, so {', '.join(names)} can't be offloaded; take "
            "save, or a mesh without the axis pipe"
        )
    stages = plan.axes["pipe"]
    table = _read_table(flags, stages)
    sizes = table or flags
    wanted = [times * stages for times in _MICROBATCHES_PER_STAGE]
    fitting = (count for count in wanted if plan.batch is None or plan.batch % (plan.shards * count) == 0)
    one_chunk = flags.schedule is not None and table is None and full_name(flags.schedule) in ONE_CHUNK
    engine = pipelined(
        microbatches=sizes.microbatches or next(fitting, stages),
        schedule=table or flags.schedule or "interleaved",
        stash="layer" if policy in (None, "nothing") else policy,  # a block's input, from which it is recomputed
        **options,
    )
    return engine, sizes.chunks or (2 if not one_chunk and (plan.depth or 0) >= 2 * stages else 1)


def _read_table(flags: Sharding, stages: int) -> Schedule | None:
    """The user's own table where --schedule is a file; ValueError where other flags contradict it."""
    if flags.schedule is None or not flags.schedule.endswith(".csv"):
        return None
    table = Schedule.from_csv(Path(flags.schedule))
    asked = {"pipe": (table.stages, stages)}
    asked |= {name: (getattr(table, name), getattr(flags, name)) for name in ("microbatches", "chunks")}
    for name, (own, given) in asked.items():
        if given not in (None, own):
            raise ValueError(
                f"--schedule {flags.schedule} is a table for {name}={own}, but {name}={given} was asked for"
            )
    return table


def read_remat(text: str) -> RematPolicy:
    """Read the value of --remat: a policy by its name, or whether each named activation is saved.

        >>> read_remat("attention_out=save,block_in=offload")
        {'attention_out': 'save', 'block_in': 'offload'}

    Raises:
      ValueError: something else, or an activation that comes twice.
    """
    if text in _REMAT_NAMES:
        return text
    kept = get_args(Kept)
    syntax = (
        f"write {', '.join(_REMAT_NAMES)}, or each activation once with {', '.join(kept)}, such as "
        "attention_out=save,block_in=offload"
    )
    return read_pairs("--remat", text, read_choice(kept), syntax)


def read_wire(text: str) -> dict[str, Any]:
    """Read the value of --wire: the arguments of `js.explicit` that it stands for.

        >>> read_wire("weights=fp8,block=128")
        {'gather_dtype': Scaled(dtype='float8_e3m4', block=128, feedback=False)}

    Raises:
      ValueError: it is not understood, or has feedback for something else than gradients in 8 bits.
    """
    formats = dict.fromkeys(("gradients", "weights"), read_choice(list(_FORMATS)))
    options = read_pairs("--wire", text, formats | readers_of(int8), _WIRE)
    sent = {name: _FORMATS[options.pop(name)] for name in formats if name in options}
    feedback = options.pop("feedback", False)
    if feedback and sent.get("gradients") not in (int8, fp8):
        raise ValueError(f"--wire {text}: feedback is for gradients in int8 or fp8; {_WIRE}")
    if not sent:
        raise ValueError(f"--wire {text}: there are neither gradients nor weights; {_WIRE}")
    arguments: dict[str, Any] = {"scatter": "end"} if feedback else {}
    try:
        if make := sent.get("gradients"):
            arguments["reduce_dtype"] = make(**options, feedback=feedback)
        if make := sent.get("weights"):
            arguments["gather_dtype"] = make(**options)
    except ValueError as error:
        raise ValueError(f"--wire {text}: {error}; {_WIRE}") from error
    return arguments


def check_feedback(engine: Engine, layout: Layout, run: TrainState | None, memory_every: int | None) -> None:
    """Raise ValueError where residuals of gradients would be lost.

    Args:
      engine: of the training.
      layout: of the training.
      run: what it goes on from; None if it starts.
      memory_every: how often it is kept in memory; None for never.
    """
    carries = bool(jax.tree.leaves(engine.residuals(layout)))
    if carries and memory_every is not None:
        raise ValueError(
            "--wire ...,feedback=on: --memory-every keeps no residuals of gradients; leave out one of them, or save "
            "with --checkpoint"
        )
    if run is not None and jax.tree.leaves(run.residuals) and not carries:
        raise ValueError(
            "--resume: the run was trained with --wire gradients=int8,feedback=on and has residuals of gradients; go "
            "on with that flag"
        )


def _check_wire(flags: Sharding, wire: Mapping[str, Any], ordered: bool, piped: bool) -> None:
    """Raise ValueError for flags that contradict --wire."""
    if wire and flags.engine == "auto":
        raise ValueError(f"--wire {flags.wire}: under --engine auto the compiler sends what it likes; leave one out")
    if ordered and isinstance(wire.get("reduce_dtype"), Format):
        raise ValueError(
            f"--ordered: --wire {flags.wire} adds gradients in one order by itself; leave out --ordered, or gradients="
        )
    if piped and "scatter" in wire:
        raise ValueError(f"--wire {flags.wire}: a pipeline keeps no residuals of gradients; leave out feedback=on")


def _check_ordered(flags: Sharding, axes: Mapping[str, int]) -> None:
    form, other_engine = flags.context or "gather", flags.engine not in (None, "explicit")
    if "context" in axes and form in ("gather", "usp"):
        raise ValueError(
            f"--ordered: --context {form} gathers keys and values, whose gradients the hardware sums in its own order; "
            "use --context ulysses, or leave out --ordered"
        )
    if other_engine or not {"expert", "tensor", "pipe"}.isdisjoint(axes):
        raise ValueError(
            "--ordered: only the engine explicit adds in one order, and without the axes tensor, pipe and expert; "
            f"leave out {f'--engine {flags.engine}' if other_engine else 'these axes'}, or --ordered"
        )
