"""The command line `jaxshard COMMAND ...`.

A command's file, and with it JAX, is imported when its flags are read, so that help and refusals come at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from jaxshard.commands import flags, parse
from jaxshard.commands.errors import UsageError, file_errors, size_errors
from jaxshard.commands.streams import OutputError, checked_streams
from jaxshard.core.near_words import did_you_mean
from jaxshard.core.version import __version__

COMMANDS = {
    name: f"{line[0].lower()}{line[1:]}".removesuffix(".")
    for name, command in flags.COMMANDS.items()
    for line in [(command.__doc__ or "").partition("\n")[0]]
}
"""Each command with its line of help."""

INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell says of a program that SIGINT ended."""

CRASHED = 70
"""The exit status after an unexpected error (EX_SOFTWARE of sysexits.h); 1 would say that a check failed."""

_AGAIN = 0.02
"""Seconds after which a Ctrl-C that was lost comes again."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    If several processes run and this one fails, it ends at once without returning, since the others may wait for it.

    Args:
      args: the words after `jaxshard`; by default `sys.argv[1:]`.

    Returns:
      0 if the command succeeded; 1 if a check failed, if a training step was not finite, or if a file can't be written;
      2 for wrong flags or data, for flags that differ between processes, and if standard output can't be written; 70 if
      the user's function raised an error, which is printed with its traceback; 75 if another process never joined; 130
      after Ctrl-C; 141 if the reader of standard output is gone, as in `jaxshard ... | head -1`. If another process
      failed, its status. Unless a check failed, a line on standard error explains a status other than 0, 70 and 141.
    """
    words = sys.argv[1:] if args is None else list(args)
    try:
        with checked_streams():
            status, line = _run(words)
            if line:
                print(f"jaxshard: {line}", file=sys.stderr)
    except (OutputError, UsageError) as error:
        status = error.exit_status
        if str(error):
            _print_if_possible(f"jaxshard: {error}")
    except Exception:  # of the user's function, whatever it is: Python's own status, 1, would say that a check failed
        if args is not None:
            raise
        sys.excepthook(*sys.exc_info())
        status = CRASHED
    if status and "jax" in sys.modules:  # without JAX this process has joined no others
        import jax

        from jaxshard.distributed.hard_exit import leave

        if jax.distributed.is_initialized():
            leave(status)
    if status == INTERRUPTED and args is None:
        os._exit(status)  # JAX and its threads, interrupted anywhere, may crash when they tidy up
    return status


def usage() -> str:
    """Return the text of `jaxshard --help`, which lists the commands."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: jaxshard COMMAND [-h] ...\n\nTrain on any mesh, with the same result as on one device.\n\n"
        f"{commands}\n\njaxshard COMMAND --help lists the flags of a command."
    )


def runner_of(name: str) -> Callable[[Any], int | None]:
    """Import and return the function `run` of a command's file; this imports JAX too."""
    run: Callable[[Any], int | None] = importlib.import_module(f"jaxshard.commands.{name}").run
    if "jax" in sys.modules:
        from jaxshard.core.compat import shorten_plugin_errors

        shorten_plugin_errors()
        _cache_every_program()
    return run


def _cache_every_program() -> None:
    """Let JAX's compilation cache, if the user names a folder, keep programs that compile in less than a second too.

    A command compiles many small programs, which a second start would otherwise compile again.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        import jax

        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _run(words: Sequence[str]) -> tuple[int, str]:
    """Run a command line; return (exit status, error message of one line, or "")."""
    name, *rest = words or [""]
    if name in ("--help", "-h"):
        print(usage())
        return 0, ""
    if name == "--version":
        print(f"jaxshard {__version__}")
        return 0, ""
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"there are {', '.join(COMMANDS)}"
        return 2, f"{f'there is no command {name!r}' if name else 'name a command'}; {hint}"
    try:
        with _ended_by_ctrl_c():
            command = flags.COMMANDS[name]
            if {"-h", "--help"} & set(itertools.takewhile("--".__ne__, rest)):
                print(parse.help_of(command))
                return 0, ""
            given = parse.parse(command, rest)
            with _uncollected():
                run = runner_of(name)
        with _ctrl_c_again_where_it_is_lost(), file_errors(), size_errors():
            return run(given) or 0, ""
    except KeyboardInterrupt:
        return INTERRUPTED, "interrupted"
    except (UsageError, ValueError, RuntimeError, FloatingPointError) as error:
        status: int | None = getattr(error, "exit_status", None)
        if status is None:
            raise
        return status, f"{error.what}; see --bad-steps" if hasattr(error, "what") else str(error)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the modules that are imported in the `with` block from the garbage collector, then and later.

    An import makes hundreds of thousands of objects that stay, and each collection would search them. Do nothing if JAX
    was imported before: then the process has objects of a caller, whose garbage must not be kept.
    """
    if "jax" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """End the process at once on Ctrl-C in the `with` block: some modules swallow KeyboardInterrupt on import."""

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(2, b"jaxshard: interrupted\n")
        os._exit(INTERRUPTED)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) not in (signal.SIG_DFL, signal.default_int_handler):
        yield  # ignored, as under nohup, or somebody else's
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _ctrl_c_again_where_it_is_lost() -> Iterator[None]:
    """Repeat a Ctrl-C that came while Python ran a callback of its garbage collector, such as JAX's.

    Python prints an exception that is raised in such a callback and goes on, even if it is a KeyboardInterrupt.
    """
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _print_if_possible(line: str) -> None:
    """Print a line to standard error, or to standard output if standard error is closed; ignore a failure."""
    with contextlib.suppress(OSError, OutputError):
        print(line, file=sys.stderr or sys.stdout, flush=True)
