"""The page of claims: what it quotes stands in the README, and its commands name what exists."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from jaxshard.commands.main import COMMANDS
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "claims.md"
README = ROOT / "README.md"
FEWEST = 15


def claims() -> dict[str, list[str]]:
    """The quoted sentences of the page, each with the commands below it."""
    parts = re.split(r"^((?:> .*\n)+)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    quotes = [" ".join(part.replace("\n> ", " ").removeprefix("> ").split()) for part in parts[::2]]
    # The text behind a quote, up to the next heading.
    texts = [part.split("\n#")[0] for part in parts[1::2]]
    return {quote: re.findall(r"^    (\S.*)$", text, re.MULTILINE) for quote, text in zip(quotes, texts, strict=True)}


CLAIMS = claims()
TESTED = [command for commands in CLAIMS.values() for command in commands if command.startswith("pytest")]
OTHERS = [command for commands in CLAIMS.values() for command in commands if not command.startswith("pytest")]


def test_every_claim_has_a_command():
    assert len(CLAIMS) >= FEWEST
    assert not [claim for claim, commands in CLAIMS.items() if not commands]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_still_stands_in_the_readme(claim: str):
    assert claim in " ".join(README.read_text(encoding="utf-8").split())


def test_what_the_readme_prints_in_bold_is_on_the_page():
    bold = re.findall(r"^- \*\*(.+?)\.\*\*", README.read_text(encoding="utf-8"), re.MULTILINE)
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert bold and not set(bold) - set(headings)


@pytest.mark.parametrize("command", TESTED)
def test_a_command_names_tests_that_exist(command: str):
    paths, wanted = paths_of(command), names_wanted(command)
    assert paths and all(path.exists() for path in paths)
    tests = {name for path in paths for name in names_in(path)}
    missing = [part for part in wanted if not any(part in test for test in tests)]
    assert tests and not missing


def test_a_command_without_marks_names_tests_of_the_fast_tier(request: pytest.FixtureRequest):
    """Read from the tests that this run has collected, if they are all of the fast tier."""
    config = request.config
    narrowed = config.option.keyword or config.getoption("--sample") is not None or config.getoption("--shard")
    if narrowed or config.args != config.getini("testpaths") or config.option.markexpr != "not slow":
        pytest.skip("needs the whole fast tier")
    missing = [
        (command, part)
        for command in TESTED
        if "-m" not in shlex.split(command)
        for part in names_wanted(command) or [""]
        if not any(part in item.name and is_below(item.path, paths_of(command)) for item in request.session.items)
    ]
    assert not missing


def paths_of(command: str) -> list[Path]:
    return [ROOT / word for word in shlex.split(command) if word.startswith("tests/")]


def names_wanted(command: str) -> list[str]:
    """The parts of names that -k lists."""
    words = shlex.split(command)
    return words[words.index("-k") + 1].split(" or ") if "-k" in words else []


def is_below(path: Path, folders: list[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def names_in(path: Path) -> set[str]:
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return {node.name for tree in trees for node in tree.body if getattr(node, "name", "").startswith("test_")}


@pytest.mark.parametrize("command", OTHERS)
def test_any_other_command_exists(command: str):
    program, what, *_ = command.split()
    assert (what in COMMANDS) if program == "jaxshard" else (program == "bash" and (ROOT / what).exists())
