"""Matrices of several kinds go to their owners in one row each, as long as the longest, and come back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxshard as js
from jaxshard.core.owners import lay_rows
from jaxshard.optim.owners.exchange import Split, from_owners, to_owners

DEVICES = 4
OWNED = {(8, 4): (1, 1, 1, 0), (4, 8): (2, 0, 1, 3), (4, 4): (0, 2, 2, 1)}
"""How many matrices of each shape the devices own. The first and the last are split along rows, the second columns."""


def _split(shape: tuple[int, ...], owned: tuple[int, ...]) -> Split:
    slots, dim = max(owned), int(shape == (4, 8))
    places = tuple(device * slots + slot for device, count in enumerate(owned) for slot in range(count))
    part, counts = list(shape), [1, 1]
    part[dim] //= DEVICES
    counts[dim] = DEVICES
    return Split(places, owned, slots, tuple(part), tuple(counts))


def test_rows_have_no_empty_places() -> None:
    rows = lay_rows([(split.owned, split.slots, split.size) for split in (_split(*one) for one in OWNED.items())])
    assert rows.firsts == ((0, 0, 0, 0), (8, 8, 8, 0), (24, 8, 16, 24))
    # Device 3 owns 3 * 8 + 4 elements, but the third place of device 2 for the second kind, which is empty, ends at 32.
    assert rows.width == 32
    assert lay_rows([((1, 0), 1, 100), ((0, 1), 1, 30)]).width == 100


def test_matrices_arrive_whole_and_come_back() -> None:
    splits = [_split(*one) for one in OWNED.items()]
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(sum(owned), *shape)).astype(np.float32) for shape, owned in OWNED.items()]
    specs = [PartitionSpec(None, *("data" if cut > 1 else None for cut in split.counts)) for split in splits]

    def there_and_back(units: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        whole = to_owners(units, splits, ("data",))
        return whole, from_owners(whole, splits, ("data",))

    mesh = js.make_mesh(jax.devices()[:DEVICES], data=DEVICES)
    owned = [PartitionSpec("data")] * len(splits)
    run = jax.shard_map(there_and_back, mesh=mesh, in_specs=(specs,), out_specs=(owned, specs), check_vma=False)
    compiled = jax.jit(run).lower([jnp.asarray(x) for x in arrays]).compile()
    assert [(one.kind, one.bytes) for one in js.collectives(compiled, mesh)] == [("all-to-all", 4 * 32 * 4)] * 2
    whole, back = compiled(arrays)
    for x, at, again, split in zip(arrays, whole, back, splits, strict=True):
        np.testing.assert_array_equal(np.asarray(at)[list(split.places)], x)
        np.testing.assert_array_equal(again, x)
