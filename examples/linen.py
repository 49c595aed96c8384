"""A Flax Linen network with batch statistics and dropout, fully sharded over all devices, evaluated while it trains."""

import argparse

import jax
import numpy as np
import optax
from flax import linen as nn

import jaxshard as js


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(32, (3, 3), strides=2)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


def loss(model, batch, train: bool) -> js.Loss:
    logits = model(batch["image"], train=train)
    nats = js.cross_entropy(logits, batch["label"])
    correct = logits.argmax(-1) == batch["label"]
    return js.Loss(js.Mean(nats.sum(), nats.size), metrics={"accuracy": js.Mean(correct.sum(), correct.size)})


def make_images(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Ten patterns under noise. Your own data goes here: anything with a length and an index."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count, np.int32)
    patterns = np.random.default_rng(0).normal(size=(10, 16, 16, 1))
    images = (patterns[labels] + 4 * random.normal(size=(count, 16, 16, 1))).astype(np.float32)
    return [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]


def main(steps: int) -> None:
    source = js.data.examples(make_images(4096, seed=1), batch=128, seed=0)
    held_out = js.data.examples(make_images(512, seed=2), batch=512, seed=0).rows(0, np.arange(512))

    model = js.linen(Classifier(), loss, held_out)  # the batch gives the shapes
    tx = optax.adamw(1e-3)
    layout = js.layout(js.fsdp("data"), js.make_mesh(data=-1), model.init, tx)  # the line that another strategy changes
    run = js.init(model.init, tx, layout, key=0)
    step = js.make_step(model.loss, tx, layout)
    eval_step = js.make_eval_step(model.evaluate, layout)
    for number, batch in zip(range(1, steps + 1), js.batches(source, layout), strict=False):
        run, metrics = step(run, batch)
        if number % 10 == 0 or number == steps:
            accuracy = js.evaluate(eval_step, run, [held_out])["accuracy"]
            print(f"step {number}: loss {metrics['loss']:.3f}, held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there is no accelerator the CPU appears as eight devices
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
