"""What the host pays around a step of `js.make_step`: per call, and for its trace and lowering; in CPU-seconds.

    python benchmarks/host.py --thread [--devices 8] [--leaves 1 64 256] [--rounds 21]
    python benchmarks/host.py --lower  [--leaves 200 500 1000] [--engine explicit]

`--thread`: the CPU time of the calling thread (`time.thread_time`) per call of a step whose run and batch are like
those of the call before, beside `jax.jit` of the same step with its run donated: the same program, with the same
outputs. Arrays have 8 elements per device, so that little else is measured. On several simulated devices both sides
wait for each step's metrics, which ours must do. Turns of a few steps alternate; the median ratio is printed.

`--lower`: the CPU time of the process (`time.process_time`) to make, trace and lower a step of that many unrolled
64 x 64 matrices on 8 simulated devices, beside a plain `jax.jit` with the same optimizer, shardings and norms.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js

WIDTH = 64
ENGINES = {"explicit": js.explicit, "auto": js.auto}


def compare_calls(leaves: int, devices: int, rounds: int) -> str:
    """Compare the calling thread's time per step with that of `jax.jit` of the same step."""
    width = 8

    def init_fn(key: jax.Array) -> Any:
        return {f"w{i:04}": jnp.full((width * devices,), 0.1) for i in range(leaves)}

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> js.Mean:
        errors = jnp.square(batch["x"] * sum(params.values()))
        return js.Mean(errors.sum(), errors.size)

    tx = optax.sgd(1e-3)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=devices), init_fn, tx)
    batch = {"x": np.ones((devices, width * devices), np.float32)}
    batch = jax.device_put(batch, layout.batch_shardings(batch))
    step = js.make_step(loss_fn, tx, layout)
    plain = jax.jit(js.make_step(loss_fn, tx, layout), donate_argnums=0)
    runs = {name: js.init(init_fn, tx, layout, 0) for name in ("ours", "plain")}
    calls = max(5, 2000 // (leaves + 10))

    def seconds(name: str, call: Callable[..., Any], waits: bool) -> float:
        run, start = runs[name], time.thread_time()
        for _ in range(calls):
            run, metrics = call(run, batch)
            if waits:
                jax.block_until_ready(metrics)
        took = (time.thread_time() - start) / calls
        runs[name] = jax.block_until_ready(run)
        return took

    def ours() -> float:
        return seconds("ours", step, False)  # it waits itself where it must

    def by_hand() -> float:
        return seconds("plain", plain, devices > 1)

    figures: list[tuple[float, float]] = []
    for number in range(rounds + 2):
        if number % 2:
            mine, theirs = ours(), by_hand()
        else:
            theirs, mine = by_hand(), ours()
        figures += [(mine, theirs)] if number > 1 else []  # the first rounds compile and warm up
    mine, theirs = (statistics.median(one) * 1e6 for one in zip(*figures, strict=True))
    ratios = [a / b for a, b in figures]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"| {leaves:6} | {devices:7} | {mine:8.0f} | {theirs:9.0f} | {ratio:5.2f} | {low:.2f}-{high:.2f} |"


def compare_lowering(leaves: int, engine: str) -> str:
    """Compare the time to make, trace and lower a step with that of a plain `jax.jit`."""

    def init_fn(key: jax.Array) -> Any:
        return {f"w{i:04}": jnp.full((WIDTH, WIDTH), 1 / WIDTH) for i in range(leaves)}

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> js.Mean:
        x = batch["x"]
        for w in params.values():
            x = jnp.tanh(x @ w)
        return js.Mean(jnp.square(x).sum(), x.size)

    tx = optax.adamw(1e-3)
    batch = {"x": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    start = time.process_time()
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx)
    placed = time.process_time()
    seconds_to_lower(by_hand(loss_fn, tx, layout, batch))  # fills the caches of JAX
    theirs = seconds_to_lower(by_hand(loss_fn, tx, layout, batch))
    step = seconds_to_lower(lambda: js.make_step(loss_fn, tx, layout, engine=ENGINES[engine]()).trace(batch))
    ratio = sum(step) / sum(theirs)
    parts = " | ".join(f"{one:6.2f}" for one in (placed - start, *step, *theirs))
    return f"| {leaves:6} | {engine:8} | {parts} | {ratio:5.2f} |"


def seconds_to_lower(trace: Callable[[], jax.stages.Traced]) -> tuple[float, float]:
    """Return the CPU-seconds to make and trace a step, and those to lower it."""
    start = time.process_time()
    traced = trace()
    between = time.process_time()
    traced.lower()
    return between - start, time.process_time() - between


def by_hand(
    loss_fn: Callable[..., js.Mean], tx: optax.GradientTransformation, layout: js.Layout, batch: Any
) -> Callable[[], jax.stages.Traced]:
    """Return a function that traces a step as one writes it with `jax.jit`, with both norms."""
    params, opt_state = layout.shapes.params, layout.shapes.opt_state
    shardings, everywhere = layout.shardings((layout.params, layout.opt_state)), NamedSharding(layout.mesh, P())

    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: loss_fn(params, batch, None).value)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        norms = {"grad_norm": optax.global_norm(grads), "update_norm": optax.global_norm(updates)}
        return optax.apply_updates(params, updates), opt_state, {"loss": loss} | norms

    jitted = jax.jit(
        update,
        in_shardings=(*shardings, layout.batch_shardings(batch)),
        out_shardings=(*shardings, everywhere),
        donate_argnums=(0, 1),
    )

    return lambda: jitted.trace(params, opt_state, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--thread", action="store_true", help="time per call in the calling thread")
    what.add_argument("--lower", action="store_true", help="time to make, trace and lower")
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 64, 256], help="how many parameters, each a row")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices of --thread")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of --thread")
    parser.add_argument("--engine", choices=ENGINES, default="explicit", help="of --lower")
    options = parser.parse_args()
    js.simulate_devices(options.devices if options.thread else 8)
    print(f"python {platform.python_version()}, jax {version('jax')}, {os.cpu_count()} cores\n")
    if options.thread:
        print("| leaves | devices | ours, us | plain, us | ratio | quartiles |\n|---:|---:|---:|---:|---:|---|")
    else:
        head = "| leaves | engine | layout, s | make and trace | lower | plain trace | plain lower | ratio |"
        print(f"{head}\n|---:|---|---:|---:|---:|---:|---:|---:|")
    for leaves in options.leaves:
        if options.thread:
            print(compare_calls(leaves, options.devices, options.rounds), flush=True)
        else:
            print(compare_lowering(leaves, options.engine), flush=True)


if __name__ == "__main__":
    main()
