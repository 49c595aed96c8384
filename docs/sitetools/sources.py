"""The pages of the site: which file of the repository becomes which page, laid out in a folder that Sphinx reads."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sitetools.command_page import with_help
from sitetools.links import Site
from sitetools.name_pages import name_pages
from sitetools.terms import TERMS, Row, rows, with_entries

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "benchmarks/README.md": "records/benchmarks.md",
    "CHANGELOG.md": "records/changes.md",
    "CONTRIBUTING.md": "records/contributing.md",
}
"""Pages of the site that don't live in docs/."""

COPIED = ("pictures", "_static")


class Source(NamedTuple):
    """A file of the repository and the page of the site that it becomes, both relative."""

    file: str
    page: str


class Group(NamedTuple):
    """Pages that stand together in the sidebar, under a caption."""

    caption: str
    pages: list[str]


def sources(root: Path = ROOT) -> list[Source]:
    """List every file that becomes a page."""
    pages = [
        Source(str(path.relative_to(root)), _page_of(path, root)) for path in sorted((root / "docs").rglob("*.md"))
    ]
    pages += [Source(str(path.relative_to(root)), f"tutorials/{path.name}") for path in _notebooks(root)]
    pages += [Source(file, page) for file, page in ELSEWHERE.items() if (root / file).exists()]
    return pages


def write_sources(folder: Path, root: Path = ROOT) -> list[str]:
    """Write all pages where Sphinx reads them, those of public names and of commands included.

    Files that would not change are left alone, so that Sphinx reads only what did.

    Args:
      folder: where to; what else is in it is deleted.
      root: the repository.

    Returns:
      Return a line for each error in the sources, such as a link that leads nowhere.
    """
    pages = sources(root)
    site = Site(root, {source.file: source.page for source in pages})
    texts = dict(_texts(pages, site, root))
    problems = list(dict.fromkeys(site.problems))
    for page, text in name_pages(problems):
        texts[page] = text
    for page, text in texts.items():
        _write(folder / page, text)
    for name in COPIED:
        _copy(root / "docs" / name, folder / name)
    for path in sorted(folder.rglob("*")):
        if (
            path.is_file()
            and str(path.relative_to(folder)) not in texts
            and path.relative_to(folder).parts[0] not in COPIED
        ):
            path.unlink()
    return problems


def term_index(root: Path = ROOT) -> list[Row]:
    """Read the index of terms, with the pages of the site that its rows lead to."""
    if not (root / TERMS).exists():
        return []
    pages = {source.file: source.page for source in sources(root)}
    text = Site(root, pages).translate((root / TERMS).read_text(encoding="utf-8"), TERMS)
    return rows(text, pages[TERMS])


def _texts(pages: list[Source], site: Site, root: Path) -> Iterator[tuple[str, str]]:
    index = term_index(root)
    for source in pages:
        text = (root / source.file).read_text(encoding="utf-8")
        if source.page.endswith(".ipynb"):
            yield source.page, _notebook(text, source, site)
            continue
        text = with_entries(site.translate(text, source.file), source.page, index)
        if Path(source.page).name == "index.md":
            text += contents(source, pages, site)
        if source.page == "reference/cli.md":
            text = with_help(text)
        yield source.page, text


def _notebook(text: str, source: Source, site: Site) -> str:
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        failed = [output["ename"] for output in cell.get("outputs", ()) if output["output_type"] == "error"]
        if failed:
            site.problems.append(f"{source.file}: a cell ends with {failed[0]}")
        if cell["cell_type"] == "markdown":
            cell["source"] = site.translate("".join(cell["source"]), source.file)
    return json.dumps(notebook)


def contents(index: Source, pages: list[Source], site: Site) -> str:
    """Make the tables of contents of an index page; their captions are the groups of the sidebar.

    The theme shows the captions of the first page alone. So an index page that has groups of its own hands them to it.
    """
    groups = _groups(index, pages, site)
    if index.page == "index.md":
        groups = [group for own in groups for group in (own, *_handed_on(own, pages, site))]
    elif _is_grouped(groups):
        return ""
    return "".join(_toctree(group) for group in groups)


def _handed_on(group: Group, pages: list[Source], site: Site) -> Iterator[Group]:
    """The groups of those index pages in a group that have several."""
    for index in (source for source in pages if source.page in group.pages and source.page.endswith("/index.md")):
        if _is_grouped(groups := _groups(index, pages, site)):
            yield from groups


def _is_grouped(groups: list[Group]) -> bool:
    return len(groups) > 1


def _groups(index: Source, pages: list[Source], site: Site) -> list[Group]:
    """The pages below an index page, by the heading over their links and in their order; those without a link last."""
    folder = Path(index.page).parent
    below = {
        source.page
        for source in pages
        if source != index and folder in Path(source.page).parents and _owner(source.page, pages) == index.page
    }
    found: dict[str, list[str]] = {}
    heading = ""
    for line in site.translate((site.root / index.file).read_text(encoding="utf-8"), index.file).splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        link = re.match(r"(?:-|\d+\.) \[[^\]]+\]\(([^)#]+)", line)
        page = os.path.normpath(folder / link[1]) if link else ""
        if page in below:
            below.remove(page)
            found.setdefault(heading, []).append(page)
    if below:
        found.setdefault("", []).extend(sorted(below))
    return [Group(heading, names) for heading, names in found.items()]


def _toctree(group: Group) -> str:
    entries = "\n".join(f"/{page}" for page in group.pages)
    caption = f":caption: {group.caption}\n" if group.caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{caption}\n{entries}\n```\n"


def _owner(page: str, pages: list[Source]) -> str:
    """The index page that has a page in its table of contents: the nearest one above it."""
    names = {source.page for source in pages}
    path = Path(page)
    folders = list(path.parents)[1:] if path.name == "index.md" else path.parents
    return next(str(folder / "index.md") for folder in folders if str(folder / "index.md") in names)


def _page_of(path: Path, root: Path) -> str:
    page = path.relative_to(root / "docs")
    return str(page.with_name("index.md") if page.name == "README.md" else page)


def _notebooks(root: Path) -> list[Path]:
    return sorted((root / "notebooks").glob("*.ipynb"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _copy(folder: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    if folder.exists():
        shutil.copytree(folder, to)
