"""A plugin: `--slow-sample N` runs N of the slow tests, none marked `slow(sampled=False)`; `--cases N` at most N cases
of every test function; under JAXSHARD_REQUIRE_TPU=1 a tpu test that skips fails.
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
    group = parser.getgroup("slow tests")
    group.addoption("--slow-sample", type=int, metavar="N", help="run only N of the selected slow tests")
    group.addoption("--slow-seed", default="", metavar="TEXT", help="every text draws another sample, and other cases")
    group.addoption("--cases", type=int, metavar="N", help="run at most N cases of every test function")


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count, most, seed = (config.getoption(name) for name in ("--slow-sample", "--cases", "--slow-seed"))
    kept = {item.nodeid for item in items}
    if count is not None:
        slow = {item.nodeid: marker for item in items if (marker := item.get_closest_marker("slow"))}
        sampled = [nodeid for nodeid, marker in slow.items() if marker.kwargs.get("sampled", True)]
        kept = (kept - set(slow)) | sample(sampled, count, seed)
    if most is not None:
        kept = cases(kept, most, seed)
    dropped = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def sample(nodeids: Iterable[str], count: int, seed: str = "") -> set[str]:
    """`count` of the node ids, by a hash: one case of every test function before a second case of any."""
    return {nodeid for _, _, nodeid in sorted(_drawn(nodeids, seed))[:count]}


def cases(nodeids: Iterable[str], most: int, seed: str = "") -> set[str]:
    """At most so many cases of every test function, by a hash."""
    return {nodeid for turn, _, nodeid in _drawn(nodeids, seed) if turn < most}


def _drawn(nodeids: Iterable[str], seed: str) -> list[tuple[int, int, str]]:
    """(how many cases of its function were drawn before, place, node id), in the order of a hash."""
    drawn = sorted(nodeids, key=lambda nodeid: hashlib.sha256(f"{seed}\n{nodeid}".encode()).digest())
    seen: Counter[str] = Counter()
    turns = []
    for order, nodeid in enumerate(drawn):
        function = nodeid.partition("[")[0]
        turns.append((seen[function], order, nodeid))
        seen[function] += 1
    return turns


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
