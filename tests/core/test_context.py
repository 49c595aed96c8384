"""`js.context` splits positions: rows are whole over its axis, everything else that asks for the axis still has it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js


def init_fn(key):
    return {"w": jnp.zeros((256, 128))}


def make_layout(strategy, **axes):
    return js.layout(strategy, js.make_mesh(**axes), init_fn, optax.sgd(0.1))


def test_rows_leave_the_axis_of_a_context_and_fills_keep_it():
    layout = make_layout(js.compose(js.fsdp(("data", "context")), js.context("context")), data=2, context=4)
    assert layout.batch_axes == ("data",) and layout.sum_axes == ("data", "context")
    assert layout.params["w"].store == P(("data", "context"), None)
    assert layout.context.axis == ("context",) and layout.context.how == "gather"
    batch = {"tokens": np.zeros((4, 32), np.int32)}
    assert layout.batch_placements(batch)["tokens"].store == P("data", None)
    assert "batch rows over data, positions over context (gather)" in str(layout)


def test_order_does_not_matter_and_rows_may_have_no_axis_left():
    layout = make_layout(js.compose(js.context("context"), js.fsdp("context")), context=8)
    assert layout.batch_axes == () and layout.sum_axes == ("context",)
    assert layout.params["w"].store == P("context", None)
    nested = js.compose(js.compose(js.context(("a", "b"), how="usp")), js.batch("data", "b"))
    layout = make_layout(nested, data=2, a=2, b=2)
    assert layout.batch_axes == ("data",) and layout.sum_axes == ("data", "a", "b")


def test_dimensions_are_found_by_the_last_name_of_a_path():
    context = js.context("context", dims={"x": 1, "frames": 2, "table": None})
    assert context.dim_of("inputs/x", 3) == 1 and context.dim_of("x", 1) is None
    assert context.dim_of("frames", 3) == 2 and context.dim_of("frames", 2) is None
    assert context.dim_of("table", 2) is None and context.dim_of("tokens", 2) is None
    assert js.context().dim_of("weights", 1) is None and js.context().dim_of("weights", 2) == 1


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: js.context(how="rings"), ValueError, "how must be one of 'gather', 'ulysses', 'usp', 'ring'"),
        (lambda: js.context("context", how="usp"), ValueError, "name two"),
        (lambda: js.context(dims={"x": 0}), ValueError, "dimension 0 has the rows"),
        (lambda: js.context(dims={"x": "1"}), TypeError, "dims must be names"),
        (lambda: js.context(dims=["x"]), TypeError, "dims must be names"),
        (lambda: js.compose(js.context("a"), js.context("b")), ValueError, "given twice"),
        (lambda: js.compose(js.context("a"), js.tensor(axis="a")), ValueError, "an axis of its own"),
        (lambda: js.compose(js.context(("a", "b")), js.pipeline("b")), ValueError, "an axis of its own"),
        (lambda: make_layout(js.compose(js.ddp(), js.context("c")), data=8), ValueError, "has no axis 'c'"),
        (lambda: make_layout(js.context, data=8), TypeError, r"write js.context\(...\), not js.context"),
    ],
)
def test_what_can_not_be_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_rows_over_the_same_axis_by_a_strategy_of_ones_own_are_refused():
    def rows(role, leaf, placement, mesh):
        return placement.split(0, ("context",)) if role == "batch" and leaf.shape else placement

    with pytest.raises(ValueError, match="splits rows over 'context' too"):
        make_layout(js.compose(rows, js.context("context")), context=8)
