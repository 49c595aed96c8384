"""Dumps of the compiler, cut down to a few values: what is live when, and which places values share."""

import json

from jaxshard.compiler.dump import assignment_of, is_assigned, program_text, read_assignment

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 add.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4096, parameter 1, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <3 param.1 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 2: size 512, parameter 0, shape |s32[]| at ShapeIndex {}:
 value: <1 param.0 @0> (size=512,offset=0): s32[]{:T(128)}
allocation 3: size 12288, preallocated-temp:
 value: <4 early @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
 value: <5 while.1{2} @0> (size=8192,offset=4096): bf16[2,16,128]{2,1,0:T(8,128)(2,1)}
 value: <6 wide.param{2} (phi) @0> (size=8192,offset=4096): bf16[2,16,128]{2,1,0:T(8,128)(2,1)}
 value: <7 late @0> (size=2048,offset=0): bf16[8,128]{1,0:T(8,128)(2,1)}
allocation 4: size 999999, color 1, preallocated-temp:
 value: <8 on.chip @0> (size=999999,offset=0): f32[8]{0:T(128)S(1)}

Total bytes used: 17408 (17.0KiB)
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:param.0
    1:early
    2:while.1
    3:late
  BufferLiveRange:
    early{}:1-1
    while.1{2}:2-9
    wide.param{2}:2-9
    late{}:3-4
    on.chip{}:0-9
  Live ranges at 2 (peak):
    early: 4096 bytes
"""


def write_dump(folder):
    stem = "module_0000.jit_step.after_optimizations"
    (folder / f"{stem}-buffer-assignment.txt").write_text(ASSIGNMENT)
    (folder / f"{stem}-live-range.txt").write_text(RANGES)
    (folder / f"{stem}.txt").write_text("HloModule jit_step, is_scheduled=true\n")


def test_the_fullest_moment_counts_a_shared_place_once(tmp_path):
    write_dump(tmp_path)
    found = read_assignment(tmp_path)
    assert (found.arguments, found.temporaries, found.moment) == ({0: 512, 1: 4096}, 12288, "late")
    assert [(value.name, value.element, added) for value, added in found.live] == [
        ("while.1", "{2}", 8192),
        ("late", "{}", 2048),
        ("wide.param", "{2}", 0),
    ]
    assert found.peak == 512 + 4096 + 8192 + 2048
    assert found.allocated == 512 + 4096 + 12288
    assert assignment_of(json.loads(json.dumps(found))) == found


def test_a_dump_without_an_assignment(tmp_path):
    assert read_assignment(tmp_path) is None
    assert program_text(tmp_path) == ""
    assert not is_assigned(tmp_path)
