"""The messages that the page of troubleshooting quotes as jaxshard's own stand in the package's source."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "troubleshooting.md"
FEWEST = 24
GAP = "\0"
"""Stands for what a message fills in."""


def quoted_messages() -> list[str]:
    """The lines of the text blocks of the first chapter, but for what Python blocks print."""
    chapter = PAGE.read_text(encoding="utf-8").split("\n## ")[1]
    assert chapter.startswith("Messages of jaxshard")
    shown = {block.shown for block in blocks_of(PAGE)}
    blocks = re.findall(r"^```text\n(.*?)^```$", chapter, re.DOTALL | re.MULTILINE)
    return [line for block in blocks if block not in shown for line in block.splitlines()]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text in the source of the package, with gaps where something is filled in."""
    files = (ROOT / "jaxshard").rglob("*.py")
    return [text for file in files for text in texts_of(ast.parse(file.read_text(encoding="utf-8")))]


def texts_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)


def stands_in(message: str, text: str) -> bool:
    """Whether all pieces of a message between its dots stand in a text, in this order."""
    pieces = [piece.strip() for piece in message.split("...") if piece.strip(" ;:,()")]
    end = 0
    for piece in pieces:
        start = text.find(piece, end)
        if start < 0:
            return False
        end = start + len(piece)
    return True


def test_there_are_messages():
    assert len(quoted_messages()) >= FEWEST


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_stands_in_the_source(message: str, texts: list[str]):
    assert any(stands_in(message, text) for text in texts), message
