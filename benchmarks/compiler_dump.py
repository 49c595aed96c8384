"""What a compiler's dump (`xla_dump_to`) tells of a program, also of one whose compilation was stopped, as JSON.

`jaxshard.compiler.dump` reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxshard.compiler.dump import is_assigned as is_assigned
from jaxshard.compiler.dump import largest, program_text, read_assignment


def final_text(dump: Path) -> str:
    """The program, with the compiler's estimates of cycles if it generated code; else as its buffers were assigned."""
    file = largest(dump, "*.after_codegen.txt")
    return program_text(dump) if file is None else file.read_text()


def memory(dump: Path, count: int = 10) -> dict[str, Any]:
    """Arguments, temporaries and peak in bytes, and the largest buffers at the peak with the operations that make them.

    The peak is arguments and the values that are live at the fullest moment. What is allocated, arguments and
    temporaries, is more where the compiler could not place all values without gaps.
    """
    found = read_assignment(dump)
    if found is None:
        return {}
    program, lines = program_text(dump), []
    for one, _ in found.live[:count]:
        source = re.search(rf'%{re.escape(one.name)} = .*?op_name="([^"]*)"', program)
        name = source[1] if source else ""
        lines.append(f"{one.bytes / 1e6:.1f} MB {one.type} {one.name}{one.element} {name}".rstrip())
    return {
        "arguments": sum(found.arguments.values()),
        "temporaries": found.temporaries,
        "peak": found.peak,
        "allocated": found.allocated,
        "largest": lines,
    }
