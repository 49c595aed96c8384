"""Bits flipped in the copy of one device, and copies compared byte by byte."""

import jax
import numpy as np

from jaxshard.core.keys import keys_of, words_of
from jaxshard.core.tree import path_str


def flipped(run, path, *, device, element, bit):
    """Return a run in which one bit of the copy that a device holds of an array differs; other copies are shared."""
    leaves = jax.tree_util.tree_leaves_with_path(run)
    found = [flip(x, device, element, bit) if path_str(at) == path else x for at, x in leaves]
    return jax.tree.unflatten(jax.tree.structure(run), found)


def flip(x, device, element, bit):
    """Flip a bit of the element that has this number in the shard of a device; on other processes nothing changes."""
    words = words_of(x)
    parts = []
    for shard in words.addressable_shards:
        data = shard.data
        if shard.device.id == device:
            host = np.array(data)
            flat = host.reshape(-1).view(np.uint8)
            flat[element * host.itemsize + bit // 8] ^= 1 << bit % 8
            data = jax.device_put(host, shard.device)
        parts.append(data)
    made = jax.make_array_from_single_device_arrays(words.shape, words.sharding, parts)
    return keys_of(made, x.dtype)


def flipped_copies(run):
    """The paths of arrays whose copies differ on the devices of this process, compared byte by byte."""
    found = set()
    for path, x in jax.tree_util.tree_leaves_with_path(run):
        first = {}
        for shard in words_of(x).addressable_shards:
            content = np.asarray(shard.data).tobytes()
            if first.setdefault(str(shard.index), content) != content:
                found.add(path_str(path))
    return found
