"""Print facts at the start of a command, its current work, and tables at the end of a training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from jaxshard.commands.config import write_config
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Config, Flags, Result
from jaxshard.commands.outputs import check_files
from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import Table, first_words
from jaxshard.hlo.counts import bytes_str, number_str

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

_NAME_WIDTH = 10
"""Characters for the names in front of facts."""


def start(flags: Flags, *, quiet: bool = False) -> Console:
    """Check that a command's output files can be written, write --save-config, and return the console to print to.

    The console prints text as it is: no markup, no wrapping, no colour codes in files and pipes. It prints to standard
    error if the JSON object goes to standard output (--json -).

    Args:
      flags: the flags of the command.
      quiet: print and write nothing, as all processes but process 0 do.

    Raises:
      UsageError: a file can't be written.
    """
    if not quiet:
        with usage_errors():
            check_files(flags)
        if isinstance(flags, Config) and flags.save_config is not None:
            write_config(flags.save_config, flags)
    stderr = isinstance(flags, Result) and str(flags.json) == "-"
    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False, soft_wrap=True)


def facts(console: Console, rows: dict[str, str]) -> None:
    """Print one line per entry of `rows`: its name, in a column of fixed width, and its value."""
    for name, value in rows.items():
        console.print(Text.assemble((f"  {name:<{_NAME_WIDTH}}  ", "dim"), value))


def printable(text: Any) -> str:
    """Replace control characters, since text from a model or a file could otherwise control the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in str(text))


@contextlib.contextmanager
def working(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Show what a command is doing; yield a function that shows other words.

    On a terminal a spinner and the time since the start go on while the command works; elsewhere it is a line.
    """

    def say(words: str) -> None:
        console.print(Text(f"  {words} ...", "dim"))

    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            shown = progress.add_task(what, total=None)
            yield lambda words: progress.update(shown, description=words)
    else:
        say(what)
        yield say


def tables(console: Console, result: dict[str, Any]) -> None:
    """Print the summary of a training run from its JSON object: losses, speed, bytes, collectives and a sample."""
    console.print()
    facts(console, _outcome(result) if result["losses"] else {"steps": "none was left to take"})
    facts(console, _describe_experts(result["experts"]) if result["experts"] else {})
    for table in (_bytes_table(result["bytes_per_device"]), _collectives_table(result["collectives"])):
        console.print("", *(f"  {line}" for line in table.lines), sep="\n")
    if sample := result["sample"]:
        # Characters that the console's encoding lacks are replaced.
        parts = (sample[part].encode(console.encoding, errors="replace") for part in ("prompt", "text"))
        prompt, text = (part.decode(console.encoding) for part in parts)
        console.print(Text(f"\n  sample, at temperature {sample['temperature']}, after a prompt", "dim"))
        console.print(Text.assemble((prompt, "dim"), text))


def _outcome(result: dict[str, Any]) -> dict[str, str]:
    """Return the lines about losses, speed and time of a training run, by name."""
    losses = ["not finite" if loss is None else f"{loss:.4f}" for loss in (*result["losses"], result["loss_eval"])]
    held_out = f", held-out {losses[-1]}" if result["evaluations"] else ""
    speed = f"{result['tokens_per_second']:,.0f} tokens/s"
    if result["flops_per_second"] is not None:
        speed += f", {result['flops_per_second'] / 1e9:,.1f} GFLOP/s"
    if result["mfu"] is not None:
        speed += f", {result['mfu']:.1%} of the chips' peak"
    times = f"{len(losses) - 1} steps in {result['train_seconds']:.1f} s, compiled in {result['compile_seconds']:.1f} s"
    unit = f"nats per {result['corpus']['unit']}"
    outcome = {"loss": f"first {losses[0]}, last {losses[-2]}{held_out} {unit}", "speed": speed, "time": times}
    if bad := result["bad_steps"]:
        outcome["bad steps"] = f"left out: {', '.join(map(str, bad))}"
    return outcome


def _describe_experts(experts: dict[str, Any]) -> dict[str, str]:
    """Return the lines about experts, by name: least and largest load in each block, and experts hardly chosen."""
    blocks = [f"{min(block):.2f} to {max(block):.2f}" for block in experts["load"]]
    lost = "" if experts["drop_rate"] is None else f"; {experts['drop_rate']:.2%} of the choices dropped"
    dead = first_words(experts["dead"], most=8) or "none"
    return {"experts": f"load {', '.join(blocks)} of the mean{lost}", "dead experts": dead}


def _bytes_table(sizes: dict[str, dict[str, int]]) -> Table:
    columns = sizes["predicted"], sizes["compiled"]
    rows = [
        (name, *(human_bytes(column[key]) if column.get(key) else "" for column in columns))
        for key, name in _ROLES.items()
        if any(column.get(key) for column in columns)
    ]
    return Table(rows, "<>>", ("bytes per device", "predicted", "compiled"))


def _collectives_table(rows: list[dict[str, Any]]) -> Table:
    cells = [(row["kind"], row["axis"], bytes_str(row["bytes"]), number_str(row["count"])) for row in rows]
    return Table(cells or [("none", "", "", "")], "<<>>", ("collectives per step", "axis", "bytes", "count"))
