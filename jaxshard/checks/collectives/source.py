"""Source lines: from an operation of a compiled program back to the user's code."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxshard.checks.collectives import hlo
from jaxshard.core.our_code import is_jaxshard_file, package_folder

_STEPS = (package_folder("jaxshard.engines"), package_folder("jaxshard.training"))
_MODELS = package_folder("jaxshard.models")
_STDLIB = sysconfig.get_paths()["stdlib"]


class Source(NamedTuple):
    """`line` is the place to look at; `frames` are `file:line` from the innermost outwards; `op_name` is JAX's path."""

    line: str
    frames: tuple[str, ...]
    op_name: str


def source_of(module: hlo.Module, scope: hlo.Scope, op: hlo.Op) -> Source:
    """The source of an operation: its own, its fusion's, or `near` that of what it works on, or else only its name."""
    chain = list(_fusions(scope, op))
    for _, one in chain:
        if frames := _frames(module, one.notes):
            return Source(users_line(frames), frames, _op_name(one.notes))
    name = next((name for _, one in chain if (name := _op_name(one.notes))), "")
    for computation, one in chain:
        if producer := _nearest_producer(module, computation, one):
            frames = _frames(module, producer.notes)
            return Source(f"near {users_line(frames)}", frames, name or _op_name(producer.notes))
    return Source(name or op.name, (), name)


def user_of(module: hlo.Module, scope: hlo.Scope, op: hlo.Op) -> str:
    """The nearest line of the user's code that uses a value, else of a library; "" where there is none near.

    A compiler names what it inserts after what it works on: a weight that is moved bears the line of the engine that
    brought it, and who asked for it is known by who uses it.
    """
    computation, outer = list(_fusions(scope, op))[-1]
    queue = list(computation.users.get(outer.name, ()))
    other = ""
    for name in queue:
        frames = _frames(module, computation[name].notes)
        if line := _users_frame(frames):
            return line
        if frames and not other and not is_jaxshard_file(frames[0]):
            other = frames[0]
        queue += [user for user in computation.users.get(name, ()) if user not in queue]
        if len(queue) > 64:
            break
    return other


def _fusions(scope: hlo.Scope, op: hlo.Op) -> Iterator[tuple[hlo.Computation, hlo.Op]]:
    """The operation and the fusions it is in, each with the computation it stands in."""
    yield scope.computation, op
    while scope.parent is not None and scope.caller is not None and scope.caller.opcode in ("fusion", "async-start"):
        yield scope.parent.computation, scope.caller
        scope = scope.parent


def _nearest_producer(module: hlo.Module, computation: hlo.Computation, op: hlo.Op) -> hlo.Op | None:
    """The operation with a source line that is the fewest operands away; the search is bounded."""
    queue = list(op.operands)
    for name in queue:
        producer = computation[name]
        if _frames(module, producer.notes):
            return producer
        queue += [operand for operand in producer.operands if operand not in queue]
        if len(queue) > 64:
            break
    return None


def _frames(module: hlo.Module, notes: str) -> tuple[str, ...]:
    if number := re.search(r"\bstack_frame_id=(\d+)", notes):
        return module.frames.get(int(number[1]), ())
    inline = re.search(r'\bsource_file="([^"]*)"(?: source_line=(\d+))?', notes)
    return () if inline is None else (f"{inline[1]}:{inline[2] or 0}",)


def _op_name(notes: str) -> str:
    found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', notes)
    return "" if found is None else found[1]


def users_line(frames: Sequence[str]) -> str:
    """The innermost frame of the user's code, or the innermost of all for what an engine or the step does itself.

    Installed libraries and this package are not the user's code (its ready-made models are), nor is what merely calls
    the step: the search ends at a frame of an engine or of the training loop.
    """
    return _users_frame(frames) or frames[0]


def _users_frame(frames: Sequence[str]) -> str:
    for frame in frames:
        file = Path(frame.rpartition(":")[0])
        if any(file.is_relative_to(folder) for folder in _STEPS):
            break
        if not _is_library(file):
            return frame
    return ""


def is_of_a_model(file: Path) -> bool:
    """Whether a file of this package is one of the ready-made models, which count as the user's code."""
    return file.is_relative_to(_MODELS)


def _is_library(file: Path) -> bool:
    if is_jaxshard_file(file):
        return not is_of_a_model(file)
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or file.is_relative_to(_STDLIB)
