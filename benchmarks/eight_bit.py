"""Adam with its moments in 8 bits beside Adam in f32: bytes, losses, outliers, collectives; and moments on the host.

    python benchmarks/eight_bit.py                               the default training, 3 seeds of each: 20 CPU-minutes
    python benchmarks/eight_bit.py --only bytes outliers collectives
    python benchmarks/eight_bit.py --only host                   needs libtpu: pip install "jax[tpu]"
    python benchmarks/eight_bit.py --json eight_bit.json         what was found, as one JSON object

bytes        of optimizer state per parameter, over arrays of more than 4,096 elements, of ready-made sizes
training     `jaxshard train` as it is (gpt-1m, the standard library's source text, 64 rows a step, 320 steps) and with
             8-bit moments: the mean training loss of the last 20 steps, per seed
outliers     200 steps on a model of which a few gradients in a thousand are 1e4 times the others
collectives  of a step under fsdp on 8 simulated devices with either optimizer, as the audit counts their bytes
host         a step compiled for v5e:4x4 with its optimizer's state on the device and in the host's memory
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from jaxshard.core.tree import bytes_of
from jaxshard.data.corpus import stdlib
from jaxshard.data.windows import windows
from jaxshard.optim.eight_bit import dequantise_magnitude, dequantise_signed, quantise_magnitude, quantise_signed

ALLOWED = 0.005
"""How far the loss of the default training, seed 0, may be from that of f32, and how far above it that of any seed."""

LAST = 20
"""Over so many steps at the end losses are averaged: of a single batch they differ by more."""


def optimizer(recipe: Any, steps: int, eight: bool) -> optax.GradientTransformation:
    """Make the recipe's optimizer, or the same with moments in 8 bits."""
    if not eight:
        made: optax.GradientTransformation = recipe.optimizer(steps)
        return made
    warmup, peak = recipe.warmup, recipe.learning_rate
    rate = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, max(steps, warmup + 1), peak / 20)
    return js.optim.adam8bit(rate, b2=recipe.b2, weight_decay=recipe.weight_decay)


def state_bytes(sizes: tuple[str, ...] = ("gpt-1m", "gpt2", "llama2-7b")) -> dict[str, float]:
    """Return the bytes of 8-bit Adam's state per parameter of large arrays, by ready-made size."""
    found = {}
    for name in sizes:
        params = jax.eval_shape(js.models.make(name).init, jax.random.key(0))
        large = [x for x in jax.tree.leaves(params) if x.size > 4096]
        state = jax.eval_shape(js.optim.scale_by_adam8bit().init, large)
        arrays = [x for x in jax.tree.leaves(state) if x.shape]
        found[name] = sum(bytes_of(x.shape, x.dtype) for x in arrays) / sum(x.size for x in large)
    return found


def train(seed: int, steps: int, eight: bool) -> list[float]:
    """Train the default model from a seed on one device; return its losses."""
    size, corpus = js.models.SIZES["gpt-1m"], stdlib()
    model, recipe = size.model(vocab=corpus.vocab), size.recipe
    tx = optimizer(recipe, steps, eight)
    layout = js.layout(js.ddp(), js.make_mesh(jax.devices()[:1], data=1), model.init, tx)
    run = js.init(model.init, tx, layout, seed)
    step = js.make_step(model.loss, tx, layout, engine=js.explicit())
    source = windows(corpus.train, batch=recipe.batch, seq=size.shape["seq"], seed=seed, vocab=corpus.vocab)
    losses = []
    for batch, _ in zip(js.batches(source, layout, start=0), range(steps), strict=False):
        run, metrics = step(run, batch)
        losses.append(float(metrics["loss"]))
    return losses


def training(seeds: int, steps: int) -> dict[str, Any]:
    """Train with either optimizer from each seed; return the losses at the end and how far they are apart."""
    rows = []
    for seed in range(seeds):
        full, eight = (statistics.mean(train(seed, steps, eight)[-LAST:]) for eight in (False, True))
        rows.append({"seed": seed, "f32": full, "eight_bit": eight, "apart": eight / full - 1})
        print(f"seed {seed}: f32 {full:.4f}, 8 bits {eight:.4f}, {rows[-1]['apart']:+.2%}", flush=True)
    apart = [row["apart"] for row in rows]
    return {"steps": steps, "seeds": rows, "default": abs(apart[0]), "highest": max(apart)}


def outliers(steps: int = 200, size: float = 1e4) -> dict[str, Any]:
    """Train a small network with outliers in its gradients; return losses of either optimizer and errors of codes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 64)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(64, 64)).astype(np.float32))
    params = {
        name: jnp.asarray(0.1 * rng.normal(size=s), jnp.float32) for name, s in (("a", (64, 256)), ("b", (256, 64)))
    }

    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    def run(tx: optax.GradientTransformation) -> tuple[list[float], Any]:
        def step(carry: Any, key: jax.Array) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            keys = dict(zip(grads, jax.random.split(key), strict=True))
            grads = {k: jnp.where(jax.random.bernoulli(keys[k], 2e-3, g.shape), size * g, g) for k, g in grads.items()}
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        keys = jax.random.split(jax.random.key(1), steps)
        (_, state), losses = jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), keys))()
        return losses.tolist(), state

    (full, state), (eight, _) = run(optax.adam(1e-3)), run(js.optim.adam8bit(1e-3))
    mean, root = state[0].mu["a"], jnp.sqrt(state[0].nu["a"])
    errors = {
        "first": jnp.median(jnp.abs(dequantise_signed(*quantise_signed(mean)) / mean - 1)),
        "root of second": jnp.median(jnp.abs(dequantise_magnitude(*quantise_magnitude(root)) / root - 1)),
    }
    return {
        "steps": steps,
        "not_finite": sum(not math.isfinite(value) for value in eight),
        "f32": full[-1],
        "eight_bit": eight[-1],
        "median_error_of_an_element": {name: float(value) for name, value in errors.items()},
    }


def collectives() -> dict[str, Any]:
    """Compile a step of a small GPT under fsdp with either optimizer; return the bytes of its collectives by kind."""
    model = js.models.gpt(vocab=256, width=128, depth=2, heads=4, seq=64)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 65), jnp.int32)}
    found = {}
    for name, tx in (("f32", optax.adam(1e-3)), ("eight_bit", js.optim.adam8bit(1e-3))):
        layout = js.layout(js.fsdp(), js.make_mesh(data=8), model.init, tx)
        step = js.make_step(model.loss, tx, layout, engine=js.explicit())
        report = js.audit(step, batch)
        found[name] = {"ok": report.ok, "ops": len(report.found), "bytes": report.found_bytes}
    return found | {"added": found["eight_bit"]["bytes"] - found["f32"]["bytes"]}


def host(topology: str = "v5e:4x4") -> dict[str, Any]:
    """Compile a step for TPUs with state on the device and on the host; return bytes per chip."""
    model = js.models.gpt(vocab=256, width=1024, depth=24, heads=16, seq=256)
    mesh, tx = js.plan.topology_mesh(topology, data=-1), optax.adam(1e-3)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, 257), jnp.int32)}
    found: dict[str, Any] = {}
    for name, more in (("on_device", ()), ("on_host", (js.offload(),))):
        layout = js.layout(js.compose(js.fsdp(), *more), mesh, model.init, tx)
        memory = js.make_step(model.loss, tx, layout, engine=js.explicit()).compile(batch).memory_analysis()
        found[name] = {
            "arguments": memory.argument_size_in_bytes,
            # The compiler's figure has the arguments on the host in it.
            "peak": memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes,
            "host": memory.host_argument_size_in_bytes,
            "promised": layout.argument_bytes(batch),
            "promised_host": layout.host_bytes_per_device(),
        }
    return found


PARTS = ("bytes", "training", "outliers", "collectives", "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    measure = {
        "bytes": state_bytes,
        "training": lambda: training(args.seeds, args.steps),
        "outliers": outliers,
        "collectives": collectives,
        "host": host,
    }
    found = {name: measure[name]() for name in args.only}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found))
    trained = found.get("training", {"default": 0, "highest": 0})
    if max(trained["default"], trained["highest"]) > ALLOWED or found.get("outliers", {}).get("not_finite"):
        sys.exit(f"the loss of seed 0 is more than {ALLOWED:.1%} from that of f32, another above it, or one not finite")


if __name__ == "__main__":
    main()
