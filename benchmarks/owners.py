"""What optimizers that multiply matrices cost under FSDP: with owners, and left to the compiler.

    python benchmarks/owners.py [--json FILE] [--soap PATH]
    python benchmarks/owners.py --topology v5e:16x16 [--model 7b] [--json FILE]       # needs libtpu

Eight matrices [256, 256] in f32 on 8 simulated devices under `js.fsdp`, whose gradients are cheap. Of each optimizer:

- bytes: of the collectives of a step, less those of SGD, as the audit counts them, over the bytes of the parameters;
- FLOPs: of the compiled step on one device, over an eighth of those of one device's step alone, both less those of SGD,
  as XLA counts them (of loops one turn: there are none where each device owns one matrix);
- peak: what the compiler needs for a step on one device, over what it needs for SGD;
- busiest: the products of matrices on the device that has most of them, by the owners' programs, over the least that
  is possible: the mean, or the most expensive matrix where that is more;
- error: of parameters after 3 steps against one device, the worst array, over its largest element.

"owners" is `js.layout`, "compiler" the same without owners (`Layout.without_owners`): plain optax on the global arrays.
`--topology` compiles the same for TPUs that are not here (bytes and peak alone), or with `--model 7b` the matrices of
Llama 2 7B in stacked blocks, under `js.optim.per_block(optax.contrib.muon(...))`. Its loss multiplies each matrix by
one row of every device, and gathers one block at a time.

The Shampoo is that of `tests/optim/owners`; SOAP that of https://github.com/haydn-jones/SOAP_JAX (commit 2c0c34f):
installed as `soap_jax`, or `--soap` a checkout's src.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # eight devices that factorize hold all cores already
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from tests.optim.owners.shampoo import shampoo

STEPS = 3
LIMIT = {"muon": 0.3, "shampoo": 0.3, "soap": 0.3, "lamb": 0.01, "adafactor": 0.01}
"""The most bytes over SGD's, in those of the parameters."""


def eight(key: jax.Array) -> dict[str, jax.Array]:
    """The matrices."""
    return {f"w{i}": jax.random.normal(k, (256, 256)) / 16 for i, k in enumerate(jax.random.split(key, 8))}


def like_7b(blocks: int) -> js.Stacked:
    """A model with the matrices of Llama 2 7B, of which each is used once for every row."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (4096, 4096))
    shapes |= {"gate": (4096, 11008), "up": (4096, 11008), "down": (11008, 4096)}

    def init(key: jax.Array) -> dict[str, Any]:
        block = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return {"embed": jnp.zeros((32000, 4096)), "block": block, "head": jnp.zeros((4096, 32000))}

    def block(w: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        x += (jnp.tanh(x @ w["query"]) * (x @ w["key"]) + x @ w["value"]) @ w["out"]
        return x + (jnp.tanh(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def head(params: Any, x: jax.Array, batch: Any, key: jax.Array) -> js.Mean:
        return js.Mean(jax.nn.logsumexp(x @ params["head"], axis=-1).sum(), x.shape[0])

    return js.Stacked(
        embed=lambda params, batch, key: params["embed"][batch["tokens"]],
        block=block,
        head=head,
        num_blocks=blocks,
        init=init,
    )


def loss_fn(params: Any, batch: Any, key: jax.Array) -> js.Mean:
    """A loss whose gradient is cheap and of full rank: the parameters times a wave of their indices."""
    total = jnp.zeros(())
    for number, x in enumerate(jax.tree.leaves(params)):
        grid = sum(
            jax.lax.broadcasted_iota(jnp.float32, x.shape, dim) * (0.7 + dim + 0.1 * number) for dim in range(x.ndim)
        )
        total += jnp.sum(x * jnp.sin(grid * grid)) + 0.05 * jnp.sum(x * x)
    rows = batch["x"].shape[0]
    return js.Mean(rows * total + batch["x"].sum(), rows)


def optimizers(soap: Path | None) -> dict[str, Callable[[], Any]]:
    """Those that are compared, by name."""
    made: dict[str, Callable[[], Any]] = {
        "muon": lambda: optax.contrib.muon(0.02),
        "shampoo": lambda: shampoo(0.02),
        "lamb": lambda: optax.lamb(0.02),
        "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=8),
    }
    if soap is not None:
        sys.path.insert(0, str(soap))
    if importlib.util.find_spec("soap_jax") is not None:
        from soap_jax import soap as make_soap

        made["soap"] = lambda: make_soap(0.02, precondition_frequency=2)
    return made


class Task(NamedTuple):
    """What is trained: `js.layout` and `js.make_step` take the first three."""

    init: Any
    loss: Any
    engine: Any
    batch: Any

    def step(self, tx: Any, mesh: Any, *, owners: bool = True) -> js.Step:
        """Make the step of an optimizer, with owners or left to the compiler."""
        layout = js.layout(js.fsdp("data", min_size=0), mesh, self.init, tx)
        layout = layout if owners else layout.without_owners
        return js.make_step(self.loss, tx, layout, engine=self.engine, guarded=False)


def moved(step: js.Step, batch: Any) -> int:
    """The bytes of all collectives of a step."""
    found = js.collectives(step.compile(batch), step.layout.mesh)
    return sum(one.bytes or sum(one.sizes) for one in found)


def error(step: js.Step, task: Task) -> float:
    """The difference of parameters from one device after a few steps."""
    layout = step.layout
    run = js.init(task.init, step.tx, layout, 0)
    params = jax.device_get(js.logical(run, layout).params)
    for _ in range(STEPS):
        run, _ = step(run, task.batch)
    alone, state = jax.jit(one_device(step.tx, task)), step.tx.init(params)
    for _ in range(STEPS):
        params, state = alone(params, state)
    pairs = zip(jax.tree.leaves(js.logical(run, layout).params), jax.tree.leaves(params), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(y)).max()) for x, y in pairs)


def one_device(tx: Any, task: Task) -> Callable[[Any, Any], Any]:
    """The step of one device, without this package."""

    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda params: task.loss(params, task.batch, jax.random.key(0)).value)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def flops_alone(tx: Any, task: Task) -> float:
    """FLOPs of one device's step, as XLA counts them."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    compiled = jax.jit(one_device(tx, task)).lower(params, jax.eval_shape(tx.init, params)).compile()
    return float(compiled.cost_analysis()["flops"])


def row(name: str, make: Any, mesh: Any, task: Task, base: tuple[int, int, float], owners: bool) -> dict[str, Any]:
    """Measure one optimizer, with owners or without."""
    tx, real = make(), mesh.devices.flat[0].platform == "cpu"
    start = time.process_time()
    step = task.step(tx, mesh, owners=owners)
    layout = step.layout
    try:
        compiled = step.compile(task.batch)
    except jax.errors.JaxRuntimeError as refusal:
        if "RESOURCE_EXHAUSTED" not in str(refusal):
            raise
        return {"optimizer": name, "by": "owners" if owners else "compiler", "refused": str(refusal).splitlines()[0]}
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layout.shapes.params))
    made = {
        "optimizer": name,
        "by": "owners" if owners else "compiler",
        "owned": step.owned,
        "extra": (moved(step, task.batch) - base[0]) / size,
        "peak": peak(compiled, mesh),
        "peak_over_sgd": peak(compiled, mesh) - base[1],
        "compile_seconds": time.process_time() - start,
    }
    if layout.owners is not None:
        most, even = layout.owners.flops_per_device
        least = max(even, *(stack.flops for stack in layout.owners.stacks))
        made |= {"busiest": most, "even": even, "least": least, "owners": str(layout.owners)}
    if real:
        alone = flops_alone(tx, task) - flops_alone(optax.sgd(0.02), task)
        over = float(compiled.cost_analysis()["flops"]) - base[2]
        made |= {"flops": over / (alone / mesh.size), "error": error(step, task)}
    return made


def peak(compiled: Any, mesh: Any) -> int:
    """Bytes of a compiled step on one device; the CPU's compiler leaves temporaries out of what it calls the peak."""
    memory = compiled.memory_analysis()
    if mesh.devices.flat[0].platform == "cpu":
        return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
    return int(memory.peak_memory_in_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="write everything as JSON into this file, - for standard output")
    parser.add_argument("--soap", type=Path, help="the folder that holds the package soap_jax")
    parser.add_argument("--topology", help="compile for TPUs, such as v5e:16x16, instead of running on 8 CPU devices")
    parser.add_argument("--model", choices=["eight", "7b"], default="eight")
    parser.add_argument("--blocks", type=int, default=32, help="how many blocks --model 7b has")
    parser.add_argument("--only", help="these optimizers, separated by commas")
    parser.add_argument("--by", default="owners,compiler", help="with owners, left to the compiler, or both")
    args = parser.parse_args()
    if args.topology:
        mesh = js.plan.topology_mesh(args.topology, data=-1)
    else:
        js.simulate_devices(8)
        mesh = js.make_mesh(data=8)
    chosen, task = optimizers(args.soap), Task(eight, loss_fn, js.auto(), {"x": np.ones(mesh.size, np.float32)})
    if args.model == "7b":
        chosen, model = {"muon": lambda: js.optim.per_block(optax.contrib.muon(0.02))}, like_7b(args.blocks)
        task = Task(model.init, model.loss, js.explicit(), {"tokens": np.zeros(mesh.size, np.int32)})
    plain = task.step(optax.sgd(0.02), mesh)
    sgd = plain.compile(task.batch)
    count = 0.0 if args.topology else float(sgd.cost_analysis()["flops"])
    base = moved(plain, task.batch), peak(sgd, mesh), count
    rows = []
    for name, make in chosen.items():
        if args.only and name not in args.only.split(","):
            continue
        for by in args.by.split(","):
            found = row(name, make, mesh, task, base, by == "owners")
            rows.append(found)
            if "refused" in found:
                print(f"{found['optimizer']:10s} {found['by']:9s} {found['refused']}", flush=True)
                continue
            cells = [f"{found['optimizer']:10s} {found['by']:9s} bytes {found['extra']:8.4f}"]
            cells += [f"FLOPs {found['flops']:6.3f}  error {found['error']:.1e}"] if "flops" in found else []
            busy = ""
            if "busiest" in found:
                even, least = (found["busiest"] / found[what] for what in ("even", "least"))
                busy = f"  busiest {even:.3f} of even, {least:.3f} of the least"
            print(*cells, f"peak over SGD {found['peak_over_sgd'] / 1e6:9.2f} MB{busy}", flush=True)
    over = [one for one in rows if one["by"] == "owners" and one.get("extra", 1.0) > LIMIT[one["optimizer"]]]
    print(f"limits of bytes over SGD, in those of the parameters: {LIMIT}; {'exceeded' if over else 'kept'}")
    if args.json:
        text = json.dumps({"jax": jax.__version__, "devices": mesh.size, "model": args.model, "rows": rows}, indent=1)
        sys.stdout.write(text + "\n") if args.json == "-" else Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
