"""A plugin: `--sample N` runs N of the selected tests, none marked `slow(sampled=False)`, a case of every test function
before a second one of any; under JAXSHARD_REQUIRE_TPU=1 a tpu test that skips fails.
"""

from __future__ import annotations

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
    group.addoption("--sample-seed", default="", metavar="TEXT", help="every text draws another sample")


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count = config.getoption("--sample")
    if count is None:
        return
    eligible = [item.nodeid for item in items if _is_sampled(item)]
    kept = sample(eligible, count, config.getoption("--sample-seed"))
    dropped = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    config.hook.pytest_deselected(items=dropped)


def _is_sampled(item: pytest.Item) -> bool:
    slow = item.get_closest_marker("slow")
    return slow is None or slow.kwargs.get("sampled", True)


def sample(nodeids: Iterable[str], count: int, seed: str = "") -> set[str]:
    """`count` of the node ids, by a hash: one case of every test function before a second case of any."""
    drawn = sorted(nodeids, key=lambda nodeid: hashlib.sha256(f"{seed}\n{nodeid}".encode()).digest())
    seen: Counter[str] = Counter()
    turns = []
    for order, nodeid in enumerate(drawn):
        function = nodeid.partition("[")[0]
        turns.append((seen[function], order, nodeid))
        seen[function] += 1
    return {nodeid for _, _, nodeid in sorted(turns)[:count]}


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
