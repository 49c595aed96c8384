"""Bytes of gradients and weights on the wire, and what rounding them does to the loss of the default training.

    python benchmarks/wire.py [--json result.json] [--steps 320] [--seeds 0 1 2] [--only bytes|losses]
    python benchmarks/wire.py --only bytes --topology v5e:2x4      the compiled program of a TPU, no hardware needed

Bytes are those of the compiled program, per device and step, of the collectives over one axis of the mesh: a level,
inside a slice ("data") or across ("replica"). An all-reduce counts twice, because it is a reduce-scatter and an
all-gather. Losses are those of `jaxshard train` (gpt-1m on the standard library's source text, 64 rows a step, 8
simulated devices), each run in a process of its own: the loss on held-out text after the last step, over that of f32
with the same seed. A mean over the seeds of more than `ALLOWED` from it, or less than `FEWER` times fewer bytes of
gradients in 8 bits, ends the command with an error.
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
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import jaxshard as js
from jaxshard.models.gpt import gpt

ROOT = Path(__file__).parent.parent
ALLOWED = 0.005
"""The largest relative difference of losses from those of f32, on average over the seeds: one run may be luck."""
FEWER = 3.9

SIZES: dict[str, Any] = {"vocab": 512, "width": 256, "depth": 2, "heads": 4, "seq": 64}
"""The model whose bytes are counted; its smallest matrices have 65,536 elements."""

STRATEGIES: dict[str, tuple[dict[str, int], js.Strategy]] = {
    "ddp": ({"data": 8}, js.ddp()),
    "fsdp": ({"data": 8}, js.fsdp()),
    "hsdp": ({"replica": 2, "data": 4}, js.hsdp()),
}

GRADIENTS: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"reduce_dtype": jnp.bfloat16},
    "int8": {"reduce_dtype": js.wire.int8()},
    "int8 with feedback": {"reduce_dtype": js.wire.int8(feedback=True), "scatter": "end"},
    "fp8": {"reduce_dtype": js.wire.fp8()},
}

WEIGHTS: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"gather_dtype": jnp.bfloat16},
    "int8": {"gather_dtype": js.wire.int8()},
    "fp8": {"gather_dtype": js.wire.fp8()},
}

TRAININGS = {
    "int8 gradients": "gradients=int8",
    "int8 gradients, feedback": "gradients=int8,feedback=on",
    "fp8 gradients": "gradients=fp8",
    "fp8 gradients, feedback": "gradients=fp8,feedback=on",
    "bf16 weights": "weights=bf16",
    "int8 weights": "weights=int8",
    "fp8 weights": "weights=fp8",
    "int8 gradients, fp8 weights": "gradients=int8,weights=fp8",
}
"""Values of --wire."""


def count_bytes(mesh: Mesh, strategy: js.Strategy, engine: Any) -> dict[tuple[str, str], int]:
    """Compile a step, check its promise, and return ("gradients" or "weights", axis) -> bytes that travel."""
    model, tx = gpt(**SIZES), optax.adam(1e-3)
    layout = js.layout(strategy, mesh, model.init, tx)
    batch = {"tokens": jax.ShapeDtypeStruct((16, SIZES["seq"] + 1), jnp.int32)}
    audit = js.audit(js.make_step(model.loss, tx, layout, engine=engine), batch)
    if not audit.ok:
        sys.exit(str(audit))
    gathered = {axis for p in layout.placed() if p.role == "param" for axis in mesh.axis_names if _gathers(p, axis)}
    found: dict[tuple[str, str], int] = {}
    for one in js.plan.arrays_only(audit.found):
        is_weight = one.kind == "all-gather" and set(one.axes) <= gathered
        key = ("weights" if is_weight else "gradients", "+".join(one.axes))
        found[key] = found.get(key, 0) + (2 if one.kind == "all-reduce" else 1) * (one.bytes or 0)
    return found


def _gathers(placed: Any, axis: str) -> bool:
    return axis in str(placed.placement.store) and axis not in str(placed.placement.use)


def measure_bytes(names: list[str], topology: str | None) -> list[dict[str, Any]]:
    """Count bytes for every strategy and format, of gradients and of weights, level by level."""
    rows = []
    for name in names:
        axes, strategy = STRATEGIES[name]
        mesh = js.plan.topology_mesh(topology, **axes) if topology else js.make_mesh(**axes)
        for what, formats in (("gradients", GRADIENTS), ("weights", WEIGHTS)):
            exact: dict[tuple[str, str], int] = {}
            for form, arguments in formats.items():
                found = count_bytes(mesh, strategy, js.explicit(remat="nothing", **arguments))
                exact = exact or found
                for (of, axis), size in found.items():
                    if of == what:
                        times = exact[of, axis] / size
                        rows.append(
                            {"strategy": name, "of": of, "axis": axis, "as": form, "bytes": size, "fewer": times}
                        )
                        print(f"{name:6} {of:10} over {axis:8} {form:20} {size:>12,} bytes  {times:5.2f}x", flush=True)
    return rows


def train(seed: int, steps: int, wire: str | None) -> float:
    """Train once in a process of its own; return the loss on held-out text at the end."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        flags = ["--seed", str(seed), "--steps", str(steps), "--sample", "0", "--json", str(result)]
        subprocess.run(
            [sys.executable, "-m", "jaxshard", "train", *flags, *(["--wire", wire] if wire else [])],
            check=True,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
        )
        return float(json.loads(result.read_text())["loss_eval"])


def measure_losses(seeds: list[int], steps: int, names: list[str]) -> list[dict[str, Any]]:
    """Train with every format and seed, and compare the losses with those of f32."""
    rows = []
    for seed in seeds:
        exact = train(seed, steps, None)
        print(f"seed {seed}  f32 {exact:.6f}", flush=True)
        for name in names:
            loss = train(seed, steps, TRAININGS[name])
            rows.append({"seed": seed, "as": name, "exact": exact, "loss": loss, "apart": loss / exact - 1})
            print(f"seed {seed}  {name:28} {loss:.6f}  {loss / exact - 1:+.3%}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=["bytes", "losses"])
    parser.add_argument("--topology", help="compile for a TPU such as v5e:2x4")
    parser.add_argument("--formats", nargs="+", choices=list(TRAININGS), default=list(TRAININGS))
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    args = parser.parse_args()
    js.simulate_devices(8)
    result: dict[str, Any] = {"model": SIZES, "topology": args.topology, "steps": args.steps}
    problems = []
    if args.only != "losses":
        result["bytes"] = measure_bytes(args.strategies, args.topology)
        for row in result["bytes"]:
            if row["as"].startswith(("int8", "fp8")) and row["fewer"] < FEWER:
                problems.append(f"{row['of']} of {row['strategy']} over {row['axis']}: only {row['fewer']:.2f}x")
    if args.only != "bytes":
        result["losses"] = measure_losses(args.seeds, args.steps, args.formats)
        for name in args.formats:
            apart = [row["apart"] for row in result["losses"] if row["as"] == name]
            print(f"{name:28} mean {statistics.mean(apart):+.3%}, largest {max(map(abs, apart)):.3%}")
            if abs(statistics.mean(apart)) > ALLOWED:
                problems.append(f"{name}: losses are {statistics.mean(apart):+.3%} from those of f32 on average")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
