"""Which collectives a device waits for: in one operation, in pairs with and without work between, in fusions of TPU."""

import pytest

from jaxshard.hlo.found import collectives
from tests.hlo.programs import GATHER_IN_FUSIONS, GROUPS, XY, mesh_of, program

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


@pytest.mark.parametrize(("overlaps", "waited"), [(True, False), (False, True)])
def test_a_collective_that_a_tpu_moves_in_fusions_with_products(overlaps, waited):
    """It is counted once, at its start."""
    lines = [
        "%a = (f32[256,16]) fusion(%p), kind=kCustom, calls=%begin",
        "%x = f32[256,16] get-tuple-element(%a), index=0",
    ]
    lines += ["%b = (f32[256,16]) fusion(%x), kind=kOutput, calls=%overlap"] if overlaps else []
    lines += [f"ROOT %c = f32[256,16] fusion(%{'b' if overlaps else 'x'}), kind=kCustom, calls=%end"]
    assert waits(program("\n".join(lines), *GATHER_IN_FUSIONS)) == [waited]
