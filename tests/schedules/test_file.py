"""CSV files of schedules: what was written is read, and whatever else is in a file is accepted only if it runs."""

import csv
import io
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxshard.schedules import Schedule, gpipe, interleaved, zero_bubble
from tests.schedules.tables import runs, schedules

HEADER = "tick,device,op,chunk,microbatch\n"
SMALL = HEADER + "0,0,F,0,0\n0,0,B,0,0\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("schedules") / "mine.csv"


def read(file, content):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Schedule.from_csv(file)


def refusal(file, content):
    with pytest.raises(ValueError, match=re.escape(f"{file} is no schedule: ")[:-2]) as error:
        read(file, content)
    return str(error.value)


@given(schedule=schedules(p=4, v=3, m=8), name=st.text(min_size=1).filter(lambda x: x.isprintable() and x.strip() == x))
@settings(max_examples=16, deadline=None)
def test_what_was_written_is_read(file, schedule, name):
    renamed = Schedule(name, schedule.stages, schedule.microbatches, schedule.chunks, schedule.ops)
    renamed.to_csv(file)
    assert Schedule.from_csv(str(file)) == renamed
    bare = file.read_text(encoding="utf-8").partition("\n")[2]
    assert bare.startswith(HEADER)
    without = read(file, bare)
    assert without.name == "mine" and without.ops == schedule.ops
    assert (without.stages, without.microbatches, without.chunks) == (
        renamed.stages,
        renamed.microbatches,
        renamed.chunks,
    )


@pytest.mark.parametrize(
    "text",
    [
        SMALL,
        SMALL.replace("\n", "\r\n"),
        "\ufeff" + SMALL,
        SMALL.replace(",", " , "),
        "\n" + SMALL.replace("\n", "\n\n"),
        SMALL.replace("op", '"op"').replace("F", '"F"'),
        HEADER + "0,0,B,0,0\n00,0,F,0,0",
        "#\n" + SMALL,
        "# stages=1\n" + SMALL,
        "#chunks=1 stages=1   microbatches=1 name=mine\r\n" + SMALL,
    ],
)
def test_what_spreadsheets_make_of_a_file_is_read(file, text):
    assert read(file, text) == Schedule("mine", 1, 1, 1, gpipe(1, 1).ops).__class__(
        "mine", 1, 1, 1, [(0, 0, "F", 0, 0), (0, 0, "B", 0, 0)]
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no operation in it; each is a line tick,device,op,chunk,microbatch"),
        (
            "0,0,F,0,0\n0,0,B,0,0\n",
            "line 1: expected the column names tick,device,op,chunk,microbatch, got '0,0,F,0,0'",
        ),
        (SMALL.replace("op", "kind"), "line 1: expected the column names"),
        (SMALL + "1,0,F,0\n", "line 4: expected the 5 fields tick,device,op,chunk,microbatch, got '1,0,F,0'"),
        (SMALL + "1,0,f,0,1\n", "line 4: op must be F, B or W, got '1,0,f,0,1'"),
        (SMALL + "-1,0,F,0,1\n", "line 4: tick must be a whole number from 0 to 999999999, got '-1,0,F,0,1'"),
        (SMALL + "1,0,F,0,\u0661\n", "line 4: microbatch must be a whole number"),
        (SMALL + "1,0,F,0," + "1" * 5000 + "\n", "line 4: microbatch must be a whole number"),
        (SMALL + "1,0,F,0,0\n", "line 4: F of micro-batch 0, chunk 0, device 0 at tick 1 is doubled"),
        (SMALL + "1,0,F,0,1\n0,0,B,0,1", "line 5: B of micro-batch 1, chunk 0, device 0 at tick 0 is premature"),
        (SMALL.replace("0,0,F,0,0\n", ""), "- F of micro-batch 0, chunk 0, device 0 is missing"),
        (SMALL + '1,0,"F,0,0\n', "line 4: unexpected end of data"),
        (SMALL + "1" * 200_000, "line 4: field larger than field limit"),
        (SMALL.encode() + b"\n\xff", "line 5 is not UTF-8 text"),
        ("# stages=2\n" + SMALL, "- F of micro-batch 0, chunk 0, device 1 is missing"),
        ("# chunks=1 microbatches=1\n" + HEADER + "0,0,F,1,0\n", "line 3: F of micro-batch 0, chunk 1"),
        ("# stages=0\n" + SMALL, "line 1: 'stages=0' is no size; write # stages=4 microbatches=8 chunks=2 name=NAME"),
        ("# stage=1\n" + SMALL, "line 1: 'stage=1' is no size"),
        ("# a remark\n" + SMALL, "line 1: 'a' is no size"),
        ("# name=\n" + SMALL, "line 1: the name '' is not one line of text"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(file, text, problem):
    message = refusal(file, text)
    assert problem in message and len(message) < 1000


def test_all_bad_lines_are_collected(file):
    message = refusal(file, SMALL + "x\n0,0,F\n" + "y\n" * 30)
    assert [int(line) for line in re.findall(r"- line (\d+):", message)] == list(range(4, 24))
    assert message.endswith("\n  - and 12 more")


def test_huge_sizes_are_refused_at_once(file):
    assert "and 1999999995999999980 more" in refusal(file, "# microbatches=999999999 stages=999999999\n" + SMALL)
    message = refusal(file, SMALL + "999999999,999999999,W,999999999,999999999\n")
    assert "ticks 1 to 999999998 hold no operation" in message or " more" in message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        Schedule.from_csv(tmp_path / "none.csv")


def check_accepted(schedule, content):
    """The operations are those that a plain reader finds, and they run."""
    text = content.decode("utf-8-sig")
    lines = text.split("\n")[1:] if text.startswith("#") else text.split("\n")
    rows = [row for row in csv.reader(io.StringIO("\n".join(lines), newline="")) if any(map(str.strip, row))][1:]
    ops = [(int(t), int(d), k.strip(), int(c), int(i)) for t, d, k, c, i in rows]
    assert sorted(schedule.ops) == sorted(ops)
    assert runs(ops, schedule.stages, schedule.microbatches, schedule.chunks)


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@example(b"#\n" + SMALL.encode())
@example(SMALL.encode() + b"\x00")
@example(HEADER.encode() + b'"0\n",0,F,0,0\n0,0,B,0,0\n')
@example(SMALL.replace("\n", "\r").encode())
@example("\ufeff# stages=1\n".encode() + SMALL.encode())
@settings(max_examples=60, deadline=None)
def test_any_bytes(file, content):
    """Nothing but a ValueError that names the file, or a schedule that is what the file says."""
    try:
        schedule = read(file, content)
    except ValueError as error:
        assert str(error).startswith(f"{file} is no schedule:") and len(str(error)) < 5000
        assert " line " in str(error) or " missing" in str(error) or " no operation" in str(error)
    else:
        check_accepted(schedule, content)


def test_the_file_of_a_schedule_is_plain(tmp_path):
    zero_bubble(1, 1, chunks=1).to_csv(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == (
        "# stages=1 microbatches=1 chunks=1 name=zero_bubble\n" + HEADER + "0,0,F,0,0\n0,0,B,0,0\n0,0,W,0,0\n"
    )
    interleaved(2, 4).to_csv(str(tmp_path / "b.csv"))
    assert Schedule.from_csv(tmp_path / "b.csv").stats() == interleaved(2, 4).stats()
