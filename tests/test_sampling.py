"""The pytest plugin `tests.sampling`, run on small test files of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import sample

ROOT = Path(__file__).parent.parent

SUITE = """
import pytest

def test_fast(): pass

@pytest.mark.slow
@pytest.mark.parametrize("i", range(8))
def test_many(i): pass

@pytest.mark.slow
def test_single(): pass
"""

HOURS = """
import pytest

@pytest.mark.slow(sampled=False)
def test_hours(): pass
"""

SKIPS = """
import pytest

@pytest.mark.tpu
def test_calls_skip(): pytest.skip("no libtpu here")

@pytest.mark.tpu
@pytest.mark.skipif(True, reason="no libtpu here")
def test_skipif(): pass

@pytest.mark.tpu
@pytest.mark.xfail(strict=True)
def test_xfail(): assert not "xfail"

def test_other(): pytest.skip("no torch here")
"""

MODULE_SKIP = """
import pytest
pytest.importorskip("no_such_module")
pytestmark = pytest.mark.tpu

def test_one(): pass
"""


def run_pytest(folder: Path, text: str, *options: str, **environment: str) -> str:
    (folder / "test_made.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  tpu\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "tests.sampling", "-p", "no:cacheprovider", *options]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "JAXSHARD_"))}
    done = subprocess.run(
        command, cwd=folder, env=outside | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, text=True
    )
    return done.stdout


def test_a_sample_is_the_same_every_time_and_another_with_another_seed():
    nodeids = [f"tests/test_a.py::test_one[{i}]" for i in range(50)]
    assert sample(nodeids, 5) == sample(nodeids[::-1], 5)
    assert len(sample(nodeids, 5)) == 5
    assert sample(nodeids, 5) != sample(nodeids, 5, "another")
    assert sample(nodeids, 99) == set(nodeids)


def test_every_function_comes_before_a_second_case_of_any():
    nodeids = [f"test_a.py::test_many[{i}]" for i in range(50)] + ["test_a.py::test_b", "test_b.py::test_b[0]"]
    functions = {nodeid.partition("[")[0] for nodeid in sample(nodeids, 3)}
    assert functions == {"test_a.py::test_many", "test_a.py::test_b", "test_b.py::test_b"}


def test_only_what_is_selected_is_sampled(tmp_path):
    assert "2 passed, 8 deselected" in run_pytest(tmp_path, SUITE, "--sample", "2", "-m", "slow")
    assert "3 passed, 7 deselected" in run_pytest(tmp_path, SUITE, "--sample", "3")
    assert "10 passed" in run_pytest(tmp_path, SUITE)


def test_what_takes_too_long_is_in_no_sample(tmp_path):
    assert "2 passed, 9 deselected" in run_pytest(tmp_path, SUITE + HOURS, "--sample", "2")
    assert "10 passed, 1 deselected" in run_pytest(tmp_path, SUITE + HOURS, "--sample", "99")


def test_a_skipped_tpu_test_fails_only_where_tpu_is_required(tmp_path):
    assert "3 skipped, 1 xfailed" in run_pytest(tmp_path, SKIPS)
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in (
        output := run_pytest(tmp_path, SKIPS, JAXSHARD_REQUIRE_TPU="1")
    )
    assert "no libtpu here" in output


@pytest.mark.parametrize("required, expected", [("0", "1 skipped"), ("1", "1 error")])
def test_a_tpu_module_that_skips_itself_is_an_error_where_tpu_is_required(tmp_path, required, expected):
    assert expected in run_pytest(tmp_path, MODULE_SKIP, JAXSHARD_REQUIRE_TPU=required)
