"""A plugin: `--slow-sample N` runs N of the slow tests; under JAXSHARD_REQUIRE_TPU=1 a tpu test that skips fails."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Generator

import pytest

REQUIRE_TPU = "JAXSHARD_REQUIRE_TPU"
TestReports = Generator[None, pytest.TestReport, pytest.TestReport]
CollectReports = Generator[None, pytest.CollectReport, pytest.CollectReport]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption("--slow-sample", type=int, metavar="N", help="run only N of the selected slow tests")
    group.addoption("--slow-seed", default="", metavar="TEXT", help="every text draws another sample")


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count = config.getoption("--slow-sample")
    if count is None:
        return
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    kept = sample(slow, count, config.getoption("--slow-seed"))
    dropped = [item for item in items if item.get_closest_marker("slow") and item.nodeid not in kept]
    items[:] = [item for item in items if item not in set(dropped)]
    config.hook.pytest_deselected(items=dropped)


def sample(nodeids: list[str], count: int, seed: str = "") -> set[str]:
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
