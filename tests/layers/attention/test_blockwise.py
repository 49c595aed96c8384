"""Attention in blocks against the formula, and the memory that it takes."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.adapt.remat import make_save_policy
from jaxshard.layers.attention.blockwise import Cut, blockwise
from jaxshard.layers.attention.formula import Extras, Form, formula
from tests.layers.cases import NOTHING, arrays, assert_equal, documents, normal

pytestmark = pytest.mark.fast_cases(2)

in_blocks = partial(blockwise, block=16)


@pytest.mark.parametrize(
    ("sizes", "extras", "form"),
    [
        ({"queries": 37}, Extras(), Form(causal=True)),
        ({"queries": 37, "keys": 50, "kv_heads": 4, "value_width": 12}, Extras(), Form()),
        ({"queries": 48, "kv_heads": 1}, Extras(segments=documents(2, 48)), Form(True, window=20, soft_cap=2.0)),
        ({"queries": 40}, Extras(bias=normal(3, 1, 4, 1, 40)), Form(window=7)),
        ({"queries": 37}, Extras(bias=normal(3, 2, 4, 37, 37)), Form(causal=True, soft_cap=2.0)),
        (
            {"queries": 37, "keys": 20},
            Extras(mask=(normal(3, 2, 1, 37, 20) > 0).at[0, 0, 5].set(False), keep=normal(4, 37, 20) > -1),
            Form(dropout=0.2),
        ),
    ],
    ids=["causal", "cross", "segments", "row-bias", "bias", "mask"],
)
def test_it_is_the_formula(sizes, extras, form):
    """A query that the mask keeps from everything (row 0, query 5) takes the mean of all values in both."""
    assert_equal(in_blocks, *arrays(**sizes), extras, form)


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.integers(1, 70), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.none() | st.integers(1, 80),
    st.booleans(), st.none() | st.floats(0.5, 30),
)  # fmt: skip
def test_any_shape_is_the_formula(positions, kv_heads, shared_by, causal, window, segmented, soft_cap):
    q, k, v = arrays(positions, heads=kv_heads * shared_by, kv_heads=kv_heads)
    extras = Extras(segments=documents(2, positions) if segmented else None)
    assert_equal(in_blocks, q, k, v, extras, Form(causal, window, soft_cap))


def test_blocks_that_see_nothing_are_left_out():
    def count(form, extras=NOTHING):
        pairs, _ = Cut(64, 64, 16, 16).pairs(form, extras)
        return len(pairs)

    assert count(Form(causal=True)) == 10
    assert count(Form(causal=True, window=16)) == 7
    assert count(Form(window=2)) == 10
    mask = jnp.ones((1, 1, 64, 64), bool)  # a query that it keeps from everything takes the mean of all values
    assert count(Form(causal=True), Extras(mask=mask)) == 16


@pytest.mark.slow
def test_second_derivatives():
    q, k, v = arrays(20, rows=1, heads=1, kv_heads=1, width=2)

    def slope(attend, q):
        return jax.grad(lambda q: (attend(q, k, v, Extras(), Form(True)) ** 2).sum())(q)

    found, expected = (jax.jit(jax.grad(lambda q, f=f: (slope(f, q) ** 2).sum()))(q) for f in (in_blocks, formula))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


# Memory


def bytes_of_a_block(positions, policy="everything"):
    """Temporaries of forward and backward pass of one block of attention."""
    w = jax.ShapeDtypeStruct((2, 64, 3, 2, 32), jnp.float32)
    x = jax.ShapeDtypeStruct((1, positions, 64), jnp.float32)

    @partial(jax.checkpoint, policy=make_save_policy(policy))
    def block(x, w):
        q, k, v = jnp.moveaxis(jnp.einsum("btc,cjhd->btjhd", x, w), 2, 0)
        return x + blockwise(q, k, v, Extras(), Form(causal=True), block=128).reshape(x.shape), None

    step = jax.jit(jax.grad(lambda w, x: jax.lax.scan(block, x, w)[0].sum()))
    return step.lower(w, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("policy", ["everything", pytest.param("dots", marks=pytest.mark.slow)])
def test_memory_is_linear_in_the_sequence(policy):
    """Whatever is saved: a policy that saves products does not save the logits."""
    short, long = bytes_of_a_block(1024, policy), bytes_of_a_block(4096, policy)
    assert long < 4.5 * short
    assert long < 4096 * 4096 * 4  # one head's logits


@pytest.mark.slow
def test_memory_is_linear_up_to_16k():
    sizes = [bytes_of_a_block(positions) / positions for positions in (1024, 2048, 4096, 8192, 16384)]
    assert max(sizes) < 1.1 * min(sizes)
