"""Processes, played by threads, meet on a port: late ones, missing ones, twice the same one, strangers, restarts."""

import json
import socket
import threading
import time
from functools import partial

import pytest

import jaxshard as js
from jaxshard.distributed import rendezvous, waiting
from jaxshard.distributed.rendezvous import meet_all
from tests.distributed.launched import free_address
from tests.distributed.store import together

GO = ["go", "", [[0, socket.gethostname(), ["", 0]]]]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PAUSE", 0.05)
    monkeypatch.setattr(waiting, "_TELL", 0.3)


@pytest.fixture
def address():
    return free_address()


def comes(address, process, count, *, after=0.0, limit=60.0, bind=None):
    """A process that comes some time later."""

    def come():
        time.sleep(after)
        for link in meet_all(address, count, process, bind=bind or address, limit=limit).open:
            link.close()

    return come


def hello(process, count, **changed):
    return json.dumps({"process": process, "processes": count, "host": "b", "limit": 60, "waited": 0} | changed) + "\n"


def call(address, line):
    """A connection to process 0, as soon as it listens, that sends a line."""
    host, port = address.split(":")
    end = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((host, int(port)))
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)
    connection.sendall(line if isinstance(line, bytes) else line.encode())
    return connection


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("late", [0, 3, 1])
def test_all_wait_for_a_late_process_and_name_it(late, address, capsys):
    outcomes = together([comes(address, process, 4, after=0.6 * (process == late)) for process in range(4)])
    assert outcomes == [None] * 4
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(f"distributed.initialize: waiting for process {late} of 4" in line for line in lines)
    if late:
        assert len(lines) <= 2, "one process speaks for all"


@pytest.mark.parametrize("bind", [None, "[::]"])
def test_the_port_is_free_again_for_the_next_meeting(bind, address):
    bind = None if bind is None else f"{bind}:{address.split(':')[1]}"
    for _ in range(3):
        assert together([comes(address, process, 2, bind=bind) for process in (1, 0)]) == [None] * 2


def test_a_process_that_never_comes_is_named_by_all_when_the_first_has_waited_long_enough(address):
    coming = [comes(address, 0, 5), comes(address, 1, 5, limit=1), comes(address, 3, 5)]
    outcomes = together(coming)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert isinstance(outcomes[0], js.distributed.MissingProcess) and outcomes[0].exit_status == 75
    text = str(outcomes[0])
    assert text.startswith(
        "distributed.initialize: process 2, process 4 of 5 did not come within 1 s; process 0 (host "
    )
    assert "JAXSHARD_INITIALIZATION_TIMEOUT" in text


def test_a_process_0_that_never_comes_is_named_with_its_address(address, capsys):
    outcomes = together([comes(address, process, 3, limit=0.8) for process in (1, 2)])
    for outcome in outcomes:
        assert isinstance(outcome, js.distributed.MissingProcess)
        assert f"process 0 of 3 did not answer at {address} (Connection refused) within 0.8 s" in str(outcome)
    assert f"waiting for process 0 of 3, which does not answer at {address}" in capsys.readouterr().err


def test_two_processes_with_one_number_are_refused_in_all(address):
    outcomes = together([comes(address, process, 3) for process in (0, 1, 1)])
    assert all(isinstance(outcome, js.distributed.Disagreement) for outcome in outcomes)
    assert "and another one on host" in str(outcomes[0]) and "have one number; give each its own" in str(outcomes[0])


def test_processes_that_count_differently_are_refused_in_all(address):
    outcomes = together([comes(address, 0, 2), comes(address, 1, 3)])
    for outcome in outcomes:
        assert isinstance(outcome, js.distributed.Disagreement)
        assert "was told of 3 processes, process 0 (host" in str(outcome) and "of 2; tell all" in str(outcome)


def test_a_process_that_ends_before_all_are_there_may_come_again(address, capsys):
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(together([comes(address, 0, 3)])))
    thread.start()
    call(address, hello(1, 3)).close()
    said, end = "", time.monotonic() + 60
    while "waiting for process 1 (host b, it came and ended), process 2 of 3" not in said:
        assert time.monotonic() < end, said
        time.sleep(0.05)
        said += capsys.readouterr().err
    with call(address, hello(1, 3)) as again, call(address, hello(2, 3)) as last:
        known = [1, "b", ["127.0.0.1", again.getsockname()[1]]], [2, "b", ["127.0.0.1", last.getsockname()[1]]]
        *start, others = json.loads(again.makefile().readline())
        assert [*start, others[:1]] == GO
        assert len(others) == 2 and others[1] in known, "one process of each host"
    thread.join(60)
    assert outcomes == [None]


def test_a_process_0_that_ends_before_all_are_there_may_come_again(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as first:
        visitor = threading.Thread(target=comes(address, 1, 2))
        visitor.start()
        first.accept()[0].close()
    assert together([comes(address, 0, 2), visitor.join]) == [None, None]


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00", b"\n", b"{}\n", b"[1, 2]\n",
    b"null\n", b"\xff\xfe\n", b"x" * 100_000, b"[" * 4000 + b"\n", hello(2, 2), hello(-1, 2), hello(1, 2, limit=-1),
    hello(1, 2, limit=float("nan")), hello(1, 2, limit="soon"), hello(10**400, 2),
]  # fmt: skip


def test_strangers_disturb_nobody(address):
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(together([comes(address, 0, 2)])))
    thread.start()
    calls = []
    for line in STRANGERS:
        try:
            calls.append(call(address, line))
        except OSError:  # it has hung up
            continue
    half = call(address, hello(1, 2)[:20])
    half.sendall(hello(1, 2)[20:].encode())
    assert json.loads(half.makefile().readline())[:2] == GO[:2]
    thread.join(60)
    assert outcomes == [[None]]
    for connection in [*calls, half]:
        connection.close()


def test_another_program_on_the_port_is_not_taken_for_process_0(address):
    host, port = address.split(":")
    over = threading.Event()

    def other():
        with socket.create_server((host, int(port))) as server:
            server.settimeout(0.1)
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"\x00\x00\x12\x04\n")

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.2)
    with pytest.raises(js.distributed.MissingProcess, match="process 0 of 2 did not answer at"):
        meet_all(address, 2, 1, bind=None, limit=0.5)
    with pytest.raises(js.distributed.MissingProcess, match=f"another program has used the port of {address}"):
        meet_all(address, 2, 0, bind=address, limit=0.5)
    over.set()
    thread.join()


def test_a_port_that_is_released_is_used(address):
    host, port = address.split(":")
    server = socket.create_server((host, int(port)))
    threading.Timer(0.5, server.close).start()
    assert together([comes(address, 0, 2), partial(comes(address, 1, 2, after=0.7))]) == [None, None]


def test_an_address_of_another_host_is_refused():
    with pytest.raises(OSError, match=r"distributed.initialize: can't listen on 192\.0\.2\.1:4711"):
        meet_all("192.0.2.1:4711", 2, 0, bind="192.0.2.1:4711", limit=5)
