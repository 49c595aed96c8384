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
            {
                "reduce_dtype": js.wire.fp8(block=64, feedback=True),
                "gather_dtype": js.wire.int8(block=64),
                "scatter": "end",
            },
        ),
    ],
)  # fmt: skip
def test_a_value_stands_for_arguments_of_the_engine(text, arguments):
    assert read_wire(text) == arguments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not name=value"),
        ("int8", "is not name=value"),
        ("gradients=int8,gradients=fp8", "comes twice"),
        ("gradients=int4", "did you mean int8. Use one of int8, fp8, bf16"),
        ("block=128", "there are neither gradients nor weights"),
        ("weights=int8,block=1", "block must be a whole number from 2 on, got 1"),
        ("weights=int8,feedback=yes", "write on or off"),
        ("weights=int8,feedback=on", "feedback is for gradients in int8 or fp8"),
        ("gradients=bf16,feedback=on", "feedback is for gradients in int8 or fp8"),
    ],
)
def test_bad_values_are_refused_with_what_to_write(text, words):
    with pytest.raises(ValueError, match=words) as refused:
        read_wire(text)
    assert str(refused.value).startswith(f"--wire {text}: ") and "write gradients=int8" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "ordered", "words"),
    [
        ({"engine": "auto"}, False, "under --engine auto the compiler sends what it likes"),
        ({}, True, "leave out --ordered, or gradients="),
        ({"mesh": "data=4,pipe=2"}, False, "leave out feedback=on"),
    ],
)
def test_flags_that_do_not_go_with_it_are_named(flags, ordered, words):
    with pytest.raises(ValueError, match=words):
        make_parallel(Sharding(wire="gradients=int8,feedback=on", **flags), ordered=ordered)


def test_the_facts_of_a_run_name_the_formats():
    how = make_parallel(Sharding(wire="gradients=int8,weights=fp8"))
    assert how.shown["engine"] == (
        "explicit, gradients travel as int8 in blocks of 256, weights travel as float8_e3m4 in blocks of 256"
    )
    assert how.about["gather_dtype"] == "float8_e3m4 in blocks of 256"
