"""Processes, played by threads around a dictionary, find out how they differ before they compute together."""

import re
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.commands import main
from jaxshard.distributed import agree, failures, waiting
from jaxshard.distributed.agree import Peers, all_peers, peers_of
from tests.distributed.store import Store, members, together


def agreed(peers, facts, point="js.init"):
    """What each process got from agreeing, with the facts of each."""
    return together([partial(member.agree, point, mine) for member, mine in zip(peers, facts, strict=True)])


VALUES = st.sampled_from(["", "8", "16", "one\ntwo", "one\n" * 400, "one\n" * 399 + "two\n", "x" * 1200])
FACTS = st.dictionaries(st.sampled_from(["seed", "mesh", "batch x", "program"]), VALUES, max_size=3)


@settings(deadline=None, max_examples=60)
@given(base=FACTS, changes=st.lists(st.one_of(st.just({}), FACTS), min_size=2, max_size=3))
def test_all_processes_raise_the_same_or_none_does(base, changes):
    facts = [base, *(base | change for change in changes)]
    outcomes = agreed(members(len(facts)), facts)
    differing = [number for number, mine in enumerate(facts) if mine != base]
    if not differing:
        assert outcomes == [None] * len(facts)
        return
    assert all(isinstance(outcome, js.distributed.Disagreement) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    for number in range(1, len(facts)):
        name = f"process {number} (host {'abcd'[number]})"
        assert (name in str(outcomes[0])) == (number in differing)
    for number in differing:
        short = {item for item in facts[number] if facts[number][item] != base.get(item)}
        assert any(f" {item} " in str(outcomes[0]) for item in short)


def test_a_difference_is_named_with_both_values_and_those_who_share_it():
    facts = [
        {"batch x": "float32[8]"},
        {"batch x": "float32[16]"},
        {"batch x": "float32[8]"},
        {"batch x": "float32[16]"},
    ]
    error = str(agreed(members(4), facts)[2])
    assert "js.init: the processes differ" in error
    assert error.endswith(
        "\n  - process 1 (host b), process 3 (host d): batch x float32[16], process 0 (host a): float32[8]"
    )


def test_a_process_at_another_point_is_told_so_and_nothing_else():
    peers = members(2)
    outcomes = together([lambda: peers[0].agree("js.init", {"seed": "0"}), lambda: peers[1].agree("js.restore", {})])
    for outcome in outcomes:
        assert str(outcome).count("\n") == 1
        assert str(outcome).endswith("process 1 (host b): call js.restore, process 0 (host a): js.init")


def test_points_are_counted_and_forgotten():
    peers = members(3)
    for number in range(5):
        assert agreed(peers, [{"seed": "0", "layout": "a\nb"}] * 3, f"point {number}") == [None] * 3
    assert len([key for key in peers[0].store.notes if "/agree/" in key]) <= 20
    assert together([partial(member.meet, "here") for member in peers]) == [None] * 3
    # After a difference they go on together.
    assert all(agreed(peers, [{"seed": "0"}, {"seed": "0"}, {"seed": "1"}]))
    assert agreed(peers, [{"seed": "0"}] * 3) == [None] * 3


def test_a_late_process_is_waited_for_and_named_by_one(monkeypatch, capsys):
    monkeypatch.setattr(agree, "_LOOK_UP", 0.05)
    monkeypatch.setattr(waiting, "_TELL", 0.2)
    peers = members(4)

    def late():
        time.sleep(1.0)
        peers[2].agree("js.init", {})

    others = [partial(peers[number].agree, "js.init", {}) for number in (0, 1, 3)]
    assert together([*others, late]) == [None] * 4
    lines = capsys.readouterr().err.splitlines()
    assert lines and all("js.init: waiting for process 2 (host c) since" in line for line in lines), lines

    # A first process that is late is named by the next one.
    def last():
        time.sleep(0.5)
        peers[0].meet("js.save")

    assert together([last, *(partial(member.meet, "js.save") for member in peers[1:])]) == [None] * 4
    lines = capsys.readouterr().err.splitlines()
    assert lines and all("js.save: waiting for process 0 (host a) since" in line for line in lines), lines


def test_nobody_waits_for_a_process_that_has_failed(monkeypatch):
    monkeypatch.setattr(agree, "_LOOK_UP", 0.05)
    peers = members(3)
    monkeypatch.setattr(failures, "coordinator_client", lambda: peers[0].store)
    monkeypatch.setattr(failures, "process_count_and_id", lambda: (3, 1))
    failures.report_failure("FileNotFoundError: data.bin", 3)
    failures.report_failure("it left with status 1", 1)
    for outcome in together([partial(peers[number].agree, "js.init", {}) for number in (0, 2)]):
        assert isinstance(outcome, js.distributed.MissingProcess) and outcome.exit_status == 3
        assert "js.init: waited in vain" in str(outcome)
        assert re.search(r"process 1 \(host \S+\): FileNotFoundError: data.bin$", str(outcome))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (js.distributed.Disagreement("js.init: the processes differ"), 2),
        (js.distributed.MissingProcess("js.init: waited in vain", 1), 1),
        (js.distributed.MissingProcess("distributed.initialize: process 1 did not come"), 75),
    ],
)
def test_commands_tell_what_is_wrong_between_processes_in_a_line(error, status, monkeypatch, capsys):
    def doctor(flags) -> None:
        raise error

    monkeypatch.setattr(main, "runner_of", lambda name: doctor)
    assert main.main(["doctor"]) == status
    assert capsys.readouterr().err == f"jaxshard: {error}\n"


def test_an_error_of_the_store_is_no_late_process():
    class Gone(Store):
        def blocking_key_value_get(self, key, timeout_in_ms):
            raise RuntimeError("UNAVAILABLE: failed to connect")

    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        Peers(Gone(), 1, range(2), "b").meet("js.init")


def test_many_processes_are_counted():
    facts = [{"seed": "0"}] + [{"seed": "1"}] * 11
    assert "process 8 (host i) and 3 more: seed 1, process 0 (host a): 0" in str(agreed(members(12), facts)[0])


def test_one_process_has_no_peers():
    assert peers_of(js.make_mesh(data=8)) is None and all_peers() is None
