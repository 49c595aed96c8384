"""What a save takes from the devices: every element once, in model order, without a copy or a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.checkpoint.leaves import Entry, entries
from jaxshard.checkpoint.snapshot import snapshot
from jaxshard.core.placement import Placement, View
from tests.checkpoint.runs import made


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
