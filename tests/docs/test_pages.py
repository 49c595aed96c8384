"""The README and the docs: length, links, the commands that newcomers are told to type, and the versions they name."""

import re
import tomllib

from jaxshard.core.compat import NEWEST_TESTED
from tests.docs.pages import PAGES, ROOT

README = ROOT / "README.md"
README_LINES = 160


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= README_LINES


def test_the_newcomer_blocks_are_there():
    text = README.read_text()
    blocks = {
        part: re.search(rf"<!-- newcomer: {part} -->\n+```\w*\n(.+?)```", text, re.DOTALL) for part in ("run", "test")
    }
    assert blocks["run"] and "jaxshard train" in blocks["run"][1]
    assert blocks["test"] and "pytest" in blocks["test"][1]


def test_relative_links_lead_somewhere():
    pages = [*PAGES, ROOT / "CHANGELOG.md", *ROOT.glob("CONTRIBUTING.md"), ROOT / "benchmarks" / "README.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)", page.read_text())]
    relative = [(page, link) for page, link in links if "://" not in link]
    assert relative
    broken = [f"{page.name}: {link}" for page, link in relative if not (page.parent / link).exists()]
    assert not broken, "\n".join(broken)


def test_files_that_pages_name_exist():
    named = [(page, file) for page in PAGES for file in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())]
    assert named
    missing = [f"{page.name}: {file}" for page, file in named if not is_file(file)]
    assert not missing, "\n".join(missing)


def is_file(name: str) -> bool:
    return (ROOT / name).exists() or (ROOT / "jaxshard" / name).exists()


def test_every_page_is_linked_from_the_readme_or_an_index_page():
    hubs = [page for page in PAGES if page == README or page.name == "index.md"]
    linked = {(hub.parent / link).resolve() for hub in hubs for link in re.findall(r"\]\(([^)#]+)", hub.read_text())}
    missing = [str(page.relative_to(ROOT)) for page in PAGES if page != README and page not in linked]
    assert not missing, missing


def test_the_readme_names_the_versions_of_jax_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (found[1] for line in project["dependencies"] if (found := re.match(r"jax>=([\d.]+)", line)))
    newest = ".".join(map(str, NEWEST_TESTED))
    text = " ".join(README.read_text().split())
    assert f"JAX {oldest} on" in text and f"JAX {newest}, the newest" in text
