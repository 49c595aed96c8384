"""Ask the compiler for the memory of a program, and stop it as soon as memory is assigned, which takes seconds.

Most of a compilation is the generation of code. Buffers are assigned before that, and a program that needs too much
memory is refused by then. So a child process compiles with a dump, and is ended as soon as the dump has the assignment
of buffers. A child takes 0.4 to 0.9 GB of memory and one core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxshard.compiler.answers import answer_key, load_answer, save_answer
from jaxshard.compiler.dump import Assignment, assignment_of, is_assigned, program_text, read_assignment
from jaxshard.compiler.refusal import parse_refusal
from jaxshard.compiler.topology import Target
from jaxshard.core.compat import CompilerInput, compiler_input

SECONDS = 1800.0
"""The seconds after which the compiler is stopped without an answer."""
CHILD = Path(__file__).with_name("child.py")
"""The script of the child, run by its path and not as a module: importing the package would import JAX."""
_PAUSE = 0.02
_FORMAT = "2"
"""The version of the fields of an answer; answers of another version are not read."""


class Answer(NamedTuple):
    """The compiler's answer about the memory of a program.

    Attributes:
      assignment: the assigned memory; None if the compiler refused the program before it assigned memory.
      text: the optimized HLO; "" if the compiler refused the program before it wrote this text.
      refusal: the first line of the compiler's out-of-memory error; "" if it accepted the program.
      seconds: the seconds until buffers were assigned or the program was refused.
    """

    assignment: Assignment | None
    text: str
    refusal: str
    seconds: float


def judge(lowered: jax.stages.Lowered, target: Target, *, seconds: float = SECONDS) -> Answer:
    """Ask the compiler for the memory of a program on a topology; an answer in the cache is used again.

    Args:
      lowered: the program, lowered for devices of the target.
      target: the topology to compile for.
      seconds: the time limit of the compiler.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses the program for another reason than memory.
      RuntimeError: the child process ended by itself; the message has its last lines of output.
      TimeoutError: the compiler took longer than `seconds`.
    """
    asked = compiler_input(lowered)
    about = json.dumps(target.description(), sort_keys=True)
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    words = repr((_FORMAT, asked.overrides, asked.devices, asked.version, about, flags))
    key = answer_key((asked.program, asked.options, words.encode()))
    if (remembered := _remembered(load_answer(key))) is not None:
        return remembered
    with tempfile.TemporaryDirectory(prefix="jaxshard-judge-") as folder:
        answer = compile_input(asked, target, Path(folder), seconds)
    save_answer(key, answer._asdict())  # tuples become lists
    return answer


def _remembered(found: dict[str, Any] | None) -> Answer | None:
    if found is None:
        return None
    try:
        assignment = None if found["assignment"] is None else assignment_of(found["assignment"])
        return Answer(**found | {"assignment": assignment})
    except (KeyError, TypeError, ValueError, AttributeError):  # damaged
        return None


def compile_input(asked: CompilerInput, target: Target, folder: Path, seconds: float) -> Answer:
    """Compile a program in a child process until buffers are assigned, and return the compiler's answer."""
    (folder / "program").write_bytes(asked.program)
    (folder / "options").write_bytes(asked.options)
    request = target.description() | {"overrides": asked.overrides, "devices": asked.devices}
    (folder / "request.json").write_text(json.dumps(request))
    dump, started = folder / "dump", time.monotonic()
    dump.mkdir()
    with open(folder / "log", "wb") as log:
        # -P keeps the script's folder out of the import path. The child ends when its standard input closes, so it ends
        # also when this process is killed.
        command = [sys.executable, "-P", str(CHILD), str(folder)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None and not is_assigned(dump):
                if time.monotonic() - started > seconds:
                    raise TimeoutError(
                        f"the compiler of {target} has assigned no memory after {seconds:.0f} s; js.plan.predict with "
                        "estimate=True, or jaxshard plan --estimate, does without it"
                    )
                time.sleep(_PAUSE)
        finally:
            child.kill()
            child.communicate()
    took, error = time.monotonic() - started, _error(folder)
    if error and parse_refusal(error) is None:
        raise jax.errors.JaxRuntimeError(error)
    assignment = read_assignment(dump)
    if assignment is None and not error:
        raise RuntimeError(f"the compiler's process ended with {child.returncode}: {_tail(folder / 'log')}")
    return Answer(assignment, program_text(dump), error.split("\n", 1)[0], took)


def _error(folder: Path) -> str:
    file = folder / "error.txt"
    return file.read_text() if file.exists() else ""


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-5:])
