"""Read the words of a command line, and the file that --config names, as the flags of a command."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from jaxshard.commands.config import read_config, suggest_flag
from jaxshard.commands.errors import UsageError
from jaxshard.commands.flags import Flags
from jaxshard.commands.values import Kind, read_choice

_NAMES, _WIDTH = 24, 120
"""Columns of the help: those for the names of flags, and all."""

F = TypeVar("F", bound=Flags)


class Flag(NamedTuple):
    """One flag of a command.

    Attributes:
      name: the name of its field, such as "sync_every" for --sync-every.
      group: the title above the flag in the help.
      help: the text of the flag in the help.
      kind: the kind of its value, which reads the value from text.
      default: the value if the flag is not given; `dataclasses.MISSING` if it must be given.
      repeats: True if the flag may be given several times; its value is then a tuple.
      is_switch: True for a flag without a value, such as --resume and --no-resume.
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

    def read(self, text: str) -> Any:
        """Convert text to the flag's value; raise UsageError if the text is refused."""
        # An empty text is that of a shell's variable that is not set; a text such as a prompt may be blank.
        if not (text if self.repeats else text.strip()) and self.name != "command":
            raise UsageError(f"{self} {text!r} is empty: give a value, or leave the flag out")
        try:
            return self.kind.read(text)
        except ValueError as error:
            raise UsageError(f"{self} {text}: {str(error).removeprefix(f'{text}: ')}") from error


def parse(command: type[F], words: Sequence[str]) -> F:
    """Convert the words after a command's name to the dataclass of its flags.

    Args:
      command: the dataclass of the command's flags.
      words: flags and their values, such as ["--steps", "3"].

    Returns:
      The flags. A value comes from the words, else from the file that --config names, else it is the default.

    Raises:
      UsageError: a flag does not exist, a required flag is missing, or a value is refused.
    """
    values = _read_words(command, words)
    flags = flags_of(command)
    if file := values.get("config"):
        from_file = read_config(file, [name for name in flags if name not in ("config", "command")], _shown(command))
        try:
            values = _read_words(command, _words_of(flags, from_file)) | values
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
    missing = [str(one) for one in flags.values() if one.default is dataclasses.MISSING and one.name not in values]
    if missing:
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
    """Return {name: flag} for a command: first the flags of its own class, then those of its base classes."""
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
    """Return (kind of the value, True if the flag may be repeated) from the type annotation of a field."""
    of, *about = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    kind = about[0] if about else Kind("")
    choices = next((get_args(one) for one in (of, *get_args(of)) if get_origin(one) is Literal), None)
    if choices is not None:
        kind = kind._replace(metavar=kind.metavar or "NAME", read=read_choice(choices))
    return kind, get_origin(of) is tuple


def _read_attributes(body: str) -> dict[str, str]:
    """Return {attribute: text} from the section "Attributes:" of a class's docstring."""
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(body).partition("Attributes:\n")[2].splitlines():
        text = line.strip()
        if line.startswith("  ") and not line.startswith("   "):
            name, _, text = text.partition(": ")
        found[name] = f"{found.get(name, '')} {text}".strip()
    return found


def _words_of(flags: dict[str, Flag], entries: dict[str, Any]) -> list[str]:
    """Convert the entries of a --config file to command-line words, such as ["--steps=3"].

    Raises:
      UsageError: a value has another type than its flag.
    """
    words = []
    for name, value in entries.items():
        one, flag = flags[name], str(flags[name])
        if one.is_switch:
            if not isinstance(value, bool):
                raise UsageError(f"{flag} {value}: write true or false, without quotes")
            words.append(flag if value else flag.replace("--", "--no-"))
            continue
        if isinstance(value, list) and not one.repeats:
            raise UsageError(f"{flag} {value}: write one value, not a list")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool | list | dict):
                raise UsageError(f"{flag} {each}: write a text or a number")
            words.append(str(each) if one.kind.is_positional else f"{flag}={each}")
    return words


def _read_words(command: type[Flags], words: Sequence[str]) -> dict[str, Any]:
    """Return {field name: value} for the flags that the words contain, without defaults."""
    end = words.index("--") if "--" in words else len(words)  # the rest is handed on unchanged
    for word in words[:end]:
        try:
            os.fsencode(word).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{word!r} is not UTF-8; rename the file, or give another one") from error
    flags = flags_of(command)
    parser = _make_parser(command, [flag for flag in flags.values() if not flag.kind.is_positional])
    given, rest = parser.parse_known_args(words[:end])
    if unknown := next((word for word in rest if word.startswith("-")), None):
        near = suggest_flag(unknown.partition("=")[0], map(str, flags.values()))
        raise UsageError(f"there is no flag {unknown}" + (f"; {near}" if near else "") + _see_help(command))
    rest += words[end + 1 :]
    places = [flag for flag in flags.values() if flag.kind.is_positional]
    values = {name: tuple(value) if flags[name].repeats else value for name, value in vars(given).items()}
    if places and places[-1].repeats:
        return values | {places[-1].name: tuple(rest)}
    if len(rest) > len(places):
        takes = " ".join(map(str, places)) or "flags alone"
        raise UsageError(f"{rest[len(places)]} is one word too many: the command takes {takes}{_see_help(command)}")
    return values | {flag.name: flag.read(word) for flag, word in zip(places, rest)}


class _Parser(argparse.ArgumentParser):
    """An `argparse` parser that raises a `UsageError` in place of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _make_parser(command: type[Flags], flags: Sequence[Flag], width: int = _WIDTH) -> _Parser:
    look = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=_NAMES, width=width)
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
            names, action = (
                [name for name in (flag.kind.alias, str(flag)) if name],
                "append" if flag.repeats else "store",
            )
            add(*names, metavar=flag.kind.metavar, action=action, type=flag.read, help=text)
    return parser


def _shown(command: type[Flags]) -> str:
    return f"jaxshard {command.__name__.lower()}"


def _see_help(command: type[Flags]) -> str:
    return f"; see {_shown(command)} --help"
