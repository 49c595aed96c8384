"""Checksums of a base: those of the logical arrays, whatever the layout."""

import jax
import jax.numpy as jnp
import pytest

from jaxshard.core.placement import View
from jaxshard.training.base import _checksum

pytestmark = pytest.mark.fast_cases(1)

WHOLE = View((7, 5), (7, 5), (7, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_padding_and_the_order_of_a_pipeline_change_nothing_and_every_element_counts(dtype):
    x = (jax.random.normal(jax.random.key(0), (7, 5)) * 9).astype(dtype)
    expected = int(_checksum(x, WHOLE))
    for view in (
        View((7, 5), (7, 8), (7, 8)),
        View((7, 5), (8, 5), (2, 2, 2, 5), 2),
        View((7, 5), (8, 6), (4, 1, 2, 6), 2),
    ):
        assert int(_checksum(view.apply(x) + (1 - view.apply(jnp.ones_like(x))), view)) == expected
    others = {int(_checksum(x.at[i, j].add(1), WHOLE)) for i in (0, 3, 6) for j in range(5)}
    assert len(others) == 15 and expected not in others
    assert int(_checksum(x.at[jnp.array([0, 1])].set(x[jnp.array([1, 0])]), WHOLE)) != expected
