"""What a strategy of one's own returns is checked by the layout: all bad arrays are named, with numbers and the fix."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core.placement import Placement
from jaxshard.core.tree import Leaf

MESH = {"data": 4, "tensor": 2}


def init_fn(key):
    return {"w": jnp.zeros((256, 10)), "v": jnp.zeros((6, 16)), "b": jnp.zeros(16)}


def place(change):
    """A layout with a strategy that changes the placements of matrices in the role "param"."""

    def mine(role, leaf: Leaf, placement: Placement, mesh) -> Placement:
        return change(leaf, placement) if role == "param" and len(leaf.shape) == 2 else placement

    strategy = js.compose(js.batch("data", "tensor"), mine, js.shard("tensor", "grad", min_size=0))
    return js.layout(strategy, js.make_mesh(**MESH), init_fn, optax.sgd(0.1))


@pytest.mark.parametrize("names", ["data", ["data"], ("data",)])
def test_one_axis_may_be_a_string(names):
    made = place(lambda leaf, placement: placement.split(1, names).use_split(1, names).pad(1, 16))
    assert made.params["w"].store == made.params["w"].use == P(None, "data")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf, p: p.split(1, "data"), r"dim 1 has 10 elements.* 4 devices of 'data'.*placement.pad\(1, 12\)"),
        (lambda leaf, p: p.split(0, "dta"), r"store names the axis 'dta', which the mesh \(data=4, tensor=2\) lacks"),
        (lambda leaf, p: p.split(0, "tensor").split(1, "tensor"), "store names the axis 'tensor' 2 times"),
        (lambda leaf, p: p.use_split(0, "tensor"), "use splits dim 0 over 'tensor', store does not"),
        (lambda leaf, p: p.split(1, "tensor").use_split(0, "tensor"), "use splits dim 0 over 'tensor', store does not"),
        (lambda leaf, p: None, "got NoneType; return the placement that the strategy received"),
        (lambda leaf, p: replace(p, store=P("data")), "store has 1 entries for 2 dimensions"),
        (lambda leaf, p: p.drop_first(), r"its view is of an array \[10\]"),
    ],
)
def test_a_placement_that_can_not_be(change, message):
    with pytest.raises(ValueError, match=rf"(?s)the strategy placed .*\n  - param w \[256, 10\]: {message}"):
        place(change)


def test_all_bad_arrays_are_named_once_with_their_roles():
    def mine(role, leaf, placement, mesh):
        return placement.split(0, "data") if role != "batch" else placement

    def odd(key):
        return {"a": jnp.zeros((6, 16)), "b": jnp.zeros(10), "fine": jnp.zeros(8)}

    with pytest.raises(ValueError) as caught:
        js.layout(mine, js.make_mesh(data=8), odd, optax.adam(0.1))
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["  - param, grad, opt a [6, 16]", "  - param, grad, opt b [10]"]


def test_a_dimension_that_the_array_lacks():
    with pytest.raises(IndexError, match="dim 2 of an array with 2 dimensions can't be split"):
        place(lambda leaf, placement: placement.split(2, "data"))


def test_rows_that_do_not_divide_and_batches_without_a_placement():
    def mine(role, leaf, placement, mesh):
        return placement.split(0, "data") if role == "batch" else placement

    made = js.layout(mine, js.make_mesh(data=8), init_fn, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"batch x \[12, 3\]: dim 0 has 12 elements.* the 8 devices.*; use 16 rows"):
        made.batch_shardings({"x": jax.ShapeDtypeStruct((12, 3), jnp.float32)})
    with pytest.raises(ValueError, match=r"batch a batch \[8\]: got NoneType"):
        js.layout(lambda *args: None, js.make_mesh(data=8), init_fn, optax.sgd(0.1))


def test_an_error_inside_a_strategy_names_the_array():
    with pytest.raises(ZeroDivisionError) as raised:
        place(lambda leaf, placement: 1 // 0)
    assert raised.value.__notes__[0] == "while the strategy placed param v [6, 16]"
