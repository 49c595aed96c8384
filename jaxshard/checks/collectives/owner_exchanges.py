"""Promise the all-to-alls of an optimizer in which one device, the owner, computes the update of each matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxshard.checks.collectives.expected import Expected
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.optim.owners.exchange import lay_rows


def owner_exchanges(layout: Layout) -> Iterator[Expected]:
    """Yield the all-to-alls that send shards of matrices to their owners, and updates back, per dtype and mesh axes.

    The owner of a matrix is the device that computes its update. Each device sends an array [owners, elements]: a row
    has the device's shards of all matrices of that owner, and is padded to the length of the longest row.
    """
    if layout.owners is None:
        return
    placements = jax.tree.leaves(layout.opt_params)
    kinds: dict[tuple[tuple[str, ...], str, str], list[tuple[tuple[int, ...], int, int]]] = {}
    for stack in layout.owners.stacks:
        part = placements[stack.leaves[0]].shard_shape(layout.mesh)[1 if stack.slices else 0 :]
        for dtypes, what in zip(stack.moved, ("matrices to their owners", "updates from the owners"), strict=True):
            for dtype in dtypes:
                kinds.setdefault((stack.axes, dtype, what), []).append((stack.counts, stack.slots, math.prod(part)))
    for (axes, dtype, what), some in kinds.items():
        shape = axis_size(layout.mesh, axes), lay_rows(some).width
        yield Expected("all-to-all", axes, shape, jnp.dtype(dtype), 1, 1, what)
