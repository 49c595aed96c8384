"""The command line `jaxshard COMMAND ...`.

A command's module, and with it JAX, is imported when the command is used, so that `jaxshard --help` answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

COMMANDS = {
    "train": "train a language model, sharded over a mesh",
    "launch": "run a command in several processes on this machine",
    "audit": "compare the collectives of a compiled step with what the strategy promises",
    "parity": "compare a sharded step with the same step on one device",
    "schedule": "print a pipeline schedule with its bubble and its memory",
    "checkpoint": "list, show or verify saved steps",
    "doctor": "print devices, versions and what is missing",
}
"""Each command with its line of help; its function is `jaxshard.commands.NAME.NAME`."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    One of several processes does not return a status other than 0 but ends at once: the others may be waiting for it.

    Args:
      args: the words after `jaxshard`; by default those of this process.

    Returns:
      0, or what the command returned: 1 where a check failed. 1 also where a step was bad, 2 for wrong flags or data
      and where several processes were given different ones, 75 where one of several processes never came, 130 after
      Ctrl-C, each with a line on standard error. Where another process failed, its status.

    Raises:
      SystemExit: with status 2, as in argparse, for a command or flag that does not exist or a value of another type;
        with status 0 for `COMMAND --help`.
    """
    name, *rest = (sys.argv[1:] if args is None else list(args)) or [""]
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name == "--version":
        print(f"jaxshard {metadata.version('jaxshard')}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        problem = f"there is no command {name!r}{hint}" if name else "name a command"
        print(f"{usage()}\n\njaxshard: {problem}", file=sys.stderr)
        raise SystemExit(2)
    status = _run(name, rest)
    if status and "jax" in sys.modules:  # without JAX this process has joined no others
        import jax

        from jaxshard.distributed.hard_exit import leave

        if jax.distributed.is_initialized():
            leave(status)
    return status


def usage() -> str:
    """The help of the command line as a whole."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: jaxshard COMMAND [-h] ...\n\nTrain on any mesh, with the same result as on one device.\n\n"
        f"{commands}\n\njaxshard COMMAND --help lists the flags of a command."
    )


def command_of(name: str) -> Callable[..., int | None]:
    """Import the function of a command."""
    command: Callable[..., int | None] = getattr(importlib.import_module(f"jaxshard.commands.{name}"), name)
    return command


def _run(name: str, args: Sequence[str]) -> int:
    """Run a command; an error that needs no traceback becomes a line on standard error and an exit status."""
    import tyro

    from jaxshard.commands.errors import UsageError

    try:
        return tyro.cli(command_of(name), prog=f"jaxshard {name}", args=args) or 0
    except UsageError as error:
        status, line = 2, str(error)
    except KeyboardInterrupt:
        status, line = 130, "interrupted"
    except (ValueError, RuntimeError, FloatingPointError) as error:
        from jaxshard.distributed.agree import Disagreement
        from jaxshard.distributed.failures import MissingProcess
        from jaxshard.training.non_finite import BadStep

        if isinstance(error, BadStep):
            status, line = 1, f"{error.what}; see --bad-steps"
        elif isinstance(error, Disagreement | MissingProcess):
            status, line = error.exit_status, str(error)
        else:
            raise
    print(f"jaxshard: {line}", file=sys.stderr)
    return status
