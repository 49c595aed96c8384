"""Operations of short programs in the text format: each kind, asynchronous, combined, called, in fusions of TPU."""

import pytest

from jaxshard.hlo.found import Row, collectives, summary
from tests.hlo.programs import GROUPS, XY, mesh_of, program

WHOLE = 64 * 16 * 4


def rows(text):
    return summary(collectives(text, mesh_of(**XY)))


@pytest.mark.parametrize(
    ("entry", "row"),
    [
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
    ],
)
def test_combined_operations_count_once(entry, row):
    assert rows(program(entry)) == (row,)


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
    unfused = f"""%r = f32[64,16] all-reduce(%p), {GROUPS}, to_apply=%add
    %id = u32[] partition-id()
    ROOT %slice = f32[16,16] dynamic-slice(%r, %id, %id), dynamic_slice_sizes={{16,16}}"""
    assert rows(program(unfused)) == (Row("all-reduce", ("y",), 1, WHOLE),)


def test_a_kernels_metadata_over_several_lines_ends_no_computation():
    """As a Pallas kernel with metadata prints it: the third line starts with braces, and more operations follow."""
    kernel = """  %k = f32[64,16]{1,0} custom-call(%p), custom_call_target="tpu", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128, all-reduce(%p)}"
}}, metadata={op_name="jit(f)/pallas_call"}
"""
    entry = f"ROOT %r = f32[64,16]{{1,0}} all-reduce(%k), {GROUPS}, to_apply=%add"
    text = program(entry).replace("  ROOT %r", f"{kernel}  ROOT %r")
    assert rows(text) == (Row("all-reduce", ("y",), 1, WHOLE),)
