"""What optimizers that multiply matrices cost under FSDP: with owners, and left to the compiler.

    python benchmarks/owners.py [--json FILE] [--soap PATH]
    python benchmarks/owners.py --topology v5e:16x16 [--model 7b] [--json FILE]       # needs libtpu

Eight matrices [256, 256] in f32 on 8 simulated devices under `js.fsdp`, whose gradients are cheap. Of each optimizer:

- bytes: of the collectives of a step, less those of SGD, as the audit counts them, over the bytes of the parameters;
- FLOPs: of the compiled step on one device, over an eighth of those of one device's step alone, both less those of SGD,
  as XLA counts them (of loops one turn: there are none where each device owns one matrix);
- peak: what the compiler needs for a step on one device, over what it needs for SGD;
- error: of parameters after 3 steps against one device, the worst array, over its largest element.

"owners" is `js.layout`, "compiler" the same without owners (`Layout.without_owners`): plain optax on the global arrays.
`--topology` compiles the same for TPUs that are not here (bytes and peak alone), or with `--model 7b` the matrices of
a model like Llama 2 7B in stacked blocks, under `js.optim.per_block(optax.contrib.muon(...))`.

The Shampoo is that of `tests/optim/owners`; SOAP that of https://github.com/haydn-jones/SOAP_JAX (commit 2c0c34f):
installed as `soap_jax`, or `--soap` a checkout's src.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
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


def like_7b(key: jax.Array, blocks: int = 32) -> dict[str, Any]:
    """The matrices of 32 blocks of width 4096, stacked, and the embedding and the head."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (4096, 4096))
    shapes |= {"gate": (4096, 11008), "up": (4096, 11008), "down": (11008, 4096)}
    stacks = {name: jnp.zeros((blocks, *shape)) for name, shape in shapes.items()}
    return {"blocks": stacks, "embed": jnp.zeros((32000, 4096)), "head": jnp.zeros((4096, 32000))}


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


def moved(step: js.Step, batch: Any) -> int:
    """The bytes of all collectives of a step."""
    found = js.collectives(step.compile(batch), step.layout.mesh)
    return sum(one.bytes or sum(one.sizes) for one in found)


def error(step: js.Step, tx: Any, init_fn: Any, batch: Any) -> float:
    """The difference of parameters from one device after a few steps."""
    layout = step.layout
    run = js.init(init_fn, tx, layout, 0)
    params = jax.device_get(js.logical(run, layout).params)
    for _ in range(STEPS):
        run, _ = step(run, batch)

    @jax.jit
    def alone(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda params: loss_fn(params, batch, jax.random.key(0)).value)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(STEPS):
        params, state = alone(params, state)
    pairs = zip(jax.tree.leaves(js.logical(run, layout).params), jax.tree.leaves(params), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(y)).max()) for x, y in pairs)


def flops_alone(tx: Any, init_fn: Any, batch: Any) -> float:
    """FLOPs of one device's step, as XLA counts them."""
    params = jax.eval_shape(init_fn, jax.random.key(0))

    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda params: loss_fn(params, batch, jax.random.key(0)).value)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step).lower(params, jax.eval_shape(tx.init, params)).compile()
    return float(compiled.cost_analysis()["flops"])


def row(
    name: str, make: Any, mesh: Any, init_fn: Any, batch: Any, base: tuple[int, int, float], owners: bool
) -> dict[str, Any]:
    """Measure one optimizer, with owners or without."""
    tx, real = make(), mesh.devices.flat[0].platform == "cpu"
    layout = js.layout(js.fsdp("data", min_size=0), mesh, init_fn, tx)
    layout = layout if owners else layout.without_owners
    start = time.process_time()
    step = js.make_step(loss_fn, tx, layout, guarded=False)
    compiled = step.compile(batch)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layout.shapes.params))
    memory = compiled.memory_analysis()
    made = {
        "optimizer": name,
        "by": "owners" if owners else "compiler",
        "owned": step.owned,
        "extra": (moved(step, batch) - base[0]) / size,
        "peak": peak(memory),
        "peak_over_sgd": peak(memory) - base[1],
        "compile_seconds": time.process_time() - start,
    }
    if layout.owners is not None:
        most, even = layout.owners.flops_per_device
        made |= {"busiest": most, "even": even, "owners": str(layout.owners)}
    if real:
        alone = flops_alone(tx, init_fn, batch) - flops_alone(optax.sgd(0.02), init_fn, batch)
        over = float(compiled.cost_analysis()["flops"]) - base[2]
        made |= {"flops": over / (alone / mesh.size), "error": error(step, tx, init_fn, batch)}
    return made


def peak(memory: Any) -> int:
    """Bytes of a compiled step on one device."""
    return int(getattr(memory, "peak_memory_in_bytes", 0) or memory.argument_size_in_bytes + memory.temp_size_in_bytes)


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
    init_fn = functools.partial(like_7b, blocks=args.blocks) if args.model == "7b" else eight
    chosen = optimizers(args.soap)
    if args.model == "7b":
        chosen = {"muon": lambda: js.optim.per_block(optax.contrib.muon(0.02))}
    batch: Any = {"x": np.ones(mesh.size, np.float32)}
    plain = js.make_step(
        loss_fn, optax.sgd(0.02), js.layout(js.fsdp("data", min_size=0), mesh, init_fn, optax.sgd(0.02)), guarded=False
    )
    sgd = plain.compile(batch)
    count = 0.0 if args.topology else float(sgd.cost_analysis()["flops"])
    base = moved(plain, batch), peak(sgd.memory_analysis()), count
    rows = []
    for name, make in chosen.items():
        if args.only and name not in args.only.split(","):
            continue
        for by in args.by.split(","):
            found = row(name, make, mesh, init_fn, batch, base, by == "owners")
            rows.append(found)
            cells = [f"{found['optimizer']:10s} {found['by']:9s} bytes {found['extra']:8.4f}"]
            cells += [f"FLOPs {found['flops']:6.3f}  error {found['error']:.1e}"] if "flops" in found else []
            busy = f"  busiest {found['busiest'] / found['even']:.3f} of even" if "busiest" in found else ""
            print(*cells, f"peak over SGD {found['peak_over_sgd'] / 1e6:9.2f} MB{busy}", flush=True)
    kept = [one for one in rows if one["by"] == "owners" and one["extra"] > LIMIT[one["optimizer"]]]
    print(f"limits of bytes over SGD, in those of the parameters: {LIMIT}; {'exceeded' if kept else 'kept'}")
    if args.json:
        text = json.dumps({"jax": jax.__version__, "devices": mesh.size, "model": args.model, "rows": rows}, indent=1)
        sys.stdout.write(text + "\n") if args.json == "-" else Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
