"""The words of a command line as a call of a command's function; what does not parse is refused in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxshard.commands.errors import UsageError, usage_errors
from jaxshard.core.local_path import check_local
from jaxshard.core.near_words import did_you_mean


def parse(command: Callable[..., int | None], name: str, words: Sequence[str]) -> Callable[[], int | None]:
    """Parse the words after a command's name.

    Args:
      command: the command's function, whose signature says which flags there are.
      name: the command's name.
      words: flags and their values.

    Returns:
      A function without arguments that runs the command.

    Raises:
      SystemExit: with status 0 after the help, and with status 2 after a line on standard error for a flag that does
        not exist or a value of another type.
      UsageError: a word that is not UTF-8, or empty; an address such as gs://... where a path is expected.
    """
    own = words[: words.index("--")] if "--" in words else words  # what follows is handed on as it is
    for word in own:
        try:
            os.fsencode(word).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{word!r} is not UTF-8; rename the file, or give another one") from error
    for before, word in zip(["", *own], own):  # as of a variable of the shell that is not set
        if not word or re.fullmatch("--[a-z-]+=", word):
            raise UsageError(f"{word.rstrip('=') or before} '' is empty: give a value, or leave the flag out".lstrip())

    @functools.wraps(command)
    def bind(*args: Any, **flags: Any) -> Callable[[], int | None]:
        with usage_errors():
            for path in _paths_in([*args, *flags.values()]):
                check_local(path)
        return functools.partial(command, *args, **flags)

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return tyro.cli(bind, prog=f"jaxshard {name}", args=words)
        except SystemExit as end:
            status = end.code
    if status:
        print(f"jaxshard: {_one_line(said.getvalue())}; see jaxshard {name} --help", file=sys.stderr)
    raise SystemExit(status)


def _paths_in(values: Iterable[Any]) -> Iterator[Path]:
    """Yield the paths among the values of flags, and among those of groups of flags."""
    for value in values:
        if isinstance(value, Path):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _paths_in(vars(value).values())


def _one_line(box: str) -> str:
    """Make one line of what tyro says: the first paragraph, and the first flag that it proposes."""
    parts: list[list[str]] = [[]]
    for row in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines():
        text = row.strip(" │|")
        if text.startswith("╭") or (text and not text.strip("─-")):
            parts.append([])  # a title, or without line drawing characters a line below it, ends
        elif text:
            parts[-1].append(text)
    del parts[0]
    problem = " ".join(" ".join(parts[0]).split()).partition(" Got errors:")[0].removesuffix(".")
    if wrong := re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)$", problem):
        choices = sorted(set(re.findall(r"'([^']*)'", wrong[3])) - {"None"})
        near = did_you_mean(wrong[1], choices)
        hint = f"{near} Expected" if near else "expected"
        return f"invalid choice '{wrong[1]}' for argument '{wrong[2]}'; {hint} one of {tuple(choices)}"
    if wrong := re.match(r"Error parsing (\S+): no type matching \S+ could be instantiated from \['(.*)'\]$", problem):
        problem = f"{wrong[1]} {wrong[2]}: give a number"
    proposed = next((part[1] for part in parts if part[:1] == ["Perhaps you meant:"]), None)
    return problem + (f"; perhaps you meant {proposed}" if proposed else "")
