"""Every Python block of the README and the docs runs, prints what the page shows, and passes the linter.

The blocks of a page run one after the other, as a reader would type them. A text block right behind a Python block is
what it prints; `...` in it stands for anything.
"""

import contextlib
import doctest
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, name_of

README = ROOT / "README.md"
RUNNABLE = [page for page in PAGES if blocks_of(page)]
QUICK_START_LINES = 40
NEEDS = {
    "evaluation": "tokenizers",
    "finetuning": "jinja2",
    "profiling": "libtpu",
    "sweeps": "optuna",
    "torch": "torch",
}
"""The extras that pages show, by their stem."""
QUICK = ("index", "proofs", "schedules", "data", "distributed", "optimizer_memory", "audits", "step_times", "api")
"""Pages whose programs compile quickly; those of the others are slow."""


def test_every_page_has_an_example():
    """The pages of names have theirs by test_name_examples."""
    bare = [str(page.relative_to(ROOT)) for page in PAGES if page not in RUNNABLE]
    assert not bare, f"no Python block on {', '.join(bare)}"


@pytest.mark.parametrize(
    "page",
    [pytest.param(x, marks=[pytest.mark.slow] * (x.stem not in QUICK), id=name_of(x)) for x in RUNNABLE if x != README],
)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(NEEDS.get(page.stem, "jaxshard"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        printed = run(block, page, namespace)
        if block.shown is not None:
            where = f"{page.relative_to(ROOT)}:{block.line}"
            assert matches(block.shown, printed), f"{where} shows\n{block.shown}\nbut prints\n{printed}"


def test_the_quick_start_is_short_and_ends_with_a_loss():
    (block,) = blocks_of(README)
    assert len(block.code.splitlines()) <= QUICK_START_LINES
    printed = run(block, README, {"__name__": "__main__"})
    assert " / data" in printed and "whole:" in printed
    assert np.isfinite(float(printed.split()[-1]))


@pytest.mark.slow
def test_the_quick_start_runs_in_a_fresh_process(tmp_path: Path):
    (block,) = blocks_of(README)
    command = [sys.executable, "-c", block.code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert np.isfinite(float(result.stdout.split()[-1]))


def test_the_blocks_are_written_like_all_code(tmp_path: Path):
    for page in RUNNABLE:
        for number, block in enumerate(blocks_of(page)):
            (tmp_path / f"{name_of(page)}_{number}.py").write_text(block.code)
    config = ["--config", str(ROOT / "pyproject.toml")]
    # Blocks use names of the blocks before them, and imports stand where a reader needs them.
    lint = ["ruff", "check", "--no-cache", *config, "--ignore", "F821,F811,E402", str(tmp_path)]
    style = ["ruff", "format", "--no-cache", *config, "--diff", str(tmp_path)]
    for command in (lint, style):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def run(block: Block, page: Path, namespace: dict[str, object]) -> str:
    """Executes a block in a namespace and returns what it printed; tracebacks show the page and its line."""
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue()


def matches(shown: str, printed: str) -> bool:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown, printed, options)
