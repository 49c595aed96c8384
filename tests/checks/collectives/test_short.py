"""The short form of an audit: surprises by line and kind, each with one advice, and counts of all else."""

from dataclasses import replace

import pytest

from jaxshard.checks.collectives.compare import Comparison, Surprise
from jaxshard.checks.collectives.found import Collective
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.collectives.short import advice, group, short
from jaxshard.checks.collectives.trail import Trail

LINE = "/home/user/model.py:31"
LOGITS = "logits, all 40 of a vocabulary: must never move over tensor"


def surprise(
    *, kind="all-gather", line=LINE, count=1, size=640, why=LOGITS, name="jit(step)/jvp()/dot_general", **trail
):
    shape = (size // 4,)
    found = Collective(
        kind, ("tensor",), count, "f32", (shape,), (size,), line, (line,), "op", name, (), trails=(Trail(**trail),)
    )
    return Surprise(found, why)


def compared(*surprises, **others):
    return Comparison((), tuple(one.found for one in surprises), surprises, (), **others)


def test_surprises_of_one_line_and_kind_are_one_finding():
    other = "/home/user/model.py:40"
    many = [surprise(size=4 * (4 + turn)) for turn in range(20)]
    groups = group([*many, surprise(line=other, size=4096), surprise(kind="all-reduce", size=8)])
    assert [len(of) for of in groups] == [1, 20, 1]  # the most bytes first
    text = short(compared(*many, surprise(line=other, size=4096)))
    assert text.count(f"at {LINE}") == 1 and text.count(f"at {other}") == 1
    assert "- all-gather over tensor, 20 times, 1.08 kB: f32[23] and 19 more\n" in text
    assert len(text.splitlines()) < 16 < len(str(compared(*many)).splitlines())


def test_a_finding_has_one_sentence_of_advice():
    text = short(compared(surprise(), surprise(size=64)))
    _, _, listed = text.partition("surprises:\n")
    head, place, why, remedy = listed.splitlines()
    assert head.startswith("- all-gather over tensor, 2 times, 704 B") and place.strip() == f"at {LINE}"
    assert why.strip() == LOGITS and "js.cross_entropy" in remedy


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (surprise(why="wire dtype bf16, promised f32: gradient of w"), "reduce_dtype="),
        (surprise(line="/venv/site-packages/optax/contrib/prodigy.py:4", why="nothing of 9"), "elementwise"),
        (surprise(name="jit(step)/jvp()/psum", why="nothing of 9"), "js.Mean and js.Sum"),
        (surprise(name="jit(step)/sharding_constraint", why="the weight up: must never move"), "constraint out"),
        (surprise(maker="sort", why="nothing of 9"), "sort or accumulate within a row"),
        (surprise(why="the weight up: must never move over tensor"), "js.tensor"),
        (surprise(maker="dot_general", why="nothing of 9"), "both operands"),
        (surprise(name="jit(step)/mul", why="nothing of 9"), "js.explicit"),
    ],
)
def test_advice_follows_what_is_moved_and_why(one, words):
    assert words in advice(one) and "\n" not in advice(one)


def test_an_unknown_number_of_turns_is_not_added_up():
    text = short(compared(surprise(count=None), surprise(count=3)))
    assert "all-gather over tensor, ? times, ? bytes" in text


def test_lists_of_what_costs_time_are_counted():
    one = surprise().found
    whole = compared(program=Program(synchronous=tuple(replace(one, op=f"op{i}") for i in range(9))))
    assert "collectives that the device waits for: 9, 5.76 kB" in short(whole)
    assert LINE not in short(whole) and LINE in str(whole)


def test_more_lines_than_fit_are_counted():
    text = short(compared(*(surprise(line=f"/home/user/model.py:{number}") for number in range(1, 13))))
    assert text.count("    at /home/user") == 8 and "- and at 4 more lines, 2.56 kB" in text


def test_as_promised_is_said_only_where_nothing_differs():
    assert compared().verdict == "as promised" and compared().ok
    assert compared(surprise()).verdict == "1 surprise"
    for differing in ({"substitutes": ("all-reduce in place of reduce-scatter over data, once",)}, {"tolerated": 5}):
        assert compared(**differing).verdict == "no surprises" and compared(**differing).ok
    assert replace(compared(), missing=("all-gather over data of 4 elements, 0 times instead of 1: w",)).verdict == (
        "no surprises"
    )
    blind = compared(surprise(), unread=("all-gather over data: 8 B promised, and neither",))
    assert blind.verdict == "1 surprise; could not read all-gather over data" and not blind.ok
