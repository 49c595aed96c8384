"""The shard of an array that each device of a mesh holds, and the device's position in a picture of the mesh."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from jaxshard.core.mesh import axis_names
from jaxshard.core.placement import Placement


def parts_held(mesh: Mesh, placement: Placement) -> np.ndarray:
    """Return the index of the shard that each device holds, as an array in the shape of the mesh."""
    places = dict(zip(mesh.axis_names, np.unravel_index(np.arange(mesh.size), tuple(mesh.shape.values()))))
    number = np.zeros(mesh.size, int)
    for entry in placement.store:
        for axis in axis_names(entry):
            number = number * mesh.shape[axis] + places[axis]
    return number


def arrange(mesh: Mesh) -> np.ndarray:
    """Arrange the indices of a mesh's devices in a table: the longest axis across, all other axes downwards."""
    ids = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    longest = int(np.argmax(ids.shape))
    return np.moveaxis(ids, longest, -1).reshape(-1, ids.shape[longest])
