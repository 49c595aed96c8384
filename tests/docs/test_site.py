"""The site as a whole: built strictly from stored outputs, and wrong in no link, reference, name, word or notebook."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

NEEDS = ("sphinx", "myst_nb", "furo", "harper", "codespell_lib")


@pytest.fixture(autouse=True)
def docs_extra() -> None:
    for package in NEEDS:
        pytest.importorskip(package, reason="needs the extra `docs`")


def build(root: Path, work: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "docs" / "build"), "--work", str(work), "--out", str(work / "site"), *flags]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow(sampled=False)
def test_the_site_builds_strictly_and_its_links_lead_somewhere(tmp_path: Path):
    result = build(ROOT, tmp_path, "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    site = tmp_path / "site"
    assert (site / "reference" / "names" / "js.fsdp.html").exists() and (site / "searchindex.js").exists()
    broken = []
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    for page, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            address, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or page.name in ("search.html", "genindex.html"):
                continue
            target = (page.parent / address.partition("?")[0]).resolve() if address else page
            if not target.exists() or (anchor and target in pages and f'id="{anchor}"' not in pages[target]):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken[:20])


@pytest.mark.slow(sampled=False)
def test_what_is_wrong_is_named(tmp_path: Path):
    root = tmp_path / "copy"
    folders = ("docs", "notebooks", "benchmarks", "jaxshard", "examples")
    for folder in folders:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, root / file)
    page = root / "docs" / "guides" / "loops.md"
    page.write_text(page.read_text() + "\n[a](none.md) [b](data.md#nowhere) `js.nonesuch` and a seemless sentense.\n")
    result = build(root, tmp_path / "work", "--check")
    said = result.stdout + result.stderr
    assert result.returncode == 1
    wrong = ("the link none.md leads to", "nowhere", "unknown name js.nonesuch", "'seemless'", "'sentense'")
    assert not [word for word in wrong if word not in said], said
