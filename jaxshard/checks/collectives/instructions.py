"""Instructions of a compiled program that tell what the compiler did about memory.

- Those that it computes again because the program would not have fitted otherwise. XLA names them after what they
  repeat: `%fusion.7.remat = ...`. What `remat=` of an engine asks for is not among them: it is in the program from the
  beginning. These cost time that nobody asked for; a smaller batch or a policy that keeps less avoids them.
- Arrays in host memory, which have memory space 5 in their layouts: `bf16[8,512]{1,0:T(8,128)(2,1)S(5)}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from jax.stages import Compiled

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.describe import times_str
from jaxshard.checks.collectives.source import find_source, find_user
from jaxshard.checks.collectives.walk import Executed, add_counts, executed
from jaxshard.core.layout import human_bytes
from jaxshard.core.our_code import is_outside_engines

# XLA clones `fusion.7` to `fusion.7.remat`, that to `.remat2`; a copy in a smaller layout is `.remat_compressed`.
_REMATERIALIZED = re.compile(r"^\S+\.remat(?:\d+|_compressed|_uncompressed)?(?:\.\S+)? = ")
_ON_HOST = re.compile(r"S\(5\)\}")
_HOST_ARRAY = re.compile(r"[a-z]\w*\[[\d,<=]*\]\{[^{}]*S\(5\)\}")
_SAME_BUFFER = (
    "bitcast",
    "call",
    "conditional",
    "dynamic-update-slice",
    "dynamic-update-slice-done",
    "get-tuple-element",
    "opt-barrier",
    "tuple",
    "while",
)
"""Opcodes whose results are arrays that are there already."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program, as one device sees it.

    Attributes:
      op: its name in the program.
      opcode: what it does, such as "fusion".
      count: executions per step; None where a loop's number of turns is not known.
      dtype: of its results, several joined by "+".
      shapes: of its results.
      size: bytes of its results in one execution, without padding.
      source: `file:line`, as of `Collective`; "near file:line" of what uses it, where the compiler lost its own.
      op_name: the path of JAX names that led to it.

    Example:
        for instruction in rematerialized(step.compile(batch)):
            print(instruction.op, instruction.bytes, instruction.source)
    """

    op: str
    opcode: str
    count: int | None
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    size: int
    source: str
    op_name: str

    @property
    def bytes(self) -> int | None:
        """Bytes of the results times `count`; None where that is unknown."""
        return None if self.count is None else self.count * self.size

    def as_dict(self) -> dict[str, Any]:
        """Return the instruction for JSON."""
        shapes = {"shapes": [list(shape) for shape in self.shapes], "bytes": self.bytes, "place": self.source}
        return {name: value for name, value in asdict(self).items() if name not in ("size", "source")} | shapes

    def __str__(self) -> str:
        shapes = ", ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes[:4])
        more = ", ..." if len(self.shapes) > 4 else ""
        return f"{self.op}, {times_str(self.count)}, {human_bytes(self.size)}: {shapes}{more}\n    at {self.source}"


def rematerialized(compiled: Compiled | str) -> tuple[Instruction, ...]:
    """List what the compiler computes again on its own, to save memory.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returned, or its text.

    Returns:
      One record per instruction, in the order of the program; those inside a fusion are part of it.

    Example:
        sum(instruction.bytes for instruction in rematerialized(step.compile(batch)))
    """
    return _merged(_record(one, hlo.arrays(one.op.type)) for one in _find(compiled, _REMATERIALIZED))


def in_host_memory(compiled: Compiled | str) -> tuple[Instruction, ...]:
    """List the arrays that a program has in host memory: the instructions that make them, and its own parameters.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returned, or its text.

    Returns:
      One record per array, in the order of the program.

    Example:
        sum(instruction.bytes for instruction in in_host_memory(step.compile(batch)))
    """
    found = list(_find(compiled, _ON_HOST))
    records = []
    for one in found:
        # Where an array moves, the result of the start also has its source; what it moves to, the result of the end.
        inner = one.op.opcode == "parameter" and one.scope.parent is not None
        if not inner and one.op.opcode not in _SAME_BUFFER and not one.op.opcode.endswith("-start"):
            arrays = hlo.arrays(" ".join(_HOST_ARRAY.findall(one.op.type)))
            if arrays:
                record = _record(one, arrays)
                records.append(
                    record if ":" in record.source else replace(record, source=_use_of(arrays[0], found, record))
                )
    return _merged(records)


def _find(compiled: Compiled | str, wanted: re.Pattern[str]) -> Iterator[Executed]:
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    return executed(hlo.parse(text or ""), wanted, fused=False)


def _record(one: Executed, arrays: tuple[hlo.Array, ...]) -> Instruction:
    source = find_source(one.scope, one.op)
    place = source.line
    if not source.frames or not is_outside_engines(place):
        user = find_user(one.scope, one.op)
        place = f"near {user}" if user else place
    return Instruction(
        op=one.op.name,
        opcode=one.op.opcode,
        count=one.times,
        dtype="+".join(dict.fromkeys(dtype for dtype, _ in arrays)),
        shapes=tuple(shape for _, shape in arrays),
        size=sum(map(hlo.nbytes, arrays)),
        source=place,
        op_name=source.op_name,
    )


def _use_of(array: hlo.Array, found: Iterable[Executed], record: Instruction) -> str:
    """The place of an array that is only allocated, after an instruction that reads or writes one like it."""
    for one in found:
        if array in hlo.arrays(one.op.type) and "metadata=" in one.op.notes:
            source = find_source(one.scope, one.op)
            if source.frames:
                return f"near {source.line.removeprefix('near ')}"
    return record.source


def _merged(records: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """One record per instruction: a computation that is called from several places is found several times."""
    merged: dict[str, Instruction] = {}
    for one in records:
        before = merged[one.op].count if one.op in merged else 0
        merged[one.op] = replace(one, count=add_counts(one.count, before))
    return tuple(merged.values())
