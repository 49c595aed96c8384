"""Make the engine of a step from flags: `--engine`, `--microbatches`, `--remat`, `--wire`, `--schedule`, `--chunks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp

from jaxshard.adapt.remat import Kept, RematPolicy
from jaxshard.commands.errors import refuse
from jaxshard.commands.flags import PrecisionName, Sharding
from jaxshard.commands.pairs import read_pairs, readers_of
from jaxshard.commands.values import read_choice
from jaxshard.core.wire import fp8, int8
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.engines.explicit import explicit
from jaxshard.engines.pipeline.engine import pipelined
from jaxshard.schedules.named import ONE_CHUNK, full_name
from jaxshard.schedules.schedule import Schedule

_REMAT_NAMES = "everything", "dots", "nothing"

_MICROBATCHES_PER_STAGE = 4, 3, 2, 1
"""The default of --microbatches in a pipeline: the first that divides the batch; with 4 an eighth at most is idle."""

_FORMATS: dict[str, Callable[..., Any]] = {"int8": int8, "fp8": fp8, "bf16": lambda **options: jnp.bfloat16}

_WIRE = (
    "write gradients=int8 or weights=int8, or both, each with int8, fp8 or bf16, and if you like block=128, and "
    "feedback=on, which makes up for the errors of gradients"
)


class Plan(NamedTuple):
    """The sizes on which the choice of an engine and its options depends.

    Attributes:
      axes: the axes of the mesh with their sizes.
      shards: the number of devices over which the rows of a batch are split.
      depth: the number of blocks of the model, or None if unknown.
      batch: the number of rows of a global batch, or None if unknown.
    """

    axes: Mapping[str, int]
    shards: int
    depth: int | None
    batch: int | None


def make_engine(
    flags: Sharding, plan: Plan, *, remat: str | None, precision: PrecisionName | None, ordered: bool
) -> tuple[Engine, int | None]:
    """Make the engine that the flags describe.

    Args:
      flags: the flags about mesh, strategy and engine.
      plan: the sizes of mesh, model and batch.
      remat: the value of --remat.
      precision: the value of --precision.
      ordered: the value of --ordered, to sum over devices in a fixed order.

    Returns:
      The engine, and the number of pipeline stages per device, which is None without a pipeline.

    Raises:
      ValueError: flags that do not fit together.
    """
    policy = None if remat is None else read_remat(remat)
    name = flags.engine or ("pipelined" if "pipe" in plan.axes else "explicit")
    wire = {} if flags.wire is None else read_wire(flags.wire)
    if ordered and name != "explicit":
        raise ValueError(f"--ordered: only the engine explicit adds in one order, not {name}; leave one of them out")
    if wire and name == "auto":
        raise ValueError(f"--wire {flags.wire}: under --engine auto the compiler sends what it likes; leave one out")
    if "pipe" in plan.axes:
        if name != "pipelined":
            raise ValueError(f"--engine {name}: a mesh with the axis pipe needs the engine pipelined; leave one out")
        return _make_pipelined(flags, plan, policy, precision=precision, **wire)
    refuse(
        f"is for a pipeline, but --mesh {flags.mesh or 'data=-1'} has no axis pipe; write --mesh data=-1,pipe=2, or "
        "leave the flag out",
        engine=name if name == "pipelined" else None,
        schedule=flags.schedule,
        chunks=flags.chunks,
    )
    options: dict[str, Any] = {"microbatches": flags.microbatches or 1, "remat": policy, "precision": precision}
    if name == "auto":
        return auto(**options), None
    # A gradient with feedback is reduced once in a step.
    options["scatter"] = "end" if getattr(wire.get("reduce_dtype"), "feedback", False) else "each"
    return explicit(**options, reduction="ordered" if ordered else "native", **wire), None


def _make_pipelined(flags: Sharding, plan: Plan, policy: RematPolicy | None, **options: Any) -> tuple[Engine, int]:
    stages = plan.axes["pipe"]
    table = _read_table(flags, stages)
    sizes = table or flags
    wanted = [times * stages for times in _MICROBATCHES_PER_STAGE]
    fitting = (count for count in wanted if plan.batch is None or plan.batch % (plan.shards * count) == 0)
    one_chunk = flags.schedule is not None and table is None and full_name(flags.schedule) in ONE_CHUNK
    engine = pipelined(
        microbatches=sizes.microbatches or next(fitting, stages),
        schedule=table or flags.schedule or "interleaved",
        stash="layer"
        if policy in (None, "nothing")
        else policy,  # the input of each block, which is recomputed from it
        **options,
    )
    return engine, sizes.chunks or (2 if not one_chunk and (plan.depth or 0) >= 2 * stages else 1)


def _read_table(flags: Sharding, stages: int) -> Schedule | None:
    """Read the pipeline schedule if --schedule names a CSV file, else None; ValueError if other flags contradict it."""
    if flags.schedule is None or not flags.schedule.endswith(".csv"):
        return None
    table = Schedule.from_csv(flags.schedule)
    given = {"stages": stages, "microbatches": flags.microbatches, "chunks": flags.chunks}
    check_table(table, flags.schedule, given)
    return table


def check_table(table: Schedule, file: str, given: Mapping[str, int | None]) -> None:
    """Raise ValueError if a size in `given`, such as "stages", differs from the schedule that `file` contains."""
    for name, number in given.items():
        if number not in (None, own := getattr(table, name)):
            raise ValueError(f"{name} {number}: {file} is a table for {name}={own}; leave {name} out, or give that")


def read_remat(text: str) -> RematPolicy:
    """Read the value of --remat: the name of a policy, or what to do with each named activation.

        >>> read_remat("attention_out=save,block_in=offload")
        {'attention_out': 'save', 'block_in': 'offload'}

    Raises:
      ValueError: `text` is neither a policy nor a list of name=save or name=offload, or names an activation twice.
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
    """Convert the value of --wire, the formats of communicated arrays, to arguments of `js.explicit` or `js.pipelined`.

        >>> read_wire("weights=fp8,block=128")
        {'gather_dtype': Scaled(dtype='float8_e3m4', block=128, feedback=False)}

    Raises:
      ValueError: `text` is not understood, or asks for feedback without gradients in 8 bits.
    """
    formats = dict.fromkeys(("gradients", "weights"), read_choice(list(_FORMATS)))
    options = read_pairs("--wire", text, formats | readers_of(int8), _WIRE)
    sent = {name: options.pop(name) for name in formats if name in options}
    feedback = options.pop("feedback", False)
    if feedback and sent.get("gradients") not in ("int8", "fp8"):
        raise ValueError(f"--wire {text}: feedback is for gradients in int8 or fp8; {_WIRE}")
    if not sent:
        raise ValueError(f"--wire {text}: there are neither gradients nor weights; {_WIRE}")
    arguments = {}
    try:
        if "gradients" in sent:
            arguments["reduce_dtype"] = _FORMATS[sent["gradients"]](**options, feedback=feedback)
        if "weights" in sent:
            arguments["gather_dtype"] = _FORMATS[sent["weights"]](**options)
    except ValueError as error:
        raise ValueError(f"--wire {text}: {error}; {_WIRE}") from error
    return arguments
