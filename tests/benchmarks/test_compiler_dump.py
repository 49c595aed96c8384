"""The dump of a TPU compiler, shortened: elements of tuples written out, and what is live at the fullest moment."""

import sys
from pathlib import Path

import pytest

from jaxshard.checks.collectives import hlo


@pytest.fixture
def compiler_dump(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import compiler_dump

    yield compiler_dump
    sys.modules.pop("compiler_dump")


PROGRAM = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %t = (f32[8]{0}, /*index=1*/(f32[4]{0:T(8,128)}, s32[])) custom-call(%p), metadata={op_name="a#1"}
  %x = f32[4]{0} copy(%t#1#0), metadata={op_name="jit(f)/x"}
  %y = f32[8]{0} copy(%t#0), metadata={op_name="jit(f)/y"}
  ROOT %z = f32[8]{0} add(%t#0, %y)
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 100, parameter 0, shape |f32[8]| at ShapeIndex {}:
 value: <1 p @0> (size=32,offset=0): f32[8]{0}
allocation 1: size 1000, color 1, preallocated-temp:
 value: <9 other @0> (size=900,offset=0): f32[8]{0}
allocation 2: size 70, preallocated-temp:
 value: <2 x @0> (size=16,offset=0): f32[4]{0}
 value: <3 y @0> (size=32,offset=16): f32[8]{0}
 value: <4 z{0} (phi) @0> (size=32,offset=16): f32[8]{0}
 value: <5 late @0> (size=40,offset=0): f32[10]{0}

Total bytes used: 1170
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:p
    1:x
  BufferLiveRange:
    p{}:0-9
    x{}:1-4
    y{}:2-4
    z{0}:3-4
    late{}:6-7
  Live ranges at 3 (peak):
    x: 16 bytes
"""


def test_elements_of_tuples_are_written_as_operations(tmp_path, compiler_dump):
    (tmp_path / "module.after_optimizations.txt").write_text(PROGRAM)
    module = hlo.parse(compiler_dump.program_text(tmp_path))
    main = module.computations["main"]
    assert (main["x"].operands, main["x"].type) == (("t.element1.element0",), "f32[4]{0}")
    inner = main["t.element1.element0"]
    assert (inner.type, inner.operands, inner.attribute("index")) == ("f32[4]{0:T(8,128)}", ("t.element1",), "0")
    assert main["z"].operands == ("t.element0", "y") and 'op_name="a#1"' in main["t"].notes
    assert list(main.lines).count("t.element0") == 1


def test_memory_counts_a_place_once_and_names_the_largest_buffers(tmp_path, compiler_dump):
    stem = tmp_path / "module.after_optimizations"
    assert compiler_dump.memory(tmp_path) == {} and not compiler_dump.is_assigned(tmp_path)
    for ending, text in ((".txt", PROGRAM), ("-buffer-assignment.txt", ASSIGNMENT), ("-live-range.txt", RANGES)):
        Path(f"{stem}{ending}").write_text(text)
    found = compiler_dump.memory(tmp_path, 2)
    assert (found["arguments"], found["temporaries"], found["peak"]) == (100, 70, 100 + 16 + 32)
    assert found["largest"] == ["0.0 MB f32[8]{0} y{} jit(f)/y", "0.0 MB f32[4]{0} x{} jit(f)/x"]
