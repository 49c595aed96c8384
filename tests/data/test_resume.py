"""A run that stops and goes on at the saved position equals one that never stopped, batch by batch."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard import data
from jaxshard.checkpoint.reader import describe


def init_fn(key):
    return {"w": jax.random.normal(key, (32, 8))}


def loss_fn(params, batch, key):
    logits = params["w"][batch["tokens"][:, 0]]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1] % 8)
    return js.Mean(nats.sum(), nats.size)


def mixed():
    rng = np.random.default_rng(0)
    parts = [data.windows(rng.integers(0, 32, n), batch=16, seq=4, seed=n) for n in (100, 333)]
    return data.mixture({"short": (parts[0], 1), "long": (parts[1], 2)}, seed=1)


def iterator():
    """Batches that depend on all before them."""
    rng = np.random.default_rng(1)
    while True:
        yield {"tokens": rng.integers(0, 32, (16, 5), np.int32)}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "open_at",
    [
        lambda layout, start: js.batches(mixed(), layout, start=start),
        lambda layout, start: js.local_batches(iterator(), layout, start=start),
    ],
    ids=["mixture", "iterator"],
)
def test_a_resumed_run_is_the_run(open_at, tmp_path):
    tx = optax.sgd(0.5, momentum=0.9)
    layout = js.layout(js.fsdp("data", min_size=8), js.make_mesh(data=8), init_fn, tx)
    step = js.make_step(loss_fn, tx, layout, engine=js.explicit())

    def train(run, batches, steps):
        history = []
        with js.Checkpointer(tmp_path, layout, every=3, data=lambda: batches.position) as checkpointer, batches:
            run = js.fit(run, step, batches, steps=steps, callbacks=[history.append], on_run=[checkpointer])
        return [record.metrics["loss"] for record in history], run

    losses, whole = train(js.init(init_fn, tx, layout, key=0), open_at(layout, 0), 5)
    position = describe(tmp_path, step=3).data
    assert position == 3
    run = js.restore(tmp_path, layout, step=3)
    again, resumed = train(run, open_at(layout, position), 5)
    assert again == losses[3:]
    assert jnp.array_equal(whole.params["w"], resumed.params["w"])


@pytest.mark.slow
def test_a_program_may_end_with_batches_under_way():
    code = """
import numpy as np, time, jaxshard as js, optax
js.simulate_devices(2)
layout = js.layout(js.ddp("data"), js.make_mesh(data=2), lambda key: {"w": np.ones(2, np.float32)}, optax.sgd(1.0))
def rows():
    for step in range(10**9):
        time.sleep(0.02)
        yield {"x": np.full((1000, 100), step, np.float32)}
stream = js.local_batches(rows(), layout, prefetch=4)
print(float(next(stream)["x"][0, 0]), float(next(stream)["x"][0, 0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.0 1.0\n", "")
