"""Buffers of a program under the names of the user's model."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.checks.programs.live import live_arrays
from jaxshard.compiler.dump import Assignment, Value
from jaxshard.plan.compiled.known import known_shapes
from jaxshard.plan.compiled.savings import savings

PROGRAM = """HloModule jit__step, is_scheduled=true, num_partitions=8

FileNames
1 "/home/user/model.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=22 end_line=22 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=30 end_line=30 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%fused (a: bf16[3,16,64], b: bf16[16,64], i: s32[]) -> bf16[3,16,64] {
  %a = bf16[3,16,64]{2,1,0} parameter(0)
  %b = bf16[16,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %t = bf16[16,64]{1,0} tanh(%b), metadata={op_name="jvp()/tanh" stack_frame_id=1}
  %u = bf16[1,16,64]{2,1,0} reshape(%t)
  ROOT %d = bf16[3,16,64]{2,1,0} dynamic-update-slice(%a, %u, %i, %i, %i), metadata={op_name="jit(_step)/jvp()/update"}
}

%forward (c: (s32[], bf16[3,16,64], bf16[16,64])) -> (s32[], bf16[3,16,64], bf16[16,64]) {
  %c = (s32[], bf16[3,16,64], bf16[16,64]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %kept = bf16[3,16,64]{2,1,0} get-tuple-element(%c), index=1
  %x = bf16[16,64]{1,0} get-tuple-element(%c), index=2
  %f = bf16[3,16,64]{2,1,0} fusion(%kept, %x, %n), kind=kLoop, calls=%fused
  ROOT %r = (s32[], bf16[3,16,64], bf16[16,64]) tuple(%n, %f, %x)
}

%forward_ends (c: (s32[], bf16[3,16,64], bf16[16,64])) -> pred[] {
  %c.1 = (s32[], bf16[3,16,64], bf16[16,64]) parameter(0)
  ROOT %stop = pred[] constant(false)
}

%backward (e: (s32[], bf16[3,16,64])) -> (s32[], bf16[3,16,64]) {
  %wide.param = (s32[], bf16[3,16,64]) parameter(0)
  %m = s32[] get-tuple-element(%wide.param), index=0
  %same = bf16[3,16,64]{2,1,0} get-tuple-element(%wide.param), index=1
  %dw = f32[64,256]{1,0} custom-call(%same), metadata={op_name="transpose(jvp())/dot_general" stack_frame_id=2}
  %weight = bf16[64,256]{1,0} all-gather(%same), metadata={op_name="transpose(jvp())/all_gather" stack_frame_id=2}
  %big = f32[16,512]{1,0} custom-call(%same), metadata={op_name="transpose(jvp())/dot_general" stack_frame_id=2}
  ROOT %s = (s32[], bf16[3,16,64]) tuple(%m, %same)
}

%backward_ends (e: (s32[], bf16[3,16,64])) -> pred[] {
  %e.1 = (s32[], bf16[3,16,64]) parameter(0)
  ROOT %stop.1 = pred[] constant(false)
}

ENTRY %main (p0: f32[3,64,32], p1: f32[3,64,32], p2: s32[2,17]) -> f32[64,256] {
  %p0 = f32[3,64,32]{2,1,0} parameter(0), metadata={op_name="run.params[\\'blocks\\'][\\'w\\']"}
  %p1 = f32[3,64,32]{2,1,0} parameter(1), metadata={op_name="run.opt_state[0].mu[\\'blocks\\'][\\'w\\']"}
  %p2 = s32[2,17]{1,0} parameter(2), metadata={op_name="batch[\\'tokens\\']"}
  %zero = s32[] constant(0)
  %zeros = bf16[3,16,64]{2,1,0} broadcast(%zero), dimensions={}
  %first = bf16[16,64]{1,0} custom-call(%p0), metadata={op_name="jit(_step)/jvp()/take" stack_frame_id=1}
  %start = (s32[], bf16[3,16,64], bf16[16,64]) tuple(%zero, %zeros, %first)
  %while.1 = (s32[], bf16[3,16,64], bf16[16,64]) while(%start), condition=%forward_ends, body=%forward
  %stack = bf16[3,16,64]{2,1,0} get-tuple-element(%while.1), index=1
  %again = (s32[], bf16[3,16,64]) tuple(%zero, %stack)
  %while.2 = (s32[], bf16[3,16,64]) while(%again), condition=%backward_ends, body=%backward
  ROOT %out = f32[64,256]{1,0} custom-call(%while.2)
}
"""
KEPT, MB = 6_000_000, 1_000_000


@pytest.fixture
def layout():
    def init_fn(key):
        return {"blocks": {"w": jnp.zeros((3, 64, 256))}, "head": {"kernel": jnp.zeros((64, 512))}}

    return js.layout(js.fsdp(), js.plan.planned_mesh("v5e:2x4", data=8), init_fn, optax.sgd(0.1, momentum=0.9))


@pytest.fixture
def assignment():
    values = [
        (Value("wide.param", "{1}", KEPT, 0, 0, 9, "bf16[3,16,64]{2,1,0}"), KEPT),
        (Value("big", "{}", 5 * MB, 6 * MB, 0, 9, "f32[16,512]{1,0}"), 5 * MB),
        (Value("dw", "{}", 4 * MB, 11 * MB, 0, 9, "f32[64,256]{1,0}"), 4 * MB),
        (Value("weight", "{}", 3 * MB, 15 * MB, 0, 9, "bf16[64,256]{1,0}"), 3 * MB),
    ]
    return Assignment({0: 2 * MB, 1: 2 * MB, 2: 512}, 0, 18 * MB, tuple(values), "dw")


def test_buffers_have_the_role_and_line_of_what_made_them(layout, assignment):
    found, moment = live_arrays(assignment, PROGRAM, known_shapes(layout))
    assert [(one.bytes, one.role, one.what, one.source) for one in found] == [
        (KEPT, "kept activations", "tanh", "/home/user/model.py:22"),
        (5 * MB, "logits", "dot_general", "/home/user/model.py:30"),
        (4 * MB, "gradients", "dot_general", "/home/user/model.py:30"),
        (3 * MB, "gathered weights", "all_gather", "/home/user/model.py:30"),
        (2 * MB, "parameters", "run.params['blocks']['w']", ""),
        (2 * MB, "optimizer state", "run.opt_state[0].mu['blocks']['w']", ""),
        (512, "batch", "batch['tokens']", ""),
    ]
    assert moment == "backward pass, at /home/user/model.py:30 (dot_general)"


def test_savings_are_of_the_arrays_that_a_change_makes_smaller(layout, assignment):
    arrays, _ = live_arrays(assignment, PROGRAM, known_shapes(layout))
    batch = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
    found = {one.change: one.bytes for one in savings(arrays, layout, js.explicit(), batch, assignment.peak)}
    assert [change.partition(" ")[0] for change in found] == ["half", "js.head_loss", 'precision="bf16"']
    assert list(found.values()) == [(KEPT + 5 * MB) // 2, 5 * MB * 15 // 16, 5 * MB // 2]
    assert "microbatches=2" in next(iter(found))
    # A row for each device can't be halved, and bf16 is there already.
    batch = {"tokens": jax.ShapeDtypeStruct((8, 17), jnp.int32)}
    narrow = js.explicit(precision="bf16", remat="nothing")
    changes = [one.change for one in savings(arrays, layout, narrow, batch, assignment.peak)]
    assert [change.partition(" ")[0] for change in changes] == ["js.context", "js.head_loss"]
