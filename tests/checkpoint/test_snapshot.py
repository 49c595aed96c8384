"""What a save takes from the devices: every element once, in model order, without a copy or a program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.checkpoint.leaves import Entry, entries
from jaxshard.checkpoint.snapshot import snapshot
from jaxshard.core.placement import Placement, View
from tests.checkpoint.runs import made

AXES = {"x": 2, "y": 2, "z": 2}


@st.composite
def placements(draw):
    """Arrays of up to three dimensions, split over some of three axes, padded where they don't divide, and cut."""
    logical = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    cut = draw(st.booleans()) if logical else False
    axes = draw(st.permutations(list(AXES)))
    dims = draw(st.lists(st.integers(0, len(logical) - 1), max_size=3)) if logical else []
    names = {dim: tuple(axis for axis, at in zip(axes, dims) if at == dim) for dim in range(len(logical))}
    widths = [math.prod(AXES[axis] for axis in names[dim]) for dim in range(len(logical))]
    padded = [-(-size // width) * width for size, width in zip(logical, widths)]
    store = [names[dim] or None for dim in range(len(logical))]
    stored = tuple(padded)
    if cut:
        chunks, per = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        stages = widths[0]
        chunks = max(chunks, -(-logical[0] // (stages * per)))
        padded[0] = chunks * stages * per
        stored, store = (chunks, stages, per, *padded[1:]), [None, store[0], None, *store[1:]]
    view = View(logical, tuple(padded), stored, 2 if cut else 0)
    return Placement(view, P(*(None,) * len(logical)), P(*store))


@pytest.mark.slow
@settings(deadline=None)
@given(placements(), st.integers(0, 9))
def test_every_element_is_there_once_at_its_place(placement, number):
    mesh, view = js.make_mesh(**AXES), placement.view
    expected = np.arange(math.prod(view.logical), dtype=np.int32).reshape(view.logical)
    x = jax.device_put(view.apply(expected), placement.sharding(mesh))
    entry = Entry("w", view.logical, x.dtype, placement)
    others = [(entry._replace(path=str(i)), x) for i in range(number)]
    pieces = snapshot([*others, (entry, x)])["w"]
    assert (pieces.shape, pieces.dtype) == (view.logical, np.int32)
    found, times = np.full(view.logical, -1, np.int32), np.zeros(view.logical, int)
    for where, block in pieces.blocks():
        found[where] = block
        times[where] += 1
        on_grid = [
            at.start % size == 0 and at.stop == min(at.start + size, whole)
            for at, size, whole in zip(where, pieces.chunk, view.logical, strict=True)
        ]
        assert all(on_grid), (where, pieces.chunk)
    assert (found == expected).all() and (times == 1).all()


@pytest.mark.parametrize("name", ["three", "hsdp"])
def test_nothing_is_computed_or_copied_on_the_way(name):
    """On a CPU the pieces are views of the shards themselves, also of blocks in pipeline order."""
    mine = made(name)
    run, wanted = mine.run(), entries(mine.layout)[0]
    pieces = snapshot(list(zip(wanted, jax.tree.leaves(run), strict=True)))
    for entry, x in zip(wanted, jax.tree.leaves(run), strict=True):
        if not entry.is_key:
            shards = [np.asarray(shard.data) for shard in x.addressable_shards]
            for _, block in pieces[entry.path].blocks():
                assert any(np.shares_memory(block, shard) for shard in shards), entry


def test_copies_of_arrays_share_the_work():
    """What lies on all devices is written by one device each, and not all by the same one."""
    everywhere = NamedSharding(js.make_mesh(data=8), P())
    placement = Placement(View((4,), (4,), (4,)), P(None), P(None))
    zeros = jax.jit(lambda: jnp.zeros(4), out_shardings=everywhere)  # in memory of each device's own
    arrays = [(Entry(str(i), (4,), np.dtype("float32"), placement), zeros()) for i in range(16)]
    pieces, owners = snapshot(arrays), []
    for entry, x in arrays:
        ((_, block),) = pieces[entry.path].blocks()
        owners += [i for i, shard in enumerate(x.addressable_shards) if np.shares_memory(block, np.asarray(shard.data))]
    assert sorted(owners) == sorted([*range(8)] * 2)
