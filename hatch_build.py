"""Build hook: the README with absolute links, since a page of a package index has no files beside it."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

FILES = "https://github.com/jaxshard/jaxshard/blob/main/"
PICTURES = "https://raw.githubusercontent.com/jaxshard/jaxshard/main/"


class AbsoluteLinks(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Set the text that the package index shows."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text)}


def with_absolute_links(text: str) -> str:
    """Return Markdown whose relative links lead to files of the repository, and whose pictures come from there."""
    text = re.sub(r"\]\((?!https?:|#)", f"]({FILES}", text)
    return re.sub(r'\b(src|srcset)="(?!https?:)', rf'\1="{PICTURES}', text)
