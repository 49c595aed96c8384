"""Formats for fewer bytes: what they are used for, and what they refuse."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import jaxshard as js
from jaxshard.core.encoding import shrinks


def test_only_what_shrinks_is_sent_in_blocks():
    wire = js.wire.int8()
    assert [shrinks(wire, size, jnp.float32) for size in (0, 1, 2, 256)] == [False, False, True, True]
    assert [shrinks(wire, size, jnp.bfloat16) for size in (4, 5)] == [False, True]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: js.wire.int8(block=1), ValueError, "block must be a whole number from 2 on, got 1"),
        (lambda: js.wire.fp8(block=True), ValueError, "got True"),
        (lambda: js.wire.fp8(mantissa=2), ValueError, "mantissa must be 4 .* or 3 .*, got 2"),
        (lambda: js.wire.int8(block=2.5), ValueError, "got 2.5"),
        (lambda: js.wire.int8(feedback="yes"), TypeError, "feedback must be True or False, got 'yes'"),
        (lambda: js.wire.Scaled("int4"), ValueError, "the dtype must be one of 'int8', .*, got 'int4'"),
    ],
)
def test_bad_formats_are_refused(make, error, words):
    with pytest.raises(error, match=words.replace("'", ".")):
        make()
