"""Files that are no compiled program are refused, and the refusal says what they are."""

import gzip
import re

import pytest

from jaxshard.checks.programs.text import parse_program
from tests.checks.programs.texts import FSDP, step_text

TEXT = step_text(*FSDP)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the file is empty"),
        (b"\x08\x01\xff\xfe binary", "binary, as the .pb files of a dump are"),
        (gzip.compress(TEXT.encode()), "a gzip file: unpack it"),
        (b"{ lambda ; a:f32[3]. let in (a,) }", "a jaxpr"),
        (TEXT.replace("is_scheduled=true, ", "").encode(), "HLO before the compiler's last passes"),
        (TEXT[: TEXT.index("ENTRY")].encode(), "cut off: it has no ENTRY"),
        (re.sub(r"(all-gather\(%ke)[^\n]*", r"\1", TEXT, count=1).encode(), "the line of %g is cut off"),
        (TEXT[: TEXT.index("%add")].encode() + TEXT[TEXT.index("ENTRY") :].encode(), "lacks the computation add"),
    ],
)
def test_what_is_no_compiled_program_is_refused_by_name(data, why):
    with pytest.raises(ValueError, match=why):
        parse_program(data)


def test_elements_of_tuples_as_dumps_write_them_are_understood():
    lines = [
        "%two = (s32[], /*index=1*/(f32[1024,64]{1,0:T(8,128)}, f32[2]{0})) custom-call(%kernel)",
        '%g = f32[1024,512]{1,0} all-gather(%two#1#0), replica_groups=[1,8]<=[8], metadata={op_name="%two#1"}',
    ]
    module = parse_program(step_text(*lines).encode())
    entry = module.computations[module.entry]
    assert entry["g"].operands == ("two.element1.element0",) and entry["g"].op_name == "%two#1"
    assert entry["two.element1.element0"].type == "f32[1024,64]{1,0:T(8,128)}"
    assert entry["two.element1"].opcode == "get-tuple-element"
