"""Trip counts of loops from their counters, where the compiler has noted none."""

import pytest

from jaxshard.hlo.found import collectives
from tests.hlo.programs import GROUPS, XY, mesh_of, program


def loop(compare, update="add(%i, %one)", start="%start", limit=5, notes="", extra=""):
    """A while loop around an all-reduce, its carry being (counter, array, limit)."""
    computations = f"""%cond (c: (s32[], f32[64,16], s32[])) -> pred[] {{
  %c = (s32[], f32[64,16]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=2
  %five = s32[] constant({limit})
  ROOT %lt = pred[] {compare}
}}
%body (c: (s32[], f32[64,16], s32[])) -> (s32[], f32[64,16], s32[]) {{
  %c = (s32[], f32[64,16]{{1,0}}, s32[]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %x = f32[64,16]{{1,0}} get-tuple-element(%c), index=1
  %n = s32[] get-tuple-element(%c), index=2
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %r = f32[64,16]{{1,0}} all-reduce(%x), {GROUPS}, to_apply=%add
  %next = s32[] {update}
  ROOT %t = (s32[], f32[64,16]{{1,0}}, s32[]) tuple(%next, %r, %n)
}}
{extra}"""
    entry = f"""%start = s32[] constant(0)
    %nine = s32[] constant(9)
    %limit = s32[] constant({limit})
    %copy-start = (s32[], s32[], u32[]) copy-start(%limit)
    %copy-done = s32[] copy-done(%copy-start)
    %init = (s32[], f32[64,16]{{1,0}}, s32[]) tuple({start}, %p, %copy-done)
    ROOT %w = (s32[], f32[64,16]{{1,0}}, s32[]) while(%init), condition=%cond, body=%body{notes}"""
    return program(entry, computations)


ADDED = """%added (m: s32[]) -> s32[] {
  %m = s32[] parameter(0)
  %k = s32[] constant(2)
  ROOT %z = s32[] add(%k, %m)
}
"""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (loop("compare(%i, %five), direction=LT"), 5),
        (loop("compare(%five, %i), direction=GT"), 5),
        (loop("compare(%i, %n), direction=LT"), 5),
        (loop("compare(%i, %five), direction=LT", update="add(%two, %i)"), 3),
        (loop("compare(%i, %five), direction=GT", update="subtract(%i, %two)", start="%nine"), 2),
        (loop("compare(%i, %n), direction=LT", "fusion(%i), kind=kLoop, calls=%added", extra=ADDED), 3),
        (loop("compare(%i, %n), direction=LT", notes=', backend_config={"known_trip_count":{"n":"7"}}'), 7),
        (loop("compare(%i, %five), direction=LT", update="multiply(%i, %two)", start="%nine"), None),
        (loop("compare(%i, %five), direction=GT"), None),
        (loop("and(%i, %five)"), None),
    ],
)
def test_trip_counts_from_the_counter(text, count):
    (found,) = collectives(text, mesh_of(**XY))
    assert found.count == count
