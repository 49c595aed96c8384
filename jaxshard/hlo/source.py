"""Find the line of the user's code that an operation of a compiled program comes from.

Most operations have the Python stack that made them as metadata. Those that the compiler inserts or combines may have
none. Then the nearest operation that has one is named: one that makes the operand, or one that uses the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxshard.core.our_code import is_jaxshard_file, users_frame, users_line
from jaxshard.hlo import hlo
from jaxshard.hlo.asynchronous import operands_of, starts_computation

_FAR = 64
"""The number of operations after which a search gives up."""


class SourceLine(NamedTuple):
    """The source line of an operation.

    Attributes:
      line: `file:line`, `near file:line`, or else the operation's name.
      frames: `file:line` of the full stack, from the innermost frame outwards; () where none is known.
      op_name: JAX's path of names, such as "jit(step)/transpose/dot_general".
    """

    line: str
    frames: tuple[str, ...]
    op_name: str


def find_source(scope: hlo.Scope, op: hlo.Op) -> SourceLine:
    """Find the source line of an operation.

    The line is in the metadata of the operation, or of the fusion that contains the operation. Otherwise the line of a
    nearby operand is returned, as `near file:line`. Without such a line the operation's name is returned.
    """
    chain = list(_fusions(scope, op))
    for _, one in chain:
        if frames := _frames(scope.module, one):
            return SourceLine(users_line(frames), frames, one.op_name)
    name = next((one.op_name for _, one in chain if one.op_name), "")
    for one in (*(near for of in chain for near in _producers(*of)), *_additions(scope, op)):
        if frames := _frames(scope.module, one):
            return SourceLine(f"near {users_line(frames)}", frames, name or one.op_name)
    return SourceLine(name or op.name, (), name)


def _additions(scope: hlo.Scope, op: hlo.Op) -> Iterator[hlo.Op]:
    """Yield the additions that an all-reduce or reduce-scatter applies to elements.

    If the compiler splits a sum over devices, only its addition keeps the metadata with the Python stack.
    """
    for computation in (scope.module.computations[name] for name in op.callees):
        yield computation[computation.root]


def find_reader(scope: hlo.Scope, op: hlo.Op) -> SourceLine:
    """Find the source line that uses the result of an operation: the nearest line of the user, else of a library.

    It tells which part of the model needs an array that the compiler moves. The operation's own source line does not
    tell this, because it is the line that makes the operand; for a weight this is a line of the engine. If no line of
    the user or a library is near, all strings in the result are empty.
    """
    computation, outer = list(_fusions(scope, op))[-1]
    library = SourceLine("", (), "")
    for name in _walk(computation.users.get(outer.name, ()), lambda name: computation.users.get(name, ())):
        user = computation[name]
        frames = _frames(scope.module, user)
        if line := users_frame(frames):
            return SourceLine(line, frames, user.op_name)
        if frames and not library.line and not is_jaxshard_file(frames[0]):
            library = SourceLine(frames[0], frames, user.op_name)
    return library


def find_parameter(scope: hlo.Scope, op: hlo.Op) -> str:
    """Find the parameter of the step from which an operation computes, such as "run.params['head']"; "" for none near.

    For the all-gather of an updated parameter this is the parameter before the update.
    """
    computation, outer = list(_fusions(scope, op))[-1]
    near = _walk(operands_of(computation, outer)[:1], lambda name: computation[name].operands)
    arguments = (computation[name] for name in near if computation[name].opcode == "parameter")
    return next((one.op_name for one in arguments if one.op_name.startswith("run.params")), "")


def _producers(computation: hlo.Computation, op: hlo.Op) -> Iterator[hlo.Op]:
    """Yield the operations from which the operands of `op` are computed, the nearest first."""
    for name in _walk(operands_of(computation, op), lambda name: computation[name].operands):
        yield computation[name]


def _walk(first: Iterable[str], neighbours: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Walk a graph breadth first: yield `first`, their neighbours and so on, each name once, up to a limit."""
    queue = list(first)
    for name in queue:
        yield name
        queue += [one for one in neighbours(name) if one not in queue]
        if len(queue) > _FAR:
            break


def _fusions(scope: hlo.Scope, op: hlo.Op) -> Iterator[tuple[hlo.Computation, hlo.Op]]:
    """Yield (computation, operation) of `op` itself, then of the fusions and asynchronous calls that contain it."""
    yield scope.computation, op
    for outer, caller in scope.callers:
        if caller.opcode not in ("fusion", "custom-call") and not starts_computation(caller):
            break
        yield outer.computation, caller


def _frames(module: hlo.Module, op: hlo.Op) -> tuple[str, ...]:
    """Return the Python stack in an operation's metadata, `file:line` from the innermost frame outwards; else ()."""
    if number := re.search(r"\bstack_frame_id=(\d+)", op.notes):
        return module.frames.get(int(number[1]), ())
    inline = re.search(r'\bsource_file="([^"]*)"(?: source_line=(\d+))?', op.notes)
    return () if inline is None else (f"{inline[1]}:{inline[2] or 0}",)
