"""Graphs of steps: what is left out of them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.graph import eliminate, every_op, skip_round_trips


@pytest.mark.parametrize(
    ("narrow", "wide", "left"),
    [(jnp.bfloat16, jnp.float32, 0), (jnp.float32, jnp.bfloat16, 2), (jnp.bfloat16, jnp.float16, 2)],
)
@pytest.mark.parametrize("looped", [False, True])
def test_a_conversion_to_a_wider_type_and_back_is_none(narrow, wide, left, looped):
    def there_and_back(x):
        return lax.cumsum(lax.cumsum(x).astype(wide).astype(narrow))

    def step(x):
        return lax.scan(lambda y, _: (there_and_back(y), None), x, None, length=2)[0] if looped else there_and_back(x)

    args = (jax.ShapeDtypeStruct((8, 128), narrow),)
    region = build(jax.make_jaxpr(step)(*args), [(((), ()), "batch", "")], {})
    skip_round_trips(region)
    eliminate(region, set(region.outputs))
    assert sum(op.name == "convert_element_type" for op in every_op(region)) == left
