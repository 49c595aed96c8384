"""A process that fails says so to the others, which end with its status; and it ends whatever becomes of the store."""

import os
import threading
import time

import pytest

from jaxshard.distributed import failures
from jaxshard.distributed.failures import Failure
from tests.distributed.store import Store


@pytest.fixture
def play(monkeypatch):
    """Play one of several processes around a store."""

    def played(store, process, count=3):
        monkeypatch.setattr(failures, "coordinator_client", lambda: store)
        monkeypatch.setattr(failures, "process_count_and_id", lambda: (count, process))
        monkeypatch.setattr(failures, "_closed", threading.Event())

    return played


def test_the_first_report_of_a_process_counts(play):
    store = Store()
    for process, why, status in ((1, "ValueError: wrong", 1), (1, "it left with status 1", 3), (2, "killed", 2)):
        play(store, process)
        failures.report_failure(why, status)
    found = failures.list_failures(store)
    assert found.keys() == {1, 2}
    assert found[1].name.startswith("process 1 (host ") and found[1][1:] == ("ValueError: wrong", 1)


def test_wrong_flags_of_one_process_are_the_status_of_all():
    def status(*statuses):
        return failures.common_status([Failure("process", "why", one) for one in statuses])

    assert (status(1), status(75, 2, 1), status(1, 75)) == (1, 2, 75)


def test_a_store_that_does_not_answer_keeps_nobody_from_ending(play, monkeypatch):
    over = threading.Event()

    class Hanging(Store):
        def key_value_set(self, key, value, allow_overwrite=False):
            over.wait(60)

    play(Hanging(), 1)
    monkeypatch.setattr(failures, "_STORE_WITHIN", 0.1)
    started = time.monotonic()
    failures.report_failure("it left with status 1", 1)
    failures.part()
    assert time.monotonic() - started < 30
    over.set()


def test_process_0_leaves_after_those_that_answer(play, monkeypatch):
    monkeypatch.setattr(failures, "_INTERVAL", 0.1)
    monkeypatch.setattr(failures, "_ANSWER", 0.1)
    store = Store()
    play(store, 0)
    # Process 1 takes its time, process 2 was killed and answers nothing.
    store.key_value_set("jaxshard/parting/0", "heard")
    store.key_value_set("jaxshard/parting/1", "heard")
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (failures.part(), ended.set()))
    thread.start()
    assert not ended.wait(1.0)
    store.key_value_set("jaxshard/parting/1", "left", allow_overwrite=True)
    thread.join(60)
    assert ended.is_set()


def test_a_process_ends_some_time_after_another_failed(play, monkeypatch, capfd):
    left = []
    monkeypatch.setattr(failures, "_INTERVAL", 0.01)
    monkeypatch.setattr(failures, "_GRACE", 0.1)
    monkeypatch.setattr(os, "_exit", left.append)
    store = Store()
    play(store, 1)
    failures.report_failure("FileNotFoundError: data.bin", 2)
    play(store, 2)
    failures._watch(store, 2, 3)
    assert left == [2] and store.notes["jaxshard/parting/2"] == "left"
    error = capfd.readouterr().err
    assert error.startswith(
        "jaxshard: this process ends with status 2, because another one failed\n  - process 1 (host "
    )
    assert error.endswith("): FileNotFoundError: data.bin\n")


def test_a_process_that_ends_by_itself_is_not_ended(play, monkeypatch):
    monkeypatch.setattr(failures, "_INTERVAL", 0.01)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("it was ended"))
    store = Store()
    play(store, 1)
    failures.report_failure("FileNotFoundError: data.bin", 2)
    play(store, 2)
    thread = threading.Thread(target=failures._watch, args=(store, 2, 3))
    thread.start()
    assert store.blocking_key_value_get("jaxshard/parting/2", 60_000) == "heard"
    failures.part()
    thread.join(60)
    assert not thread.is_alive() and store.notes["jaxshard/parting/2"] == "left"
