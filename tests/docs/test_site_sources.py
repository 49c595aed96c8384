"""The sources of the site: links of a Git host become links of the site, docstrings become pages, all are checked."""

import re
from pathlib import Path

import pytest
from sitetools.checks import Text, check_conventions, without_code
from sitetools.docstring import markdown, sections_of
from sitetools.links import REPOSITORY, Site
from sitetools.sources import Source, contents
from sitetools.terms import anchor_of

from tests.docs.pages import ROOT


@pytest.fixture
def site(tmp_path: Path) -> Site:
    for file in (
        "docs/index.md",
        "docs/guides/index.md",
        "docs/guides/loops.md",
        "benchmarks/README.md",
        "examples/nnx.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    pages = {"docs/index.md": "index.md", "docs/guides/index.md": "guides/index.md"}
    pages |= {"docs/guides/loops.md": "guides/loops.md", "benchmarks/README.md": "records/benchmarks.md"}
    return Site(tmp_path, pages)


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("../index.md", "../index.md"),
        ("index.md#a-b", "index.md#a-b"),
        ("#a-b", "#a-b"),
        ("../../benchmarks/README.md#x", "../records/benchmarks.md#x"),
        ("../../benchmarks", "../records/benchmarks.md"),
        ("../../examples/nnx.py", f"{REPOSITORY}/blob/main/examples/nnx.py"),
        ("../../examples", f"{REPOSITORY}/tree/main/examples"),
        (f"{REPOSITORY}/blob/main/docs/index.md", "../index.md"),
        ("https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_a_link_leads_to_the_page_or_to_the_repository(site: Site, link: str, becomes: str):
    assert site.translate(f"[`a`]({link}) `[b]({link})`", "docs/guides/loops.md") == f"[`a`]({becomes}) `[b]({link})`"
    assert not site.problems


def test_a_link_that_leads_nowhere_is_a_problem(site: Site):
    site.translate("[a](none.md)\n```python\n[b](other.md)\n```\n", "docs/guides/loops.md")
    assert site.problems == ["docs/guides/loops.md: the link none.md leads to docs/guides/none.md, which is not there"]


DOCSTRING = """Split rows.

A paragraph with `code`.

Args:
  axis: a mesh axis,
    or several.
  a, b: sizes.

Example:
    >>> 1 + 1
    2
"""


def test_a_docstring_becomes_markdown():
    prose, arguments, example = sections_of(DOCSTRING)
    assert prose.text == "Split rows.\n\nA paragraph with `code`."
    assert markdown(arguments) == "- **`axis`**: a mesh axis,\n  or several.\n- **`a`**, **`b`**: sizes."
    assert markdown(example) == "```pycon\n>>> 1 + 1\n2\n```"


def test_praise_and_odd_headings_are_found():
    text = Text("a.md", "# A seamless start.\n\n`simply` is code, simply is not\n\n```\nblazing\n```\n")
    assert [problem.split(":")[1] for problem in check_conventions(text)] == ["1", "1", "3"]
    assert without_code("a\n```\nb\n```\nc").splitlines() == ["a", "   ", " ", "   ", "c"]


GUIDES = """# Guides

## Models

- [B](b.md): two.
- [A](a.md): one.

## Runs

- [C](c.md): three.
"""


def test_headings_over_links_are_the_groups_of_the_sidebar(tmp_path: Path):
    top = "# Top\n\n## Learn\n\n- [Guides](guides/index.md): all.\n\n## Records\n\n- [Claims](claims.md): some.\n"
    texts = {"index.md": top, "claims.md": "", "guides/index.md": GUIDES}
    texts |= {f"guides/{name}.md": "" for name in "abcd"}
    for page, text in texts.items():
        (tmp_path / "docs" / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / page).write_text(text)
    site = Site(tmp_path, {f"docs/{page}": page for page in texts})
    pages = [Source(file, page) for file, page in site.pages.items()]
    first, guides = (contents(Source(f"docs/{page}", page), pages, site) for page in ("index.md", "guides/index.md"))
    trees = re.findall(r"```{toctree}\n:hidden:\n(?::caption: (\w+)\n)?\n(.*?)\n```", first, re.DOTALL)
    assert [(caption, tree.split()) for caption, tree in trees] == [
        ("Learn", ["/guides/index.md"]),
        ("Models", ["/guides/b.md", "/guides/a.md"]),
        ("Runs", ["/guides/c.md"]),
        ("", ["/guides/d.md"]),
        ("Records", ["/claims.md"]),
    ]
    assert guides == ""


def test_the_look_names_the_page_whose_messages_wrap():
    title = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("\n")[0]
    assert f"#{anchor_of(title.removeprefix('# '))} " in (ROOT / "docs" / "_static" / "site.css").read_text(
        encoding="utf-8"
    )
