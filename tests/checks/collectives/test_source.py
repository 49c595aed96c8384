"""Source lines of collectives: behind tables, in the operation, lost, and this package's own."""

import pytest

from jaxshard.checks.collectives.found import collectives
from tests.checks.collectives.programs import GROUPS, XY, mesh_of, program

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
    assert found.op_name == 'jit("f")/dot'


def test_a_lost_source_line_is_looked_for_at_the_operands():
    entry = f"""%a = f32[64,16] add(%p, %p), metadata={{source_file="/home/user/model.py" source_line=7}}
    %c = f32[64,16] copy(%a)
    ROOT %r = f32[64,16] all-reduce(%c), {GROUPS}, to_apply=%add"""
    (found,) = collectives(program(entry), mesh_of(**XY))
    assert found.source == "near /home/user/model.py:7"
    (found,) = collectives(program(f"ROOT %r = f32[64,16] all-reduce(%p), {GROUPS}"), mesh_of(**XY))
    assert (found.source, found.frames) == ("r", ())
