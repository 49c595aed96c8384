"""A process that fails says so to the others, which end with its status; and it ends whatever becomes of the store."""

import os
import threading
import time

import pytest

from jaxshard.distributed import failures
from jaxshard.distributed.failures import Failure
from jaxshard.distributed.links import Loss
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
    assert found[1].name.startswith("process 1 (host ") and found[1][1:] == ("ValueError: wrong", 1, False)


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


LOST = Loss(2, "process 2 (host c)", "no answer from its host", killed=False)


def test_all_end_at_once_if_a_host_does_not_answer(play, monkeypatch, capfd):
    left = []
    monkeypatch.setattr(failures, "_INTERVAL", 0.01)
    monkeypatch.setattr(failures, "_GRACE", 1000.0)
    monkeypatch.setattr(os, "_exit", left.append)
    store = Store()
    play(store, 1)
    failures._report_lost(store, [LOST])
    failures._watch(store, 1, 3)
    assert left == [75]
    failures._end_without([LOST._replace(process=0, name="process 0 (host a)")])
    assert left == [75, 75]
    said = "jaxshard: this process ends with status 75, because another one failed\n  - {}: no answer from its host\n"
    assert capfd.readouterr().err == said.format("process 2 (host c)") + said.format("process 0 (host a)")


def test_what_a_process_says_of_itself_counts_more_than_that_it_is_lost(play):
    store = Store()
    play(store, 2)
    failures.report_failure("ValueError: wrong", 1)
    failures._report_lost(store, [LOST, LOST._replace(process=1, killed=True)])
    found = failures.list_failures(store)
    assert found[2][1:] == ("ValueError: wrong", 1, False) and found[1][2:] == (75, False)


def test_an_error_that_follows_from_a_failure_of_another_process_has_its_status(play, capfd):
    store = Store()
    play(store, 1)
    assert failures.explain_by_others() is None
    failures.report_failure("ValueError: my own", 1)
    assert failures.explain_by_others() is None and capfd.readouterr().err == ""
    failures._report_lost(store, [LOST])
    assert failures.explain_by_others() == 75 and "process 2 (host c): no answer" in capfd.readouterr().err
