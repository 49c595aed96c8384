"""Links as a Git host follows them, relative between files, translated into links of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

REPOSITORY = "https://github.com/jaxshard/jaxshard"

_PARTS = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|\]\((?P<target>[^)\s]+)\)"
    r"|(?P<picture><picture>.*?</picture>)",
    re.DOTALL | re.MULTILINE,
)


class Site:
    """The pages of a site, to which links are translated; `problems` collects those that lead nowhere."""

    def __init__(self, root: Path, pages: dict[str, str]):
        self.root = root
        self.pages = pages
        self.problems: list[str] = []

    def translate(self, text: str, file: str) -> str:
        """Translate the links of a file of the repository into those of its page; code is left as it is."""

        def link(found: re.Match[str]) -> str:
            if found["code"]:
                return found[0]
            if found["picture"]:
                return self._picture(found["picture"], file)
            return f"]({self.target(found['target'], file)})"

        return _PARTS.sub(link, text)

    def target(self, target: str, file: str) -> str:
        """Return the target of a link in the site: another page, or a file of the repository on its Git host."""
        address, hash_sign, anchor = target.partition("#")
        if not address:
            return target
        path = self._own_path(address, file)
        if path is None:
            return target
        if not (self.root / path).exists():
            self.problems.append(f"{file}: the link {target} leads to {path}, which is not there")
            return target
        path = self._index_of(path)
        here = PurePosixPath(self.pages[file]).parent
        if path in self.pages:
            return os.path.relpath(self.pages[path], here) + hash_sign + anchor
        if path.startswith("docs/pictures/"):
            return os.path.relpath(path.removeprefix("docs/"), here)
        kind = "tree" if (self.root / path).is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{path}{hash_sign}{anchor}"

    def _own_path(self, address: str, file: str) -> str | None:
        """The file of the repository that an address means, or None for an address elsewhere."""
        found = re.fullmatch(re.escape(REPOSITORY) + r"/(?:blob|tree)/main/(.+)", address)
        if found:
            return os.path.normpath(found[1])
        if re.match(r"[a-z]+:", address):
            return None
        return os.path.normpath(PurePosixPath(file).parent / address)

    def _index_of(self, path: str) -> str:
        names = (f"{path}/index.md", f"{path}/README.md")
        return next((name for name in names if name in self.pages), path)

    def _picture(self, html: str, file: str) -> str:
        """A picture for light and one for dark, as the theme shows them: by what the reader chose in the page."""
        dark = re.search(r'<source[^>]*prefers-color-scheme: *dark[^>]*srcset="([^"]+)"', html)
        dark = dark or re.search(r'<source[^>]*srcset="([^"]+)"[^>]*prefers-color-scheme: *dark', html)
        light = re.search(r'<img[^>]*src="([^"]+)"', html)
        alt = re.search(r'alt="([^"]*)"', html)
        if not dark or not light or not alt:
            self.problems.append(f"{file}: a <picture> needs a dark <source srcset> and an <img> with src and alt")
            return html
        pictures = (("light", light[1]), ("dark", dark[1]))
        return "\n".join(
            f"```{{image}} {self.target(source, file)}\n:class: only-{scheme}\n:alt: {alt[1]}\n```"
            for scheme, source in pictures
        )
