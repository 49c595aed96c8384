"""Compiled for a TPU, the programs need no memory besides the pieces, and pieces are inserted in place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxshard as js
from jaxshard.reshard.programs import cutter, inserter, sender, union_mesh
from tests.reshard.cases import MODEL, make_layout


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_programs_for_a_tpu_need_no_memory_besides_the_pieces(dtype):
    mesh, spec, shape, piece = (
        js.plan.topology_mesh("v5e:2x2", data=2, tensor=2),
        PartitionSpec("data", "tensor"),
        (4096, 4096),
        (512, 2048),
    )
    size = math.prod(piece) * np.dtype(dtype).itemsize
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    at, flat = np.zeros((4, 2), np.int32), union_mesh(mesh, mesh)
    bits = jax.eval_shape(cutter(mesh, spec, piece), x, at).dtype

    def pieces(mesh):
        return jax.ShapeDtypeStruct((4, *piece), bits, sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))

    lowered = {
        "cut": cutter(mesh, spec, piece).lower(x, at),
        "send": sender(flat, (((0, 1), (1, 2)),)).lower(pieces(flat)),
        "insert": inserter(mesh, spec, piece).lower(x, at, np.zeros(4, bool), pieces(mesh)),
    }
    memory = {name: one.compile().memory_analysis() for name, one in lowered.items()}
    assert all(one.temp_size_in_bytes < size / 10 for one in memory.values())
    assert memory["cut"].output_size_in_bytes == memory["send"].output_size_in_bytes == size
    assert memory["insert"].alias_size_in_bytes == math.prod(shape) // 4 * np.dtype(dtype).itemsize


@pytest.mark.slow
@pytest.mark.tpu
def test_devices_that_only_compile_are_refused():
    here = make_layout("fsdp", tx=None)
    there = js.layout(js.ddp("data"), js.plan.topology_mesh("v5e:2x2", data=4), MODEL.init)
    with pytest.raises(ValueError, match=r"devices of several platforms, cpu, tpu, which no collective connects"):
        js.plan_transfer(here, there)
    with pytest.raises(ValueError, match=r"4 of 4 devices of the source layout \(data=4\), such as .* among the 8 cpu"):
        js.plan_transfer(there, there)
