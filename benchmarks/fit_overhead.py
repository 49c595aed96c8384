"""What `js.fit` costs in addition to the step that it calls: microseconds of the calling thread's CPU time per step.

    python benchmarks/fit_overhead.py [--rounds 9] [--steps 500] [--devices 8] [--checkpointer]

The step is compiled before. A bare loop (`run, metrics = step(run, batch)`, the loss read after each step) and `js.fit`
take turns in one process; the median and the least of the rounds are printed. To compare two versions of the package,
run it with each on PYTHONPATH, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

WIDTH = 64


def init_fn(key: jax.Array) -> Any:
    """Two matrices."""
    return {name: jax.random.normal(key, (WIDTH, WIDTH)) / 8 for name in ("first", "second")}


def loss_fn(params: Any, batch: Any, key: jax.Array) -> js.Mean:
    """The squares of a small MLP's output."""
    y = jnp.tanh(batch["x"] @ params["first"]) @ params["second"]
    return js.Mean(jnp.square(y).sum(), y.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--checkpointer", action="store_true", help="with a js.Checkpointer that never saves")
    arguments = parser.parse_args()
    js.simulate_devices(arguments.devices)
    tx = optax.adamw(1e-3)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=arguments.devices), init_fn, tx)
    step = js.make_step(loss_fn, tx, layout, engine=js.explicit())
    batch = {"x": np.ones((16, WIDTH), np.float32)}
    run, _ = step(js.init(init_fn, tx, layout, 0), batch)

    def bare(run: js.TrainState, count: int) -> js.TrainState:
        for _ in range(count):
            run, metrics = step(run, batch)
            float(metrics["loss"])
        return run

    with ExitStack() as stack:
        on_run = []
        if arguments.checkpointer:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            on_run = [stack.enter_context(js.Checkpointer(folder, layout, every=10**9))]

        def fitted(run: js.TrainState, count: int) -> js.TrainState:
            return js.fit(run, step, itertools.repeat(batch), steps=int(run.step) + count, on_run=on_run)

        found: dict[str, list[float]] = {"bare": [], "fit": []}
        ways: dict[str, Callable[[js.TrainState, int], js.TrainState]] = {"bare": bare, "fit": fitted}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                run = way(run, 5)
                began = time.thread_time()
                run = way(run, arguments.steps)
                found[name].append(1e6 * (time.thread_time() - began) / arguments.steps)
    for name, times in found.items():
        print(f"{name:4}  median {statistics.median(times):7.1f} us  least {min(times):7.1f} us")


if __name__ == "__main__":
    main()
