"""The command line: `jaxshard COMMAND ...`, one function per command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import tyro

from jaxshard.commands.doctor import doctor
from jaxshard.commands.errors import UsageError
from jaxshard.commands.train import train

COMMANDS: dict[str, Callable[..., None]] = {"train": train, "doctor": doctor}


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0, or 2 with a line on standard error for wrong flags or data.

    A flag that does not exist, or a value that can't be read, leaves through SystemExit(2), as in argparse.
    """
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="jaxshard",
            description="Train on any mesh, with the same result as on one device.",
            args=args,
        )
    except UsageError as error:
        print(f"jaxshard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxshard: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
