"""Source lines of collectives: behind tables, in the operation, and lost."""

import re

import pytest

from jaxshard.hlo import hlo
from jaxshard.hlo.found import collectives
from jaxshard.hlo.source import find_parameter
from tests.hlo.programs import GROUPS, TABLES, XY, mesh_of, program


@pytest.mark.parametrize("first", [0, 1])
def test_source_lines_behind_tables_with_parents_counted_from_zero_or_one(first):
    tables = re.sub(r"parent_frame_id=(\d)", lambda found: f"parent_frame_id={int(found[1]) - 1 + first}", TABLES)
    name = r'metadata={op_name="jit(\"f\")/dot" stack_frame_id=3}'
    entry = f"ROOT %r = f32[64,16] all-reduce(%p), {GROUPS}, to_apply=%add, {name}"
    (found,) = collectives(program(entry, tables=tables), mesh_of(**XY))
    assert found.source == "/home/user/train.py:12"
    assert [frame.rpartition("/")[2] for frame in found.frames] == ["linear.py:271", "train.py:12", "main.py:10"]
    assert found.op_name == 'jit("f")/dot'


def test_a_gather_names_the_parameter_from_which_it_computes():
    entry = """%w = f32[64,16] parameter(1), metadata={op_name="run.params['w']"}
    %new = f32[64,16] subtract(%p, %w)
    ROOT %r = f32[64,16] all-reduce(%new), to_apply=%add"""
    module = hlo.parse(program(entry))
    scope = next(hlo.Scope(module, one) for one in module.computations.values() if "new" in one.lines)
    assert find_parameter(scope, scope.computation["r"]) == "run.params['w']"
    assert find_parameter(scope, scope.computation["p"]) == ""


def test_a_lost_source_line_is_looked_for_at_the_operands():
    entry = f"""%a = f32[64,16] add(%p, %p), metadata={{source_file="/home/user/model.py" source_line=7}}
    %c = f32[64,16] copy(%a)
    ROOT %r = f32[64,16] all-reduce(%c), {GROUPS}, to_apply=%add"""
    (found,) = collectives(program(entry), mesh_of(**XY))
    assert found.source == "near /home/user/model.py:7"
    (found,) = collectives(program(f"ROOT %r = f32[64,16] all-reduce(%p), {GROUPS}"), mesh_of(**XY))
    assert (found.source, found.frames) == ("r", ())
