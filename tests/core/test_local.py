"""`js.local`: the steps after which replicas are synchronised. tests/training/test_local_step.py has the steps."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import jaxshard as js
from jaxshard.core.local import due


@pytest.mark.parametrize(
    ("every", "fragments", "warmup", "expected"),
    [
        (3, 1, 0, [0, 0, 1, 0, 0, 1, 0]),
        (4, 2, 0, [0, 1, 0, 2, 0, 1, 0]),
        (1, 1, 0, [1, 1, 1, 1, 1, 1, 1]),
        # A warm-up changes nothing after it: which step synchronises depends on its number alone.
        (3, 1, 3, [2, 2, 2, 0, 0, 1, 0]),
        (4, 2, 3, [3, 3, 3, 2, 0, 1, 0]),
    ],
)
def test_after_which_steps_which_fragment_is_synchronised(every, fragments, warmup, expected):
    assert due(jnp.arange(7), every, fragments, warmup).tolist() == expected


def test_a_warm_up_is_a_number_of_steps():
    with pytest.raises(ValueError, match="local: warmup must be a whole number from 0 on, got -1"):
        js.local(every=4, warmup=-1)
