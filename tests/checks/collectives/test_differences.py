"""Every byte by which a program differs from its promise has a name: the array, the line, and the compiler's reason."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.checks.collectives.cause import array_words, cause
from jaxshard.checks.collectives.compare import audit, compare
from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.found import Collective
from jaxshard.checks.collectives.promise import Promise
from jaxshard.checks.collectives.trail import Trail, module_of, pass_of
from tests.plan.repair import bad_models
from tests.toys import quick_compile

GRADIENT = Expected("reduce-scatter", ("data",), (8, 4), jnp.float32, 2, 2, "gradient of w")


def found(kind, axes, count, shape, op_name="", dtype="f32", **trail):
    size = (2 if dtype == "bf16" else 4) * shape[0] * shape[1]
    place = ("user.py:3",)
    trails = (Trail(**trail),)
    return Collective(kind, axes, count, dtype, (shape,), (size,), place[0], place, "op", op_name, (), trails=trails)


def compared(expected, *collectives, slack=0):
    comparison = compare(Promise(tuple(expected), (), slack), collectives)
    assert comparison.promised_bytes + sum(one.bytes for one in comparison.differences) == comparison.found_bytes
    return comparison


def test_a_kept_promise_has_no_difference():
    assert not compared([GRADIENT], found("reduce-scatter", ("data",), 2, (8, 4))).differences
    assert not compared([GRADIENT], found("all-reduce", ("data",), 2, (4, 8))).differences


def test_other_forms_of_a_promised_array_are_counted_once_and_named_after_it():
    ring = replace(
        GRADIENT, kind="collective-permute", shape=(2, 4), least=0, most=10, what="shards", instead_of="gradient of w"
    )
    comparison = compared([GRADIENT, ring], found("collective-permute", ("data",), 10, (2, 4)))
    (one,) = comparison.differences
    assert (one.what, one.promised, one.found) == ("gradient of w", 256, 320)
    assert one.kinds == ("collective-permute over data",) and "around a ring" in one.why


@pytest.mark.parametrize(
    ("change", "why", "size"),
    [
        ({"count": 1}, "less often", -128),
        ({"dtype": "bf16", "kind": "all-gather"}, "in bf16 in place of f32", -128),
        ({"count": 0}, "not summed in this form", -256),
    ],
)
def test_why_a_promised_array_moves_less(change, why, size):
    what = "weight w" if change.get("kind") else "gradient of w"
    expected = replace(GRADIENT, kind=change.get("kind", "reduce-scatter"), what=what)
    given = {"kind": "reduce-scatter", "axes": ("data",), "count": 2, "shape": (8, 4)} | change
    comparison = compared([expected], *([found(**given)] if given["count"] else []))
    (one,) = comparison.differences
    assert one.bytes == size and one.what == what and why in one.why, one


ONCE = (1, (8, 4))
SUM = {"op_name": "jit(step)/transpose(jvp(Net))/Dense_0/dot_general", "maker": "dot_general", "made_at": "user.py:3"}


@pytest.mark.parametrize(
    ("collective", "why"),
    [
        (found("all-reduce", ("tensor",), *ONCE, **SUM), "dot_general contracts a dimension that is split over tensor"),
        (found("all-reduce", ("tensor",), *ONCE, maker="scatter-add"), "scatter-add adds up what each device"),
        (found("all-reduce", ("tensor",), *ONCE, maker="gather"), "a lookup in a table whose rows are split"),
        (found("all-reduce", ("tensor",), *ONCE, "jit(f)/reduce_max"), "reduce_max goes along a dimension"),
        (found("all-reduce", ("data",), *ONCE, arguments=("weight w",)), "a gather over data that is written as a sum"),
        (found("all-gather", ("tensor",), *ONCE, dim=1, reader="sort", read_at="user.py:9"),
         "sort at user.py:9 needs dimension 1, split over tensor, whole"),
        (found("all-gather", ("tensor",), *ONCE, "jit(f)/while/body/dynamic_slice", dim=0),
         "dynamic_slice takes a part along dimension 0"),
        (found("all-gather", ("data",), *ONCE, "jit(f)/sharding_constraint", dim=0, reader="tanh", read_at="user.py:4"),
         "a constraint asks for dimension 0, split over data, whole: tanh at user.py:4 reads it"),
        (found("all-gather", ("data",), *ONCE, "jit(f)/shard_map/all_gather"), "the program itself has it"),
        (found("all-to-all", ("data",), *ONCE, maker="mul", made_at="user.py:3", reader="sort", read_at="user.py:9"),
         "mul at user.py:3 leaves it split over data along another dimension than sort at user.py:9 takes it"),
        (found("collective-permute", ("data",), *ONCE, "jit(f)/concatenate"), "concatenate cuts or joins a dimension"),
        (found("collective-permute", ("data",), *ONCE, "jit(f)/dot_general"), "shards go around a ring over data"),
        (found("collective-permute", ("data",), *ONCE, maker="reduce-scatter"), "in shards of whole tiles"),
        (found("collective-permute", ("data",), *ONCE, "jit(f)/reshape"), "reshape folds a dimension"),
        (found("collective-permute", ("data",), *ONCE, "jit(f)/mul", maker="while"), "the loop leaves other parts"),
        (found("collective-broadcast", ("data",), *ONCE), "the compiler's own"),
    ],
)  # fmt: skip
def test_the_cause_is_said_of_every_kind(collective, why):
    (one,) = compared([], collective).differences
    assert why in cause(collective) and one.why == f"not promised; {cause(collective)}"
    assert cause(collective) in str(compared([], collective).surprises[0])


def test_an_array_is_named_by_its_argument_or_by_what_computes_it():
    assert array_words(found("all-gather", ("data",), *ONCE, arguments=("weight w",))) == "weight w, f32[8, 4]"
    made = array_words(found("all-reduce", ("tensor",), *ONCE, **SUM))
    assert made == "f32[8, 4], made by dot_general at user.py:3 of Dense_0 in the backward pass"
    assert array_words(found("all-gather", ("data",), *ONCE, dtype="s32")) == "indices s32[8, 4]"
    assert module_of("jit(f)/jvp(Net)/while/body/closed_call/checkpoint/Block/Dense_0/tanh") == "Block/Dense_0"
    assert [pass_of(name) for name in ("jit(f)/jvp(N)/x", "jit(f)/transpose(jvp(N))/x", "jit(f)/x")] == [
        "forward pass", "backward pass", "",
    ]  # fmt: skip


def test_what_is_left_to_the_compiler_and_what_is_needed_is_named():
    needed = Expected("all-reduce", ("tensor",), None, None, 0, None, "activations")
    product = found("all-reduce", ("tensor",), 3, (8, 4), **SUM)
    small = found("all-gather", ("data",), 1, (2, 4), dtype="s32")
    comparison = compared([needed], product, small, slack=32)
    assert comparison.ok and comparison.tolerated == 32
    assert [(one.bytes, one.why.partition(";")[0]) for one in comparison.differences] == [
        (384, "promised as needed: activations"),
        (32, "left to the compiler"),
    ]
    assert "+384 B, all-reduce over tensor: f32[8, 4], made by dot_general" in str(comparison)


def audited(name, engine, strategy, **axes):
    bad = getattr(bad_models, name)()
    layout = js.layout(strategy, js.make_mesh(**axes), bad.init_fn, optax.sgd(0.1))
    with quick_compile():
        return audit(js.make_step(bad.loss_fn, optax.sgd(0.1), layout, engine=engine), bad.arguments()["batch"])


AUTO = {
    "data": (js.fsdp(min_size=0), {"data": 8}),
    "data and tensor": (js.compose(js.fsdp(min_size=0), js.tensor()), {"data": 4, "tensor": 2}),
}


@pytest.mark.parametrize("axes", ["data and tensor", pytest.param("data", marks=pytest.mark.slow)])
def test_every_byte_of_a_users_model_under_the_automatic_engine_has_a_name(axes):
    strategy, sizes = AUTO[axes]
    comparison = audited("moved_rows", js.auto(), strategy, **sizes)
    total = sum(one.bytes for one in comparison.differences)
    assert comparison.promised_bytes + total == comparison.found_bytes
    assert comparison.differences and all(one.what and one.why for one in comparison.differences)
    places = [one.place for one in comparison.differences if one.place]
    assert places and all("bad_models.py:" in place for place in places), places
    if axes == "data and tensor":
        products = [
            one for one in comparison.differences if "contracts a dimension that is split over tensor" in one.why
        ]
        assert products and all("made by" in one.what and "bad_models.py" in one.what for one in products)
