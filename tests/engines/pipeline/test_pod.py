"""An eight-billion-parameter Llama over a pod's three axes, compiled for 128 TPU chips that are not here."""

import re

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
from jaxshard.schedules.buffers import plan_buffers
from tests.engines.programs import tpu

ROWS, SEQ = 64, 8192


@tpu
@pytest.mark.slow
def test_an_8b_llama_over_pipe_data_and_tensor_axes_compiles_for_128_chips_and_moves_what_was_promised():
    model, tx = SIZES["llama3-8b"].model(), optax.adamw(3e-4)
    mesh = topology_mesh("v5p:4x4x8", pipe=4, data=8, tensor=4)
    layout = js.layout(js.compose(js.fsdp("data"), js.tensor(), js.pipeline("pipe", chunks=2)), mesh, model.init, tx)
    engine = js.pipelined(microbatches=8, compute_dtype=jnp.bfloat16)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, SEQ + 1), jnp.int32)}
    step = js.make_step(model.loss, tx, layout, engine=engine)
    compiled = step.compile(batch)
    memory = compiled.memory_analysis()
    # 3.8 GB of it are the stash and 2.8 sums of gradients, which scatter="each" would keep split. Gaps between buffers
    # add 0.3 GB, to 8.9 of 9 that it may take.
    assert memory.peak_memory_in_bytes - memory.argument_size_in_bytes < 8.7e9
    stash = plan_buffers(engine.table(layout)).sizes["kept"], 32 // 4 // 2, 1, SEQ, 4096
    assert stash not in copied_in_loops(compiled.as_text())
    found = collectives(compiled, mesh)
    comparison = compare(promise(layout, engine, model.loss, batch), found)
    assert comparison.ok, comparison
    over = {axis: [one for one in arrays_only(found) if axis in one.axes] for axis in mesh.axis_names}
    assert {one.kind for one in over["tensor"]} == {"all-reduce"}  # of activations: no weight is gathered
    assert {one.kind for one in over["pipe"]} == {"collective-permute", "all-reduce"}
    activation = SEQ * 4096
    assert {one.shapes for one in over["pipe"] if one.kind == "collective-permute"} == {((1, SEQ, 4096),)}
    ends = sum(x.size for name in ("embed", "head") for x in jax.tree.leaves(layout.shapes.params[name]))
    summed = [shape for one in over["pipe"] if one.kind == "all-reduce" for shape in one.shapes]
    parts = mesh.shape["data"] * mesh.shape["tensor"]
    assert sum(jnp.prod(jnp.array(shape)).item() for shape in summed) < ends / parts * 1.01 + activation / 100


def copied_in_loops(text: str) -> list[tuple[int, ...]]:
    """The shapes that a compiled program copies outside of its entry."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:copy|copy-start)\(", text.split("\nENTRY ")[0])
    return [tuple(int(size) for size in shape.split(",") if size) for shape in found]
