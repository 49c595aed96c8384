"""Reshapes that move elements on a TPU, and what is stored because of them."""

import jax
import jax.numpy as jnp
import pytest

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.moved import moves_elements
from jaxshard.plan.memory.roles import temporary_bytes

ROWS, WIDTH = 64, 128


def step_of(positions: int, dtype=jnp.bfloat16) -> Liveness:
    """The derivative of an exact GELU behind a product over merged rows and positions, which computes both again."""

    def step(x, w, g):
        h = (x @ w).reshape(ROWS, positions, WIDTH)
        half, tail, slope = h * 0.5, jax.lax.erfc(-h * 0.7), jnp.exp(-(h * h))
        return g * half + g * tail * slope

    shapes = (ROWS * positions, WIDTH), (WIDTH, WIDTH), (ROWS, positions, WIDTH)
    closed = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    region = build(closed, [(((),) * len(shape), "", "") for shape in shapes], {})
    return Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)


@pytest.mark.parametrize(("positions", "apart"), [(196, ["erfc", "exp", "mul"]), (200, [])])
def test_a_product_writes_what_is_left_of_a_function_where_positions_do_not_fill_tiles(positions, apart):
    # Where they do, the product is stored alone, and the function is computed from it where it is read.
    found = step_of(positions)
    assert [moves_elements(op) for op in found.ops if op.name == "reshape"] == [positions % 8 > 0]
    assert sorted(found.makers[one].name for one in found.apart) == apart


def test_the_operand_of_erfc_is_moved_in_f32():
    # 196 positions are padded to 200; the operand is there in both shapes while it is moved, and the result is not yet.
    moment = step_of(196).peak()
    assert moment.op is not None and moment.op.name == "erfc"
    assert [one.bytes for one in moment.live if one.note == "copy"] == [4 * ROWS * 200 * WIDTH, 2 * ROWS * 200 * WIDTH]


def test_what_was_kept_is_copied_once_where_positions_do_not_fill_tiles():
    def step(h, g):
        h = (h * 2).reshape(ROWS, 196, WIDTH)
        return g * jax.lax.erfc(-h * 0.7) + g * jnp.exp(-(h * h))

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((ROWS * 196, WIDTH), (ROWS, 196, WIDTH))]
    region = build(jax.make_jaxpr(step)(*args), [(((),) * len(one.shape), "", "") for one in args], {})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    assert not found.apart


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ((64 * 196, 8), (64, 196, 8), True),
        ((64, 196, 8), (64 * 196, 8), True),
        ((64 * 200, 8), (64, 200, 8), False),  # whole tiles
        ((64, 196, 8), (8, 8, 196, 8), False),  # not along the sublanes
        ((1, 196, 8), (196, 8), False),
        ((196, 8), (196 * 8,), False),
    ],
)
def test_a_reshape_moves_elements_where_it_cuts_tiles(before, after, moves):
    closed = jax.make_jaxpr(lambda x: jax.lax.reshape(x * 1, after))(jax.ShapeDtypeStruct(before, jnp.float32))
    region = build(closed, [(((),) * len(before), "", "")], {})
    assert [moves_elements(op) for op in region.ops] == [False, moves]
