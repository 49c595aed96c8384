"""A process that fails says so to those that wait for it, and ends whatever becomes of the store."""

import threading
import time

from jaxshard.distributed import hard_exit as failures
from tests.distributed.store import Store


def test_the_first_report_of_a_process_counts(monkeypatch):
    store = Store()
    monkeypatch.setattr(failures, "coordinator_client", lambda: store)
    for process, why in ((1, "ValueError: wrong"), (1, "it left with status 1"), (2, "killed")):
        monkeypatch.setattr(failures, "process_count_and_id", lambda process=process: (3, process))
        failures.report_failure(why)
    (first, why), (second, _) = failures.list_failures(store)
    assert first.startswith("process 1 (host ") and why == "ValueError: wrong" and second.startswith("process 2")


def test_a_store_that_does_not_answer_keeps_nobody_from_ending(monkeypatch):
    over = threading.Event()

    class Hanging(Store):
        def key_value_set(self, key, value, allow_overwrite=False):
            over.wait(60)

    monkeypatch.setattr(failures, "coordinator_client", Hanging)
    monkeypatch.setattr(failures, "_REPORT_WITHIN", 0.1)
    started = time.monotonic()
    failures.report_failure("it left with status 1")
    assert time.monotonic() - started < 30
    over.set()


def test_one_process_has_nobody_to_tell(monkeypatch):
    monkeypatch.setattr(failures, "coordinator_client", lambda: None)
    failures.report_failure("it left with status 1")
