"""Read flags from a TOML file (`--config`), by the same names, and write them (`--save-config`)."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tomli_w

from jaxshard.commands.errors import UsageError, usage_errors
from jaxshard.commands.flags import Flags
from jaxshard.core.file_errors import naming
from jaxshard.core.near_words import did_you_mean


def read_config(file: Path, names: Collection[str], command: str) -> dict[str, Any]:
    """Read the flags in a TOML file.

    Args:
      file: the file; `sync-every = 8` and `sync_every = 8` are the flag --sync-every.
      names: the names of the flags that the command has.
      command: the name of the command, for error messages.

    Raises:
      UsageError: the file can't be read, is not TOML, or has a name that is not a flag of the command, or one
        flag twice.
    """
    with usage_errors():
        try:
            entries = tomllib.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--config {file}: this is no TOML: {error}") from error
    found: dict[str, Any] = {}
    for name, value in entries.items():
        field = name.replace("-", "_")
        if field not in names:
            near = did_you_mean(name, [one.replace("_", "-") for one in names])
            raise UsageError(f"--config {file}: {name} is no flag of {command}" + (f"; {near}" if near else ""))
        if isinstance(value, dict):
            raise UsageError(f"--config {file}: {name} is a table; write {name} = VALUE")
        if field in found:
            raise UsageError(f"--config {file}: {name} is given twice, with - and with _; leave one out")
        found[field] = value
    return found


def write_config(file: Path, flags: Flags) -> None:
    """Write the flags that differ from their defaults as a TOML file that `read_config` reads."""
    differing = [one for one in dataclasses.fields(flags) if getattr(flags, one.name) != one.default]
    entries = {
        one.name.replace("_", "-"): _plain(getattr(flags, one.name))
        for one in differing
        if one.name not in ("config", "save_config")
    }
    with naming(file):
        file.write_text(tomli_w.dumps(entries), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Convert a flag's value to a type that TOML has: a tuple becomes a list, a path becomes text."""
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return value if isinstance(value, bool | int | float) else str(value)
