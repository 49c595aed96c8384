"""Write the JSON object of a command."""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxshard.storage.paths import AnyPath, write_file


def write_json(file: AnyPath | None, result: dict[str, Any]) -> None:
    """Write a JSON object into a file, or to standard output if `file` is "-"; write nothing if it is None."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    elif file is not None:
        write_file(file, text.encode())
