"""The default training under seven strategies: every loss curve in one picture, and how far each is from one device's.

    python benchmarks/curves.py [--steps 320] [--json benchmarks/curves.json] [--pictures docs/pictures]
    python benchmarks/curves.py --draw           only the pictures, from the recorded curves

Each run is the command `jaxshard train` with its defaults (gpt-1m, the standard library's source text, 64 rows a step,
AdamW, all in f32), in a process of its own, on simulated CPU devices: once on one device, then sharded. Model, seed,
data and order of the batches are the same, so that the curves differ by the order in which sums are added up alone. The
spread of a run is its largest relative difference from the loss of one device in any step; more than `ALLOWED` ends the
command with an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jaxshard as js

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "benchmarks" / "curves.json"
PICTURES = ROOT / "docs" / "pictures"

ALLOWED = 1e-4
"""The largest relative difference from one device in any step."""

STEPS = 320
"""All of the command's default: the recipe's 80 steps of warm-up, and then the decay."""

ONE = "one device"

RUNS = {
    ONE: ("--devices", "1", "--strategy", "ddp"),
    "ddp": ("--mesh", "data=8", "--strategy", "ddp"),
    "zero2": ("--mesh", "data=8", "--strategy", "zero2"),
    "fsdp": ("--mesh", "data=8", "--strategy", "fsdp"),
    "tensor": ("--mesh", "data=1,tensor=4", "--devices", "4", "--strategy", "ddp"),
    "context": ("--mesh", "data=1,context=4", "--devices", "4", "--strategy", "ddp"),
    "pipeline": ("--mesh", "data=1,pipe=4", "--devices", "4", "--strategy", "ddp"),
    "data x tensor x pipe": ("--mesh", "data=2,tensor=2,pipe=2", "--strategy", "fsdp"),
}
"""The flags of each run; all others are the defaults."""


def train(flags: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Train once in a process of its own; return its losses, the CPU-seconds that it took, and what it was."""
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "log.jsonl"), Path(folder, "result.json")
        length = ("--steps", str(steps))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "jaxshard",
                "train",
                *flags,
                *length,
                "--sample",
                "0",
                "--log",
                log,
                "--json",
                result,
            ],
            check=True,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
        facts = json.loads(result.read_text())
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"flags": list(flags), "cpu_seconds": round(seconds, 1), "loss": losses, "facts": facts}


def record(steps: int) -> dict[str, Any]:
    """Train under every strategy, one after the other; return the curves with what was trained on what."""
    runs = {}
    for name, flags in RUNS.items():
        runs[name] = train(flags, steps)
        print(f"{name}: {runs[name]['cpu_seconds']} CPU-seconds, last loss {runs[name]['loss'][-1]:.6f}", flush=True)
    return collect(runs)


def collect(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Put runs together with the facts that they share."""
    facts = [run.pop("facts") for run in runs.values()].pop()
    about = {name: facts[name] for name in ("model", "params", "recipe", "corpus", "versions")}
    return {"command": "python benchmarks/curves.py", "allowed": ALLOWED, **about, "runs": runs}


def spread(recorded: dict[str, Any], name: str) -> float:
    """Return the largest relative difference of a run's loss from that of one device in any step."""
    ours, theirs = (recorded["runs"][one]["loss"] for one in (name, ONE))
    return max(abs(float(loss) / float(expected) - 1) for loss, expected in zip(ours, theirs, strict=True))


def draw(file: Path, folder: Path) -> None:
    """Draw the recorded curves for light and for dark pages; each picture names the file that it was made from."""
    import matplotlib.style

    content = file.read_bytes()
    curves = {name: run["loss"] for name, run in json.loads(content)["runs"].items()}
    folder.mkdir(parents=True, exist_ok=True)
    for look, style in (("light", "default"), ("dark", "dark_background")):
        with matplotlib.style.context(style):
            figure = js.metrics.loss_figure(curves, reference=ONE)
            figure.axes[1].axhline(ALLOWED, color=figure.axes[1].yaxis.label.get_color(), linestyle=":")
        path = folder / f"loss_curves_{look}.svg"
        js.plan.write_picture(figure, path)
        declaration, rest = path.read_text().split("\n", 1)
        path.write_text(f"{declaration}\n<!-- {source_of(content)} -->\n{rest}")


def source_of(content: bytes) -> str:
    """Return the line by which a picture names the recorded curves that it shows."""
    return f"benchmarks/curves.json, sha256 {hashlib.sha256(content).hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, default=RECORDED)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    parser.add_argument("--draw", action="store_true", help="only draw what --json has")
    args = parser.parse_args()
    if not args.draw:
        args.json.write_text(to_json(record(args.steps)))
    draw(args.json, args.pictures)
    recorded = json.loads(args.json.read_text())
    spreads = {name: spread(recorded, name) for name in recorded["runs"] if name != ONE}
    for name, largest in spreads.items():
        print(f"{name:21} {largest:.1e} apart from {ONE} at most")
    if max(spreads.values()) > ALLOWED:
        sys.exit(f"more than {ALLOWED:.0e}")


def to_json(recorded: dict[str, Any]) -> str:
    """Write the record with a line for each run, so that two records are compared line by line."""
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in recorded["runs"].items())
    rest = json.dumps({name: value for name, value in recorded.items() if name != "runs"}, indent=1)
    return f'{rest[:-2]},\n "runs": {{\n{runs}\n }}\n}}\n'


if __name__ == "__main__":
    main()
