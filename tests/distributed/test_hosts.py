"""Who reaches whom, and with which clock."""

import json
import socket
import textwrap
import threading

import pytest

from jaxshard.distributed import hosts
from jaxshard.distributed.hosts import answers, own_address, survey
from tests.distributed.network import Network, networks_are_allowed
from tests.distributed.store import Store, members, together


def test_one_process_is_alone():
    (host,) = survey({"cores": 2})
    assert host == (0, socket.gethostname(), own_address("192.0.2.1"), 0.0, (), {"cores": 2})


def test_a_port_answers_if_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        assert answers(place)
    assert not answers(place)


def test_the_own_address_is_that_on_the_network_of_the_other_host():
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
    assert own_address("127.0.0.7") == "127.0.0.1"  # no interface's own, and no default route's
    assert own_address("there.is.no.such.host.invalid") == "127.0.0.1"


@pytest.mark.parametrize(
    ("towards", "expected"),
    [
        # The coordinator's host knows its own name by a loopback address.
        (
            {"node0": ["127.0.1.1", "127.0.1.1", "10.0.0.2"], "10.0.0.2": ["10.0.0.1"] * 2},
            ["10.0.0.1", "10.0.0.1", "10.0.0.2"],
        ),
        ({"node0": ["10.0.0.1", "10.0.0.1", "10.0.0.2"]}, ["10.0.0.1", "10.0.0.1", "10.0.0.2"]),
        ({"node0": ["127.0.0.1"] * 3}, ["127.0.0.1"] * 3),
    ],
)
def test_all_take_their_address_towards_another_host(towards, expected, monkeypatch):
    store, here = Store(), threading.local()
    monkeypatch.setattr(hosts, "coordinator_address", lambda: "node0:8476")
    monkeypatch.setattr(hosts, "own_address", lambda other: towards[other][here.process])

    def address(peers, process):
        here.process = process
        return hosts.common_address(peers, store, process)

    calls = [
        lambda peers=peers, number=number: address(peers, number) for number, peers in enumerate(members(3, store))
    ]
    assert together(calls) == expected


SURVEY = """
    import json
    import jaxshard as js
    from jaxshard.distributed.hosts import survey
    js.distributed.initialize()
    print(json.dumps([(host.address, host.unreached) for host in survey({})]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not networks_are_allowed(), reason="needs network namespaces, which root may make on Linux")
def test_hosts_without_a_default_route_reach_each_other(tmp_path):
    with Network(tmp_path, 2) as network:
        programs = [network.start(host, textwrap.dedent(SURVEY), tmp_path / f"out{host}") for host in range(2)]
        statuses = [program.wait(200) for program in programs]
    for status, said in zip(statuses, [(tmp_path / f"out{host}").read_text() for host in range(2)], strict=True):
        assert status == 0 and json.loads(said.splitlines()[-1]) == [["10.77.0.1", []], ["10.77.0.2", []]], said
