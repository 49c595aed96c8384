"""Pieces: together they are the array, in the order of its bytes, and none is larger than it may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.checkpoint.safetensors.pieces import fetch_bytes, largest_window, stream_pieces, window_starts
from jaxshard.hlo.found import collectives

pytestmark = pytest.mark.fast_cases(4)


@st.composite
def cuts(draw):
    """(shape, splits): into how many parts each dimension is split."""
    parts = draw(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 1, 2, 4])), max_size=4))
    return tuple(size * split for size, split in parts), tuple(split for _, split in parts)


@given(cut=cuts(), itemsize=st.sampled_from([1, 2, 4, 8]), limit=st.integers(1, 400))
@example(cut=((6, 4), (2, 2)), itemsize=4, limit=32)
@settings(max_examples=100, deadline=None)
def test_windows_cover_an_array_in_its_order(cut, itemsize, limit):
    shape, splits = cut
    window = largest_window(shape, splits, itemsize, limit)
    size = int(np.prod(window.shape)) * itemsize
    assert size <= max(limit, itemsize)
    array, seen = np.arange(np.prod(shape, dtype=int)).reshape(shape), []
    for start, skip in window_starts(shape, splits, window):
        index = tuple(slice(at, at + length) for at, length in zip(start, window.shape))
        for dim in range(window.cut):  # one shard holds all of it
            local = shape[dim] // splits[dim]
            assert start[dim] // local == (start[dim] + window.shape[dim] - 1) // local
        seen += array[index].reshape(-1)[skip:].tolist()
    assert seen == list(range(array.size))


def mesh():
    return js.make_mesh(jax.devices(), x=4, y=2)


SPECS = [
    P(None, None, None),
    P("x", None, "y"),
    P(None, ("x", "y"), None),
    P("y", "x", None),
    P(None, None, ("y", "x")),
]


def spread(value, spec):
    return jax.device_put(value, NamedSharding(mesh(), spec))


@pytest.mark.parametrize("limit", [8, 100, 1 << 20])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_pieces_are_the_bytes(spec, limit):
    value = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)
    raws = [fetch_bytes(piece) for piece in stream_pieces(spread(value, spec), mesh(), spec, limit)]
    assert b"".join(raws) == value.tobytes() and max(map(len, raws)) <= limit


def test_a_device_holds_a_piece_besides_its_shard():
    """The program of a piece: one all-reduce over what splits the cut dimension, one all-gather of the rest."""
    from jaxshard.checkpoint.safetensors.pieces import _jit_fetch

    spec, shape = P("x", "y"), (1024, 512)
    window = largest_window(shape, (4, 2), 4, 1 << 14)
    assert window.shape == (8, 512)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))
    compiled = _jit_fetch(mesh(), spec, window).lower(x, jax.ShapeDtypeStruct((2,), jnp.int32)).compile()
    found = [(one.kind, one.axes) for one in collectives(compiled, mesh())]
    assert sorted(found) == [("all-gather", ("y",)), ("all-reduce", ("x",))]
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 4 << 14 < memory.argument_size_in_bytes
