"""Every row of the table in "From PyTorch FSDP2 and DTensor" runs on both sides, and does what the row says."""

import re
from pathlib import Path

import pytest

from tests.docs.fsdp2_ours import OURS, SLOW
from tests.docs.fsdp2_theirs import NOT_TORCH, THEIRS, process_group
from tests.docs.pages import ROOT

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PAGE = ROOT / "docs" / "coming_from" / "fsdp2.md"
COMPILED = [pytest.param(row, marks=[pytest.mark.slow] * (row in SLOW)) for row in OURS]


def test_every_row_of_the_page_has_a_pair():
    terms = PAGE.read_text().split("## Terms")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", terms, re.MULTILINE)[1:]
    assert len(rows) == len(set(rows)) > 20
    assert set(rows) == set(OURS)
    assert set(rows) == set(THEIRS) | NOT_TORCH and not NOT_TORCH & set(THEIRS)


@pytest.mark.parametrize("row", COMPILED)
def test_our_side_of_a_row(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    OURS[row]()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_their_side_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A name that torch renames is found by the row that has it."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    failed = {}
    with process_group():
        for row, run in THEIRS.items():
            try:
                run()
            except Exception as error:  # all rows are tried, so that one run shows every name that changed
                failed[row] = repr(error)
    assert not failed, "\n".join(f"{row}: {error}" for row, error in failed.items())
