"""Meshes of stand-ins: names, refusals, places, and a step traced on them."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.compiler.planned import GPUS, TPUS, parse_topology, planned_devices, planned_mesh
from jaxshard.compiler.topology import topology_mesh
from jaxshard.layers.attention.cudnn import is_rocm
from jaxshard.models.sizes import make
from tests.engines.programs import tpu


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:16x15", r"v5e is not rented as 16x15; near it are v5e:16x16, v5e:8x16, v5e:8x8"),
        ("v5e:16x32", r"at most 256 chips in a slice; take several slices; near it are v5e:16x16"),
        ("v5p:4x4", r"near it are v5p:2x2x4"),
        ("v5p:3x4x4", r"near it are v5p:4x4x4, v5p:2x4x4"),
        ("v5litepod-255", r"none of v4, v5e.*such as.*v5e:4x4"),
        ("v7x:4x4", r"such as tpu7x:2x2x4"),
        ("h1000:8", r"such as h100:8"),
        ("h100:9", r"h100 is not rented as 9; near it are h100:8"),
        ("h100", r"write h100:shape, such as"),
        ("v5e:0x4", r"near it are"),
        ("nonsense", r"one of v4:2x2x4, v5e:4x4"),
        ("", r"one of v4:2x2x4"),
    ],
)
def test_an_unknown_topology_lists_near_ones(name, message):
    with pytest.raises(ValueError, match=message):
        planned_mesh(name, data=-1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v5litepod-256", "v5e:16x16"), ("v5e-8", "v5e:2x4"), ("v6e-64", "v6e:8x8"), ("v4-512", "v4:4x8x8"),
        ("v5p-512", "v5p:4x8x8"), ("v5p-1536", "v5p:8x8x12"), ("V5P-8", "v5p:2x2x1"),
    ],
)  # fmt: skip
def test_a_slice_may_be_named_as_google_names_it(name, shape):
    assert str(parse_topology(name)) == shape
    assert len(planned_devices(name)) == len(planned_devices(shape))


def test_a_mesh_of_another_size_names_both_sizes():
    with pytest.raises(ValueError, match="2 x v5e:4x4: data=8, tensor=2 needs 16 devices, but there are 32"):
        planned_mesh("v5e:4x4", num_slices=2, data=8, tensor=2)
    with pytest.raises(ValueError, match="leaves no size for 'tensor': 16 devices are not divisible by 3"):
        planned_mesh("v5e:4x4", data=3, tensor=-1)
    with pytest.raises(ValueError, match="for more hosts write h100:8x8"):
        planned_mesh("h100:8x4", num_slices=2, data=-1)


def test_every_version_has_a_known_chip():
    for version in (*TPUS, *GPUS):
        name = f"{version}:2x2x1" if version in ("v4", "v5p", "tpu7x") else f"{version}:2x2"
        device = planned_devices(name)[0]
        assert js.plan.chip(device.device_kind, num_cores=device.num_cores), version
        assert str(parse_topology(name)) == name


def test_gpus_of_a_host_share_a_slice():
    mesh = planned_mesh("h100:4x2", replica=2, data=4)
    assert [{device.slice_index for device in row} for row in mesh.devices] == [{0}, {1}]


def test_an_amd_gpu_has_an_architecture_and_no_cudnn():
    for name, amd in (("mi300x:8", True), ("h100:8", False)):
        device = planned_devices(name)[0]
        assert is_rocm(device) == device.compute_capability.startswith("gfx") == amd


@tpu
@pytest.mark.parametrize(
    ("name", "slices", "axes"),
    [
        ("v5e:4x4", 1, {"data": 4, "tensor": 4}),
        ("v5e:4x8", 1, {"data": 32}),
        ("v6e:8x8", 1, {"data": 16, "tensor": 4}),
        ("v5p:2x4x4", 1, {"x": 4, "y": 2, "z": 4}),
        ("v5p:4x4x4", 1, {"data": 16, "tensor": 4}),
        ("v4:2x2x2", 1, {"data": 16}),
        ("tpu7x:2x2x4", 1, {"data": 16, "core": 2}),
        ("v5e:4x4", 2, {"replica": 2, "data": 16}),
    ],
)
def test_stand_ins_stand_where_the_compiler_has_its_devices(name, slices, axes):
    def places(mesh):
        return [
            (d.id, tuple(d.coords), d.core_on_chip, d.num_cores, d.process_index, d.device_kind)
            + ((d.slice_index,) if slices > 1 else ())
            for d in mesh.devices.flat
        ]

    planned, real = planned_mesh(name, num_slices=slices, **axes), topology_mesh(name, num_slices=slices, **axes)
    assert places(planned) == places(real)
    assert planned.devices.shape == real.devices.shape


@pytest.mark.parametrize("name", ["h100:8", pytest.param("mi300x:8", marks=pytest.mark.slow)])
def test_a_step_is_laid_out_and_traced_for_chips_that_are_not_here(name):
    mesh, engine = planned_mesh(name, data=4, tensor=2), js.auto(precision="bf16")
    model, tx = make("llama-1m", depth=1), optax.adam(1e-3)
    layout = js.layout(js.compose(js.fsdp("data"), js.tensor()), mesh, model.init, tx)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 33), jnp.int32)}
    assert js.plan.promise(layout, engine, model.loss, batch).expected
    step = js.make_step(model.loss, tx, layout, engine=engine)
    with pytest.raises(ValueError, match="topology_mesh"):
        step.compile(batch)
