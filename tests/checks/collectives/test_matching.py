"""Records of collectives written by hand, against promises written by hand."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxshard.checks.collectives.compare import compare
from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.forbidden import Never
from jaxshard.checks.collectives.promise import Promise
from jaxshard.hlo.found import Collective

ONE = Collective(
    kind="all-gather", axes=("data",), count=2, arrays=(("f32", (8, 4)),), op="all-gather.1", op_name="jit/x",
    source="user.py:3", frames=("user.py:3",),
)  # fmt: skip
WEIGHT = Expected("all-gather", ("data",), (8, 4), jnp.float32, 2, 2, "weight w")


def compared(expected, found, *, never=(), slack=0):
    return compare(Promise(tuple(expected), tuple(never), slack), found)


def test_what_was_promised_is_no_surprise_and_what_is_left_over_is():
    assert compared([WEIGHT], [ONE]).ok
    comparison = compared([WEIGHT], [ONE, ONE])
    assert len(compared([WEIGHT], [ONE, ONE, ONE]).surprises) == 1  # of one place, added up
    (surprise,) = comparison.surprises
    assert surprise.why == "more often than promised: 2 times for weight w"
    assert surprise.as_dict()["place"] == "user.py:3"
    assert comparison.short().splitlines()[:-1] == [
        "collective  axis  promised at most  found  times",
        "all-gather  data             256 B  512 B      4",
        "",
        "surprises:",
        "- all-gather over data, 2 times, 256 B: f32[8, 4]",
        "    at user.py:3",
        "    more often than promised: 2 times for weight w",
    ]


def test_other_axes_kinds_and_sizes_are_surprises():
    for change in ({"axes": ("tensor",)}, {"kind": "all-to-all"}, {"arrays": (("f32", (8, 5)),)}, {"count": None}):
        comparison = compared([WEIGHT], [replace(ONE, **change)])
        assert len(comparison.surprises) == 1, change
        assert comparison.missing == ("all-gather over data of 32 elements, 0 times instead of 2: weight w",)


def test_an_all_reduce_stands_for_a_reduce_scatter_and_not_the_other_way_round():
    reduced = replace(ONE, kind="all-reduce")
    assert compared([replace(WEIGHT, kind="reduce-scatter")], [reduced]).ok
    assert not compared([replace(WEIGHT, kind="all-reduce")], [replace(ONE, kind="reduce-scatter")]).ok


def test_a_compiler_may_lay_sums_of_several_arrays_end_to_end():
    """As a GPU's does: 32 elements twice, 5 and the loss in one array of 70."""
    weight = replace(WEIGHT, kind="all-reduce", stack=2)
    bias = replace(weight, shape=(5,), least=1, most=1, stack=1, what="weight b")
    joined = replace(ONE, kind="all-reduce", count=1, arrays=(("f32", (70,)),))
    comparison = compared([weight, bias], [joined])
    assert comparison.ok and not comparison.missing and not comparison.substitutes
    twice = compared([weight, bias], [joined, joined])
    assert [one.why for one in twice.surprises] == ["nothing of 70 elements is promised there"]
    for other in (
        {"arrays": (("f32", (7, 10)),)}, {"arrays": (("bf16", (70,)),)}, {"axes": ("tensor",)}, {"kind": "all-gather"}
    ):  # fmt: skip
        assert not compared([weight, bias], [replace(joined, **other)]).ok, other
    longer = replace(joined, arrays=(("f32", (90,)),))
    assert not compared([weight, bias], [longer]).ok  # 21 elements of no promise
    assert compared([weight, bias], [joined, replace(ONE, kind="all-reduce", count=1)]).surprises


def test_small_movements_are_left_to_the_compiler_the_smallest_first():
    small = replace(ONE, arrays=(("f32", (2,)),), count=1)
    tolerated = compared([], [small, ONE], slack=256 + 8)
    assert tolerated.ok and tolerated.tolerated == 256 + 8
    assert tolerated.short().endswith("left to the compiler: 264 B")
    comparison = compared([], [ONE, small], slack=256 + 7)
    assert [one.found for one in comparison.surprises] == [ONE]


def test_a_weight_is_a_surprise_however_small():
    never = Never(("data",), "the weight w", frozenset({(4, 8)}), frozenset({16}))
    assert compared([], [ONE], slack=10**6).ok
    assert not compared([], [ONE], never=[never], slack=10**6).ok
    exchanged = replace(ONE, kind="all-to-all", arrays=(("f32", (4, 4)),))
    (surprise,) = compared([], [exchanged], never=[never], slack=10**6).surprises
    assert surprise.why == "by its size part of the weight w: must never move over data"


def test_a_sum_in_a_narrower_dtype_than_promised_is_a_surprise_and_other_changes_of_dtype_are_named():
    narrow = replace(ONE, arrays=(("bf16", (8, 4)),))
    for kind in ("all-reduce", "reduce-scatter"):
        gradient = replace(WEIGHT, kind=kind, what="gradient of w")
        (surprise,) = compared([gradient], [replace(narrow, kind=kind)], slack=10**6).surprises
        assert surprise.why == "wire dtype bf16, promised f32: gradient of w"
    comparison = compared([WEIGHT], [narrow])
    assert comparison.ok
    (line,) = comparison.substitutes
    assert line == "all-gather in bf16 in place of all-gather in f32 over data, 2 times, 128 B: weight w"
    assert "other kinds or dtypes than promised:\n- all-gather in bf16" in str(comparison)
    assert not compared([WEIGHT], [ONE]).substitutes
