"""Surprises: why the compiler moves an array, what to write instead, and many of one line as one entry."""

from dataclasses import replace

import pytest

from jaxshard.checks.collectives.cause import array_words, cause
from jaxshard.checks.collectives.comparison import Comparison
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.collectives.surprise import Surprise
from jaxshard.hlo.found import Collective
from jaxshard.hlo.trail import Trail

TABLE = {"name": "jit(f)/transpose(jvp(N))/Embed_0/jit(_take)/scatter-add"}
LINE = "/home/user/model.py:31"
LOGITS = "logits, all 40 of a vocabulary: must never move over tensor"
CONSTRAINT = "js.constrain(x, ('batch', None, 'vocab'))"
PRODUCT = {"name": "jit(f)/transpose(jvp(N))/Dense_0/dot_general", "maker": "dot_general", "made_at": "user.py:3"}


def moved(kind="all-gather", axes=("tensor",), *, shape=(160,), count=1, line=LINE, name="jit(f)/jvp()/mul", **trail):
    place = {"op": "op", "op_name": name, "source": line, "frames": (line,)}
    return Collective(kind=kind, axes=axes, count=count, arrays=(("f32", shape),), trails=(Trail(**trail),), **place)


def surprise(why=LOGITS, **found):
    return Surprise(moved(**found), why, CONSTRAINT)


def compared(*surprises, **others):
    return Comparison((), tuple(one.found for one in surprises), surprises, (), **others)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (moved("all-reduce", **PRODUCT), "dot_general contracts a dimension that is split over tensor"),
        (moved("all-reduce", maker="gather"), "a lookup in a table whose rows are split"),
        (moved("all-reduce", name="jit(f)/reduce_max"), "reduce_max goes along a dimension"),
        (moved(dim=1, name="jit(f)/sort", reader="sort", read_at="user.py:9"),
         "sort at user.py:9 needs all of dimension 1, split over tensor"),
        (moved(name="jit(f)/while/body/dynamic_slice", dim=0), "dynamic_slice takes a part along dimension 0"),
        (moved(name="jit(f)/sharding_constraint", dim=0, reader="tanh", read_at="user.py:4"),
         "a constraint asks for all of dimension 0, split over tensor: tanh at user.py:4 reads it"),
        (moved(name="jit(f)/shard_map/all_gather"), "the program itself has it"),
        (moved("all-to-all", maker="mul", made_at="user.py:3", reader="sort", read_at="user.py:9"),
         "mul at user.py:3 leaves it split over tensor along another dimension than sort at user.py:9 needs"),
        (moved("collective-permute", name="jit(f)/concatenate"), "concatenate cuts or joins a dimension"),
        (moved("collective-permute", maker="reduce-scatter"), "in shards of whole tiles"),
        (moved("collective-broadcast"), "the compiler's own"),
    ],
)  # fmt: skip
def test_the_cause_is_said_of_every_kind(found, why):
    assert why in cause(found) and cause(found) in str(Surprise(found, "nothing of 9"))


def test_an_array_is_named_by_its_argument_or_by_what_computes_it():
    assert array_words(moved(arguments=("weight w",))) == "weight w, f32[160]"
    made = array_words(moved("all-reduce", **PRODUCT))
    assert made == "f32[160], made by dot_general at user.py:3 in the backward pass"


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (surprise("wire dtype bf16, promised f32: gradient of w"), "reduce_dtype="),
        (surprise("nothing of 9", line="/venv/site-packages/optax/contrib/prodigy.py:4"), "elementwise"),
        (surprise("nothing of 9", name="jit(step)/jvp()/psum"), "js.Mean and js.Sum"),
        (surprise(), f"keep the logits split, {CONSTRAINT}: js.cross_entropy"),
        (surprise("nothing of 9", name="jit(step)/sharding_constraint"), f"constraint out, or keep .*: {CONSTRAINT}"),
        (surprise("nothing of 9", maker="scatter-add", made_at="user.py:3", count=2, **TABLE),
         "gradient of the table looked up at user.py:3: leave it if its 1.28 kB are few, or .*replicated"),
        (surprise("nothing of 9", maker="select_n", made_at="user.py:3", **TABLE), f"looked up at {LINE}:"),
        (surprise("nothing of 9", name="jit(f)/jvp(N)/scatter-add", maker="scatter-add"), CONSTRAINT),
        (surprise("nothing of 9", maker="sort"), "sort or accumulate within a row"),
        (surprise("the weight up: must never move over tensor"), "js.tensor"),
        (surprise("more often than promised: 1 times for weight w", arguments=("weight w",)), "weight w is moved for"),
        (surprise("nothing of 9", arguments=("batch x",), maker="mul", made_at="user.py:3"), CONSTRAINT),
        (surprise("more often than promised: 1 times for gradient of w", **PRODUCT), "over devices once"),
        (surprise("nothing of 9", **PRODUCT), f"both operands of the product alike, and its result: {CONSTRAINT}"),
        (surprise("nothing of 9", maker="mul", made_at="user.py:3"), f"the result of mul at user.py:3, {CONSTRAINT}"),
    ],
)  # fmt: skip
def test_advice_is_one_line_with_the_constraint_to_write(one, words):
    assert all(part in one.advice for part in words.split(".*")) and "\n" not in one.advice
    assert one.as_dict()["advice"] == one.advice and one.advice in str(one)


def test_surprises_of_one_line_and_kind_are_one_entry_with_a_count_of_the_rest():
    other = "/home/user/model.py:40"
    many = [surprise(shape=(4 + turn,)) for turn in range(20)]
    text = compared(*many, surprise(line=other, shape=(1024,)), surprise(kind="all-reduce", shape=(2,))).short()
    assert [text.count(f"    at {line}") for line in (other, LINE)] == [1, 2]
    assert text.index(f"at {other}") < text.index("and 19 more") < text.index("- all-reduce")  # the most bytes first
    assert "- all-gather over tensor, 20 times, 1.08 kB: f32[23] and 19 more\n" in text
    assert len(text.splitlines()) < 24 < len(str(compared(*many)).splitlines())
    lines = compared(*(surprise(line=f"/home/user/model.py:{number}") for number in range(1, 13))).short()
    assert lines.count("    at /home/user") == 8 and "- and at 4 more lines, 2.56 kB" in lines


def test_lists_of_what_costs_time_are_counted():
    whole = compared(program=Program(synchronous=tuple(replace(moved(), op=f"op{i}") for i in range(9))))
    assert "collectives that the device waits for: 9, 5.76 kB" in whole.short()
    assert LINE not in whole.short() and LINE in str(whole)


def test_as_promised_is_said_only_where_nothing_differs():
    assert compared().verdict == "as promised" and compared().ok
    assert compared(surprise()).verdict == "1 surprise"
    for differing in ({"substitutes": ("all-reduce in place of",)}, {"tolerated": 5}, {"needed_bytes": 5}):
        assert compared(**differing).verdict == "no surprises" and compared(**differing).ok
    assert replace(compared(), missing=("all-gather, 0 times instead of 1: w",)).verdict == "no surprises"
    blind = compared(surprise(), unread=("all-gather over data: 8 B promised, and neither",))
    assert blind.verdict == "1 surprise; could not read all-gather over data" and not blind.ok
