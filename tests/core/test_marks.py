"""A mark is one equation of the traced program, also where it is mapped; outside of the context nothing changes."""

import jax
import jax.numpy as jnp

import jaxshard as js
from jaxshard.core.marks import MARK, is_marking, leave_mark, show_marks

Q = jax.ShapeDtypeStruct((6, 32, 4, 8), jnp.float32)


def marks_of(fn, *args):
    with show_marks(32):
        equations = jax.make_jaxpr(fn)(*args).eqns
    return [eqn for eqn in equations if eqn.primitive is MARK]


def test_attention_leaves_a_mark_that_says_where_its_operands_have_positions():
    ids = jax.ShapeDtypeStruct((6, 32), jnp.int32)
    (mark,) = marks_of(lambda q, ids: js.attention(q, q, q, causal=True, segment_ids=ids), Q, ids)
    assert mark.params["name"] == "js.attention"
    assert mark.params["positions"] == (-3, -3, -3, -1)
    assert mark.params["result_positions"] == (-3,)
    assert not is_marking()


def test_a_mapped_mark_has_the_new_dimension_in_front_so_that_positions_are_where_it_says():
    (mark,) = marks_of(jax.vmap(lambda q: js.attention(q, q, q, causal=True), in_axes=1), Q)
    assert [x.aval.shape for x in mark.invars] == [(32, 6, 4, 8)] * 3  # 6 positions now, for each of 32
    assert [x.aval.shape for x in mark.outvars] == [(32, 6, 4, 8)]


def test_operands_that_are_not_mapped_are_repeated():
    def fn(x, w):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return leave_mark("some", (x, w), (-1, None), [like], [-1])[0]

    x, w = jnp.ones((3, 5)), jnp.ones(7)
    (mark,) = marks_of(jax.vmap(fn, in_axes=(0, None)), x, w)
    assert [x.aval.shape for x in mark.invars] == [(3, 5), (3, 7)]
