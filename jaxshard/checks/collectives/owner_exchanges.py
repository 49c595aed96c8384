"""The all-to-alls that bring matrices to their owners and updates back, as a layout with owners promises them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxshard.checks.collectives.expected import Expected
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size


def owner_exchanges(layout: Layout) -> Iterator[Expected]:
    """List them: one for what goes to the owners, and one for what comes back, of each dtype.

    Each is as large as the places of one device: [devices, this device's parts of the matrices of one owner]. Places
    that are empty travel too.
    """
    if layout.owners is None:
        return
    placements = jax.tree.leaves(layout.opt_params)
    sizes: dict[tuple[tuple[str, ...], str, str], int] = {}
    for stack in layout.owners.stacks:
        part = placements[stack.leaves[0]].shard_shape(layout.mesh)[1 if stack.slices else 0 :]
        for dtypes, what in zip(stack.moved, ("matrices to their owners", "updates from the owners"), strict=True):
            for dtype in dtypes:
                key = stack.axes, dtype, what
                sizes[key] = sizes.get(key, 0) + stack.slots * math.prod(part)
    for (axes, dtype, what), size in sizes.items():
        yield Expected("all-to-all", axes, (axis_size(layout.mesh, axes), size), jnp.dtype(dtype), 1, 1, what)
