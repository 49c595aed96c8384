"""A pytest plugin that runs a part of the selected tests, the same part every time.

`--sample N` runs N of them, none marked `slow(sampled=False)`: a test of every file before a second test of any, and a
case of every test function before a second case of any. `--shard I/N` runs the I-th of N parts, which are disjoint and
together hold all of them; `tests/run_slow.sh` runs one after another. Under JAXSHARD_REQUIRE_TPU=1 a tpu test that
skips fails.

A test function, or a file by its `pytestmark`, that is marked `fast_cases(N)` has its first N cases in the fast tier;
the others are slow.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import Counter
from collections.abc import Generator, Iterable

import pytest

REQUIRE_TPU = "JAXSHARD_REQUIRE_TPU"
TestReports = Generator[None, pytest.TestReport, pytest.TestReport]
CollectReports = Generator[None, pytest.CollectReport, pytest.CollectReport]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("samples")
    group.addoption("--sample", type=int, metavar="N", help="run only N of the selected tests")
    group.addoption("--shard", type=_parse_shard, metavar="I/N", help="run only part I of N of the selected tests")


_FAST_CASES = pytest.StashKey[Counter[str]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the cases of a function slow that are too many for the fast tier."""
    mark = item.get_closest_marker("fast_cases")
    if mark is None or item.get_closest_marker("slow"):
        return
    seen = item.config.stash.setdefault(_FAST_CASES, Counter())
    function = item.nodeid.partition("[")[0]
    seen[function] += 1
    if seen[function] > mark.args[0]:
        item.add_marker(pytest.mark.slow)


def _parse_shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, as in 3/12")
    return int(index), int(count)


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = {item.nodeid for item in items}
    if part := config.getoption("--shard"):
        kept &= shard(kept, *part)
    if (count := config.getoption("--sample")) is not None:
        eligible = [item.nodeid for item in items if item.nodeid in kept and _is_sampled(item)]
        kept &= sample(eligible, count)
    if dropped := [item for item in items if item.nodeid not in kept]:
        items[:] = [item for item in items if item.nodeid in kept]
        config.hook.pytest_deselected(items=dropped)


def _is_sampled(item: pytest.Item) -> bool:
    slow = item.get_closest_marker("slow")
    return slow is None or slow.kwargs.get("sampled", True)


def shard(nodeids: Iterable[str], index: int, count: int) -> set[str]:
    """Returns the node ids of part `index` (from 1) of `count`: each belongs to one part, whatever the others are."""
    return {nodeid for nodeid in nodeids if int.from_bytes(_digest(nodeid)) % count == index - 1}


def sample(nodeids: Iterable[str], count: int) -> set[str]:
    """Returns `count` of the node ids, by a hash.

    One case of every test function comes before a second case of any, and of these first cases one of every file before
    a second one of any.
    """
    cases: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    turns = []
    for order, nodeid in enumerate(sorted(nodeids, key=_digest)):
        function = nodeid.partition("[")[0]
        file = nodeid.partition("::")[0]
        turns.append((cases[function], tests[file], order, nodeid))
        cases[function] += 1
        tests[file] += cases[function] == 1
    return {turn[-1] for turn in sorted(turns)[:count]}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: after pytest has told an xfail from a skip
def pytest_runtest_makereport(item: pytest.Item) -> TestReports:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _tpu_required() and item.get_closest_marker("tpu"):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> CollectReports:
    report = yield
    # A module that skips itself, by importorskip for example, has no marks to look at: its text tells.
    if report.skipped and _tpu_required() and "mark.tpu" in collector.path.read_text(encoding="utf-8"):
        _fail(report)
    return report


def _tpu_required() -> bool:
    return os.environ.get(REQUIRE_TPU, "") not in ("", "0")


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{REQUIRE_TPU} is set, but this test was skipped ({reason}); install the extra `tpu`"
