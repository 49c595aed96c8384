"""List what the compiler did to save memory: rematerialized instructions, and arrays in host memory.

- XLA computes some values again if the program would not fit otherwise, and names these instructions after the ones
  that they repeat: `%fusion.7.remat = ...`. Recomputation by `remat=` of an engine is not among them: it is part of the
  program from the beginning. They cost time; a smaller batch or a `remat=` policy that keeps less avoids them.
- Arrays in host memory have memory space 5 in their layouts: `bf16[8,512]{1,0:T(8,128)(2,1)S(5)}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from jax.stages import Compiled

from jaxshard.hlo import hlo
from jaxshard.hlo.counts import grouped, total
from jaxshard.hlo.operation import Operation, origin_of
from jaxshard.hlo.source import find_source
from jaxshard.hlo.walk import Executed, executed

# XLA clones `fusion.7` to `fusion.7.remat`, that to `.remat2`; a copy in a smaller layout is `.remat_compressed`.
_REMATERIALIZED = re.compile(r"^\S+\.remat(?:\d+|_compressed|_uncompressed)?(?:\.\S+)? = ")
_ON_HOST = re.compile(r"S\(5\)\}")
_HOST_ARRAY = re.compile(r"[a-z]\w*\[[\d,<=]*\]\{[^{}]*S\(5\)\}")
_SAME_BUFFER = (
    "bitcast", "call", "conditional", "dynamic-update-slice", "dynamic-update-slice-done", "get-tuple-element",
    "opt-barrier", "tuple", "while",
)  # fmt: skip
"""Opcodes that return the buffers of their operands."""


def rematerialized(compiled: Compiled | str) -> tuple[Operation, ...]:
    """List the instructions that the compiler rematerializes on its own, to save memory.

    Args:
      compiled: the result of `jax.jit(f).lower(...).compile()`, or its text.

    Returns:
      One record per instruction, in the order of the program; instructions inside a fusion have no record of their own.

    Example:
        sum(instruction.bytes for instruction in rematerialized(step.compile(batch)))
    """
    return tuple(_record(of, hlo.arrays(of[0].op.type)) for of in _find(compiled, _REMATERIALIZED))


def in_host_memory(compiled: Compiled | str) -> tuple[Operation, ...]:
    """List the arrays that a program keeps in host memory: its own parameters, and arrays that instructions put there.

    Args:
      compiled: the result of `jax.jit(f).lower(...).compile()`, or its text.

    Returns:
      One record per array, in the order of the program.

    Example:
        sum(instruction.bytes for instruction in in_host_memory(step.compile(batch)))
    """
    found = list(_find(compiled, _ON_HOST))
    records = []
    for of in found:
        op = of[0].op
        # The result of a copy's start has source and target, that of its end the target alone: so starts are skipped.
        inner = op.opcode == "parameter" and of[0].scope.parent is not None
        arrays = hlo.arrays(" ".join(_HOST_ARRAY.findall(op.type)))
        if arrays and not inner and op.opcode not in _SAME_BUFFER and not op.opcode.endswith("-start"):
            record = _record(of, arrays)
            if not record.frames and not record.user:
                # An allocation has no source line: name an operation that reads or writes an array of this shape.
                alike = (other[0] for other in found if arrays[0] in hlo.arrays(other[0].op.type))
                sources = (find_source(one.scope, one.op) for one in alike if "metadata=" in one.op.notes)
                near = next((source for source in sources if source.frames), None)
                record = record if near is None else replace(record, source=near.line, frames=near.frames)
            records.append(record)
    return tuple(records)


def _find(compiled: Compiled | str, wanted: re.Pattern[str]) -> Iterator[list[Executed]]:
    """Yield, for each operation whose line matches `wanted`, its executions: one for each place that runs it."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    yield from grouped(executed(hlo.parse(text or ""), wanted, fused=False), lambda one: one.op.name).values()


def _record(of: list[Executed], arrays: tuple[hlo.Array, ...]) -> Operation:
    count = total(one.times for one in of)
    return Operation(kind=of[0].op.opcode, count=count, arrays=arrays, **origin_of(of[0].scope, of[0].op))
