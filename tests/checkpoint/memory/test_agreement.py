"""Which step several processes go on from, what each finds and what it lacks; processes are threads here."""

import threading

import numpy as np
import pytest

from jaxshard.checkpoint.checksums import Damaged
from jaxshard.checkpoint.memory import agreement
from jaxshard.checkpoint.memory.agreement import recall
from jaxshard.checkpoint.memory.segment import Header, Record, create_segment
from tests.distributed.store import together

NEEDED = [{"a", "c"}, {"b", "c"}, {"a", "c"}, {"b", "c"}]
"""Processes 0 and 2 are replicas, and so are 1 and 3; all hold c."""


@pytest.fixture
def gathered(monkeypatch):
    """Texts of four threads reach all of them."""
    texts, barrier, mine = {}, threading.Barrier(4), threading.local()

    def gather_texts(text, point):
        texts[mine.number] = text
        barrier.wait(20)
        found = [texts[number] for number in range(4)]
        barrier.wait(20)
        return found

    monkeypatch.setattr(agreement, "gather_texts", gather_texts)
    return mine


class Machines:
    """Four processes, each with a folder of its own."""

    def __init__(self, root, mine):
        self.mine = mine
        self.segments = []
        for number, names in enumerate(NEEDED):
            folder = root / str(number)
            folder.mkdir()
            sizes = dict.fromkeys(sorted(names), 64)
            self.segments.append(create_segment(folder / f"process-{number}", Header({}, {}, sizes)))

    def save(self, number, step, run="r", saves=2):
        names = sorted(NEEDED[number])
        data = [np.full(64, 16 * step + ord(name) % 16, np.uint8) for name in names]
        self.segments[number].write(step % 2, Record(run, step, saves, f"at {step}", []), data)

    def lose(self, number, step, name=None):
        """Damage a block of a process, or all that it has of a step."""
        slot, segment = step % 2, self.segments[number]
        if name is None:
            segment.clear(slot)
        else:
            segment._slot(slot)[segment._places[segment._names[name]]] ^= 1

    def recall(self):
        def of(number):
            def call():
                self.mine.number = number
                return recall([self.segments[number]], NEEDED.__getitem__, number)

            return call

        return together([of(number) for number in range(4)])


@pytest.fixture
def machines(tmp_path, gathered):
    return Machines(tmp_path, gathered)


def test_a_process_that_did_not_write_the_newest_step_gets_it_from_its_replica(machines):
    for number, step in [(number, step) for number in range(4) for step in (5, 6, 7)]:
        if (number, step) != (1, 7):
            machines.save(number, step)
    machines.lose(2, 6), machines.lose(2, 7)
    found = machines.recall()
    assert {one.step for one in found} == {7} and {one.data for one in found} == {"at 7"}
    assert found[0].missing == [frozenset(), frozenset("bc"), frozenset("ac"), frozenset()]
    assert found[0].holders == {"a": 0, "b": 3, "c": 0}
    assert found[3].found.keys() == set("bc") and not found[1].found and (found[3].found["b"] == 114).all()


def test_without_any_copy_of_the_newest_step_it_is_the_one_before(machines):
    for number in range(4):
        for step in (5, 6, 7):
            if number % 2 == 0 or step < 7:
                machines.save(number, step)
    found = machines.recall()
    assert {one.step for one in found} == {6} and not any(names for one in found for names in one.missing)


def test_a_damaged_block_alone_is_fetched(machines):
    for number in range(4):
        machines.save(number, 6), machines.save(number, 7)
    machines.lose(1, 7, "b")
    found = machines.recall()
    assert {one.step for one in found} == {7} and found[1].found.keys() == {"c"}
    assert found[0].missing == [frozenset(), frozenset("b"), frozenset(), frozenset()] and found[0].holders == {"b": 3}
    assert found[1].damaged == {machines.segments[1].file} and "step 7: other bytes" in found[1].notes[0]


def test_what_nobody_has_is_named(machines):
    for number in range(4):
        machines.save(number, 6), machines.save(number, 7)
    for number in (1, 3):
        machines.lose(number, 7, "b"), machines.lose(number, 6)
    for error in machines.recall():
        assert isinstance(error, Damaged) and "step 7: b" in str(error) and "step 6: b" in str(error)


def test_steps_of_two_runs_are_refused_by_name(machines):
    for number in range(4):
        machines.save(number, 6, run="one" if number else "two")
    for error in machines.recall():
        assert isinstance(error, ValueError) and "run one: step 6 in process-1" in str(error)
        assert "run two: step 6 in process-0" in str(error)


def test_a_first_save_that_was_cut_off_is_no_loss(machines):
    assert machines.recall() == [None] * 4
    machines.save(0, 1, saves=1)
    assert machines.recall() == [None] * 4
