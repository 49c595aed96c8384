"""The second start of a command: with JAX's compilation cache, beside the first one, which compiles.

    python benchmarks/second_start.py [--rounds 5] [--only TEXT] [--json FILE]

Every start is a process of its own, from `python -m jaxshard` to its end: imports, traces, compiling or loading, one
step and one evaluation on a small text (for `generate`: eight tokens). In each round every command is started with an
empty cache and then with the cache that this start has filled; the rounds take turns over the commands. Printed are
medians: seconds by the clock, which mean something only on an idle machine, and CPU-seconds (user and system, all
threads). Bytecode of Python is kept for the starts, as on a user's machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TRAIN = ["train", "--data", "{text}", "--batch", "8", "--sample", "0", "--steps"]
COMMANDS = {
    "train, one device": [*TRAIN, "1", "--devices", "1"],
    "train, 8 simulated": [*TRAIN, "1", "--devices", "8"],
    "train --resume, 8 simulated": [*TRAIN, "2", "--devices", "8", "--checkpoint", "{run}", "--resume"],
    "generate, one device": ["generate", "--model", "gpt-1m", "--prompt", "def ", "--length", "8"],
}
PREPARE = [*TRAIN, "1", "--devices", "8", "--checkpoint", "{run}"]
"""Saves the run that `train --resume` goes on from."""
TARGETS = {"train, one device": 3.0, "train, 8 simulated": 3.0, "generate, one device": 2.0}
"""Seconds by the clock that a second start may take on two idle cores."""


class Taken(NamedTuple):
    """What a start took.

    Attributes:
      wall: seconds by the clock.
      cpu: CPU-seconds of the process and its children.
    """

    wall: float
    cpu: float


def start(words: list[str], folder: Path) -> Taken:
    """Run `jaxshard` with these words and the cache in `folder`, and return what it took."""
    filled = [word.format(text=folder / "text.txt", run=folder / "run") for word in words]
    settings = {
        "PYTHONPATH": str(ROOT),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | settings
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxshard", *filled], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{filled}: status {process.returncode}\n{said.decode()[-2000:]}")
    return Taken(time.perf_counter() - began, usage.ru_utime + usage.ru_stime)


def measure(names: list[str], rounds: int, folder: Path) -> dict[str, dict[str, list[Taken]]]:
    """Start every command cold and then from its cache, `rounds` times in turns."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "jaxshard" / "core").glob("*.py")))
    (folder / "text.txt").write_text(text[:50_000], encoding="utf-8")
    start(["--help"], folder)  # bytecode
    turns: dict[str, dict[str, list[Taken]]] = {name: {"cold": [], "second": []} for name in names}
    for _ in range(rounds):
        for name in names:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            shutil.rmtree(folder / "run", ignore_errors=True)
            resumes = "{run}" in COMMANDS[name]
            if resumes:
                start(PREPARE, folder)
                shutil.copytree(folder / "run", folder / "saved", dirs_exist_ok=True)
                shutil.rmtree(folder / "cache", ignore_errors=True)
            for when in ("cold", "second"):
                if resumes:
                    shutil.rmtree(folder / "run")
                    shutil.copytree(folder / "saved", folder / "run")
                turns[name][when].append(start(COMMANDS[name], folder))
    return turns


def report(turns: dict[str, dict[str, list[Taken]]]) -> None:
    """Print the table."""
    print(f"| {'':27} | cold, s | CPU-s | second, s | CPU-s | ratio of CPU-s | target, s |")
    print(f"|{'-' * 29}|--------:|------:|----------:|------:|---------------:|----------:|")
    for name, row in turns.items():
        cold, second = row["cold"], row["second"]
        wall = [statistics.median(taken.wall for taken in some) for some in (cold, second)]
        cpu = [statistics.median(taken.cpu for taken in some) for some in (cold, second)]
        ratio = statistics.median(after.cpu / before.cpu for before, after in zip(cold, second, strict=True))
        target = TARGETS.get(name, "")
        print(
            f"| {name:27} | {wall[0]:7.1f} | {cpu[0]:5.1f} | {wall[1]:9.1f} | {cpu[1]:5.1f} | {ratio:14.2f} "
            f"| {target:>9} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="TEXT", help="only commands whose name has this text")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    names = [name for name in COMMANDS if args.only in name]
    with tempfile.TemporaryDirectory() as folder:
        turns = measure(names, args.rounds, Path(folder))
    report(turns)
    if args.json:
        Path(args.json).write_text(json.dumps({"python": sys.version.split()[0], "starts": turns}, indent=2) + "\n")


if __name__ == "__main__":
    main()
