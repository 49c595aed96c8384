"""The part of an array that each device holds, beside what JAX says."""

import jax
import numpy as np
import pytest

import jaxshard as js
from jaxshard.core.mesh import axis_size
from jaxshard.core.pictures.tiles import arrange, parts_held
from jaxshard.core.placement import Placement, View


@pytest.mark.parametrize("spec", [("tensor", "data"), (("data", "tensor"), None), (None, "tensor")])
def test_parts_are_those_of_the_shards_of_jax(spec):
    """Two devices have one number if and only if JAX gives them the same part."""
    mesh, store = js.make_mesh(data=4, tensor=2), jax.sharding.PartitionSpec(*spec)
    placement = Placement(View((64, 512), (64, 512), (64, 512)), store, store)
    found = parts_held(mesh, placement)
    indices = jax.sharding.NamedSharding(mesh, store).devices_indices_map((64, 512))
    parts = [str(indices[device]) for device in mesh.devices.flat]
    assert len(set(found.tolist())) == axis_size(mesh, [axis for one in spec if one for axis in np.atleast_1d(one)])
    assert all((found[i] == found[j]) is np.bool_(parts[i] == parts[j]) for i in range(8) for j in range(8))


def test_the_longest_axis_goes_to_the_right():
    assert arrange(js.make_mesh(data=2, tensor=4)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert arrange(js.make_mesh(data=4, tensor=2)).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert arrange(js.make_mesh(data=8)).tolist() == [list(range(8))]
