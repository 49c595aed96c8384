"""The pages of the documentation, and the Python blocks in them with the output that they show."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A Python block of a page, the line where it begins, and the text block right behind it, if there is one."""

    code: str
    line: int
    shown: str | None


def name_of(page: Path) -> str:
    """A page by its folder and stem, such as guides_models."""
    return "_".join(page.relative_to(ROOT).with_suffix("").parts).removeprefix("docs_")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["code"], text[: found.start("code")].count("\n") + 1, found["shown"])
        for found in _BLOCK.finditer(text)
    ]
