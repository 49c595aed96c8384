"""The command line: `jaxshard COMMAND ...`, one function per command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import jax
import tyro

from jaxshard._bad import BadStep
from jaxshard.commands.audit import audit
from jaxshard.commands.checkpoint import checkpoint
from jaxshard.commands.doctor import doctor
from jaxshard.commands.errors import UsageError
from jaxshard.commands.launch import launch
from jaxshard.commands.parity import parity
from jaxshard.commands.schedule import schedule
from jaxshard.commands.train import train
from jaxshard.distributed import Disagreement, leave

COMMANDS: dict[str, Callable[..., int | None]] = {
    "train": train,
    "launch": launch,
    "audit": audit,
    "parity": parity,
    "schedule": schedule,
    "checkpoint": checkpoint,
    "doctor": doctor,
}


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0, what the command returned (1 where a check found something, or
    a step was bad), or 2.

    2 is for wrong flags or data, with a line on standard error, and for processes that were given different ones.

    A flag that does not exist, or a value that can't be read, leaves through SystemExit(2), as in argparse. One of
    several processes does not return another status than 0, it ends at once: the others may be waiting for it.
    """
    status = _status(args)
    if status and jax.distributed.is_initialized():
        leave(status)
    return status


def _status(args: Sequence[str] | None) -> int:
    try:
        status: int | None = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="jaxshard",
            description="Train on any mesh, with the same result as on one device.",
            args=args,
        )
    except UsageError as error:
        print(f"jaxshard: {error}", file=sys.stderr)
        return 2
    except Disagreement as error:
        print(f"jaxshard: {error}", file=sys.stderr)
        return 2
    except BadStep as error:
        print(f"jaxshard: {error.what}; see --bad-steps", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxshard: interrupted", file=sys.stderr)
        return 130
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
