"""Records on their way to a service: no step waits, what can be sent is sent, and failures are said."""

import threading

import pytest

from jaxshard.training.metrics import background
from jaxshard.training.metrics.background import Background
from tests.training.metrics.records import record


class Service:
    """A service in memory; `down` makes every call fail, and `gate` makes sending wait."""

    name = "a service"

    def __init__(self, *, down=None):
        self.down, self.opened, self.sent, self.ends = down, 0, [], []
        self.gate = threading.Event()
        self.gate.set()
        self.has_sent = threading.Event()

    def open(self):
        self._answer()
        self.opened += 1

    def send(self, records):
        self.gate.wait()
        self._answer()
        self.sent += [one.step for one in records]
        self.has_sent.set()

    def close(self, end):
        self._answer()
        self.ends.append(end)

    def _answer(self):
        if self.down is not None:
            raise self.down


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch):
    monkeypatch.setattr(background, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(background, "_LONGEST_DELAY", 0.01)


def test_records_are_sent_in_order_while_the_caller_goes_on():
    service = Service()
    service.gate.clear()
    write = Background(service)
    for step in (1, 2, 3):
        write(record(step))  # returns although nothing is sent
    assert service.opened == 1 and service.sent == []
    service.gate.set()
    write.finish(None)
    assert service.sent == [1, 2, 3] and service.ends == ["finished"]


@pytest.mark.parametrize(("error", "end"), [(ValueError(), "failed"), (KeyboardInterrupt(), "killed")])
def test_the_end_says_what_ended_the_training(error, end):
    service = Service()
    with pytest.raises(type(error)), Background(service) as write:
        write(record(1))
        raise error
    assert service.ends == [end]
    write.finish(None)
    assert service.ends == [end]  # ended already


def test_a_service_that_fails_and_answers_again_gets_all_records_and_the_caller_one_warning():
    service = Service(down=ConnectionError("no route"))
    with pytest.warns(RuntimeWarning, match="a service: ConnectionError: no route. The training goes on") as said:
        write = Background(service)
        write(record(1))
        write(record(2))
    assert len(said) == 1
    service.down = None
    assert service.has_sent.wait(60)
    write.finish(None)
    assert service.sent == [1, 2] and service.ends == ["finished"]


def test_a_service_that_hangs_does_not_hold_up_the_end():
    service = Service()
    service.gate.clear()
    write = Background(service, patience=0.1)
    write(record(1))
    with pytest.warns(RuntimeWarning, match="1 records were not sent: it did not answer within 0.1 s"):
        write.finish(None)
    service.gate.set()


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(background, "MOST_KEPT", 2)
    service = Service()
    service.gate.clear()
    write = Background(service)
    for step in (1, 2, 3):
        write(record(step))
    service.gate.set()
    with pytest.warns(RuntimeWarning, match="1 records were not sent"):
        write.finish(None)
    assert service.sent == [1, 2]


def test_of_several_processes_the_first_writes(monkeypatch):
    monkeypatch.setattr(background, "process_count_and_id", lambda: (2, 1))
    service = Service()
    write = Background(service)
    write(record(1))
    write.finish(None)
    assert (service.opened, service.sent, service.ends) == (0, [], [])
