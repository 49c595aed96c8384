"""What starting costs: importing this package beside JAX, Flax and optax, and the help of its command line.

    python benchmarks/startup.py [--rounds 9] [--json FILE]

Every program is a process of its own; they take turns, and a difference or ratio is taken within a round. Printed are
CPU-seconds (user and system, all threads) of the whole process, Python's own start included. "used names" are those of
the README's example; a name of the package is imported when it is first used, so a bare import imports none of them.
`python -X importtime -c "..."` shows where the time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BASE = "import jax, flax.linen, optax"
USED = "compose fsdp tensor make_mesh layout init make_step explicit auto batches linen fit Mean cross_entropy"
PROGRAMS = {
    "python": ["-c", "pass"],
    "jax, flax, optax": ["-c", BASE],
    "and import jaxshard": ["-c", f"{BASE}; import jaxshard as js"],
    "and used names": ["-c", f"{BASE}; import jaxshard as js; [getattr(js, name) for name in '{USED}'.split()]"],
    "and every name": ["-c", f"{BASE}; import jaxshard as js; [getattr(js, name) for name in js.__all__]"],
    "jaxshard --help": ["-m", "jaxshard", "--help"],
    "jaxshard train --help": ["-m", "jaxshard", "train", "--help"],
}
REFERENCE = "jax, flax, optax"
TARGETS = {"and import jaxshard": 0.3, "jaxshard --help": 1.0}
"""CPU-seconds: what an import may add to the reference, and what a help may take in all."""


def cpu_seconds(words: list[str]) -> float:
    """Run Python with these words, and return the CPU-seconds of its process."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{words}: status {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def measure(rounds: int) -> dict[str, dict[str, Any]]:
    """Run all programs in turns; return their median, and what they add to the reference in a round."""
    turns: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for words in PROGRAMS.values():
        cpu_seconds(words)  # files are read, and bytecode is written
    for _ in range(rounds):
        for name, words in PROGRAMS.items():
            turns[name].append(cpu_seconds(words))
    rows: dict[str, dict[str, Any]] = {}
    for name, taken in turns.items():
        pairs = list(zip(taken, turns[REFERENCE], strict=True))
        rows[name] = {
            "cpu_seconds": statistics.median(taken),
            "added": statistics.median(mine - base for mine, base in pairs),
            "ratio": statistics.median(mine / base for mine, base in pairs),
            "turns": taken,
        }
    return rows


def report(rows: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    print(f"| {'':22} | CPU-s | added | ratio | target |\n|{'-' * 24}|------:|------:|------:|--------|")
    for name, row in rows.items():
        added, ratio = (f"{row['added']:5.2f}", f"{row['ratio']:5.2f}") if name.startswith("and") else ("", "")
        target = f"<= {TARGETS[name]}" if name in TARGETS else ""
        print(f"| {name:22} | {row['cpu_seconds']:5.2f} | {added:5} | {ratio:5} | {target:6} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    rows = measure(args.rounds)
    report(rows)
    if args.json:
        Path(args.json).write_text(json.dumps({"python": sys.version.split()[0], "programs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
