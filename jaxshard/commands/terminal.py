"""What the commands print: facts at the start, the progress of a training, tables at its end."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from jaxshard.commands.config import write_config
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Config, Flags, Result
from jaxshard.commands.outputs import check_files
from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import align_columns

if TYPE_CHECKING:  # `jaxshard doctor` prints even where Flax does not import
    from jaxshard.training.records import Record

_ROLES = {
    "param": "parameters",
    "grad": "gradients",
    "opt": "optimizer state",
    "state": "model state",
    "batch": "batch",
    "step_and_key": "step and key",
    "arguments": "all arguments of a step",
    "temporaries": "temporaries, with gradients",
}
"""Rows of the table of bytes: the names in the JSON object with those for people."""

_PROGRESS_LINES = 10
"""The number of lines about progress where there is no terminal for a bar."""

_NAME_WIDTH = 10
"""Characters for the names in front of facts."""

_RECENT_STEPS = 20
"""The number of steps over which the shown speed is a mean."""


def start(flags: Flags, *, quiet: bool = False) -> Console:
    """Check the files that a command will write, save its flags, and make its console.

    The console prints text as it is: no markup, no wrapping, no colour codes in files and pipes. It is standard error
    where standard output is kept for JSON.

    Args:
      flags: of the command.
      quiet: print and write nothing, as all but the first of several processes do.

    Raises:
      UsageError: a file that can't be written.
    """
    if not quiet:
        with usage_errors():
            check_files(flags)
        if isinstance(flags, Config) and flags.save_config is not None:
            write_config(flags.save_config, flags)
    stderr = isinstance(flags, Result) and str(flags.json) == "-"
    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False, soft_wrap=True)


def facts(console: Console, rows: dict[str, str]) -> None:
    """Print one line per fact, with the names in a column of their own."""
    for name, value in rows.items():
        console.print(Text.assemble((f"  {name:<{_NAME_WIDTH}}  ", "dim"), value))


def printable(text: Any) -> str:
    """Replace what would command a terminal, in the text of a model or of a stranger's file."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in str(text))


@contextlib.contextmanager
def working(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Show the current work, as a spinner on a terminal, else as a line; yield a function that shows the next words."""

    def say(words: str) -> None:
        console.print(Text(f"  {words} ...", "dim"))

    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
    else:
        say(what)
        yield say


@contextlib.contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[Record], None]]:
    """Yield a callback for `js.fit` that shows step, loss, speed and time left.

    On a terminal this is a live bar, elsewhere about ten lines over the whole run.

    Args:
      console: where it is shown.
      steps: the number of the last step.
    """
    from jaxshard.training.records import mean_speed

    columns = TextColumn(" "), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[status]}", markup=False)
    bar = Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
    task = bar.add_task("", total=steps, status="the first step")
    recent: deque[Record] = deque(maxlen=_RECENT_STEPS)
    started, before = time.perf_counter(), 0

    def show(record: Record) -> None:
        nonlocal before
        before = before if recent else record.step - 1
        recent.append(record)
        left = (time.perf_counter() - started) / (record.step - before) * (steps - record.step)
        speed = mean_speed(recent, "tokens_per_second")
        status = f"loss {record.metrics['loss']:.3f}  {speed:,.0f} tokens/s  {_clock(left)} left"
        bar.update(task, completed=record.step, status=status)
        if bar.disable and (record.step % max(1, steps // _PROGRESS_LINES) == 0 or record.step in (before + 1, steps)):
            console.print(f"  step {record.step}/{steps}  {status}")
        if record.evaluation is not None:
            names = sorted(record.evaluation, key=lambda name: (name != "loss", name))
            numbers = "  ".join(f"{name} {record.evaluation[name]:.4f}" for name in names)
            console.print(Text(f"  step {record.step}: held-out {numbers}", "bold"))

    with bar:
        yield show


def tables(console: Console, result: dict[str, Any]) -> None:
    """Print the end of a training run from its JSON object: losses, speed, bytes, collectives and a sample."""
    console.print()
    facts(console, _outcome(result) if result["losses"] else {"steps": "none was left to take"})
    if result["experts"]:
        facts(console, _describe_experts(result["experts"]))
    console.print()
    _print_table(console, _bytes_rows(result["bytes_per_device"]), "<>>")
    console.print()
    _print_table(console, _collectives_rows(result["collectives"]), "<>>>")
    if sample := result["sample"]:
        # Characters that the console's encoding lacks are replaced.
        parts = (sample[part].encode(console.encoding, errors="replace") for part in ("prompt", "text"))
        prompt, text = (part.decode(console.encoding) for part in parts)
        console.print(Text("\n  sample, after a prompt", "dim"))
        console.print(Text.assemble((prompt, "dim"), text))


def _outcome(result: dict[str, Any]) -> dict[str, str]:
    """Losses, speed and time of the steps that were taken, as facts."""
    losses, held_out = result["losses"], result["loss_eval"]
    loss = f"first {_number(losses[0])}, last {_number(losses[-1])}"
    if result["evaluations"]:
        loss += f", held-out {_number(held_out)}"
    speed = f"{result['tokens_per_second']:,.0f} tokens/s, {_flops(result['flops_per_second'])}"
    if result["mfu"] is not None:
        speed += f", {result['mfu']:.1%} of what the chips can do"
    times = f"{len(losses)} steps in {result['train_seconds']:.1f} s, compiled in {result['compile_seconds']:.1f} s"
    outcome = {"loss": f"{loss} nats per {result['corpus']['unit']}", "speed": speed, "time": times}
    if bad := result["bad_steps"]:
        outcome["bad steps"] = f"left out: {', '.join(map(str, bad))}"
    return outcome


def _describe_experts(experts: dict[str, Any]) -> dict[str, str]:
    """Write the loads of experts as facts: from the least to the most of each block, and who is dead."""
    blocks = [f"{min(block):.2f} to {max(block):.2f}" for block in experts["load"]]
    dead: list[str] = experts["dead"]
    shown = ", ".join(dead[:8]) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
    lost = "" if experts["drop_rate"] is None else f"; {experts['drop_rate']:.2%} of the choices dropped"
    return {"experts": f"load {', '.join(blocks)} of the mean{lost}", "dead experts": shown or "none"}


def _bytes_rows(sizes: dict[str, dict[str, int]]) -> Iterator[tuple[str, ...]]:
    yield "bytes per device", "predicted", "compiled"
    for key, name in _ROLES.items():
        known = [sizes[column].get(key) for column in ("predicted", "compiled")]
        if any(known):
            yield name, *("" if size is None else human_bytes(size) for size in known)


def _collectives_rows(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield "collectives per step", "axis", "count", "bytes"
    for row in rows:
        count = "?" if row["count"] is None else f"{row['count']:,}"
        size = "?" if row["bytes"] is None else human_bytes(row["bytes"])
        yield row["kind"], row["axis"], count, size
    if not rows:
        yield "none", "", "", ""


def _print_table(console: Console, rows: Iterable[Sequence[str]], sides: str) -> None:
    """Print aligned columns, the heading dimmed."""
    heading, *lines = align_columns(rows, sides)
    console.print(Text(f"  {heading}", "dim"))
    for line in lines:
        console.print(f"  {line}")


def _flops(rate: float) -> str:
    """Format a rate with its unit, such as "15.0 GFLOP/s"."""
    unit, name = next((pair for pair in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if rate >= pair[0]), (1e6, "M"))
    return f"{rate / unit:.1f} {name}FLOP/s"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return (f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{int(seconds) % 60:02d}"
