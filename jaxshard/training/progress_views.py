"""Views of a `Progress`: a live line on a terminal or in a notebook, about ten lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxshard.core.layout import human_bytes
from jaxshard.training.goodput import clock_str
from jaxshard.training.metrics.writer import finishing
from jaxshard.training.progress import Progress, Reporter, View
from jaxshard.training.records import Record, mean_speed

if TYPE_CHECKING:  # most programs show nothing, and need not wait for its import
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

_PHASES = {"compiling": "compiling the step"}
"""Other words to show for a phase."""

_PLAIN_LINES = 10
"""The number of lines about steps in a pipe or file."""

_RECENT_STEPS = 20
"""The number of steps over which the shown speed is a mean."""


class Line:
    """The base class of the views, which writes a progress as one line of text.

    Attributes:
      last: the last `Progress`; None before the first.
    """

    def __init__(self) -> None:
        self.last: Progress | None = None
        self._since = time.monotonic()
        self._recent: deque[Record] = deque(maxlen=_RECENT_STEPS + 1)
        self._evaluation: Record | None = None

    def __call__(self, progress: Progress) -> None:
        """Take the news, and show them if it is time."""
        if self.last is None or self.last.phase != progress.phase:
            self._since = time.monotonic()
        self.last = progress
        record = progress.record
        if progress.phase == "training" and record is not None:
            self._recent.append(record)
            self._evaluation = self._evaluation if record.evaluation is None else record
        self.show(progress)

    def show(self, progress: Progress) -> None:
        """Show the line; a view that refreshes itself does nothing here."""

    def finish(self, error: BaseException | None) -> None:
        """Leave the last line as it is."""

    @property
    def text(self) -> str:
        """The line: step, loss, speed, memory, the last evaluation and the time left; or what happens before."""
        if self.last is None:
            return ""
        parts = _steps(self.last)
        if self.last.phase not in ("training", "finished"):
            parts.append(f"{_PHASES.get(self.last.phase, self.last.phase)}, {time.monotonic() - self._since:.0f} s")
        if self._recent:
            parts += _numbers(list(self._recent))
        if self._evaluation is not None and self._evaluation.evaluation is not None:
            parts.append(_held_out(self._evaluation.evaluation))
        if self.last.seconds_left is not None:
            parts.append(f"{clock_str(self.last.seconds_left)} left")
        return "  ".join(parts)


class TerminalLine(Line):
    """A line of a terminal that is written over four times a second; what the program prints appears above it.

    Args:
      console: where it is shown.
    """

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self._live: Live | None = None

    def show(self, progress: Progress) -> None:
        """Show the line from the first call on."""
        if self._live is None:
            from rich.live import Live

            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start(refresh=True)

    def finish(self, error: BaseException | None) -> None:
        """Leave the last line as it is, and print the goodput below it."""
        if self._live is not None:
            self._live.transient = not self.text  # of work without steps nothing stays
            self._live.stop()
            self._live = None
            _print_goodput(self._console, self.last)

    def _render(self) -> Text:
        from rich.text import Text

        return Text(f"  {self.text}", no_wrap=True, overflow="ellipsis")


class PlainLines(Line):
    """About ten lines in all, without control characters, for pipes and files.

    Args:
      console: where they are printed.
    """

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self._next_step = self._next_evaluation = 0

    def show(self, progress: Progress) -> None:
        """Print the line if a tenth of the steps has passed, also for evaluations; and what begins before the steps."""
        if progress.phase not in ("training", "evaluating", "finished"):
            doing = _PHASES.get(progress.phase, progress.phase)
            self._console.print(f"  {'  '.join([*_steps(progress), doing])} ...")
        if progress.phase != "training":
            return
        step, every = progress.step, max(1, progress.steps // _PLAIN_LINES)
        evaluated = self._evaluation is not None and step >= self._next_evaluation
        if not evaluated and step < self._next_step and step != progress.steps:
            return
        self._console.print(f"  {self.text}")
        self._next_step = step - step % every + every
        if evaluated:
            self._next_evaluation = step + every
        self._evaluation = None  # it is told once

    def finish(self, error: BaseException | None) -> None:
        """Print the goodput."""
        _print_goodput(self._console, self.last)


class NotebookLine(Line):
    """A line below a notebook's cell that is replaced once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, progress: Progress) -> None:
        """Show the line from the first call on."""
        if self._thread is None:
            from IPython.display import display

            self._closed.clear()
            self._handle = display(self._bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            self._thread = threading.Thread(target=self._refresh, name="progress", daemon=True)
            self._thread.start()

    def finish(self, error: BaseException | None) -> None:
        """Leave the last line as it is, with the goodput."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join()
            self._thread = None
            self._handle.update(self._bundle, raw=True)

    @property
    def _bundle(self) -> dict[str, str]:
        goodput = None if self.last is None else self.last.goodput
        return {"text/plain": self.text if goodput is None else f"{self.text}\n{goodput}"}

    def _refresh(self) -> None:
        while not self._closed.wait(1.0):
            self._handle.update(self._bundle, raw=True)


def choose_view(progress: bool | View | None) -> View | None:
    """Return the view that `progress=` of `js.fit` or `js.parity` asks for, or None for none.

    Args:
      progress: None for a view on a terminal or in a notebook; True also in a pipe or file; False for none; or a
        function, which is returned. In all processes but the first the result is None.

    Raises:
      TypeError: it is neither of these.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            f"progress must be True, False, None or a function of a js.Progress, got {type(progress).__name__}"
        )
    if progress is False or jax.process_index() != 0:
        return None
    if callable(progress):
        return progress
    if progress is None and not _in_notebook() and not _is_terminal(sys.stderr):
        return None
    if _in_notebook():
        return NotebookLine()
    from rich.console import Console

    # Never control characters in a pipe, even if the environment asks rich for colours there.
    is_live = _is_terminal(sys.stderr)
    return view_on(Console(stderr=True, force_terminal=is_live, markup=False, highlight=False, soft_wrap=True))


@contextlib.contextmanager
def telling(progress: bool | View | None) -> Iterator[Callable[[str], None]]:
    """Show what work without steps is doing; yield a function to call with words for each part of it.

    Args:
      progress: as for `choose_view`. A view receives the words as the phase of a `Progress`, and "finished" at the end.
    """
    view = choose_view(progress)
    tell = Reporter(view, step=0, steps=0).phase
    with finishing([] if view is None else [view]):
        yield tell
        tell("finished")


def view_on(console: Console) -> Line:
    """Return the view that suits a console: a live line on a terminal, else about ten lines."""
    is_live = _is_terminal(console.file) and not console.is_dumb_terminal
    return TerminalLine(console) if is_live else PlainLines(console)


def _is_terminal(stream: Any) -> bool:
    with contextlib.suppress(AttributeError, ValueError):  # None without a console, or closed
        return bool(stream.isatty())
    return False


def _in_notebook() -> bool:
    """Return True in the kernel of a notebook, where IPython is loaded already."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _print_goodput(console: Console, last: Progress | None) -> None:
    if last is not None and last.goodput is not None:
        console.print(f"  {last.goodput}")


def _steps(progress: Progress) -> list[str]:
    """Write how many steps are done; nothing for work without steps, such as a comparison."""
    return [f"step {progress.step:,}/{progress.steps:,}"] if progress.steps else []


def _numbers(recent: Sequence[Record]) -> list[str]:
    """Write the loss and memory of the last record, and the mean speed without the first, which may have compiled.

    A record alone gets no speed.
    """
    last, recent = recent[-1], recent[1:]
    words = [f"loss {last.metrics['loss']:.3f}"] if "loss" in last.metrics else []
    for unit in ("tokens", "rows"):
        if (speed := mean_speed(recent, f"{unit}_per_second")) is not None:
            words.append(f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s")
            break
    if (mfu := mean_speed(recent, "mfu")) is not None:
        words.append(f"MFU {mfu:.1%}")
    if (memory := last.speed.get("memory_bytes")) is not None:
        words.append(human_bytes(int(memory)))
    return words


def _held_out(evaluation: dict[str, float]) -> str:
    """Write the results of an evaluation, the loss first."""
    names = sorted(evaluation, key=lambda name: (name != "loss", name))
    return "held-out " + " ".join(f"{name} {evaluation[name]:.4f}" for name in names)
