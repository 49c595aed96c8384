"""`--wire gradients=int8,...`: in which numbers gradients and weights travel between devices, read from the flag."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.layout import Layout
from jaxshard.core.wire import Scaled, fp8, int8
from jaxshard.engines.engine import Engine
from jaxshard.training.state import TrainState

_SYNTAX = (
    "write gradients=int8 or weights=int8, or both, each with int8, fp8 or bf16, and if you like block=128, and "
    "feedback=on, which makes up for the errors of gradients"
)
_MAKE = {"int8": int8, "fp8": fp8}
_SWITCH = {"on": True, "off": False}


def parse_wire(text: str) -> dict[str, Any]:
    """Parse the value of --wire: the arguments of `js.explicit` that it stands for.

        >>> parse_wire("weights=fp8,block=128")
        {'gather_dtype': Scaled(dtype='float8_e3m4', block=128, feedback=False)}

    Raises:
      ValueError: a part that is not name=value, an unknown name, one that comes twice, or a value that is none.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        if name not in ("gradients", "weights", "block", "feedback") or name in given:
            raise ValueError(f"--wire {text}: {part.strip()!r} is not understood or comes twice; {_SYNTAX}")
        given[name] = value
    block, feedback = given.pop("block", "256"), given.pop("feedback", "off")
    if not block.isdecimal() or not int(block[:9]) >= 2 or feedback not in _SWITCH or not given:
        raise ValueError(f"--wire {text}: block is a number from 2 on, feedback on or off; {_SYNTAX}")
    makes_up = _SWITCH[feedback]
    if makes_up and given.get("gradients") not in _MAKE:
        raise ValueError(f"--wire {text}: feedback is for gradients in int8 or fp8; {_SYNTAX}")

    def format_of(name: str, feedback: bool) -> Scaled | Any:
        if given[name] == "bf16":
            return jnp.bfloat16
        if given[name] not in _MAKE:
            raise ValueError(f"--wire {text}: {name}={given[name]} is none of int8, fp8 and bf16; {_SYNTAX}")
        return _MAKE[given[name]](block=int(block), feedback=feedback)

    arguments: dict[str, Any] = {"scatter": "end"} if makes_up else {}
    if "gradients" in given:
        arguments["reduce_dtype"] = format_of("gradients", makes_up)
    if "weights" in given:
        arguments["gather_dtype"] = format_of("weights", False)
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
