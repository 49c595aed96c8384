"""The command line: `jaxshard COMMAND ...`. A command is imported when it is used, so that help comes at once."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "train": "train a language model, sharded over a mesh",
    "launch": "run a command in several processes on this machine",
    "audit": "compare the collectives of a compiled step with what the strategy promises",
    "parity": "compare a sharded step with the same step on one device",
    "schedule": "print a pipeline schedule with its bubble and its memory",
    "checkpoint": "list, show or verify saved steps",
    "doctor": "print devices, versions and what is missing",
}
"""What each command does; its function is `jaxshard.commands.NAME.NAME`."""


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0, what the command returned (1 where a check failed or a step was bad), or 2.

    2 is for wrong flags or data, with a line on standard error, and for processes that were given different ones.

    A flag that does not exist, or a value that can't be read, leaves through SystemExit(2), as in argparse. One of
    several processes does not return a status other than 0, it ends at once: the others may be waiting for it.
    """
    name, *rest = (sys.argv[1:] if args is None else list(args)) or [""]
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        problem = f"there is no command {name!r}{hint}" if name else "name a command"
        print(f"{usage()}\n\njaxshard: {problem}", file=sys.stderr)
        raise SystemExit(2)
    return _run(name, rest)


def usage() -> str:
    """The help of the command line as a whole."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: jaxshard COMMAND [-h] ...",
            "",
            "Train on any mesh, with the same result as on one device.",
            "",
            *(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()),
            "",
            "jaxshard COMMAND --help lists the flags of a command.",
        ]
    )


def command_of(name: str) -> Callable[..., int | None]:
    """The function of a command."""
    command: Callable[..., int | None] = getattr(importlib.import_module(f"jaxshard.commands.{name}"), name)
    return command


def _run(name: str, args: Sequence[str]) -> int:
    """The exit status of one command."""
    import jax

    from jaxshard.distributed.hard_exit import leave

    status = _status(command_of(name), f"jaxshard {name}", args)
    if status and jax.distributed.is_initialized():
        leave(status)
    return status


def _status(command: Callable[..., int | None], prog: str, args: Sequence[str]) -> int:
    import tyro

    from jaxshard.commands.errors import UsageError
    from jaxshard.distributed.agree import Disagreement
    from jaxshard.training.non_finite import BadStep

    try:
        return tyro.cli(command, prog=prog, args=args) or 0
    except (UsageError, Disagreement) as error:
        print(f"jaxshard: {error}", file=sys.stderr)
        return 2
    except BadStep as error:
        print(f"jaxshard: {error.what}; see --bad-steps", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxshard: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
