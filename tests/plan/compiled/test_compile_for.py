"""The verdict of the real compilers, and what is refused before they are asked."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.compiler.planned import planned_devices
from jaxshard.compiler.topology import topology_devices
from jaxshard.plan.compiled import target
from jaxshard.plan.memory.tiles import tiled_argument_bytes
from tests.engines.programs import tpu
from tests.notebook_page import check_shows_text

without_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="JAX's CUDA plugin is not installed"
)
SEQ = 512


def make(mesh, *, strategy=None, rows=None, depth=2, **engine):
    model = js.models.make("gpt2", seq=SEQ, depth=depth, width=256, heads=2, vocab=4096)
    layout = js.layout(strategy or js.fsdp(), mesh, model.init, optax.adamw(1e-3))
    batch = {"tokens": jax.ShapeDtypeStruct((rows or mesh.size, SEQ + 1), jnp.int32)}
    return js.make_step(model.loss, optax.adamw(1e-3), layout, engine=js.explicit(precision="bf16", **engine)), batch


@pytest.fixture
def small_step(monkeypatch):
    """A step for four planned devices, where the compiler is asked for stand-ins too."""
    monkeypatch.setattr(target, "topology_devices", planned_devices)
    mesh, tx = js.plan.planned_mesh("v5e:2x2", data=2, tensor=2), optax.sgd(0.1)
    layout = js.layout(js.fsdp(("data", "tensor")), mesh, lambda key: {"w": jnp.zeros((64, 64))}, tx)
    return js.make_step(lambda params, batch, key: js.Mean((batch @ params["w"]).sum(), 1), tx, layout)


BATCH = jax.ShapeDtypeStruct((4, 64), jnp.float32)


def test_a_mesh_that_the_topology_can_not_hold_names_both_sizes(small_step):
    message = (
        r"2 slices of v5e:4x4 has 32 devices, and the mesh of the step \(data=2, tensor=2\) 4; .*"
        r'js.plan.planned_mesh\("v5e:4x4", num_slices=2, data=16, tensor=2\)'
    )
    with pytest.raises(ValueError, match=message):
        js.plan.compile_for(small_step, BATCH, "v5e:4x4", num_slices=2)


def test_an_unknown_topology_lists_near_ones(small_step):
    for name, near in (("v5e:16x15", "v5e:16x16"), ("h100:9", "h100:8"), ("v7e:4x4", "v5e")):
        with pytest.raises(ValueError, match=f"no topology '{name}'.*{near}"):
            js.plan.compile_for(small_step, BATCH, name)


def test_a_missing_compiler_names_the_command_that_installs_it(small_step, monkeypatch):
    monkeypatch.setattr(target, "topology_devices", topology_devices)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'libtpu is not installed; pip install "jax\[tpu\]=='):
        js.plan.compile_for(small_step, BATCH, "v5e:2x2")
    with pytest.raises(ImportError, match="CUDA plugin is not installed; pip install --no-deps"):
        js.plan.compile_for(small_step, BATCH, "h100:4")


@tpu
@pytest.mark.slow
def test_a_step_for_simulated_devices_is_compiled_for_a_topology():
    step, batch = make(js.make_mesh(data=8))
    verdict = js.plan.compile_for(step, batch, "v5e:2x4", codegen=True)
    on_topology, _ = make(js.plan.topology_mesh("v5e:2x4", data=8))
    compiled = on_topology.compile(batch)
    memory = compiled.memory_analysis()
    assert verdict.fits and verdict.live_bytes == sum(verdict.by_role.values()) <= verdict.allocated_bytes
    # Stopped when memory is assigned the compiler says the same.
    early = js.plan.compile_for(step, batch, "v5e:2x4")
    assert early.compiled is None and verdict.compiled is not None
    assert (early.live_bytes, early.allocated_bytes) == (verdict.live_bytes, verdict.allocated_bytes)
    # Arguments are counted in whole tiles; on-chip memory is not part of the peak.
    assert memory.argument_size_in_bytes < verdict.live_bytes <= memory.peak_memory_in_bytes
    resting = tiled_argument_bytes(on_topology.layout, batch)
    arguments = {role: verdict.by_role[role] for role in ("parameters", "optimizer state", "batch")}
    assert abs(sum(arguments.values()) - resting) <= 2048  # number of the step and key are with the batch
    found = js.collectives(compiled, on_topology.layout.mesh)
    assert [(one.kind, one.axes, one.bytes) for one in verdict.collectives] == [
        (one.kind, one.axes, one.bytes) for one in found
    ]
    assert verdict.cycles > 100_000
    # Twice the blocks: the loop over them counts.
    deeper, _ = make(js.make_mesh(data=8), depth=4)
    assert js.plan.compile_for(deeper, batch, "v5e:2x4", codegen=True).cycles > 1.3 * verdict.cycles


@tpu
@pytest.mark.slow
def test_a_refusal_names_the_arrays_of_the_model_and_what_would_save_them():
    mesh = js.plan.planned_mesh("v5e:2x4", data=8)
    step, batch = make(mesh, strategy=js.ddp(), rows=8192, depth=12, remat="everything")
    verdict = js.plan.compile_for(step, batch, "v5e:2x4")
    assert verdict.fits is False and verdict.cycles is None
    assert verdict.allocated_bytes > verdict.usable_bytes == int(15.75 * 2**30)
    assert verdict.refusal.startswith("RESOURCE_EXHAUSTED")
    largest = verdict.arrays[0]
    assert largest.role == "kept activations" and "jaxshard/models/" in largest.source
    assert largest.shape[:3] == (12, 1024, SEQ)
    best = verdict.savings[0]
    assert 'remat="nothing"' in best.change and best.bytes > 0.5 * verdict.live_bytes
    # The saving is real: the step with it is that much smaller, at least by half of the bound.
    lean, _ = make(mesh, strategy=js.ddp(), rows=8192, depth=12, remat="nothing")
    after = js.plan.compile_for(lean, batch, "v5e:2x4")
    assert verdict.live_bytes - after.live_bytes > 0.5 * best.bytes
    shown = str(verdict)
    assert "does not fit;" in shown and "what would save how much" in shown
    assert verdict.as_dict()["fits"] is False
    check_shows_text(verdict)


@tpu
@pytest.mark.slow
def test_several_slices_are_compiled_with_their_network():
    step, batch = make(js.plan.planned_mesh("v5e:2x2", num_slices=2, replica=2, data=4), strategy=js.hsdp())
    verdict = js.plan.compile_for(step, batch, "v5e:2x2", num_slices=2)
    assert (verdict.topology, verdict.devices, verdict.fits) == ("2 x v5e:2x2", 8, True)
    over = {row.axes for row in verdict.traffic}
    assert {("replica",), ("data",)} <= over


@pytest.mark.slow
@without_plugin
def test_gpus_whose_compiler_enforces_no_memory():
    mesh = js.plan.planned_mesh("h100:8", data=8)
    step, batch = make(mesh)
    verdict = js.plan.compile_for(step, batch, "h100:8")
    assert (verdict.fits, verdict.cycles, verdict.device_kind) == (True, None, "NVIDIA H100 80GB HBM3")
    compiled = make(js.plan.topology_mesh("h100:8", data=8))[0].compile(batch)
    assert abs(verdict.live_bytes - compiled.memory_analysis().peak_memory_in_bytes) < 0.01 * verdict.live_bytes
    assert any(not row.synchronous for row in verdict.traffic if row.kind == "all-gather")
    step, batch = make(mesh, rows=32768, depth=12, remat="everything")
    assert js.plan.compile_for(step, batch, "h100:8").fits is False
