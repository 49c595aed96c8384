"""Views and placements: what is stored comes back, and shards have the shapes that are promised."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core.placement import axes_of, whole
from jaxshard.core.tree import Leaf
from tests.toys import quick_compile

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def views(draw):
    """Any padding, then dimensions cut in two or merged."""
    logical = draw(SHAPES)
    padded = tuple(size + draw(st.integers(0, 3)) for size in logical)
    stored = list(padded)
    if stored and draw(st.booleans()):
        dim = draw(st.integers(0, len(stored) - 1))
        parts = draw(st.sampled_from([n for n in range(1, stored[dim] + 1) if stored[dim] % n == 0]))
        stored[dim : dim + 1] = [parts, stored[dim] // parts]
    elif len(stored) > 1 and draw(st.booleans()):
        stored[0:2] = [stored[0] * stored[1]]
    return js.View(logical, padded, tuple(stored))


def numbers(shape):
    return np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)


@settings(max_examples=5, deadline=None)
@given(view=views())
def test_a_view_gives_back_what_it_stored_and_pads_with_zeros(view):
    x = numbers(view.logical)
    with quick_compile():
        stored = np.asarray(view.apply(x))
        assert stored.shape == view.stored
        np.testing.assert_array_equal(view.invert(stored), x)
        assert np.count_nonzero(stored) == x.size
        full = numbers(view.stored)
        np.testing.assert_array_equal(view.clear_padding(full), view.apply(view.invert(full)))


def test_clearing_the_padding_of_nan():
    view = js.View((3,), (4,), (4,))
    np.testing.assert_array_equal(view.clear_padding(jnp.array([1, 2, 3, jnp.nan])), [1, 2, 3, 0])


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES, axes=st.sampled_from(["x", "y", ("x", "y"), ("y", "x")]))
def test_fills_split_every_array_of_more_than_one_element_evenly(shape, axes):
    mesh = js.make_mesh(x=4, y=2)
    leaf = Leaf("w", shape, jnp.float32, (None,) * len(shape))
    placement = js.shard(axes, ["param"], min_size=0)("param", leaf, whole(leaf), mesh)
    parts = math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))
    if leaf.size == 1:
        assert placement.why == "one element" and placement.store == placement.use
        return
    assert placement.use == P(*(None,) * len(shape))
    assert sorted(axes_of(placement.store)) == sorted((axes,) if isinstance(axes, str) else axes)
    assert placement.shard_shape(mesh) == placement.sharding(mesh).shard_shape(placement.view.stored)
    assert math.prod(placement.shard_shape(mesh)) * parts == math.prod(placement.view.stored)
    if any(size % parts == 0 for size in shape):
        assert not placement.view.is_padded
        dim = next(dim for dim, entry in enumerate(placement.store) if entry is not None)
        assert shape[dim] == max(size for size in shape if size % parts == 0)
    else:  # padded by less than one row per device, where that costs least
        least = min(math.prod(shape) // size * (size + -size % parts) for size in shape)
        assert math.prod(placement.view.padded) == least


def test_numbers_of_blocks_lie_with_the_blocks() -> None:
    mesh = js.make_mesh(data=4, tensor=2)

    def numbers(shape: tuple[int, ...], store: P, counts: tuple[int, ...]) -> tuple[P, tuple[int, ...]] | None:
        array = js.Placement(js.View(shape, shape, shape), P(*(None,) * len(shape)), store)
        made = array.of_blocks(counts, mesh)
        return made and (made.store, made.view.stored)

    assert numbers((8, 512), P("data", "tensor"), (8, 4)) == (P("data", "tensor"), (8, 4))
    # Blocks of 128 that four devices cut in two: another dimension is split in its place, if one divides.
    assert numbers((8, 256), P("tensor", "data"), (8, 2)) == (P(("tensor", "data"), None), (8, 2))
    assert numbers((7, 256), P(None, "data"), (7, 2)) == (P(None, None), (7, 2))
    # No numbers of blocks: another rank, the same shape, more than there are elements, one number.
    for counts in ((8,), (8, 256), (16, 2), (1, 1)):
        assert numbers((8, 256), P("data", None), counts) is None
    piped = js.Placement(js.View((7, 512), (8, 512), (2, 2, 2, 512), 2), P(None, None), P(None, "tensor", None, None))
    made = piped.of_blocks((7, 4), mesh)
    assert made is not None and made.view == js.View((7, 4), (8, 4), (2, 2, 2, 4), 2) and made.store == piped.store
    assert piped.of_blocks((1, 4), mesh) is None


def test_dimensions_count_from_the_end_and_others_are_refused() -> None:
    placement = whole(Leaf("w", (5, 70), jnp.float32, (None, None)))
    padded = placement.pad(-1, 72)
    assert padded == placement.pad(1, 72) and padded.view.stored == (5, 72)
    assert padded.split(-1, ("data",)).store == P(None, "data")
    with pytest.raises(IndexError, match="dim 2 of an array with 2 dimensions can't be padded"):
        placement.pad(2, 72)
    with pytest.raises(IndexError, match="dim -3 of an array with 2 dimensions can't be split"):
        placement.split(-3, ("data",))
