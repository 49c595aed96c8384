"""Read and write a schedule as a CSV file: a line of sizes, a line of column names, a line per operation.

    # stages=2 microbatches=2 chunks=1 name=mine
    tick,device,op,chunk,microbatch
    0,0,F,0,0
    1,0,F,0,1
    ...

The first line, and each part of it, is optional: a missing size is one more than the largest value in its column, and a
missing name is that of the file.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxshard.core.tree import raise_all
from jaxshard.schedules.table import KINDS, Kind, Op, Table, find_problems, is_name, shorten

COLUMNS = ("tick", "device", "op", "chunk", "microbatch")
_SIZES = ("stages", "microbatches", "chunks")
_NUMBER = re.compile("[0-9]{1,9}")


class Contents(NamedTuple):
    """The contents of a CSV file, which are the arguments of `Schedule` in their order."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    ops: tuple[Op, ...]


def read_csv(path: Path) -> Contents:
    """Read a CSV file and check that its schedule can run.

    Raises:
      OSError: the file can't be read.
      ValueError: names every line that is not an operation. If all lines are operations, the message names every
        wrong operation with its line, and every missing operation.
    """
    text = _decoded(path)
    first, _, rest = text.partition("\n")
    wrong: list[str] = []
    head: dict[str, str] = {}
    skipped = 0
    if first.startswith("#"):
        text, skipped = rest, 1
        head = _head(first, wrong)
    lines: dict[Op, int] = {}
    ops: list[Op] = []
    for number, op in _rows(text, skipped, wrong):
        ops.append(op)
        lines[op] = number
    headline = f"{path} is no schedule:"
    raise_all(shorten(wrong), ValueError, headline)
    if not ops:
        raise ValueError(f"{path} is no schedule: there is no operation in it; each is a line {','.join(COLUMNS)}")
    largest = {"stages": "device", "microbatches": "microbatch", "chunks": "chunk"}
    stages, microbatches, chunks = (
        int(head[size]) if size in head else 1 + max(getattr(op, largest[size]) for op in ops) for size in _SIZES
    )
    found = find_problems(ops, stages, microbatches, chunks)
    texts = (f"line {lines[op]}: {text}" if op in lines else text for op, text in found)
    raise_all(texts, ValueError, headline)
    return Contents(head.get("name", path.stem), stages, microbatches, chunks, tuple(ops))


def write_csv(path: Path, schedule: Table) -> None:
    """Write a schedule to the CSV file that `read_csv` reads."""
    sizes = " ".join(f"{size}={getattr(schedule, size)}" for size in _SIZES)
    rows = [f"# {sizes} name={schedule.name}", ",".join(COLUMNS), *(",".join(map(str, op)) for op in schedule.ops)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _decoded(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is no schedule: line {line} is not UTF-8 text") from error


def _head(line: str, wrong: list[str]) -> dict[str, str]:
    """Parse the first line, `# stages=2 ... name=mine`, into a dictionary; append descriptions of errors to `wrong`."""
    words, named, name = line.removeprefix("#").strip().partition("name=")
    head = {}
    for word in words.split():
        key, _, value = word.partition("=")
        if key not in _SIZES or key in head or not _NUMBER.fullmatch(value) or int(value) == 0:
            wrong.append(f"line 1: {_short(word)} is no size; write # stages=4 microbatches=8 chunks=2 name=NAME")
        head[key] = value
    if named:
        if not is_name(name):
            wrong.append(f"line 1: the name {_short(name)} is not one line of text")
        head["name"] = name
    return head


def _rows(text: str, skipped: int, wrong: list[str]) -> Iterator[tuple[int, Op]]:
    """Yield (line number, operation) for each line of a CSV file; append descriptions of wrong lines to `wrong`.

    `skipped` is the number of lines before `text`, which line numbers include.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    titles = False
    try:
        for row in reader:
            number, fields = skipped + reader.line_num, [field.strip() for field in row]
            if not any(fields) and len(fields) < 2:
                continue
            if not titles:
                titles = True
                if tuple(fields) != COLUMNS:
                    wrong.append(f"line {number}: expected the column names {','.join(COLUMNS)}, got {_shown(row)}")
                continue
            text_wrong = _row_problem(fields)
            if text_wrong:
                wrong.append(f"line {number}: {text_wrong}, got {_shown(row)}")
            else:
                tick, device, kind, chunk, microbatch = fields
                yield number, Op(int(tick), int(device), cast(Kind, kind), int(chunk), int(microbatch))
    except csv.Error as error:
        wrong.append(f"line {skipped + reader.line_num}: {error}")


def _row_problem(fields: list[str]) -> str | None:
    if len(fields) != len(COLUMNS):
        return f"expected the {len(COLUMNS)} fields {','.join(COLUMNS)}"
    for name, text in zip(COLUMNS, fields):
        if name == "op" and text not in KINDS:
            return "op must be F, B or W"
        if name != "op" and not _NUMBER.fullmatch(text):
            return f"{name} must be a whole number from 0 to 999999999"
    return None


def _shown(row: list[str]) -> str:
    return _short(",".join(row))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
