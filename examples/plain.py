"""Plain JAX without a model library: parameters in a dict, ZeRO-2, a loop of your own, and a restore under FSDP."""

import argparse
import tempfile

import jax
import numpy as np
import optax

import jaxshard as js


def init_fn(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (8, 4096)) / 2,
        "second": jax.random.normal(second, (4096, 1)) / 64,
    }


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["first"])
    return (hidden @ params["second"])[:, 0]


def loss_fn(params, batch, key) -> js.Mean:
    errors = (predict(params, batch["x"]) - batch["y"]) ** 2
    return js.Mean(errors.sum(), errors.size)  # a mean that stays exact over any number of devices


def make_batch(random: np.random.Generator) -> dict[str, np.ndarray]:
    x = random.uniform(-1, 1, size=(256, 8)).astype(np.float32)
    return {"x": x, "y": np.square(x).sum(axis=1)}


def main(steps: int) -> None:
    random = np.random.default_rng(0)
    mesh = js.make_mesh(data=-1)
    tx = optax.adam(3e-4)
    layout = js.layout(js.zero2("data"), mesh, init_fn, tx)
    print(layout)
    run = js.init(init_fn, tx, layout, key=0)
    step = js.make_step(loss_fn, tx, layout, engine=js.explicit())
    for number in range(1, steps + 1):
        run, metrics = step(run, make_batch(random))
        if number % 10 == 0 or number == steps:
            print(f"step {number}: loss {metrics['loss']:.4f}")

    with tempfile.TemporaryDirectory() as folder:  # a checkpoint does not depend on the strategy that saved it
        js.save(folder, run, layout)
        sharded = js.layout(js.fsdp("data"), mesh, init_fn, tx)
        run = js.restore(folder, sharded)
    print("predictions:", js.make_apply(predict, sharded)(run, make_batch(random)["x"])[:4])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there is no accelerator the CPU appears as eight devices
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
