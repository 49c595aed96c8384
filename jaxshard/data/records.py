"""Read documents from JSON lines, and find which of their characters are answers, which a model is to learn.

{"text": "..."}                                              a document
{"prompt": "2 + 2 =", "completion": " 4"}                    the completion is the answer
{"messages": [{"role": "user", "content": "2 + 2?"},         the assistant's messages are the answers
              {"role": "assistant", "content": "4"}]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.data.chat_template import TemplateRefusedError
from jaxshard.data.conversations import Spans, check_text

Writer = Callable[[Mapping[str, Any]], tuple[str, Spans]]
"""Writes a record with messages as text; the spans are (begin, end) of the answers in it."""

_KINDS = {"text": ("text",), "completion": ("prompt", "completion"), "messages": ("messages",)}
_EXPECTED = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'
_SHOWN = 5
"""The largest number of invalid lines that an error message names."""


class Record(NamedTuple):
    """A document.

    Attributes:
      text: the text of the document.
      answers: the answers in the text, as (begin, end) indices of characters in order; None if the full text is
        learned.
      line: the document's line in the file, from 1; 0 if the document is a file.
    """

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    line: int = 0


def read_records(file: Path, write: Writer) -> Iterator[Record]:
    """Yield the documents of a file of JSON lines, which must all have the same keys. Blank lines are skipped.

    Args:
      file: the file.
      write: writes a conversation as text.

    Raises:
      TemplateRefusedError: the chat template can't be used.
      ValueError: after the last record: invalid lines, the first five with their numbers.
    """
    wrong: dict[str, list[int]] = {}
    count, kind, first = 0, None, 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            count += 1
            try:
                record = _parse(line)
                its_kind = _kind_of(record)
                kind, first = (its_kind, number) if kind is None else (kind, first)
                if its_kind != kind:
                    raise ValueError(f"{_name(its_kind)}, but line {first} has {_name(kind)}; give one kind a file")
                yield _make(its_kind, record, write)._replace(line=number)
            except TemplateRefusedError:
                raise
            except ValueError as error:
                wrong.setdefault(str(error), []).append(number)
    if wrong:
        raise ValueError(f"data: {_list_wrong(file, wrong, count)}")


def _list_wrong(file: Path, wrong: dict[str, list[int]], count: int) -> str:
    """List what is wrong with the first few invalid lines of a file; what is wrong with all of them is said once.

    Args:
      file: the file.
      wrong: {what is wrong: the numbers of the lines}.
      count: the number of lines in the file that are not blank.
    """
    if count > 1 and [len(numbers) for numbers in wrong.values()] == [count]:
        return f"{file} in all {count} lines: {next(iter(wrong))}"
    listed = sorted((number, error) for error, numbers in wrong.items() for number in numbers)
    more = f"; and {len(listed) - _SHOWN} more lines" if len(listed) > _SHOWN else ""
    return "; ".join(f"{file} line {number}: {error}" for number, error in listed[:_SHOWN]) + more


def first_kind(file: Path) -> str | None:
    """Return the kind of the first record of a file: "text", "completion" or "messages"; None if it is not a record."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return _kind_of(_parse(first))
    except ValueError:
        return None


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"is no object, but {type(record).__name__}; expected {_EXPECTED}")
    return record


def _kind_of(record: dict[str, Any]) -> str:
    found = [kind for kind, keys in _KINDS.items() if any(key in record for key in keys)]
    if len(found) != 1:
        names = ", ".join(map(repr, record)) or "no key"
        raise ValueError(f"has {names}; expected one of {_EXPECTED}")
    if missing := [key for key in _KINDS[found[0]] if key not in record]:
        raise ValueError(f"has no {missing[0]!r}; expected {_name(found[0])}")
    return found[0]


def _name(kind: str) -> str:
    return " and ".join(f'"{key}"' for key in _KINDS[kind])


def _make(kind: str, record: dict[str, Any], write: Writer) -> Record:
    if kind == "text":
        return Record(check_text(record["text"], '"text"'))
    if kind == "completion":
        prompt, completion = (check_text(record[key], f'"{key}"') for key in ("prompt", "completion"))
        if not completion:
            raise ValueError('"completion" is empty, so that there is nothing to learn; leave the line out')
        return Record(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
    return Record(*write(record))
