"""Instructions that tell about memory: computed again by the compiler, and arrays on the host."""

from jaxshard.checks.collectives.program import Program
from jaxshard.hlo.instructions import in_host_memory, rematerialized
from tests.hlo.programs import program

META = 'metadata={op_name="jit(f)/mul" source_file="/home/user/model.py" source_line=22}'
FUSED = """%fused (q: f32[64,16]) -> f32[64,16] {
  %q = f32[64,16]{1,0} parameter(0)
  ROOT %inner.remat = f32[64,16]{1,0} multiply(%q, %q)
}
"""
LOOP = f"""%body (c: (f32[64,16])) -> (f32[64,16]) {{
  %c = (f32[64,16]) parameter(0)
  %x = f32[64,16]{{1,0}} get-tuple-element(%c), index=0
  %fusion.7.remat2 = f32[64,16]{{1,0}} fusion(%x), kind=kLoop, calls=%fused, {META}
  ROOT %t = (f32[64,16]) tuple(%fusion.7.remat2)
}}
%cond (c: (f32[64,16])) -> pred[] {{
  %c = (f32[64,16]) parameter(0)
  ROOT %lt = pred[] constant(true)
}}
"""
TURNS = 'backend_config={"known_trip_count":{"n":"5"}}'


def test_what_the_compiler_computes_again_is_counted_with_loops_and_named():
    entry = f"""%copy.remat_compressed = f32[64,16]{{0,1}} copy(%p), {META}
    %checkpoint.remat_policy_of_mine = f32[64,16]{{1,0}} copy(%p)
    %rematted.3 = f32[64,16]{{1,0}} copy(%p)
    %init = (f32[64,16]) tuple(%copy.remat_compressed)
    %w = (f32[64,16]) while(%init), condition=%cond, body=%body, {TURNS}
    ROOT %r = f32[64,16] get-tuple-element(%w), index=0"""
    text = program(entry, FUSED, LOOP)
    found = {one.op: one for one in rematerialized(text)}
    assert {op: one.count for op, one in found.items()} == {"copy.remat_compressed": 1, "fusion.7.remat2": 5}
    again = found["fusion.7.remat2"]
    assert (again.kind, again.bytes, again.dtype) == ("fusion", 5 * 4096, "f32")
    assert again.source == "/home/user/model.py:22"
    shown = str(Program(rematerialized=rematerialized(text)))
    assert "computed again by the compiler on its own" in shown
    assert "fusion.7.remat2, 5 times, 20.48 kB: f32[64, 16]\n    at /home/user/model.py:22" in shown
    assert rematerialized(program("ROOT %r = f32[64,16]{1,0} copy(%p)")) == ()


def test_arrays_in_host_memory_are_listed_once():
    entry = f"""%h = f32[64,16]{{1,0:S(5)}} copy(%p), {META}
    ROOT %r = f32[64,16]{{1,0}} copy(%h)"""
    (kept,) = in_host_memory(program(entry))
    assert (kept.shapes, kept.dtype, kept.count, kept.place) == (((64, 16),), "f32", 1, "/home/user/model.py:22")
