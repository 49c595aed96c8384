"""The text of a compiled program, parsed; anything else is refused."""

from __future__ import annotations

import re

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.dump import expand_elements

_HOW = (
    "give what jax.jit(step).lower(...).compile().as_text() returns, or the file *after_optimizations.txt that "
    "XLA_FLAGS=--xla_dump_to=FOLDER writes"
)
_OPERATION = re.compile(r"\s+(?:ROOT )?%([\w.\-~]+) = (?:\(|[a-z]\w*\[)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|called_computations)=\{?%([\w.\-~]+)")


def parse_program(data: bytes) -> hlo.Module:
    """Parse the text of a compiled program; raises ValueError for anything else, and says what it is."""
    try:
        text = data.decode().lstrip("\ufeff \t\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"this is no text ({_kind_of_bytes(data)}); {_HOW}") from error
    if not text:
        raise ValueError(f"the file is empty; {_HOW}")
    if not text.startswith("HloModule"):
        raise ValueError(f"{_kind_of_text(text)}; {_HOW}")
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "this is HLO before the compiler's last passes (its first line does not say is_scheduled=true), in which "
            f"collectives are still missing; {_HOW}"
        )
    try:
        module = hlo.parse(expand_elements(text))
    except (IndexError, KeyError) as error:
        raise ValueError(f"the HLO text is damaged: {error!r}") from error
    _check_whole(text, module)
    return module


def _kind_of_bytes(data: bytes) -> str:
    if data.startswith(b"\x1f\x8b"):
        return "but a gzip file: unpack it"
    return "but binary, as the .pb files of a dump are"


def _kind_of_text(text: str) -> str:
    start = repr(text[:40])
    if re.search(r"\b(?:stablehlo|mhlo)\.|^module @", text[:4000], re.MULTILINE):
        return "this is StableHLO, of a program that is lowered and not compiled: it has no collectives yet"
    if text.startswith("{ lambda"):
        return "this is a jaxpr, of a program that is traced and not compiled"
    if "BufferAssignment" in text[:400]:
        return "this is a buffer assignment: take the file beside it without -buffer-assignment in its name"
    return f"this is no HLO text: it starts with {start}"


def _check_whole(text: str, module: hlo.Module) -> None:
    """Raise ValueError where the end of the text is missing: its entry, or a computation that another one calls."""
    for line in text.splitlines():
        if " = " in line and line.count("(") != line.count(")"):
            _check_line(line)
    last = text.rstrip().rpartition("\n")[2]
    closed = last == "}" or last.startswith("}, execution_thread=")
    missing = sorted(set(_CALLED.findall(text)) - module.computations.keys())
    if closed and module.entry and not missing:
        return
    why = "it has no ENTRY" if not module.entry else f"it lacks the computation {missing[0]}" if missing else ""
    why = why or f"it ends with {last[:60]!r}"
    raise ValueError(f"the text is cut off: {why}; write the whole program to the file")


def _check_line(line: str) -> None:
    """Raise ValueError for an operation whose parentheses are not closed before its free text, which may have any."""
    found = _OPERATION.match(line)
    if found is None:
        return
    before = hlo.FREE_TEXT.split(line)[0]
    if before.count("(") > before.count(")"):
        raise ValueError(
            f"the line of %{found[1]} is cut off; write the whole program to the file, lines of any length"
        )
