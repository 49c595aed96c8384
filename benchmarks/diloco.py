"""Replicas that seldom meet (`js.local`): the bytes that they exchange, and the loss that they reach.

    python benchmarks/diloco.py [--every 1 8 32] [--fragments 4] [--json FILE]     bytes, from compiled programs
    python benchmarks/diloco.py --train [--only NAME ...] [--change CHANGES] [--seeds 3] [--steps N]

Bytes: `gpt-1m` on 8 simulated devices, two replicas of four, whole (`ddp`) and split (`fsdp`) inside. Counted are the
arrays that the compiled step moves over the axis of the replicas, as one device sees them: those of each step, and
those inside its conditional, of which a step takes at most one branch. "average" has these divided by the number of
steps from one meeting to the next, "most" is the step that moves the most. For comparison the same mesh where every
step reduces gradients over all devices.

Losses (with `--json FILE` too): `jaxshard train` with its defaults but for strategy and seed, two replicas of one
device; each is a process of its own. Compared is the loss of held-out text after the last step, at equal tokens.
`--change width=64,depth=2,heads=4` takes a smaller model, which trains in a fifth of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import optax

import jaxshard as js

ROOT = Path(__file__).parent.parent


def count_bytes(every: list[int], model: str = "gpt-1m") -> list[dict[str, Any]]:
    """Compile a step for each strategy and count what it moves over the axis of the replicas."""
    js.simulate_devices(8)
    mesh = js.make_mesh(replica=2, data=4)
    rows = []
    for name, plain, inside in (
        ("ddp", js.ddp(("replica", "data")), js.ddp("data")),
        ("fsdp", js.hsdp("replica", "data"), js.fsdp("data")),
    ):
        rows.append({"inside": name, "strategy": "every step", "every": 1, **_count(model, plain, mesh, 1)})
        for steps in every:
            strategy = js.compose(inside, js.local("replica", every=steps))
            found = _count(model, strategy, mesh, steps)
            rows.append({"inside": name, "strategy": "local", "every": steps, **found})
    return rows


def _count(model: str, strategy: Any, mesh: Any, every: int) -> dict[str, float]:
    made = js.models.make(model)
    tx = optax.adamw(3e-4)
    layout = js.layout(strategy, mesh, made.init, tx)
    step = js.make_step(made.loss, tx, layout, engine=js.explicit())
    batch = {"tokens": jax.ShapeDtypeStruct((16, 33), "int32")}
    found = [one for one in js.collectives(step.compile(batch), mesh) if "replica" in one.axes]
    always = sum(one.bytes or 0 for one in found if not one.conditional)
    seldom: dict[str, int] = {}
    for one in found:
        if one.conditional:
            branch = one.op_name.split("branch_")[1].split("_")[0]
            seldom[branch] = seldom.get(branch, 0) + (one.bytes or 0)
    total = sum(seldom.values())
    most = always + max(seldom.values(), default=0)
    return {"each_step": always, "meeting": total, "average": always + total / every, "most": most}


def _local(every: int, outer: str, *more: str) -> tuple[str, ...]:
    return ("--mesh", "replica=2,data=1", "--sync-every", str(every), "--outer", outer, *more)


RUNS = {
    "ddp": ("--mesh", "data=2"),
    "average, every 8": _local(8, "average"),
    "average, every 8 from step 80 on": _local(8, "average", "--sync-warmup", "80"),
    "average, every 8 from step 80 on, lr 5e-3": _local(8, "average", "--sync-warmup", "80", "--lr", "5e-3"),
    "rate 0.6, momentum 0.6, every 8 from step 80 on": _local(8, "rate=0.6,momentum=0.6", "--sync-warmup", "80"),
    "rate 0.5, momentum 0.75, every 8 from step 80 on": _local(8, "rate=0.5,momentum=0.75", "--sync-warmup", "80"),
    "momentum 0.4, every 8": _local(8, "rate=1,momentum=0.4"),
    "momentum 0.6, every 8": _local(8, "rate=1,momentum=0.6"),
    "momentum 0.4, every 8 from step 80 on": _local(8, "rate=1,momentum=0.4", "--sync-warmup", "80"),
    "rate 0.7, momentum 0.9, every 8": _local(8, "rate=0.7,momentum=0.9"),
}
"""The flags of each training; all others are the defaults. Of the first the others' distance is told."""


def train(flags: tuple[str, ...], seed: int, args: argparse.Namespace) -> float:
    """Train once in a process of its own; return the loss of held-out text after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "jaxshard", "train", "--devices", "2", "--strategy", "ddp", *flags]
        changes = [] if args.steps is None else ["--steps", str(args.steps)]
        changes += [] if args.change is None else ["--change", args.change]
        subprocess.run(
            [*command, *changes, "--seed", str(seed), "--sample", "0", "--json", str(result)],
            check=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return float(json.loads(result.read_text())["loss_eval"])


def compare_losses(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every way with every seed; return the losses, and how far their mean is from that of data parallelism."""
    rows: list[dict[str, Any]] = []
    for name in ("ddp", *args.only) if args.only else RUNS:
        losses = []
        for seed in range(args.seeds):
            losses.append(train(RUNS[name], seed, args))
            print(f"{name}, seed {seed}: {losses[-1]:.4f}", flush=True)
        mean = statistics.fmean(losses)
        rows.append(
            {"run": name, "losses": losses, "mean": mean, "over_ddp": mean / (rows or [{"mean": mean}])[0]["mean"] - 1}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--every", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[*RUNS][1:], default=[], help="these trainings, beside ddp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--change", help="of gpt-1m, as jaxshard train takes it, such as width=64,depth=2,heads=4")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.train:
        rows = compare_losses(args)
        for row in rows:
            print(f"{row['run']:38} mean {row['mean']:.4f}  {row['over_ddp']:+.2%} over ddp")
    else:
        rows = count_bytes(args.every)
        print(
            f"{'inside':6} {'strategy':16} {'every':>5} {'each step':>12} {'meeting':>12} {'average':>12} {'most':>12}"
        )
        for row in rows:
            numbers = " ".join(f"{row[key]:>12,.0f}" for key in ("each_step", "meeting", "average", "most"))
            print(f"{row['inside']:6} {row['strategy']:16} {row['every']:>5} {numbers}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
