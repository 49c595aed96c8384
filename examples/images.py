"""Images read and augmented by Grain, a residual network with batch statistics, any mesh of data and tensor axes."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from flax import linen as nn
from PIL import Image

import jaxshard as js

SIDE, MARGIN = 32, 4


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        axes: Any = js.row_axes() or None  # for statistics of the global batch; Flax's annotation knows one axis
        norm = partial(nn.BatchNorm, not train, momentum=0.9, axis_name=axes)
        y = nn.relu(norm()(nn.Conv(self.width, (3, 3), 2, use_bias=False)(x)))
        y = norm()(nn.Conv(self.width, (3, 3), use_bias=False)(y))
        return nn.relu(y + nn.avg_pool(x, (2, 2), (2, 2)))


class ResNet(nn.Module):
    classes: int
    width: int = 32
    depth: int = 2

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.Conv(self.width, (3, 3), 2)(x))
        for _ in range(self.depth):
            x = Block(self.width)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def loss(model: Any, batch: dict[str, jax.Array], train: bool) -> js.Loss:
    logits, labels = model(batch["image"], train=train), batch["label"]
    nats, hits = js.cross_entropy(logits, labels), logits.argmax(-1) == labels
    return js.Loss(js.Mean(nats.sum(), nats.size), metrics={"accuracy": js.Mean(hits.sum(), hits.size)})


def read_folder(folder: str) -> tuple[grain.MapDataset, int]:
    """A folder of image files for each class; files are opened when they are needed."""
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    files = [(file, label) for label, path in enumerate(classes) for file in sorted(path.iterdir())]

    def read(row: tuple[Path, int]) -> dict[str, Any]:
        with Image.open(row[0]) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), np.float32) / 255
        return {"image": pixels, "label": np.int32(row[1])}

    return grain.MapDataset.source(files).map(read), len(classes)


def draw_patterns(count: int = 4096) -> tuple[grain.MapDataset, int]:
    """Ten patterns under noise, where there is no folder."""
    random = np.random.default_rng(0)
    patterns, labels = random.uniform(size=(10, 4, 4, 3)), random.integers(0, 10, count, np.int32)
    images = patterns.repeat(SIDE // 4, 1).repeat(SIDE // 4, 2)[labels] + random.normal(0, 0.5, (count, SIDE, SIDE, 3))
    rows = [{"image": image, "label": label} for image, label in zip(images.astype(np.float32), labels, strict=True)]
    return grain.MapDataset.source(rows), 10


def augment(row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """Move an image by up to four pixels, and mirror half of all."""
    padded = np.pad(row["image"], ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))
    top, left = random.integers(0, 2 * MARGIN + 1, 2)
    image = padded[top : top + SIDE, left : left + SIDE]
    return row | {"image": image[:, ::-1] if random.random() < 0.5 else image}


def main(steps: int, mesh: str, folder: str | None, batch: int = 64) -> None:
    images, classes = draw_patterns() if folder is None else read_folder(folder)
    images = images.seed(0).shuffle()
    held_out = [next(iter(images[:batch].batch(batch)))]
    drawn = images[batch:].repeat().random_map(augment)  # by the number of the row: the same on any number of hosts
    source = js.data.examples(drawn, batch=batch, seed=None)

    model = js.linen(ResNet(classes), loss, held_out[0])
    tx = optax.adamw(3e-3)
    axes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
    strategy = js.compose(js.fsdp("data"), js.tensor()) if "tensor" in axes else js.fsdp("data")
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, tx)
    run = js.init(model.init, tx, layout, key=0)
    step = js.make_step(model.loss, tx, layout)
    eval_step = js.make_eval_step(model.evaluate, layout)
    for number, rows in zip(range(1, steps + 1), js.batches(source, layout), strict=False):
        run, metrics = step(run, rows)
        if number % 10 == 0 or number == steps:
            accuracy = js.evaluate(eval_step, run, held_out)["accuracy"]
            print(f"step {number}: loss {metrics['loss']:.3f}, held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there is no accelerator the CPU appears as eight devices
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--mesh", default="data=-1", help="such as data=4,tensor=2")
    parser.add_argument("--folder", help="a folder of image files for each class; without it patterns are drawn")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.mesh, arguments.folder)
