"""Strategies are functions that compose; the named ones differ only in the roles that they split."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core.placement import Placement, whole
from jaxshard.core.tree import Leaf

MESH = {"replica": 2, "data": 4}
LEAF = Leaf("layer/kernel", (24, 40), jnp.float32, (None, None))


def store(strategy, role, leaf=LEAF):
    return strategy(role, leaf, whole(leaf), js.make_mesh(**MESH)).store


@pytest.mark.parametrize(
    ("strategy", "split"),
    [
        (js.ddp(), ""),
        (js.zero1(min_size=0), "opt"),
        (js.zero2(min_size=0), "opt grad"),
        (js.fsdp(min_size=0), "opt grad param"),
        (js.hsdp(min_size=0), "opt grad param"),
    ],
)
def test_named_strategies_split_these_roles(strategy, split):
    for role in ("param", "grad", "opt", "state"):
        assert store(strategy, role) == (P(None, "data") if role in split.split() else P(None, None))


def test_rows_are_split_over_the_batch_axes_in_order():
    leaf = Leaf("x", (16, 3), jnp.float32, (None, None))
    assert store(js.ddp(), "batch", leaf) == P("data", None)
    assert store(js.hsdp(), "batch", leaf) == P(("replica", "data"), None)
    assert store(js.fsdp(("data", "replica")), "batch", leaf) == P(("data", "replica"), None)
    assert store(js.compose(js.batch("data"), js.batch("replica")), "batch", leaf) == P(("data", "replica"), None)


def by_name(role, leaf, placement, mesh) -> Placement:
    """What a tensor strategy does: the last dimension to a named axis, in computation and in storage."""
    split = placement.split(len(leaf.shape) - 1, ("replica",)) if role == "param" else placement
    return Placement(split.view, split.store, split.store)


def test_placements_by_name_come_before_fills_whatever_the_order():
    fill = js.shard("data", ["param"], min_size=0)
    stores = {store(js.compose(*order), "param") for order in itertools.permutations([fill, by_name, js.batch("data")])}
    assert stores == {P("data", "replica")}


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((), "one element"),
        ((1, 1), "one element"),
        ((0, 4), "no elements"),
        ((100,), "small: 100 elements, under 16384"),
    ],
)
def test_why_an_array_stays_whole(shape, why):
    leaf = Leaf("w", shape, jnp.float32, (None,) * len(shape))
    placement = js.fsdp()("param", leaf, whole(leaf), js.make_mesh(**MESH))
    assert placement.why == why
    assert placement.store == placement.use and placement.view == whole(leaf).view


def test_large_arrays_are_padded_and_small_ones_left_at_the_default_threshold():
    odd = Leaf("w", (1001, 17), jnp.float32, (None, None))
    placement = js.fsdp()("param", odd, whole(odd), js.make_mesh(**MESH))
    assert placement.view.padded == (1004, 17) and placement.store == P("data", None)


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ((2, 4 * 43, 4096), P(None, None, "data")),  # 43 rows end inside a tile of 8, 1024 columns do not
        ((2, 4 * 40, 4096), P(None, "data", None)),
        ((2, 4 * 43, 4100), P(None, "data", None)),  # neither 43 nor 1025 is a multiple of 8
        ((2, 4 * 43, 2048), P(None, "data", None)),  # fewer than 2**20 elements
    ],
)
def test_large_blocks_prefer_shards_of_full_tiles(shape, split):
    leaf = Leaf("blocks/w", shape, jnp.float32, ("blocks", None, None))
    assert store(js.fsdp(), "param", leaf) == split
    assert store(js.fsdp(), "param", Leaf("w", shape[1:], jnp.float32, (None, None))) == P("data", None)


# Pipelines.

RING = {"pipe": 2, "data": 2, "tensor": 2}


def place_block(strategy, shape, names, role="param", path="blocks/mlp_in/kernel"):
    leaf = Leaf(path, shape, jnp.float32, names)
    return strategy(role, leaf, whole(leaf), js.make_mesh(**RING))


def test_blocks_are_split_by_stage_in_every_role_and_nothing_else_is():
    strategy = js.pipeline(chunks=3)
    for role in ("param", "grad", "opt"):
        placement = place_block(strategy, (13, 8), ("blocks", None), role)
        assert placement.view == js.View((13, 8), (18, 8), (3, 2, 3, 8), 2)
        assert placement.store == P(None, "pipe", None, None) and placement.use == P(None, None)
        assert placement.shard_shape(js.make_mesh(**RING)) == (3, 1, 3, 8)
        rest = place_block(strategy, (14, 8), (None, None), role)
        assert rest.store == P(None, None) and rest.view.stored == (14, 8)
    for role in ("batch", "state"):
        assert place_block(strategy, (14, 8), ("blocks", None), role).store == P(None, None)


@settings(max_examples=50, deadline=None)
@given(
    blocks=st.integers(1, 4).map(lambda k: 8 * k),
    chunks=st.sampled_from([1, 2, 4]),
    tail=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    axes=st.sampled_from(["data", ("data", "tensor")]),
)
def test_fills_never_split_chunks_stages_or_blocks(blocks, chunks, tail, axes):
    """Whose sizes would divide: what a fill takes lies behind them, if need be padded."""
    strategy = js.compose(js.pipeline(chunks=chunks), js.shard(axes, ["param"], min_size=0))
    placement = place_block(strategy, (blocks, *tail), ("blocks", *(None,) * len(tail)))
    assert placement.store[:3] == (None, "pipe", None)
    split = [entry for entry in placement.store[3:] if entry is not None]
    assert split == ([axes] if tail else []) and (tail or placement.why == "no free dimension")
    assert placement.view.stored[:3] == (chunks, 2, blocks // (2 * chunks))
    assert placement.shard_shape(js.make_mesh(**RING))[1] == 1


@pytest.mark.parametrize(("dim", "fill"), [(1, 4), (2, 3)])
def test_dims_of_a_tensor_axis_and_a_fill_are_found_behind_the_cut(dim, fill):
    names = ["blocks", None, None]
    names[dim] = "mlp"
    strategies = [js.pipeline(), js.tensor([("mlp", "split")]), js.shard("data", ["param"], min_size=0)]
    placements = [
        place_block(js.compose(*order), (8, 6, 6), tuple(names)) for order in itertools.permutations(strategies)
    ]
    assert all(placement == placements[0] for placement in placements)
    store = [None, "pipe", None, None, None]
    store[dim + 2], store[fill] = "tensor", "data"
    use = [None, None, None]
    use[dim] = "tensor"
    assert placements[0].store == P(*store) and placements[0].use == P(*use)
    tail = placements[0].drop_first()
    assert tail.use == P(*use[1:]) and tail.store == P(*store[3:]) and tail.view.stored == (6, 6)


# Errors.


class SGD:
    """The least that passes for an optimizer."""

    init = staticmethod(lambda params: ())
    update = staticmethod(lambda grads, state, params=None: (grads, state))


def place(strategy, **mesh):
    return js.layout(strategy, js.make_mesh(**mesh), lambda key: {"layer": {"kernel": jnp.zeros((24, 40))}}, SGD)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (js.fsdp("model"), r"batch: the mesh \(data=8\) has no axis 'model'.* add it.*make_mesh\(data=-1, model=2\)"),
        (js.hsdp(), "has no axis 'replica'"),
        (js.fsdp(("data", "data")), "must name each mesh axis once"),
        (js.shard("model", ["param"]), "shard: the mesh .* has no axis 'model'"),
        (js.shard((), ["param"]), "must name each mesh axis once"),
    ],
)
def test_unknown_and_repeated_axes(strategy, message):
    with pytest.raises(ValueError, match=message):
        place(strategy, data=8)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (js.compose(js.fsdp(), js.fsdp()), "batch: axis 'data' already splits the rows of a batch; apply each"),
        (js.compose(js.ddp(), js.ddp()), "batch: axis 'data' already splits the rows of a batch; apply each"),
        (
            js.compose(js.shard("data", ["opt"], min_size=0), js.zero1(min_size=0)),
            r"shard: axis 'data' already splits dim 1 of layer/kernel \[24, 40\]; apply each strategy once per axis",
        ),
    ],
)
def test_a_strategy_applied_twice(strategy, message):
    with pytest.raises(ValueError, match=message):
        place(strategy, data=8)


def test_an_axis_that_splits_rows_cannot_split_them_again():
    leaf = Leaf("x", (16,), jnp.float32, (None,))
    with pytest.raises(ValueError, match="axis 'data' already splits the rows of x"):
        store(js.compose(js.batch("data"), js.batch("replica", "data")), "batch", leaf)


def test_roles_that_do_not_exist():
    with pytest.raises(ValueError, match=r"shard: unknown roles \['params'\]; use some of 'param', 'grad'"):
        js.shard("data", ["params"])
    with pytest.raises(ValueError, match=r"unknown roles \['batch'\]"):
        js.shard("data", ["batch"])


def test_a_threshold_below_zero():
    with pytest.raises(ValueError, match="shard: min_size must be at least 0 elements, got -1"):
        js.fsdp(min_size=-1)


def test_composing_what_is_no_strategy():
    with pytest.raises(TypeError, match=r"compose: expected strategies, got str \('data'\)"):
        js.compose(js.ddp(), "data")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (js.fsdp, r"write js.fsdp\(...\), not js.fsdp"),
        (js.shard, r"write js.shard\(...\), not js.shard"),
        (lambda role, leaf: None, r"function \(role, leaf, placement, mesh\) -> placement, got <lambda>\(role, leaf\)"),
    ],
)
def test_composing_functions_that_are_no_strategies(strategy, message):
    with pytest.raises(TypeError, match=message):
        js.compose(strategy, js.tensor())
    with pytest.raises(TypeError, match=message):
        place(strategy, data=8)
