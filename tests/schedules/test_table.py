"""Tables that can't run are refused, and the operation that is at fault is named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.schedules import Op, Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from tests.schedules.tables import runs, schedules


def remade(schedule, ops):
    return Schedule("mine", schedule.stages, schedule.microbatches, schedule.chunks, tuple(ops))


def refusal(schedule, ops):
    with pytest.raises(ValueError, match="the schedule 'mine' can't run:\n  - ") as error:
        remade(schedule, ops)
    return str(error.value).split("\n  - ")[1:]


def name(op):
    return f"{op.kind} of micro-batch {op.microbatch}, chunk {op.chunk}, device {op.device}"


small = schedules(p=4, v=2, m=6)


@given(schedule=small, data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_table_is_accepted_if_and_only_if_it_runs(schedule, data):
    """Judged by a machine of its own, after up to three changes of any field."""
    ops = list(schedule.ops)
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(ops) - 1))
        change = data.draw(st.sampled_from(["tick", "device", "chunk", "microbatch", "kind", "swap"]))
        if change == "swap":
            j = data.draw(st.integers(0, len(ops) - 1))
            ops[i], ops[j] = ops[i]._replace(tick=ops[j].tick), ops[j]._replace(tick=ops[i].tick)
        elif change == "kind":
            ops[i] = ops[i]._replace(kind=data.draw(st.sampled_from("FBW")))
        else:
            ops[i] = ops[i]._replace(**{change: max(0, getattr(ops[i], change) + data.draw(st.integers(-2, 2)))})
    try:
        remade(schedule, ops)
    except ValueError:
        accepted = False
    else:
        accepted = True
    assert accepted == runs(ops, schedule.stages, schedule.microbatches, schedule.chunks)


def test_all_problems_are_collected():
    schedule = one_f_one_b(2, 2)
    ops = {(op.kind, op.device, op.microbatch): op for op in schedule.ops}
    del ops["F", 0, 1]
    ops["B", 1, 0] = ops["B", 1, 0]._replace(tick=0)
    ops["B", 0, 1] = ops["B", 0, 1]._replace(device=2)
    assert refusal(schedule, ops.values()) == [
        "B of micro-batch 1, chunk 0, device 2 at tick 4: there is no device 2, only 0 to 1",
        "B of micro-batch 0, chunk 0, device 1 at tick 0 is premature: it needs F of micro-batch 0, chunk 0, device 1 "
        "at tick 1; move it to tick 1 or later",
        "F of micro-batch 1, chunk 0, device 0 is missing",
        "B of micro-batch 1, chunk 0, device 0 is missing",
    ]


def test_one_operation_of_a_kind_fits_into_a_tick_of_a_device():
    schedule = gpipe(1, 2)
    ops = [op._replace(tick=0) if op.kind == "F" else op for op in schedule.ops]
    found = refusal(schedule, ops)
    assert found[0] == (
        "F of micro-batch 1, chunk 0, device 0 at tick 0: the device has another F in that tick, of micro-batch 0 and "
        "chunk 0; one of a kind fits"
    )


def test_empty_ticks_are_refused():
    schedule = gpipe(2, 2)
    assert refusal(schedule, [op._replace(tick=op.tick + 3) for op in schedule.ops]) == [
        "ticks 0 to 2 hold no operation; number the ticks without gaps from 0"
    ]
    assert refusal(schedule, [op._replace(tick=op.tick - 1) for op in schedule.ops]) == [
        "F of micro-batch 0, chunk 0, device 0 at tick -1: the tick is below 0",
        "F of micro-batch 0, chunk 0, device 0 is missing",
    ]


def test_a_weight_gradient_for_some_asks_for_all():
    schedule = zero_bubble(2, 2, chunks=1)
    ops = [op for op in schedule.ops if op.kind != "W" or op.device == 0]
    assert refusal(schedule, ops) == [f"W of micro-batch {i}, chunk 0, device 1 is missing" for i in range(2)]
    early = [op._replace(tick=0) if op.kind == "W" and op.microbatch == op.device == 0 else op for op in schedule.ops]
    assert "is premature: it needs B of micro-batch 0, chunk 0, device 0" in refusal(schedule, early)[0]


def test_long_lists_are_cut_and_huge_sizes_take_no_time():
    found = refusal(Schedule("a", 1, 1, 1, gpipe(1, 1).ops), gpipe(30, 1).ops)
    assert len(found) == 21 and found[-1].startswith("and ")
    with pytest.raises(ValueError, match="and 1999999999999999978 more") as error:
        Schedule("mine", 10**9, 10**9, 1, (Op(0, 0, "F", 0, 0), Op(0, 0, "B", 0, 0)))
    assert len(str(error.value)) < 3000


def test_entries_in_any_order_and_of_any_integer_type():
    schedule = interleaved(2, 3)
    entries = [(np.int32(t), np.int64(d), k, c, np.uint8(i)) for t, d, k, c, i in reversed(schedule.ops)]
    made = Schedule("interleaved", 2, 3, 2, entries)
    assert made == schedule and hash(made) == hash(schedule)
    assert all(type(number) is int for op in made.ops for number in (op.tick, op.device, op.chunk, op.microbatch))
    slots = [(op.tick, "FBW".index(op.kind), op.device) for op in made.ops]
    assert slots == sorted(slots)


@pytest.mark.parametrize("entry", [3, (0, 0, "F", 0), (0.0, 0, "F", 0, 0), "abcde", None])
def test_entries_that_are_no_operations_are_refused(entry):
    with pytest.raises(TypeError, match=r"is no operation; give \(tick, device, kind, chunk, microbatch\)"):
        Schedule("mine", 1, 1, 1, (*gpipe(1, 1).ops, entry))


def test_kinds_and_names():
    with pytest.raises(ValueError, match="the kind of an operation is F, B or W, got 'X'"):
        Schedule("mine", 1, 1, 1, ((0, 0, "X", 0, 0),))
    for bad in ("", "two\nlines", " padded", 3):
        with pytest.raises(ValueError, match="the name of a schedule must be one line of text"):
            Schedule(bad, 1, 1, 1, gpipe(1, 1).ops)
    assert refusal(gpipe(1, 1), ()) == [f"{kind} of micro-batch 0, chunk 0, device 0 is missing" for kind in "FB"]
