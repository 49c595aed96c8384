"""A training program of several processes with checkpoints, small enough to be killed often.

jaxshard launch -n 2 --max-restarts 3 -- python -m tests.distributed.small FOLDER LOG STEPS
"""

import sys
import time

import jax
import numpy as np
import optax

import jaxshard as js
from jaxshard.metrics import json_lines

SIZE, ROWS = 128, 8


def init_fn(key):
    return {"in": jax.random.normal(key, (SIZE, SIZE)) / SIZE**0.5, "out": jax.random.normal(key, (SIZE,))}


def loss_fn(params, batch, key):
    noise = 0.1 * jax.random.normal(key, batch["x"].shape)
    errors = jax.numpy.tanh((batch["x"] + noise) @ params["in"]) @ params["out"] - batch["y"]
    return js.Mean((errors**2).sum(), errors.size)


class Rows:
    """Rows that depend on their number alone."""

    batch = ROWS

    def rows(self, step, rows):
        made = [np.random.default_rng((step, row)) for row in rows]
        x = np.stack([rng.normal(size=SIZE).astype(np.float32) for rng in made])
        return {"x": x, "y": x.sum(axis=1)}


def train(folder, log, steps, mesh, pause=0.0):
    """Trains from the newest step in a folder on; every step is a line in the log."""
    tx = optax.adam(1e-2)
    layout = js.layout(js.fsdp("data"), mesh, init_fn, tx)
    new = js.latest_step(folder) is None
    run = js.init(init_fn, tx, layout, key=0) if new else js.restore(folder, layout)
    step = js.make_step(loss_fn, tx, layout)
    with js.Checkpointer(folder, layout, every=2, keep=3) as checkpointer:
        js.fit(
            run,
            step,
            js.batches(Rows(), layout, start=run.step),
            steps=steps,
            callbacks=[json_lines(log), lambda record: time.sleep(pause)],
            on_run=[checkpointer],
        )


if __name__ == "__main__":
    js.distributed.initialize()
    js.simulate_devices(1)
    folder, log, steps = sys.argv[1:]
    train(folder, log, int(steps), js.make_mesh(data=-1), pause=0.05)
