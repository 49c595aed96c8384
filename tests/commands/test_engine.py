"""`--wire`: what its values stand for, and what is refused beside it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import jaxshard as js
from jaxshard.commands.engine import read_wire
from jaxshard.commands.flags import Sharding
from jaxshard.commands.parallel import make_parallel


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("gradients=int8", {"reduce_dtype": js.wire.int8()}),
        ("weights=bf16", {"gather_dtype": jnp.bfloat16}),
        (
            "gradients=fp8,weights=int8,block=64,feedback=on",
            {"reduce_dtype": js.wire.fp8(block=64, feedback=True), "gather_dtype": js.wire.int8(block=64)},
        ),
    ],
)  # fmt: skip
def test_a_value_stands_for_arguments_of_the_engine(text, arguments):
    assert read_wire(text) == arguments


@pytest.mark.parametrize(
    ("flags", "ordered", "words"),
    [
        ({"engine": "auto"}, False, "under --engine auto the compiler sends what it likes"),
        ({}, True, "reduce_dtype=.* has a fixed order by itself"),
        ({"mesh": "data=4,pipe=2"}, False, "js.pipelined keeps no residuals of gradients"),
    ],
)
def test_flags_that_do_not_go_with_it_are_named(flags, ordered, words):
    with pytest.raises(ValueError, match=words):
        make_parallel(Sharding(wire="gradients=int8,feedback=on", **flags), ordered=ordered)


def test_the_facts_of_a_run_name_the_formats():
    how = make_parallel(Sharding(wire="gradients=int8,weights=fp8"))
    assert how.shown["engine"] == (
        "explicit, reduce_dtype int8 in blocks of 256, gather_dtype float8_e3m4 in blocks of 256"
    )
    assert how.about["gather_dtype"] == "float8_e3m4 in blocks of 256"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({}, "explicit (js.make_step takes auto by default)"),
        ({"engine": "auto"}, "auto (the default of js.make_step)"),
        ({"mesh": "data=4,pipe=2"}, "pipelined"),
    ],
)
def test_commands_that_look_at_a_step_say_which_engine_python_takes(flags, shown):
    assert make_parallel(Sharding(**flags)).shown_of_step["engine"] == shown
