"""The pytest plugin `tests.sampling`, run on small test files of its own."""

from collections.abc import Callable

import pytest

from tests.sampling import sample, shard

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


OPTIONS = ("-rA", "-p", "tests.sampling", "-p", "no:xdist", "--assert=plain", "-p", "no:unraisableexception")
"""The last one would collect garbage five times after each run, all of JAX included."""

Run = Callable[..., str]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest with the plugin on a file of the given text, in this process, and returns what it printed."""
    monkeypatch.delenv("JAXSHARD_REQUIRE_TPU", raising=False)
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  tpu\n")

    def run(text: str, *options: str) -> str:
        pytester.makepyfile(test_made=text)
        return str(pytester.runpytest_inprocess(*OPTIONS, *options).stdout)

    return run


def test_a_sample_depends_on_the_names_alone():
    nodeids = [f"tests/test_a.py::test_one[{i}]" for i in range(50)]
    assert sample(nodeids, 5) == sample(nodeids[::-1], 5)
    assert len(sample(nodeids, 5)) == 5
    assert len(sample([*nodeids, "tests/test_b.py::test_new"], 5) & sample(nodeids, 5)) >= 4
    assert sample(nodeids, 99) == set(nodeids)


def test_a_sample_has_a_test_of_every_file_and_a_case_of_every_function_first():
    nodeids = [f"tests/test_{f}.py::test_{n}[{i}]" for f in "abc" for n in range(4) for i in range(9)]
    assert {nodeid.partition("::")[0] for nodeid in sample(nodeids, 3)} == {f"tests/test_{f}.py" for f in "abc"}
    assert len({nodeid.partition("[")[0] for nodeid in sample(nodeids, 12)}) == 12


def test_every_test_is_in_one_shard_and_stays_there_when_others_come():
    nodeids = {f"tests/test_a.py::test_one[{i}]" for i in range(200)}
    shards = [shard(nodeids, index, 5) for index in range(1, 6)]
    assert set.union(*shards) == nodeids and sum(map(len, shards)) == 200
    assert all(20 <= len(part) <= 60 for part in shards)
    assert shard({*nodeids, "tests/test_b.py::test_new"}, 2, 5) & nodeids == shards[1]


def test_only_what_is_selected_is_sampled(run):
    assert "2 passed, 8 deselected" in run(SUITE, "--sample", "2", "-m", "slow")
    assert "3 passed, 7 deselected" in run(SUITE, "--sample", "3")
    assert "10 passed" in run(SUITE)


def test_shards_part_what_is_selected(run):
    outputs = [run(SUITE, "--shard", f"{index}/3", "-m", "slow") for index in (1, 2, 3)]
    passed = [line for output in outputs for line in output.splitlines() if line.startswith("PASSED")]
    assert len(passed) == len(set(passed)) == 9


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b"])
def test_a_shard_that_is_none_is_refused(run, capfd, text):
    run(SUITE, "--shard", text)
    assert f"{text!r} is not I/N with I from 1 to N" in capfd.readouterr().err


def test_what_takes_too_long_is_in_no_sample(run):
    assert "2 passed, 9 deselected" in run(SUITE + HOURS, "--sample", "2")
    assert "10 passed, 1 deselected" in run(SUITE + HOURS, "--sample", "99")


def test_a_skipped_tpu_test_fails_only_where_tpu_is_required(run, monkeypatch):
    assert "3 skipped, 1 xfailed" in run(SKIPS)
    monkeypatch.setenv("JAXSHARD_REQUIRE_TPU", "1")
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in (output := run(SKIPS))
    assert "no libtpu here" in output


@pytest.mark.parametrize("required, expected", [("0", "1 skipped"), ("1", "1 error")])
def test_a_tpu_module_that_skips_itself_is_an_error_where_tpu_is_required(run, monkeypatch, required, expected):
    monkeypatch.setenv("JAXSHARD_REQUIRE_TPU", required)
    assert expected in run(MODULE_SKIP)
