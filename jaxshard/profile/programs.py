"""Say what the operations in a trace are: their kinds, and their lines in the user's code.

A trace names an operation as its compiled program does, "fusion.12", and holds the program itself, as a serialized
`HloProto`. `jax.profiler.ProfileData` does not hand it out, so this reads the few fields that lead to it, by the
numbers that they have in XLA's xplane.proto and hlo.proto. Field numbers never change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from jaxshard.core.compat import hlo_text
from jaxshard.hlo import hlo
from jaxshard.hlo.found import COLLECTIVE, KINDS, kind_of
from jaxshard.hlo.operation import Operation, origin_of
from jaxshard.hlo.source import find_parameter

_METADATA_PLANE = b"/host:metadata"
_SPACE_PLANES = 1
_PLANE_NAME, _PLANE_EVENT_METADATA = 2, 4
_MAP_VALUE = 2
_METADATA_NAME, _METADATA_STATS = 2, 5
_STAT_BYTES = 6
_HLO_MODULE = 1

_HALVES = re.compile(r"-(start|update|done)$")
_SPELLINGS = {kind.replace("-", ""): kind for kind in sorted(KINDS, key=len, reverse=True)} | {
    "sendrecv": "collective-permute",
    "psum": "all-reduce",
    "ppermute": "collective-permute",
}
"""Parts of the names of collectives, longest first: XLA's opcodes, NCCL's kernels, JAX's functions."""


class Known(NamedTuple):
    """An operation of a trace.

    Attributes:
      kind: its opcode, such as "fusion"; of the start, the end and every other part of a collective one of `KINDS`;
        "" if it is not known.
      source: the line of the user's code, as `Operation.place` has it; else the parameter that it gathers, or its
        name. Of a collective that the compiler combined from several, the number of arrays and the place of the first.
    """

    kind: str
    source: str


class Program:
    """A compiled program in a trace."""

    def __init__(self, proto: bytes) -> None:
        self._proto = proto
        self._known: dict[str, Known | None] = {}

    @cached_property
    def _scopes(self) -> dict[str, hlo.Scope]:
        """The computation that contains an operation, by the operation's name; none if this XLA can't read it."""
        try:
            text = hlo_text(self._proto)
        except RuntimeError:  # written by another version, with operations that this one lacks
            return {}
        module = hlo.parse(text)
        return {name: hlo.Scope(module, one) for one in module.computations.values() for name in one.lines}

    @cached_property
    def _by_kernel(self) -> dict[str, str]:
        """The names of operations by those of their kernels on a GPU: "loop_add_fusion_7" for "loop_add_fusion.7"."""
        return {re.sub(r"\W", "_", name): name for name in self._scopes}

    def find(self, name: str) -> Known | None:
        """Return what an operation is; None if the program has none of this name."""
        if name not in self._known:
            self._known[name] = self._look_up(name)
        return self._known[name]

    def name_of_kernel(self, kernel: str) -> str | None:
        """Return the name of the operation that a GPU's kernel was compiled from; None for one of a library."""
        return self._by_kernel.get(kernel)

    def _look_up(self, name: str) -> Known | None:
        scope = self._scopes.get(name)
        if scope is None:
            return None
        op = scope.computation[name]
        kind = _kind(scope, op)
        found = Operation(kind=kind, count=None, arrays=(), **origin_of(scope, op))
        place = found.place
        if kind == "all-gather" and not (found.is_users or found.user):
            place = find_parameter(scope, op) or place
        joined = len(_start_of(scope, op).operands) if kind in KINDS else 1
        return Known(kind, f"{joined} arrays, first: {place}" if joined > 1 else place)


def read_programs(trace: memoryview) -> dict[str, Program]:
    """Return the programs in a serialized trace by name and id, such as "jit_step(6)"."""
    programs: dict[str, Program] = {}
    for plane in _messages(trace, _SPACE_PLANES):
        if next(_messages(plane, _PLANE_NAME), b"") == _METADATA_PLANE:
            for metadata in _messages(plane, _PLANE_EVENT_METADATA, _MAP_VALUE):
                name = bytes(next(_messages(metadata, _METADATA_NAME), b"")).decode()
                for module in _messages(metadata, _METADATA_STATS, _STAT_BYTES, _HLO_MODULE):
                    programs[name] = Program(bytes(module))
    return programs


def kind_by_name(text: str) -> str:
    """Guess the kind of an operation whose program is not in the trace, from its name or its line."""
    if " = " in text and (opcode := hlo.OPCODE.search(text)):
        return _HALVES.sub("", opcode[1])
    letters = re.sub("[^a-z]", "", text.lower())
    return next((kind for spelling, kind in _SPELLINGS.items() if spelling in letters), "")


def _kind(scope: hlo.Scope, op: hlo.Op) -> str:
    if _HALVES.sub("", op.opcode) in KINDS:
        return _HALVES.sub("", op.opcode)
    if op.opcode in ("async-update", "async-done"):  # only the start says what is asynchronous
        return _kind(scope, scope.computation[op.operands[0]])
    if op.opcode in ("fusion", "async-start"):
        return next(filter(None, (_fused_kind(scope.enter(op, name)) for name in op.callees)), op.opcode)
    return _HALVES.sub("", op.opcode)


def _start_of(scope: hlo.Scope, op: hlo.Op) -> hlo.Op:
    """Return the start of a collective for its end, "all-reduce-done"; else the operation itself."""
    return scope.computation[op.operands[0]] if op.opcode.endswith("-done") else op


def _fused_kind(scope: hlo.Scope) -> str | None:
    """Return the kind of collective that a fusion starts or waits for; None for one that computes meanwhile."""
    lines = scope.computation.lines
    collectives = [scope.computation[name] for name, line in lines.items() if COLLECTIVE.search(f" = {line}")]
    if collectives and any('"AsyncCollectiveDone"' in line for line in lines.values()):
        return _HALVES.sub("", collectives[0].opcode)
    return next(filter(None, (kind_of(scope, one) for one in collectives)), None)


def _messages(message: memoryview, wanted: int, *inner: int) -> Iterator[memoryview]:
    """Yield the strings, bytes and messages in one field of a serialized protocol buffer, or in a field of that."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            _, at = _varint(message, at)
            continue
        size, at = _varint(message, at) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], at)
        if field == wanted and wire_type == 2:
            found = message[at : at + size]
            yield from _messages(found, *inner) if inner else [found]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Read an integer of seven bits per byte; return it with the position behind it."""
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
