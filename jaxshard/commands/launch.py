"""`jaxshard launch`: run a command in several processes on this machine; when one dies, start all of them again."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from jaxshard.checkpoint.memory.folder import memory_folder
from jaxshard.commands.errors import UsageError, usage_errors
from jaxshard.commands.flags import Launch
from jaxshard.commands.supervisor import WRONG_USAGE, run_together, say
from jaxshard.core.launch_environment import GOODPUT
from jaxshard.training.goodput_file import read_goodput

MOST_PROCESSES = 4096
"""More are refused: each has threads and pipes of its own."""


def run(flags: Launch) -> int:
    """Run `jaxshard launch`: start a command in several processes, and end all of them if one fails.

    Returns:
      The exit status: 0 if all processes ended with 0, else the status of the process that failed first.
    """
    with usage_errors():
        if flags.processes > MOST_PROCESSES:
            raise ValueError(f"--processes {flags.processes}: at most {MOST_PROCESSES} can be started on a machine")
        if not hasattr(os, "killpg"):
            raise ValueError(f"launch needs process groups, which {sys.platform} does not have; use Linux or macOS")
        command = (_find_program(flags.command), *flags.command[1:])
    with memory_folder(make=flags.max_restarts > 0) as memory, tempfile.TemporaryDirectory() as notes:
        ledger = Path(notes) / "goodput"
        for restarts in range(flags.max_restarts + 1):
            if restarts:
                say(f"starting all again, {restarts} of {flags.max_restarts}")
            outcome = run_together(
                command,
                count=flags.processes,
                restarts=restarts,
                grace=flags.grace,
                more=memory | {GOODPUT: str(ledger)},
            )
            if outcome.status in (0, WRONG_USAGE) or outcome.interrupted:
                break
        _say_goodput(ledger)
    return outcome.status


def _say_goodput(ledger: Path) -> None:
    """Print the goodput of the training that the processes did; nothing if they called no `js.fit`."""
    try:
        goodput = read_goodput(ledger)
    except (OSError, ValueError) as error:
        say(f"the goodput can't be read: {error}")
    else:
        if goodput is not None:
            say(str(goodput))


def _find_program(command: tuple[str, ...]) -> str:
    """Find the program of a command on PATH; raise UsageError if there is none."""
    if not command:
        raise UsageError("give the command after a double dash: jaxshard launch -n 2 -- jaxshard train")
    # The programs of an environment that was not activated are in the folder of its Python, not on PATH.
    program = shutil.which(command[0]) or shutil.which(command[0], path=os.path.dirname(sys.executable))
    if program is None:
        raise UsageError(f"{command[0]}: there is no such command on PATH; give its path, or install it")
    return program
