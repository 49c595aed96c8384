"""Refusals as libtpu 0.0.42 (JAX 0.10.2) and 0.0.52 (JAX 0.12) write them."""

import pytest

from jaxshard.compiler.refusal import Refusal, parse_refusal

OF_0_10 = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (39.08G) exceeds "
    "available HBM (15.75G)."
)
OF_0_12 = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (512.50M) exceeds available HBM (95.74G). HLO module: jit__step.\nSee "
    "https://openxla.org/xla/errors/error_1000 for more details."
)


@pytest.mark.parametrize(
    ("message", "asked", "usable"), [(OF_0_10, 39.08 * 2**30, 15.75 * 2**30), (OF_0_12, 512.5 * 2**20, 95.74 * 2**30)]
)
def test_a_refusal_says_what_was_asked_for_and_what_there_is(message, asked, usable):
    assert parse_refusal(message) == Refusal(int(asked), int(usable))


@pytest.mark.parametrize(
    "message",
    [
        "UNIMPLEMENTED: Stable sorting of more than 2^31-1 elements is not implemented",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack.",
    ],
)
def test_other_errors_are_no_refusals_for_want_of_memory(message):
    assert parse_refusal(message) is None
