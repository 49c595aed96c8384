"""Meshes of TPU topologies, and the collectives of programs compiled for them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.compiler import topology
from jaxshard.compiler.topology import topology_mesh
from jaxshard.hlo.found import Row, collectives, summary
from tests.engines.programs import tpu


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def manual(mesh, function, in_specs, out_specs, *args):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return collectives(jax.jit(mapped).lower(*args).compile(), mesh)


def gather(w, axes):
    for axis in reversed(axes):
        w = lax.all_gather(w, axis, tiled=True)
    return w


def scatter(w, axes):
    for axis in axes:
        w = lax.psum_scatter(w, axis, tiled=True)
    return w


MB = 2**20


def test_a_missing_libtpu_names_the_extra(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf'pip install "jax\[tpu\]=={re.escape(jax.__version__)}"'):
        topology_mesh("v5e:2x4", data=8)


@tpu
@pytest.mark.parametrize(
    ("name", "axes", "dims"),
    [
        ("v5e:2x4", {"x": 2, "y": 4}, (0, 1)),
        ("v5e:2x4", {"x": 4, "y": 2}, (1, 0)),
        ("v5e:2x4", {"x": 2, "one": 1, "y": -1}, (0, None, 1)),
        ("v5p:2x2x4", {"x": 4, "y": 2, "z": 2}, (2, 0, 1)),
    ],
)
def test_axes_run_along_the_dimensions_of_the_torus(name, axes, dims):
    mesh = topology_mesh(name, **axes)
    assert mesh.axis_names == tuple(axes)
    assert set(mesh.axis_types) == {AxisType.Auto}
    for axis, dim in enumerate(dims):
        along = mesh.devices.take(range(mesh.devices.shape[axis]), axis)
        first = [device.coords for device in along.swapaxes(0, axis).reshape(along.shape[axis], -1)[:, 0]]
        assert {i for i in range(3) if len({coords[i] for coords in first}) > 1} == ({dim} - {None})


@tpu
def test_nested_scatters_along_the_torus_are_reduce_scatters():
    mesh = topology_mesh("v5e:2x4", x=2, y=4)
    axes = ("x", "y")
    found = manual(mesh, lambda x: scatter(x, axes), P(), P(axes), struct(mesh, (1024, 512)))
    assert summary(found) == (Row("reduce-scatter", ("x",), 1, 2 * MB), Row("reduce-scatter", ("y",), 1, MB))


@tpu
def test_an_axis_over_a_torus_of_two_dimensions_stays_an_all_reduce():
    mesh = topology_mesh("v6e:4x4", data=16)
    found = manual(mesh, lambda x: scatter(x, ("data",)), P(), P("data"), struct(mesh, (1024, 512)))
    assert summary(found) == (Row("all-reduce", ("data",), 1, 2 * MB),)


@tpu
def test_slices_of_whole_cubes_are_closed_to_rings_so_that_one_axis_gathers():
    mesh = topology_mesh("v5p:4x4x4", data=64)
    found = manual(mesh, lambda x: gather(x, ("data",)), P("data"), P(), struct(mesh, (1024, 512)))
    assert summary(found) == (Row("all-gather", ("data",), 1, 2 * MB),)


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("v5e:16x16", (True, True, False)),
        ("v6e:8x16", (False, True, False)),
        ("v5e:4x8", (False, False, False)),
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),
        ("v3:8x8", ()),
        ("v5p:cube", ()),
    ],
)
def test_dimensions_that_are_rings_on_the_real_slice(name, closed):
    assert topology._closed_dimensions(name) == closed
