"""The command `docs/build`: the pages and notebooks of this repository as a site, strictly."""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOST = "github.com"
"""Where most external links lead."""


def main(words: list[str] | None = None) -> int:
    """Build and check the site.

    Returns:
      0, or 1 where a link leads nowhere, a reference is unknown, a name has no example, a notebook failed, a check
      found something, or the search does not find a term of the index; and where external links are to be followed but
      the internet can't be reached.
    """
    flags = _parse(words)
    if flags.linkcheck and (reason := _why_offline()):
        print(f"docs/build: --linkcheck needs the internet: {reason}; leave it out here", file=sys.stderr)
        return 1
    if flags.execute:
        subprocess.run([sys.executable, str(DOCS / "execute_notebooks.py")], cwd=ROOT, check=True)
    from sitetools.sources import term_index, write_sources
    from sitetools.terms import not_found

    folder = flags.work / "source"
    problems = write_sources(folder)
    if flags.check:
        from sitetools.checks import check_texts

        problems += check_texts(ROOT)
    built = [_sphinx(builder, folder, flags.work) for builder in ("html", *["linkcheck"] * flags.linkcheck)]
    problems += not_found(term_index(), flags.work / "html" / "searchindex.js")
    for problem in problems:
        print(f"docs/build: {problem}", file=sys.stderr)
    shutil.rmtree(flags.out, ignore_errors=True)
    shutil.copytree(flags.work / "html", flags.out)
    if any(built) or problems:
        print(f"docs/build: failed; {len(problems)} problems besides Sphinx's warnings", file=sys.stderr)
        return 1
    print(f"docs/build: {len(list(flags.out.rglob('*.html')))} pages in {flags.out}/")
    return 0


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="docs/build", description="Build the site of the documentation, strictly.")
    parser.add_argument("--execute", action="store_true", help="run the notebooks first and store their outputs")
    parser.add_argument("--check", action="store_true", help="check spelling and prose of all pages too")
    parser.add_argument("--linkcheck", action="store_true", help="follow external links too; needs the internet")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the site's folder (site/)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "docs", help="what is kept between builds (build/docs/)"
    )
    return parser.parse_args(words)


def _why_offline() -> str | None:
    """Say why external links can't be followed from here; None where they can."""
    try:
        socket.create_connection((HOST, 443), timeout=10).close()
    except OSError as error:
        return f"{HOST} can't be reached ({error})"
    return None


def _sphinx(builder: str, source: Path, work: Path) -> int:
    """Run Sphinx; warnings are errors, and all of them are shown.

    Only pages that changed are read, but all are written (`-a`). Pages that are not written would keep an old sidebar,
    and Sphinx 9 would leave their entries of the index out of the search.
    """
    strict = ["-W", "--keep-going", "-n", "-q", "-a", "-j", "2"]
    words = [sys.executable, "-m", "sphinx", *strict, "-b", builder, "-c", str(DOCS), "-d", str(work / "doctrees")]
    return subprocess.run([*words, str(source), str(work / builder)], cwd=ROOT, check=False).returncode
