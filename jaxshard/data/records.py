"""Read documents from JSON lines, and find which of their characters are answers, which a model is to learn.

    {"text": "..."}                                              a document
    {"prompt": "2 + 2 =", "completion": " 4"}                    the completion is the answer
    {"messages": [{"role": "user", "content": "2 + 2?"},         the assistant's messages are the answers
                  {"role": "assistant", "content": "4"}]}

A template converts a message to text: its {role} and {content} are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TEMPLATE = "{role}:\n{content}\n"
"""The default template of a message in a conversation."""

ANSWERING = ("assistant", "model")
"""The roles in a conversation whose messages are answers."""

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


def split_template(template: str) -> tuple[str, str]:
    """Split the template of a message at {content}; return (the text before it, the text after it).

    Raises:
      ValueError: a template without {content}, or with more than one.
    """
    head, *tails = template.split("{content}")
    if len(tails) != 1:
        raise ValueError(f"template {template!r}: say {{content}} once, and {{role}} where it stands: {TEMPLATE!r}")
    return head, tails[0]


def read_records(file: Path, template: str = TEMPLATE) -> Iterator[Record]:
    """Yield the documents of a file of JSON lines, which must all have the same keys. Blank lines are skipped.

    Raises:
      ValueError: an invalid template. After the last record: invalid lines, the first five with their numbers.
    """
    head, tail = split_template(template)
    wrong: list[str] = []
    kind, first = None, 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = _parse(line)
                its_kind = _kind_of(record)
                kind, first = (its_kind, number) if kind is None else (kind, first)
                if its_kind != kind:
                    raise ValueError(f"{_name(its_kind)}, but line {first} has {_name(kind)}; give one kind a file")
                yield _make(its_kind, record, head, tail)._replace(line=number)
            except ValueError as error:
                wrong.append(f"{file} line {number}: {error}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more lines" if len(wrong) > _SHOWN else ""
        raise ValueError(f"data: {'; '.join(wrong[:_SHOWN])}{more}")


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


def _make(kind: str, record: dict[str, Any], head: str, tail: str) -> Record:
    if kind == "text":
        return Record(_text(record["text"], '"text"'))
    if kind == "completion":
        prompt, completion = _text(record["prompt"], '"prompt"'), _text(record["completion"], '"completion"')
        if not completion:
            raise ValueError('"completion" is empty, so that there is nothing to learn; leave the line out')
        return Record(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
    return _make_conversation(record["messages"], head, tail)


def _make_conversation(messages: Any, head: str, tail: str) -> Record:
    """Make the document of a conversation: the text of all messages, and where in it the assistant's answers are.

    `head` and `tail` are the template's text before and after {content}. An answer is the content and the tail.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one {"role": ..., "content": ...}')
    text, answers = "", []
    for number, message in enumerate(messages):
        name = f'"messages"[{number}]'
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f'{name} must be {{"role": ..., "content": ...}}')
        if extra := [key for key, value in message.items() if key not in ("role", "content") and value]:
            raise ValueError(f"{name} has {extra[0]!r}, which no template of {{role}} and {{content}} writes")
        role, content = _text(message["role"], f'{name}["role"]'), _text(message["content"], f'{name}["content"]')
        text += head.replace("{role}", role)
        begin = len(text)
        text += content + tail.replace("{role}", role)
        if role in ANSWERING:
            if not content:
                raise ValueError(f'{name}["content"] is empty, so that there is nothing to learn; leave it out')
            answers.append((begin, len(text)))
    if not answers:
        raise ValueError('no message is of the role "assistant" (or "model"), so that there is nothing to learn')
    return Record(text, tuple(answers))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a character (a lone surrogate), which is no text") from error
    return value
