"""Make the page of the commands: the written page, followed by the help of each command."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

COLUMNS = 120


def with_help(text: str) -> str:
    """Add to a page what every command prints for `--help`."""
    from jaxshard.commands.main import COMMANDS

    parts = [text]
    for name, line in COMMANDS.items():
        parts += [f"## jaxshard {name}", f"{line[0].upper()}{line[1:]}.", f"```text\n{help_of(name)}```"]
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def help_of(name: str) -> str:
    """Return what a command prints for `--help`."""
    from jaxshard.commands.main import main

    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        main([name, "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines()) + "\n"
