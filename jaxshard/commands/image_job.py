"""`ImageJob`: all that the flags of `jaxshard train` decide for a classifier of images, before anything is computed."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxshard.commands.doctor import versions
from jaxshard.commands.flags import DataFlags, check_not_empty, refuse
from jaxshard.commands.parallel import Parallel
from jaxshard.commands.result import predicted_bytes
from jaxshard.core.layout import human_bytes, join_model
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.types import PyTree
from jaxshard.cost.flops import train_flops
from jaxshard.data.digits import digits
from jaxshard.data.images import Augment, Images, eval_images, images, load_images
from jaxshard.models.recipe import Size

EVAL_IMAGES = 2048
"""The number of held-out images in an evaluation, evenly spaced over all of them."""


class ImageJob:
    """A classifier, its images, and how it is trained.

    Attributes:
      name: the name of the ready-made size, with what was changed of it.
      how: mesh, strategy and engine.
      size: the size's numbers and recipe, with those of the images and those that were given by flags.
      corpus: the images.
      augment: how they are changed in training.
      seed: of the parameters, the order of the images and their augmentation.
      tokens: None: rows are counted.
      network: the model.
      tx: the recipe's optimizer.
      layout: where every array lives.
      source: the batches to train on.
      rows: the shapes and dtypes of a global batch.
      held_out: the batches to evaluate on.

    Raises:
      ValueError: a batch that devices and micro-batches do not divide, or images that the model can't take.
    """

    tokens: int | None = None

    def __init__(self, name: str, how: Parallel, size: Size, corpus: Images, seed: int, augment: Augment):
        self.name, self.how, self.corpus, self.seed, self.augment = name, how, corpus, seed, augment
        batch = size.recipe.batch
        if batch % how.rows_multiple:
            parts = f"{how.rows_multiple}, the devices that share the rows times the micro-batches"
            raise ValueError(
                f"--batch {batch}: use a multiple of {parts}, such as {batch + -batch % how.rows_multiple}"
            )
        given = {"classes": len(corpus.classes), "channels": corpus.channels}
        given |= {} if corpus.side is None else {"image": corpus.side}
        self.size = size._replace(shape=size.shape | given)
        self.network = self.size.model()
        self.tx = size.recipe.optimizer()
        self.layout = make_layout(how.strategy, how.mesh, self.network.init, self.tx)
        side = self.size.shape["image"]
        self.source = images(corpus.train, batch=batch, seed=seed, side=side, augment=augment)
        self.held_out = eval_images(corpus.held_out, batch=batch, side=side, limit=EVAL_IMAGES)
        self.rows: PyTree = {
            "images": jax.ShapeDtypeStruct((batch, side, side, corpus.channels), np.uint8),
            "labels": jax.ShapeDtypeStruct((batch,), np.int32),
        }

    @property
    def flops(self) -> float | None:
        """Floating point operations of a step, on all devices together."""
        shapes = self.layout.shapes
        return train_flops(self.network.loss, join_model(shapes.params, shapes.state), self.rows, shapes.key)

    @property
    def sequence(self) -> dict[str, Any]:
        """The facts that decide the batches and learning rates of all steps, to go on with the same ones."""
        recipe, corpus = self.size.recipe, self.corpus
        return {
            "model": self.name,
            "batch": recipe.batch,
            "augment": self.augment,
            "seed": self.seed,
            "corpus": f"{corpus.name} ({corpus.digest})",
            "steps": recipe.steps,
            "lr": recipe.learning_rate,
        }

    @property
    def about(self) -> dict[str, Any]:
        """The facts that the command writes into its JSON object."""
        about, corpus = self.how.about, self.corpus
        if "remat" in about:
            about["remat"] = about["remat"] or self.size.remat
        return {
            "model": self.name,
            "params": sum(x.size for x in jax.tree.leaves(self.layout.shapes.params)),
            "device_kind": self.how.mesh.devices.flat[0].device_kind,
            **{name: fact for name, fact in about.items() if fact is not None},
            "seed": self.seed,
            "size": self.size.shape,
            "recipe": self.size.recipe._asdict(),
            "corpus": {
                "name": corpus.name,
                "sha256": corpus.digest,
                "unit": "image",
                "classes": list(corpus.classes),
                "train_images": len(corpus.train),
                "held_out_images": len(corpus.held_out),
            },
            "augment": self.augment,
            "versions": versions(),
        }

    @property
    def shown(self) -> dict[str, str]:
        """The facts that the command prints, by name."""
        predicted, corpus = predicted_bytes(self.layout, self.rows), self.corpus
        roles = {"param": "params", "grad": "grads", "opt": "optimizer"}
        per_device = ", ".join(f"{name} {human_bytes(predicted[role])}" for role, name in roles.items())
        _, side, _, channels = self.rows["images"].shape
        return {
            "model": f"{self.name}: {self.about['params']:,} parameters",
            "data": f"{corpus.name}: {len(corpus.train):,} images of {len(corpus.classes)} classes, "
            f"{len(corpus.held_out):,} held out",
            "steps": f"{self.size.recipe.steps:,} of {self.size.recipe.batch} images of {side} x {side} x {channels}, "
            f"augmented: {self.augment}",
            "per device": f"{per_device} (predicted)",
        }


def load_image_corpus(console: Console, flags: DataFlags) -> Images:
    """Load the images that the flags name; print a note about what loading leaves out.

    Raises:
      ValueError: a flag for token ids; what `js.data.load_images` refuses.
      OSError: a file that can't be read.
    """
    check_not_empty(data=flags.data)
    refuse(
        "describes text or token ids, which this model does not read; leave it out",
        dtype=flags.dtype,
        vocab=flags.vocab,
        tokenizer=flags.tokenizer,
        template=flags.template,
    )
    if flags.data is None:
        return digits()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loaded = load_images(flags.data)
    for warning in caught:
        console.print(f"note: {warning.message}")
    return loaded
