"""What is said where programs can't be compiled for GPUs, or are planned without cuDNN."""

import os
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import jaxshard as js
from jaxshard.compiler import gpus, topology
from jaxshard.compiler.topology import topology_mesh
from jaxshard.layers.attention import cudnn


def test_a_missing_plugin_names_the_command(monkeypatch):
    monkeypatch.setattr(gpus, "_PLUGINS", ("jax_plugins.no_such_plugin", "no_such_package.plugin"))
    command = f'pip install --no-deps "jax-cuda12-plugin=={jax.__version__}" "jax-cuda12-pjrt=={jax.__version__}"'
    with pytest.raises(ImportError, match=f"JAX's CUDA plugin is not installed; {command}"):
        topology_mesh("h100:8", data=8)


def test_without_a_driver_the_plugin_is_started_again_for_its_compiler(monkeypatch):
    """JAX's CUDA plugin looks for a driver unless JAX_PLATFORMS leaves out GPUs, and then offers no topology."""
    started = []

    def start():
        if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
            raise RuntimeError("Unable to load CUDA. Is it installed?")
        started.append(jax.default_backend())  # JAX's own devices came first: it would look for GPUs

    def describe(name, platform, **options):
        if not started:
            raise NotImplementedError(f"topology not implemented for {platform}")
        return types.SimpleNamespace(devices=jax.devices()[:2])

    plugin = types.ModuleType("plugin_without_driver")
    plugin.initialize, plugin.__spec__ = start, object()
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    monkeypatch.setattr(gpus, "_PLUGINS", (plugin.__name__,))
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(topology, "_targets", {})
    topology._make_devices.cache_clear()
    assert topology.topology_devices("h100:2") == jax.devices()[:2]
    assert started == ["cpu"]
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
    topology._make_devices.cache_clear()


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
    with pytest.warns(UserWarning, match="cuDNN is not installed .* are those of blocks, which store no logits"):
        js.plan.promise(layout, js.explicit(precision="bf16"), model.loss, batch)
