"""Read and write the file of a guard: the snapshot of a program for each target, one line for each fact.

The file is made for review: entries are sorted, and a change of the program changes few lines.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax

from jaxshard.core.file_errors import naming
from jaxshard.core.version import __version__
from jaxshard.plan.guard.snapshot import Snapshot, snapshot_of
from jaxshard.storage.paths import AnyPath, write_file
from jaxshard.storage.strict_json import decode_object, read_plain_file

_FORMAT = 1


class Recorded(NamedTuple):
    """The content of a guard's file.

    Attributes:
      target: the function that `jaxshard guard` called, or a file of HLO text; "" if `js.guard` wrote the file.
      snapshots: the snapshot of the program for each target, such as "v5e:4x4" or "cpu:8".
    """

    target: str
    snapshots: dict[str, Snapshot]


def write_guard(file: AnyPath, recorded: Recorded) -> None:
    """Write the file of a guard; replace it in one step.

    Raises:
      ValueError: a compiler refused the program.
      OSError: the file can't be written.
    """
    for name, one in recorded.snapshots.items():
        if one.refusal:
            raise ValueError(f"nothing is recorded, since the compiler refuses the program for {name}: {one.refusal}")
    made_with = {"jaxshard": __version__, "jax": jax.__version__}
    compiled = {name: recorded.snapshots[name].as_dict() for name in sorted(recorded.snapshots)}
    head = {"guard": _FORMAT, "made_with": made_with, "target": recorded.target}
    text = _lines(head | {"compiled": compiled}, 0)
    with naming(str(file)):
        write_file(file, f"{text}\n".encode())


def read_guard(file: AnyPath) -> Recorded:
    """Read the file of a guard.

    Raises:
      OSError: the file can't be read.
      ValueError: it is no file of a guard, is damaged, or is of a newer version.
    """
    how = "record it again with `jaxshard guard record`"
    try:
        found = decode_object(read_plain_file(file))
        if found.get("guard") != _FORMAT:
            raise ValueError(f"its format is {found.get('guard')!r}, this version of jaxshard reads {_FORMAT}")
        target, compiled = found.get("target"), found.get("compiled")
        if not isinstance(target, str) or not isinstance(compiled, dict) or not compiled:
            raise ValueError("it has no compiled program")
        return Recorded(target, {name: snapshot_of(name, values) for name, values in compiled.items()})
    except ValueError as error:
        raise ValueError(f"{file} is no file of a guard, or is damaged: {error}; {how}") from error


def _lines(value: Any, depth: int) -> str:
    """Write JSON with one line for each entry of a list, and for each entry of the outer objects."""
    space, end = "  " * (depth + 1), "  " * depth
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(space + json.dumps(one) for one in value) + f"\n{end}]"
    if isinstance(value, dict) and value and any(isinstance(one, (dict, list)) for one in value.values()):
        inner = (f"{space}{json.dumps(name)}: {_lines(one, depth + 1)}" for name, one in value.items())
        return "{\n" + ",\n".join(inner) + f"\n{end}}}"
    return json.dumps(value, allow_nan=False)
