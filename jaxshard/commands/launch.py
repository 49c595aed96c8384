"""`jaxshard launch`: run a command in several processes on this machine; when one dies, start all of them again."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import tyro

from jaxshard.commands.errors import UsageError, usage_errors
from jaxshard.commands.flags import check_positive
from jaxshard.commands.supervisor import WRONG_USAGE, run_together, say


def launch(
    command: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="COMMAND ...", help_behavior_hint="")]
    ],
    *,
    processes: Annotated[int, tyro.conf.arg(aliases=("-n",), metavar="N")],
    max_restarts: Annotated[int, tyro.conf.arg(metavar="K")] = 0,
    grace: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 20.0,
) -> int:
    """Run a command as several processes of this machine that train together, after a double dash.

    jaxshard launch -n 2 --max-restarts 3 -- jaxshard train --checkpoint run --resume

    Every process finds the others by its environment, which js.distributed.initialize() reads; its lines are shown with
    its number in front. When one dies the others are ended, and all are started again, with the same command: it has to
    go on from a checkpoint by itself. The exit status is that of the process that failed first (128 + n where signal n
    ended it), or 0 when all ended with 0. After status 2, for wrong flags, nothing is started again.

    Args:
      command: what every process runs, found on PATH.
      processes: how many there are.
      max_restarts: start all again up to so many times.
      grace: SIGTERM and Ctrl-C are passed on; what is still there so many seconds later is killed.
    """
    with usage_errors():
        check_positive(processes=processes, grace=grace)
        if max_restarts < 0:
            raise ValueError(f"--max-restarts {max_restarts}: give 0 or more")
        if not hasattr(os, "killpg"):
            raise ValueError(f"launch needs process groups, which {sys.platform} does not have; use Linux or macOS")
        command = (_find_program(command), *command[1:])
    for restarts in range(max_restarts + 1):
        if restarts:
            say(f"starting all again, {restarts} of {max_restarts}")
        outcome = run_together(command, count=processes, restarts=restarts, grace=grace)
        if outcome.status in (0, WRONG_USAGE) or outcome.interrupted:
            break
    return outcome.status


def _find_program(command: tuple[str, ...]) -> str:
    """Find the file to run; UsageError if there is none."""
    if not command:
        raise UsageError("give the command after a double dash: jaxshard launch -n 2 -- jaxshard train")
    # An environment that was not activated has its programs beside its Python, and not on PATH.
    program = shutil.which(command[0]) or shutil.which(command[0], path=os.path.dirname(sys.executable))
    if program is None:
        raise UsageError(f"{command[0]}: there is no such command on PATH; give its path, or install it")
    return program
