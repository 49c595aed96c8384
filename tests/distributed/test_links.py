"""Which process is lost: connections that end, hosts that are silent, and what every process says of a host cut off."""

import queue
import re
import signal
import socket
import string
import struct
import subprocess
import sys
import textwrap
import time

import pytest

from jaxshard.distributed import links
from jaxshard.distributed.links import Links, Other, close_links, watch_links
from tests.distributed.network import Network, networks_are_allowed

GONE = ("192.0.2.1", 9)
"""An address at which nobody answers."""


@pytest.fixture
def connected(monkeypatch):
    """Connect this process to others on hosts b, c, ...; return the links, and the sockets at their other ends."""
    monkeypatch.setattr(links, "_INTERVAL", 0.02)
    monkeypatch.setattr(links, "_REACHED_WITHIN", 0.1)
    monkeypatch.setattr(links, "_open", [])
    ends, closing = [], []
    monkeypatch.setattr(links, "call_before_exit", closing.append)

    def connect(count):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ends.extend(socket.create_connection(server.getsockname()) for _ in range(count))
            here = [server.accept()[0] for _ in range(count)]
        others = [Other(number + 1, string.ascii_lowercase[number + 1], GONE) for number in range(count)]
        return Links(dict(zip(here, others, strict=True)), others), ends

    yield connect
    for close in closing:
        close()
    for end in ends:
        end.close()


@pytest.fixture
def silent_for(monkeypatch):
    """{connection: seconds since its host answered}, in place of what the kernel says."""
    seconds = {}
    monkeypatch.setattr(links, "_seconds_since_answer", lambda link: seconds.get(link, 0.0))
    return seconds


def test_a_connection_that_ends_without_a_bye_is_a_process_that_was_killed(connected):
    found, (polite, killed, reset) = connected(3)
    lost = queue.Queue()
    watch_links(found, 20, lost.put)
    polite.sendall(b".")
    polite.close()
    killed.close()
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    losses = lost.get(timeout=60)
    while len(losses) < 2:
        losses += lost.get(timeout=60)
    assert [(loss.name, loss.killed) for loss in sorted(losses)] == [
        ("process 2 (host c)", True),
        ("process 3 (host d)", True),
    ]
    assert lost.empty() and all(loss.why == "ended without a word, as if killed" for loss in losses)


def test_a_process_that_ends_on_purpose_says_bye_on_each_connection(connected):
    found, ends = connected(24)
    watch_links(found, 20, lambda lost: pytest.fail(f"{lost}"))
    close_links()
    for end in ends:
        end.settimeout(60)
        assert end.makefile("rb").read() == b"."


def test_a_host_that_answers_again_is_not_lost(connected, silent_for, capsys):
    found, _ = connected(2)
    first = next(iter(found.open))
    silent_for[first] = 19.0
    watch_links(found, 20, lambda lost: pytest.fail(f"{lost}"))
    said, end = "", time.monotonic() + 60
    while "an answer again" not in said:
        assert time.monotonic() < end, said
        time.sleep(0.02)
        said += capsys.readouterr().err
        silent_for[first] = 0.0 if "no answer" in said else 19.0
    assert said.splitlines() == [
        "jaxshard: no answer from the host of process 1 (host b); all processes end after 20 s of silence",
        "jaxshard: an answer again from the host of process 1 (host b)",
    ]


@pytest.mark.parametrize(
    ("silent", "answer", "blamed"),
    [
        ("b", "cd", "; c answers, but not b: cut off, frozen or without power"),
        ("bc", "d", "; d answers, but not b, c: cut off, frozen or without power"),
        ("bcd", "", "; no other host answers, so this host, a, is cut off"),
    ],
)
def test_all_hosts_that_fell_silent_together_are_lost_and_one_is_blamed(
    connected, silent_for, monkeypatch, silent, answer, blamed
):
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    found, _ = connected(3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = [other._replace(address=server.getsockname()) if other.host in answer else other for other in found[1]]
        for link, other in found.open.items():
            silent_for[link] = 20.5 - 0.01 * other.process if other.host in silent else 0.5
        lost = queue.Queue()
        watch_links(found._replace(known=known), 20, lost.put)
        losses = lost.get(timeout=60)
    assert [loss.name for loss in losses] == [other.name for other in found.known if other.host in silent]
    for loss in losses:
        assert not loss.killed and re.match(r"no answer from its host since \d\d:\d\d:\d\d, for 20 s;", loss.why)
        assert loss.why.endswith(blamed)


@pytest.mark.skipif(sys.platform != "linux", reason="the coordinator's connections are found in /proc")
def test_connections_of_the_coordinator_live_three_times_as_long_as_a_host_may_be_silent(connected):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()) for _ in range(3)]
        first, second, coordinator = (server.accept()[0] for _ in ends)
    waits = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    _, closed_later = connected(0)
    closed_later += [*ends, coordinator]
    watch_links(Links({first: Other(0, "a", GONE)}, []), 20, lambda lost: pytest.fail(f"{lost}"))
    assert coordinator.getsockopt(*waits) == 0, "the coordinator is in process 0"
    watch_links(Links({second: Other(1, "b", GONE)}, []), 20, lambda lost: pytest.fail(f"{lost}"))
    assert coordinator.getsockopt(*waits) == 60_000 and ends[2].getsockopt(*waits) == 0


def test_a_refused_connection_is_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert links._answers(address)
    assert links._answers(address)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says when the other kernel answered")
@pytest.mark.parametrize("timeout", [5, 300])
def test_the_kernel_answers_for_a_process_that_does_nothing(connected, timeout):
    found, _ = connected(1)
    (link,) = found.open
    time.sleep(1.5)  # nothing has been tested so far
    assert links._seconds_since_answer(link) > 1.4
    watch_links(found, timeout, lambda lost: pytest.fail(f"{lost}"))
    most, end = 0.0, time.monotonic() + timeout / 15
    while time.monotonic() < end + 2:
        time.sleep(0.1)
        most = max(most, links._seconds_since_answer(link)) if time.monotonic() > end else 0.0
    assert most < timeout / 2


FORK = """
    import os, socket, sys, time
    from jaxshard.distributed.links import Links, Other, watch_links
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    watch_links(Links({here: Other(1, "b", ("127.0.0.1", 9))}, []), 20, lambda lost: print("lost", lost))
    child = os.fork()
    if child == 0:
        time.sleep(0.5)
        sys.exit(0)
    os.waitpid(child, 0)
    end.settimeout(2.0)
    try:
        print("received", end.recv(1))
    except TimeoutError:
        print("nothing")
"""


@pytest.mark.slow
def test_a_forked_process_that_ends_does_not_end_the_connections_of_its_parent():
    program = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORK)]
    assert subprocess.run(program, capture_output=True, text=True, timeout=200).stdout == "nothing\n"


TRAIN = """
    import os, time
    from pathlib import Path
    import jax
    jax.config.update("jax_num_cpu_devices", 1)
    import numpy as np
    import optax
    import jaxshard as js
    js.distributed.initialize()

    def init_fn(key):
        return {"w": jax.random.normal(key, (8, 8))}

    tx = optax.sgd(0.1)
    layout = js.layout(js.ddp("data"), js.make_mesh(data=-1), init_fn, tx)
    step = js.make_step(lambda params, batch, key: ((batch["x"] @ params["w"]) ** 2).mean(), tx, layout)

    def batches():
        while True:
            time.sleep(0.1)
            yield {"x": np.ones((jax.process_count(), 8), np.float32)}

    def tell(number, run):
        Path(os.environ["STEP"]).write_text(str(number))

    steps = int(os.environ["STEPS"])
    run = js.fit(js.init(init_fn, tx, layout, 0), step, batches(), steps=steps, on_run=[tell])
    print("done", int(run.step))
"""


class Training:
    """Three processes that train, each on a host of its own."""

    def __init__(self, network, folder, steps, timeout):
        self.folder, self.network = folder, network
        there = {"STEPS": str(steps), "JAXSHARD_HEARTBEAT_TIMEOUT": str(timeout), "GLOO_SOCKET_IFNAME": "eth0"}
        self.programs = [
            network.start(
                host, textwrap.dedent(TRAIN), folder / f"out{host}", STEP=str(folder / f"step{host}"), **there
            )
            for host in range(3)
        ]
        self.wait_for_step(3)

    def wait_for_step(self, number):
        end = time.monotonic() + 200
        while self.step() < number:
            assert time.monotonic() < end and all(program.poll() is None for program in self.programs), self.said()
            time.sleep(0.1)

    def step(self):
        try:
            return int((self.folder / "step0").read_text() or 0)
        except OSError:
            return 0

    def said(self):
        return [(self.folder / f"out{host}").read_text() for host in range(3)]

    def ended(self):
        """Return (exit status, what it printed) of each process, and the seconds until the last one ended."""
        begun = time.monotonic()
        statuses = [program.wait(200) for program in self.programs]
        return list(zip(statuses, self.said(), strict=True)), time.monotonic() - begun


@pytest.fixture
def training(tmp_path):
    """Start a training on three hosts."""
    if not networks_are_allowed():
        pytest.skip("needs network namespaces, which root may make on Linux")
    with Network(tmp_path, 3) as network:
        yield lambda steps=10_000, timeout=6: Training(network, tmp_path, steps, timeout)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_every_process_names_the_host_that_is_cut_off_and_ends_with_75(victim, training):
    run = training()
    run.network.cut(victim)
    ended, seconds = run.ended()
    assert [status for status, _ in ended] == [75] * 3, ended
    assert 5 < seconds < 32, "JAX aborts the processes after 32 s at the earliest"
    for host, (_, said) in enumerate(ended):
        assert "client.h" not in said, "JAX aborted it"
        assert "this process ends with status 75, because another one failed" in said
        assert re.search(r"\(host node\d\): no answer from its host since \d\d:\d\d:\d\d, for [67] s; ", said)
        if host == victim:
            assert f"no other host answers, so this host, node{victim}, is cut off" in said
        else:
            assert f"process {victim} (host node{victim}): no answer from its host" in said
            assert f"answers, but not node{victim}: cut off, frozen or without power" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "stop"])
def test_a_short_cut_and_a_stopped_process_are_survived(how, training):
    run = training(steps=40)
    if how == "cut":
        run.network.cut(1)
        time.sleep(4.0)
        run.network.heal(1)
    else:
        run.programs[1].send_signal(signal.SIGSTOP)
        time.sleep(12.0)  # longer than the limit, but its host answers
        run.programs[1].send_signal(signal.SIGCONT)
    ended, _ = run.ended()
    assert [status for status, _ in ended] == [0] * 3, ended
    assert all("done 40" in said and "ends with status" not in said for _, said in ended)
    assert ("an answer again" in ended[0][1]) == (how == "cut")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_that_was_killed_is_named(victim, training):
    run = training()
    run.programs[victim].kill()
    ended, _ = run.ended()
    assert ended[victim][0] == -signal.SIGKILL
    for host in {0, 1, 2} - {victim}:
        status, said = ended[host]
        assert status == 75, said
        assert f"process {victim} (host node{victim}): ended without a word, as if killed" in said
