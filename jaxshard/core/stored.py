"""Convert trees of arrays between logical and stored arrays, in global-view code.

Logical arrays have the shapes of the model; stored arrays are padded and reshaped by the layout's views, and may be in
the host's memory.
"""

from __future__ import annotations

import jax

from jaxshard.core.placement import Placement
from jaxshard.core.types import PyTree


def store(placements: PyTree, tree: PyTree) -> PyTree:
    """Convert a tree from logical arrays (the shapes of the model) to stored arrays (padded, reshaped).

    Offloaded arrays are moved to the host's memory.
    """
    return send_to_host(placements, jax.tree.map(lambda x, placement: placement.view.apply(x), tree, placements))


def unstore(placements: PyTree, tree: PyTree) -> PyTree:
    """Convert a tree from stored arrays (padded, reshaped) to logical arrays (the shapes of the model).

    Offloaded arrays are moved to the devices.
    """
    there = bring_to_device(placements, tree)
    return jax.tree.map(lambda x, placement: placement.view.invert(x), there, placements)


def bring_to_device(placements: PyTree, tree: PyTree) -> PyTree:
    """Copy arrays in the host's memory to the devices; return all other arrays unchanged."""

    def bring(x: jax.Array, placement: Placement) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Device) if placement.memory else x

    return jax.tree.map(bring, tree, placements)


def send_to_host(placements: PyTree, tree: PyTree) -> PyTree:
    """Copy the arrays that their placements keep in the host's memory there; return all other arrays unchanged."""

    def send(x: jax.Array, placement: Placement) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host) if placement.memory else x

    return jax.tree.map(send, tree, placements)
