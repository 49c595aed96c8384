"""Mixtral and Qwen3 with experts over an axis of a pod, two blocks, compiled for TPU chips that are not here."""

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

CASES = {
    # Sums of one expert's gradients in f32 take 0.70 GB, its matrices 0.35, and a window's arrays 0.12 each.
    "mixtral-8x7b": ("v5e:16x16", {"data": 32, "expert": 8}, "all-to-all", 3.5e9),
    "qwen3-30b-a3b": ("v5p:4x4x4", {"data0": 4, "data1": 4, "expert": 4}, "ragged-all-to-all", 4e9),
}


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("size", CASES)
def test_experts_over_an_axis_of_a_pod_move_what_was_promised_and_fit(size):
    topology, axes, exchange, limit = CASES[size]
    model, tx = SIZES[size].model(depth=2, seq=4096), optax.adamw(3e-4)
    mesh = topology_mesh(topology, **axes)
    layout = js.layout(js.compose(js.fsdp(tuple(axes)), js.expert()), mesh, model.init, tx)
    engine = js.explicit(precision="bf16")
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, 4097), jnp.int32)}
    compiled = js.make_step(model.loss, tx, layout, engine=engine).compile(batch)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < limit
    found = collectives(compiled, mesh)
    comparison = compare(promise(layout, engine, model.loss, batch), found)
    assert comparison.ok, comparison
    exchanges = [one for one in arrays_only(found) if "all-to-all" in one.kind]
    assert {(one.kind, one.axes) for one in exchanges} == {(exchange, ("expert",))}
    assert len(exchanges) == 7  # two forward and five backward, in loops over windows
    # One number over the other axes: no device takes more windows than another.
    numbers = [one for one in found if one.dtype == "s32" and one.shapes == ((),) and one.count == 2]
    assert {axis for one in numbers for axis in one.axes} == set(axes) - {"expert"}
