"""A step of low-rank factors beside Llama 3 8B's blocks, compiled for TPU chips that are not here."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.checks.collectives.compare import compare
from jaxshard.checks.collectives.found import arrays_only, collectives
from jaxshard.checks.collectives.promise import promise
from jaxshard.models import SIZES
from jaxshard.plan.topology import topology_mesh
from tests.engines.programs import tpu


@tpu
@pytest.mark.slow
def test_an_int8_base_is_gathered_as_it_is_stored_and_only_factors_are_reduced():
    model, tx = SIZES["llama3-8b"].model(depth=2, seq=4096), optax.adamw(1e-4)
    tuned = js.lora(model.init, model.loss, rank=16, match=["blocks/*_proj/kernel"], base="int8")
    mesh = topology_mesh("v5e:4x4", data=16)
    layout = js.layout(js.fsdp(), mesh, tuned.init, tx)
    sizes, engine = layout.bytes_per_device(), js.explicit(precision="bf16")
    # Of one block: q and o [4096, 4096], k and v [4096, 1024], gate, up and down [4096, 14336]; rank 16, f32.
    factors = 2 * 4 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert sizes["grad"] == factors // 16 and sizes["opt"] == 2 * factors // 16 + 4
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, 4097), jnp.int32)}
    compiled = js.make_step(tuned.loss, tx, layout, engine=engine).compile(batch)
    memory = compiled.memory_analysis()
    print(
        f"arguments {memory.argument_size_in_bytes / 1e9:.3f} GB, temporaries {memory.temp_size_in_bytes / 1e9:.3f} GB"
    )
    assert memory.temp_size_in_bytes < 6e9
    found = collectives(compiled, mesh)
    comparison = compare(promise(layout, engine, tuned.loss, batch), found)
    print(comparison)
    assert comparison.ok, comparison
    reduced = sum(one.bytes * one.count for one in arrays_only(found) if "reduce" in one.kind)
    assert reduced <= 2 * factors  # and nothing of the base, 0.87 GB
    assert "s8" in {one.dtype for one in found if one.kind == "all-gather"}
