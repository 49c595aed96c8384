"""The words of a command line, and the entries of its --config, as the flags of a command."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from jaxshard.commands.config import read_config
from jaxshard.commands.errors import UsageError
from jaxshard.commands.flags import Flags
from jaxshard.commands.values import Kind, read_choice
from jaxshard.core.near_words import did_you_mean

_NAMES, _WIDTH = 24, 120
"""Columns of the help: those for the names of flags, and all."""

F = TypeVar("F", bound=Flags)


class Flag(NamedTuple):
    """One flag of a command.

    Attributes:
      name: of its field, such as "sync_every".
      group: the title above it in the help.
      help: its line in the help.
      kind: of its value.
      default: its value where it is not given; `dataclasses.MISSING` if it must be given.
      repeats: it may be given several times, and its value is a tuple.
      is_switch: it has no value of its own: --resume and --no-resume.
    """

    name: str
    group: str
    help: str
    kind: Kind
    default: Any
    repeats: bool
    is_switch: bool

    def __str__(self) -> str:
        return self.kind.metavar if self.kind.is_positional else f"--{self.name.replace('_', '-')}"


def parse(command: type[F], words: Sequence[str]) -> F:
    """Read the words after a command's name.

    Args:
      command: the dataclass of the command's flags.
      words: flags and their values.

    Returns:
      The flags: from the words, else from the file that --config names, else the defaults.

    Raises:
      UsageError: a flag that does not exist or is missing, or a value that is refused.
    """
    flags = flags_of(command)
    values = {name: _read(flags[name], given) for name, given in _split(command, words).items()}
    if file := values.get("config"):
        entries = read_config(file, [name for name in flags if name not in ("config", "command")], _shown(command))
        values = {name: _read(flags[name], given, f"{file}: ") for name, given in entries.items()} | values
    if missing := [
        str(flag) for flag in flags.values() if flag.default is dataclasses.MISSING and flag.name not in values
    ]:
        raise UsageError(f"{' and '.join(missing)} must be given{_see_help(command)}")
    return command(**values)


def help_of(command: type[Flags]) -> str:
    """Return the help of a command: a description, and its flags in groups."""
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    about = (command.__doc__ or "").partition("Attributes:")[0]
    paragraphs = (" ".join(one.split()) for one in about.split("\n\n"))
    parser = _make_parser(command, list(flags_of(command).values()), width)
    parser.description = "\n\n".join(textwrap.fill(one, width) for one in paragraphs)
    return parser.format_help()


def flags_of(command: type[Flags]) -> dict[str, Flag]:
    """Return the flags of a command by name: its own first, then its groups."""
    hints = get_type_hints(command, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    found: dict[str, Flag] = {}
    for group in command.__mro__[:-1]:
        title, _, body = (group.__doc__ or "").partition("\n")
        title = "flags" if group is command else title.removesuffix(".")
        for name, text in _read_attributes(body).items():
            if name not in found:
                kind, repeats = _kind_of(hints[name])
                found[name] = Flag(name, title, text, kind, defaults[name], repeats, hints[name] is bool)
    return found


def _kind_of(hint: Any) -> tuple[Kind, bool]:
    """Return the kind of a field's values by its type, and whether it is a tuple of them."""
    of, *about = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    kind = about[0] if about else Kind("")
    choices = next((get_args(one) for one in (of, *get_args(of)) if get_origin(one) is Literal), None)
    if choices is not None:
        kind = kind._replace(metavar=kind.metavar or "NAME", read=read_choice(choices))
    return kind, get_origin(of) is tuple


def _read_attributes(body: str) -> dict[str, str]:
    """Return the texts below "Attributes:" in the docstring of a class, by name."""
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(body).partition("Attributes:\n")[2].splitlines():
        text = line.strip()
        if line.startswith("  ") and not line.startswith("   "):
            name, _, text = text.partition(": ")
        found[name] = f"{found.get(name, '')} {text}".strip()
    return found


def _split(command: type[Flags], words: Sequence[str]) -> dict[str, Any]:
    """Return the texts that the words give to flags, by name; True or False for switches, and lists for several."""
    end = words.index("--") if "--" in words else len(words)  # what follows is handed on as it is
    for word in words[:end]:
        try:
            os.fsencode(word).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{word!r} is not UTF-8; rename the file, or give another one") from error
    flags = flags_of(command).values()
    parser = _make_parser(command, [flag for flag in flags if not flag.kind.is_positional])
    given, rest = parser.parse_known_args(words[:end])
    if unknown := next((word for word in rest if word.startswith("-")), None):
        near = did_you_mean(unknown.partition("=")[0], map(str, flags))
        raise UsageError(f"there is no flag {unknown}" + (f"; {near}" if near else "") + _see_help(command))
    return vars(given) | _place(command, [*rest, *words[end + 1 :]])


def _place(command: type[Flags], words: Sequence[str]) -> dict[str, Any]:
    """Return the words that are no flags by the names of the fields that they stand for."""
    fields = [flag for flag in flags_of(command).values() if flag.kind.is_positional]
    if fields and fields[-1].repeats:
        return {fields[-1].name: list(words)}
    if len(words) > len(fields):
        takes = " ".join(map(str, fields)) or "flags alone"
        raise UsageError(f"{words[len(fields)]} is one word too many: the command takes {takes}{_see_help(command)}")
    return {flag.name: word for flag, word in zip(fields, words)}


def _read(flag: Flag, given: Any, where: str = "") -> Any:
    """Read the text of a flag, or a value from the file `where`.

    Raises:
      UsageError: it is refused.
    """
    if flag.is_switch:
        if not isinstance(given, bool):
            raise UsageError(f"{where}{flag} {given!r}: write true or false")
        return given
    if flag.repeats:
        return tuple(_read_text(flag, text, where) for text in (given if isinstance(given, list) else [given]))
    return _read_text(flag, given, where)


def _read_text(flag: Flag, given: Any, where: str) -> Any:
    text = str(given)
    if not (text if flag.repeats else text.strip()) and flag.name != "command":
        # As of a variable of the shell that is not set.
        raise UsageError(f"{where}{flag} {text!r} is empty: give a value, or leave the flag out")
    try:
        return flag.kind.read(text)
    except ValueError as error:
        raise UsageError(f"{where}{flag} {text}: {str(error).removeprefix(f'{text}: ')}") from error


class _Parser(argparse.ArgumentParser):
    """Splits words into flags and their texts; its errors are a `UsageError`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _make_parser(command: type[Flags], flags: Sequence[Flag], width: int = _WIDTH) -> _Parser:
    def look(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=_NAMES, width=width)

    usage = [_shown(command), "[flags ...]"]
    for one in (flag for flag in flags if flag.kind.is_positional):
        usage.append(f"-- {one}" if one.repeats else str(one) if one.default is dataclasses.MISSING else f"[{one}]")
    parser = _Parser(
        prog=_shown(command),
        usage=" ".join(usage),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
        formatter_class=look,
    )
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(flag.group for flag in flags)}
    for flag in flags:
        has_default = flag.default and flag.default is not dataclasses.MISSING
        shown = f" (default: {flag.default})" if has_default else ""
        text, add = (flag.help + shown).replace("%", "%%"), groups[flag.group].add_argument
        if flag.kind.is_positional:
            add(flag.name, metavar=flag.kind.metavar, help=text)
        elif flag.is_switch:
            add(str(flag), action="store_true", help=text)
            add(str(flag).replace("--", "--no-"), dest=flag.name, action="store_false", help=argparse.SUPPRESS)
        else:
            names = [name for name in (flag.kind.alias, str(flag)) if name]
            add(*names, metavar=flag.kind.metavar, action="append" if flag.repeats else "store", help=text)
    return parser


def _shown(command: type[Flags]) -> str:
    return f"jaxshard {command.__name__.lower()}"


def _see_help(command: type[Flags]) -> str:
    return f"; see {_shown(command)} --help"
