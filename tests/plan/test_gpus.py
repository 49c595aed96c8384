"""Programs compiled for GPUs that are not here, from a description; slow where JAX's CUDA plugin is installed."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.layers.attention import cudnn
from jaxshard.plan import gpus
from jaxshard.plan.topology import topology_mesh

without_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="JAX's CUDA plugin is not installed"
)


def test_a_missing_plugin_names_the_command(monkeypatch):
    monkeypatch.setattr(gpus, "_PLUGINS", ("jax_plugins.no_such_plugin", "no_such_package.plugin"))
    command = f'pip install --no-deps "jax-cuda12-plugin=={jax.__version__}" "jax-cuda12-pjrt=={jax.__version__}"'
    with pytest.raises(ImportError, match=f"JAX's CUDA plugin is not installed; {command}"):
        topology_mesh("h100:8", data=8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("h100:9", {}, "h100 is not rented as 9; near it are h100:8"),
        ("h100:8", {"num_slices": 2}, "slices are of TPUs, got num_slices=2"),
        ("b200:8", {}, "no GPU 'b200' to compile for; there are descriptions of a100, h100, h200"),
    ],
)
def test_gpus_that_can_not_be_compiled_for(name, options, message):
    with pytest.raises(ValueError, match=message):
        topology_mesh(name, data=-1, **options)


def test_a_step_planned_without_cudnn_has_attention_in_blocks(monkeypatch):
    """Otherwise JAX raises "cuDNN is not detected" when the step is traced."""
    monkeypatch.setattr(cudnn, "has_cudnn", lambda: False)
    mesh = js.plan.planned_mesh("h100:8", data=8)
    model = js.models.make("gpt2", seq=1024, depth=1, width=64, heads=1, vocab=64)
    layout = js.layout(js.fsdp(), mesh, model.init)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 1025), jnp.int32)}
    with pytest.warns(UserWarning, match="cuDNN is not installed"):
        js.plan.promise(layout, js.explicit(precision="bf16"), model.loss, batch)


@pytest.mark.slow
@without_plugin
def test_a_program_for_two_hosts_of_gpus():
    mesh = topology_mesh("h100:8x2", replica=2, data=8)
    assert {device.device_kind for device in mesh.devices.flat} == {"NVIDIA H100 80GB HBM3"}
    assert [{device.process_index for device in row} for row in mesh.devices] == [{0}, {1}]
    rows = NamedSharding(mesh, P("data"))
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=rows)
    compiled = jax.jit(lambda w: w @ w, out_shardings=rows).lower(w).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 512 * 512 * 4 // 8
    assert [(one.kind, one.axes, one.bytes) for one in js.collectives(compiled, mesh)] == [
        ("all-gather", ("data",), 512 * 512 * 4)
    ]
