"""Which collectives a device waits for: in one operation, in pairs with and without work between, in fusions of TPU."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.checks.collectives.compare import audit
from jaxshard.checks.collectives.found import collectives
from jaxshard.plan.topology import topology_mesh
from tests.checks.collectives.programs import GROUPS, XY, mesh_of, program
from tests.engines.programs import tpu

WORK = "%w = f32[64,16]{1,0} fusion(%p), kind=kLoop, calls=%add"
START = f"%s = (f32[64,16]{{1,0}}, f32[256,16]{{1,0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}"
DONE = "ROOT %d = f32[256,16]{1,0} all-gather-done(%s)"
HELD = "%e = f32[256,16]{1,0} get-tuple-element(%s), index=1"


def waits(text):
    return [one.synchronous for one in collectives(text, mesh_of(**XY))]


@pytest.mark.parametrize(
    ("lines", "waited"),
    [
        ([f"ROOT %r = f32[64,16]{{1,0}} all-reduce(%p), {GROUPS}, to_apply=%add"], True),
        ([START, WORK, DONE], False),
        ([START, DONE], True),
        ([WORK, START, HELD, DONE], True),
        ([START, "%c = (f32[64,16]{1,0}, f32[64,16]{1,0}, u32[]) copy-start(%p)", DONE], True),
        ([START.replace("dimensions={0}", 'dimensions={0}, backend_config={"is_sync":true}'), WORK, DONE], True),
        ([START, "ROOT %t = (f32[256,16]{1,0}) tuple(%s)"], False),  # it ends in the loop's next turn
    ],
)
def test_a_collective_is_waited_for_unless_something_is_computed_between_its_start_and_its_end(lines, waited):
    assert waits(program("\n".join(lines))) == [waited]


@tpu
@pytest.mark.slow
def test_on_a_tpu_gathers_of_later_layers_overlap_with_products_and_what_is_waited_for_has_a_line():
    mesh = topology_mesh("v5e:2x4", x=2, y=4)
    model = js.models.llama(vocab=512, width=512, depth=2, heads=4, kv_heads=4, hidden=1408, seq=512)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 513), jnp.int32)}
    layout = js.layout(js.fsdp(("x", "y")), mesh, model.init, optax.sgd(0.1))
    engine = js.explicit(compute_dtype=jnp.bfloat16, remat="nothing")
    comparison = audit(js.make_step(model.loss, optax.sgd(0.1), layout, engine=engine), batch)
    overlapped = [one for one in comparison.found if not one.synchronous]
    assert overlapped and {one.kind for one in overlapped} == {"all-gather"}
    assert comparison.program is not None
    waited = comparison.program.synchronous
    assert len(waited) + len(overlapped) == len(comparison.found)
    assert {one.kind for one in waited} >= {"reduce-scatter", "all-gather"}
    text = str(comparison)
    assert "collectives that the device waits for: " in text and "    at " in text.partition("waits for")[2]
    assert comparison.program.rematerialized == () and comparison.program.host == ()
