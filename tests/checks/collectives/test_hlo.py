"""Short programs in the text format, for what a given compiler may or may not print."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.found import Row, collectives, summary
from jaxshard.checks.collectives.groups import axes_of_groups, axes_of_pairs, parse_groups, parse_pairs
from jaxshard.core.our_code import package_folder


def mesh_of(**axes):
    count = math.prod(axes.values())
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


XY = {"x": 2, "y": 4}


def program(entry, *computations, tables=""):
    """A program over eight devices whose entry has an f32[64,16] parameter %p."""
    body = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    added = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  ROOT %s = f32[] add(%a, %a)\n}\n"
    return (
        f"HloModule test, is_scheduled=true, num_partitions=8\n{tables}\n{added}\n{''.join(computations)}\n"
        f"ENTRY %main (p: f32[64,16]) -> f32[64,16] {{\n  %p = f32[64,16]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def rows(text, **axes):
    return summary(collectives(text, mesh_of(**(axes or XY))))


WHOLE = 64 * 16 * 4


# Replica groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4], use_global_device_ids=true", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}, dimensions={0}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh[a=2,b=2] {a}", ((0, 2), (1, 3))),
        ("mesh['a'=4,'b'=1] {'b'}", ((0,), (1,), (2,), (3,))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_replica_groups_in_every_syntax(text, groups):
    found = parse_groups(text, 4)
    assert sorted(map(sorted, found)) == sorted(map(sorted, groups))


@pytest.mark.parametrize("text", ["V2{0,1}", "mesh['a'=2] {'z'}"])
def test_an_unknown_syntax_is_an_error(text):
    with pytest.raises(ValueError, match="replica groups"):
        parse_groups(text, 2)


def test_axes_of_groups_in_three_dimensions():
    mesh = mesh_of(a=2, b=2, c=2)
    assert axes_of_groups(parse_groups("{{0,1},{2,3},{4,5},{6,7}}", 8), mesh) == ("c",)
    assert axes_of_groups(parse_groups("{{4,6,0,2},{5,7,1,3}}", 8), mesh) == ("a", "b")
    assert axes_of_groups(parse_groups("{}", 8), mesh) == ("a", "b", "c")
    assert axes_of_groups(parse_groups("{{0,3},{1,2},{4,7},{5,6}}", 8), mesh) == ("?",)
    assert axes_of_groups(parse_groups("{{0,1},{2,3},{4,5}}", 8), mesh) == ("?",)
    assert axes_of_groups(parse_groups("{{0},{1},{2},{3},{4},{5},{6},{7}}", 8), mesh) == ()


def test_axes_of_pairs():
    mesh = mesh_of(a=2, b=4)
    assert axes_of_pairs(parse_pairs("{{0,4},{4,0}}"), mesh) == ("a",)
    assert axes_of_pairs(parse_pairs("{{0,1},{1,2},{2,3}}"), mesh) == ("b",)
    assert axes_of_pairs(parse_pairs("{{3,4},{7,0}}"), mesh) == ("a", "b")
    assert axes_of_pairs(parse_pairs("{{5,5}}"), mesh) == ()
    assert axes_of_pairs((), mesh) == ()


# Operations


def test_types_and_sizes():
    assert hlo.arrays("(bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, (pred[], u32[]{:S(2)}), token[])") == (
        ("bf16", (4, 8)),
        ("pred", ()),
        ("u32", ()),
    )
    arrays = [("bf16", (3,)), ("pred", (5,)), ("f8e4m3fn", (7,)), ("s4", (3,)), ("c64", (2,)), ("f64", ())]
    assert [hlo.nbytes(array) for array in arrays] == [6, 5, 7, 2, 16, 8]


GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        (
            f"""%s = f32[64,16]{{1,0}} all-reduce-start(%p), channel_id=1, {GROUPS}, to_apply=%add
            ROOT %d = f32[64,16]{{1,0}} all-reduce-done(%s)""",
            Row("all-reduce", ("y",), 1, WHOLE),
        ),
        (
            f"""%s = (f32[64,16]{{1,0}}, f32[256,16]{{1,0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}
            ROOT %d = f32[256,16]{{1,0}} all-gather-done(%s)""",
            Row("all-gather", ("y",), 1, 4 * WHOLE),
        ),
        (
            f"""%s = ((f32[64,16]{{1,0}}, f32[64,16]{{1,0}}), (f32[64,64]{{1,0}}, f32[64,64]{{1,0}})) all-gather-start(
            %p, /*index=1*/%p), {GROUPS}, dimensions={{1}}""".replace("start(\n            %p", "start(%p"),
            Row("all-gather", ("y",), 1, 8 * WHOLE),
        ),
        (
            f"""%s = ((f32[64,16]{{1,0}}), f32[16,16]{{1,0}}, u32[]) reduce-scatter-start(%p), {GROUPS}, to_apply=%add
            %u = ((f32[64,16]{{1,0}}), f32[16,16]{{1,0}}, u32[]) reduce-scatter-update(%s)
            ROOT %d = f32[16,16]{{1,0}} reduce-scatter-done(%u)""",
            Row("reduce-scatter", ("y",), 1, WHOLE),
        ),
        (
            """%s = (f32[64,16]{1,0}, f32[64,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), """
            """source_target_pairs={{0,4},{4,0}}
            ROOT %d = f32[64,16]{1,0} collective-permute-done(%s)""",
            Row("collective-permute", ("x",), 1, WHOLE),
        ),
        (
            f"""%q = f32[2]{{0}} constant({{1, 2}})
            ROOT %r = (f32[64,16]{{1,0}}, f32[2]{{0}}) all-reduce(f32[64,16]{{1,0}} %p, f32[2]{{0}} %q), {GROUPS}""",
            Row("all-reduce", ("y",), 1, WHOLE + 8),
        ),
        (
            f"""%q = f32[16,16]{{1,0}} slice(%p), slice={{[0:16], [0:16]}}
            ROOT %r = (f32[16,16], f32[16,16], f32[16,16], f32[16,16]) all-to-all(%q, %q, %q, %q), {GROUPS}""",
            Row("all-to-all", ("y",), 1, WHOLE),
        ),
        (
            f"ROOT %r = f32[64,16]{{1,0}} collective-broadcast(%p), {GROUPS}",
            Row("collective-broadcast", ("y",), 1, WHOLE),
        ),
        (
            f"""%o = s32[4]{{0}} constant({{0, 1, 2, 3}})
            ROOT %r = f32[64,16]{{1,0}} ragged-all-to-all(%p, %p, %o, %o, %o, %o), {GROUPS}""",
            Row("ragged-all-to-all", ("y",), 1, WHOLE),
        ),
    ],
)
def test_asynchronous_and_combined_operations_count_once(entry, row):
    assert rows(program(entry)) == (row,)


def test_the_computations_that_are_called_are_reached():
    inner = f"""%wrapped (q: f32[64,16]) -> f32[16,16] {{
  %q = f32[64,16]{{1,0}} parameter(0)
  ROOT %rs = f32[16,16]{{1,0}} reduce-scatter(%q), channel_id=1, {GROUPS}, dimensions={{0}}, to_apply=%add
}}
"""
    start = """%s = ((f32[64,16]), f32[16,16], s32[]) async-start(%p), calls=%wrapped
    %u = ((f32[64,16]), f32[16,16], s32[]) async-update(%s), calls=%wrapped
    ROOT %d = f32[16,16] async-done(%u), calls=%wrapped"""
    assert rows(program(start, inner)) == (Row("reduce-scatter", ("y",), 1, WHOLE),)
    twice = """%c = f32[16,16] call(%p), to_apply=%wrapped
    ROOT %d = f32[16,16] call(%p), to_apply=%wrapped"""
    (found,) = collectives(program(twice, inner), mesh_of(**XY))
    assert (found.count, found.bytes) == (2, 2 * WHOLE)
    custom = '%c = f32[16,16] custom-call(%p), custom_call_target="start", called_computations={%wrapped}'
    assert rows(program(custom, inner)) == (Row("reduce-scatter", ("y",), 1, WHOLE),)


def test_branches_written_both_ways():
    branches = "".join(
        f"""%{name} (q: f32[64,16]) -> f32[64,16] {{
  %q = f32[64,16]{{1,0}} parameter(0)
  ROOT %r = f32[64,16]{{1,0}} all-reduce(%q), {groups}, to_apply=%add
}}
"""
        for name, groups in [("yes", GROUPS), ("no", "replica_groups={{0,4},{1,5},{2,6},{3,7}}")]
    )
    expected = (Row("all-reduce", ("x",), 1, WHOLE, True), Row("all-reduce", ("y",), 1, WHOLE, True))
    boolean = """%t = pred[] constant(true)
    ROOT %c = f32[64,16] conditional(%t, %p, %p), true_computation=%yes, false_computation=%no"""
    assert rows(program(boolean, branches)) == expected
    indexed = """%i = s32[] constant(0)
    ROOT %c = f32[64,16] conditional(%i, %p, %p), branch_computations={%yes, %no}"""
    assert rows(program(indexed, branches)) == expected


# Fusions of TPU


def test_an_all_reduce_that_is_sliced_in_a_fusion_is_a_reduce_scatter():
    scatter = f"""%all-reduce-scatter (input: f32[64,16]) -> f32[20,16] {{
  %input = f32[64,16]{{1,0}} parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[80,16]{{1,0}} pad(%input, %zero), padding=0_16x0_0
  %all-reduce.1 = f32[80,16]{{1,0}} all-reduce(%pad), channel_id=3, {GROUPS}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %slice = f32[20,16]{{1,0}} dynamic-slice(%all-reduce.1, %id, %id), dynamic_slice_sizes={{20,16}}
}}
"""
    entry = "ROOT %f = f32[20,16] fusion(%p), kind=kCustom, calls=%all-reduce-scatter"
    assert rows(program(entry, scatter)) == (Row("reduce-scatter", ("y",), 1, WHOLE),)
    combined = f"""%all-reduce-scatter (input: f32[64,16]) -> (f32[16,16], f32[16,16]) {{
  %input = f32[64,16]{{1,0}} parameter(0)
  %all-reduce.1 = (f32[64,16], f32[64,16]) all-reduce(%input, %input), channel_id=3, {GROUPS}, to_apply=%add
  %id = u32[] partition-id()
  %first = f32[64,16] get-tuple-element(%all-reduce.1), index=0
  %a = f32[16,16] dynamic-slice(%first, %id, %id), dynamic_slice_sizes={{16,16}}
  %second = f32[64,16] get-tuple-element(%all-reduce.1), index=1
  %b = f32[16,16] dynamic-slice(%second, %id, %id), dynamic_slice_sizes={{16,16}}
  ROOT %t = (f32[16,16], f32[16,16]) tuple(%a, %b)
}}
"""
    assert rows(program(entry, combined)) == (Row("reduce-scatter", ("y",), 1, 2 * WHOLE),)
    unfused = f"""%r = f32[64,16] all-reduce(%p), {GROUPS}, to_apply=%add
    %id = u32[] partition-id()
    ROOT %slice = f32[16,16] dynamic-slice(%r, %id, %id), dynamic_slice_sizes={{16,16}}"""
    assert rows(program(unfused)) == (Row("all-reduce", ("y",), 1, WHOLE),)


def test_a_collective_that_overlaps_with_several_fusions_counts_at_its_start():
    def fused(name, last):
        return f"""%{name} (q: f32[64,16]) -> f32[256,16] {{
  %q = f32[64,16]{{1,0}} parameter(0)
  %ag = f32[256,16]{{1,0}} all-gather(%q), {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  {last}
}}
"""

    computations = [
        fused("begin", 'ROOT %c = (f32[256,16]) custom-call(%ag), custom_call_target="AsyncCollectiveStart"'),
        fused("overlap", "ROOT %t = (f32[256,16]) tuple(%ag)"),
        fused("end", 'ROOT %c = f32[256,16] custom-call(%ag), custom_call_target="AsyncCollectiveDone"'),
    ]
    entry = """%a = f32[256,16] fusion(%p), kind=kCustom, calls=%begin
    %b = f32[256,16] fusion(%p), kind=kOutput, calls=%overlap
    ROOT %c = f32[256,16] fusion(%p), kind=kCustom, calls=%end"""
    assert rows(program(entry, *computations)) == (Row("all-gather", ("y",), 1, 4 * WHOLE),)


# Trip counts


def loop(compare, update="add(%i, %one)", start="%start", limit=5, notes="", extra=""):
    """A while loop around an all-reduce, its carry being (counter, array, limit)."""
    computations = f"""%cond (c: (s32[], f32[64,16], s32[])) -> pred[] {{
  %c = (s32[], f32[64,16]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %copied = s32[] copy(%i)
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


COMPARED = """%compared (l: s32[], r: s32[]) -> pred[] {
  %l = s32[] parameter(0)
  %r = s32[] parameter(1)
  ROOT %z = pred[] compare(%r, %l), direction=GT
}
"""
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
        (loop("compare(%copied, %five), direction=LE"), 6),
        (loop("compare(%five, %i), direction=GT"), 5),
        (loop("compare(%i, %n), direction=LT"), 5),
        (loop("compare(%i, %five), direction=NE"), 5),
        (loop("compare(%i, %five), direction=LT", update="add(%two, %i)"), 3),
        (loop("compare(%i, %five), direction=GT", update="subtract(%i, %two)", start="%nine"), 2),
        (loop("compare(%i, %five), direction=GE", update="subtract(%i, %one)", start="%nine"), 5),
        (loop("compare(%i, %five), direction=LT", start="%nine"), 0),
        (loop("fusion(%i, %n), kind=kLoop, calls=%compared", extra=COMPARED), 5),
        (loop("compare(%i, %n), direction=LT", "fusion(%i), kind=kLoop, calls=%added", extra=ADDED), 3),
        (loop("compare(%i, %n), direction=LT", notes=', backend_config={"known_trip_count":{"n":"7"}}'), 7),
        (loop("compare(%i, %five), direction=LT", update="multiply(%i, %two)", start="%nine"), None),
        (loop("compare(%i, %five), direction=LT", update="subtract(%one, %i)"), None),
        (loop("compare(%i, %five), direction=GT"), None),
        (loop("compare(%i, %five), direction=NE", update="add(%two, %i)"), None),
        (loop("compare(%i, %i), direction=LT"), None),
        (loop("and(%i, %five)"), None),
    ],
)
def test_trip_counts_from_the_counter(text, count):
    (found,) = collectives(text, mesh_of(**XY))
    assert found.count == count


# Source lines


TABLES = """
FileNames
1 "/home/user/model.py"
2 "/opt/lib/python3.12/site-packages/flax/linen/linear.py"
3 "/home/user/train.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=3 function_name_id=1 line=10 end_line=10 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=22 end_line=22 column=4 end_column=9}
3 {file_name_id=2 function_name_id=1 line=271 end_line=271 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=PARENT1}
2 {file_location_id=2 parent_frame_id=PARENT2}
3 {file_location_id=3 parent_frame_id=PARENT3}
"""


@pytest.mark.parametrize("shift", [0, 1])
def test_source_lines_behind_tables_with_parents_counted_from_zero_or_one(shift):
    tables = TABLES
    for frame in (1, 2, 3):
        tables = tables.replace(f"PARENT{frame}", str(frame - 1 + shift))
    name = r'metadata={op_name="jit(\"f\")/dot" stack_frame_id=3}'
    entry = f"ROOT %r = f32[64,16] all-reduce(%p), {GROUPS}, to_apply=%add, {name}"
    (found,) = collectives(program(entry, tables=tables), mesh_of(**XY))
    assert found.source == "/home/user/model.py:22"
    assert [frame.rpartition("/")[2] for frame in found.frames] == ["linear.py:271", "model.py:22", "train.py:10"]
    assert found.op_name == r"jit(\"f\")/dot"


def test_source_lines_written_in_the_operation():
    name = 'metadata={op_type="psum" op_name="jit(f)/psum" source_file="/home/user/model.py" source_line=7}'
    entry = f"ROOT %r = f32[64,16] all-reduce(%p), {GROUPS}, to_apply=%add, {name}"
    (found,) = collectives(program(entry), mesh_of(**XY))
    assert (found.source, found.op_name) == ("/home/user/model.py:7", "jit(f)/psum")


def test_a_lost_source_line_is_looked_for_at_the_operands():
    entry = f"""%a = f32[64,16] add(%p, %p), metadata={{source_file="/home/user/model.py" source_line=7}}
    %c = f32[64,16] copy(%a)
    ROOT %r = f32[64,16] all-reduce(%c), {GROUPS}, to_apply=%add"""
    (found,) = collectives(program(entry), mesh_of(**XY))
    assert found.source == "near /home/user/model.py:7"
    (found,) = collectives(program(f"ROOT %r = f32[64,16] all-reduce(%p), {GROUPS}"), mesh_of(**XY))
    assert (found.source, found.frames) == ("r", ())


PACKAGE = str(package_folder("jaxshard"))


@pytest.mark.parametrize(
    ("inner", "middle", "source"),
    [
        (f"{PACKAGE}/adapt/linen.py", f"{PACKAGE}/models/gpt.py", f"{PACKAGE}/models/gpt.py:22"),
        (f"{PACKAGE}/optim/clip.py", "/home/user/model.py", "/home/user/model.py:22"),
        (f"{PACKAGE}/adapt/stacked.py", f"{PACKAGE}/engines/explicit.py", f"{PACKAGE}/adapt/stacked.py:271"),
        (f"{PACKAGE}/training/step.py", "/home/user/train.py", f"{PACKAGE}/training/step.py:271"),
    ],
)
def test_the_package_names_itself_only_for_what_an_engine_does(inner, middle, source):
    tables = TABLES.replace("/opt/lib/python3.12/site-packages/flax/linen/linear.py", inner)
    tables = tables.replace("/home/user/model.py", middle)
    for frame in (1, 2, 3):
        tables = tables.replace(f"PARENT{frame}", str(frame))
    entry = f"ROOT %r = f32[64,16] all-reduce(%p), {GROUPS}, metadata={{stack_frame_id=3}}"
    (found,) = collectives(program(entry, tables=tables), mesh_of(**XY))
    assert found.source == source
