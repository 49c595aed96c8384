"""What a training command shows: lines at the start, a live bar, tables at the end."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from jaxshard.core.layout import human_bytes
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
_LINES = 10
"""How many progress lines are written where there is no terminal for a bar."""
_WIDTH = 10
"""Of the names in front of facts."""


def make_console(*, stderr: bool, quiet: bool = False) -> Console:
    """A console for plain text: nothing is read as markup, and no colour codes go into files and pipes."""
    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False, soft_wrap=True)


def facts(console: Console, rows: dict[str, str]) -> None:
    """One line per fact, names in a column of their own."""
    for name, value in rows.items():
        console.print(Text.assemble((f"  {name:<{_WIDTH}}  ", "dim"), value))


@contextlib.contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[Record], None]]:
    """A callback for `fit` that shows step, loss, speed and time left: a live bar, or some lines without a terminal."""
    columns = TextColumn(" "), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[status]}", markup=False)
    bar = Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal)
    task = bar.add_task("", total=steps, status="the first step")
    recent: deque[Record] = deque(maxlen=20)
    started, before = time.perf_counter(), 0

    def show(record: Record) -> None:
        nonlocal before
        before = before if recent else record.step - 1
        recent.append(record)
        left = (time.perf_counter() - started) / (record.step - before) * (steps - record.step)
        status = f"loss {record.metrics['loss']:.3f}  {_speed(recent)}  {_clock(left)} left"
        bar.update(task, completed=record.step, status=status)
        if bar.disable and (record.step % max(1, steps // _LINES) == 0 or record.step in (before + 1, steps)):
            console.print(f"  step {record.step}/{steps}  {status}")
        if record.evaluation is not None:
            names = sorted(record.evaluation, key=lambda name: (name != "loss", name))
            numbers = "  ".join(f"{name} {record.evaluation[name]:.4f}" for name in names)
            console.print(Text(f"  step {record.step}: held-out {numbers}", "bold"))

    with bar:
        yield show


def tables(console: Console, result: dict[str, Any]) -> None:
    """The end of a training run, from its JSON object: losses, speed, bytes per device, collectives and a sample."""
    console.print()
    facts(console, _outcome(result) if result["losses"] else {"steps": "none was left to take"})
    console.print()
    console.print(_bytes_table(result["bytes_per_device"]))
    console.print()
    console.print(_collectives_table(result["collectives"]))
    if sample := result["sample"]:
        prompt, text = (_printable(sample[part], console) for part in ("prompt", "text"))
        console.print(Text("\n  sample, after a prompt", "dim"))
        console.print(Text.assemble((prompt, "dim"), text))


def _outcome(result: dict[str, Any]) -> dict[str, str]:
    """Losses and speed of the steps that were taken."""
    losses, held_out = result["losses"], result["loss_eval"]
    loss = f"first {_number(losses[0])}, last {_number(losses[-1])}"
    if result["evaluations"]:
        loss += f", held-out {_number(held_out)}"
    speed = f"{result['tokens_per_second']:,.0f} tokens/s, {_flops(result['flops_per_second'])}"
    if result["mfu"] is not None:
        speed += f", {result['mfu']:.1%} of what the chips can do"
    times = f"{len(losses)} steps in {result['train_seconds']:.1f} s, compiled in {result['compile_seconds']:.1f} s"
    told = {"loss": f"{loss} nats per {result['corpus']['unit']}", "speed": speed, "time": times}
    return told | ({"bad steps": f"left out: {', '.join(map(str, bad))}"} if (bad := result["bad_steps"]) else {})


def _bytes_table(sizes: dict[str, dict[str, int]]) -> Table:
    table = _table("bytes per device", "predicted", "compiled")
    for key, name in _ROLES.items():
        known = [sizes[column].get(key) for column in ("predicted", "compiled")]
        if any(known):
            table.add_row(name, *("" if size is None else human_bytes(size) for size in known))
    return table


def _collectives_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("collectives per step", "axis", "count", "bytes")
    for row in rows:
        count = "?" if row["count"] is None else f"{row['count']:,}"
        size = "?" if row["bytes"] is None else human_bytes(row["bytes"])
        table.add_row(row["kind"], row["axis"], count, size)
    if not rows:
        table.add_row("none")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title, box=None, padding=(0, 2), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _speed(records: deque[Record]) -> str:
    """The rate over the latest records, in the unit of the first rate they hold."""
    name = next(iter(records[-1].speed))
    seconds = sum(record.seconds for record in records)
    rate = sum(record.speed[name] * record.seconds for record in records) / seconds
    return f"{rate:,.0f} {name.removesuffix('_per_second')}/s"


def _flops(rate: float) -> str:
    """A rate with its unit: "15.0 GFLOP/s"."""
    unit, name = next((pair for pair in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if rate >= pair[0]), (1e6, "M"))
    return f"{rate / unit:.1f} {name}FLOP/s"


def _printable(text: str, console: Console) -> str:
    """The text with what the console's encoding lacks replaced."""
    return text.encode(console.encoding, errors="replace").decode(console.encoding)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return (f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{int(seconds) % 60:02d}"
