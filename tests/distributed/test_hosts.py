"""Who reaches whom, and with which clock."""

import socket

from jaxshard.distributed.hosts import answers, own_address, survey


def test_one_process_is_alone():
    (host,) = survey({"cores": 2})
    assert host == (0, socket.gethostname(), own_address(), 0.0, (), {"cores": 2})


def test_a_port_answers_if_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        assert answers(place)
    assert not answers(place)
