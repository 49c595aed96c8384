"""`Job`: all that the flags of a training command decide, before anything is computed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxshard.commands.doctor import versions
from jaxshard.commands.parallel import Parallel
from jaxshard.commands.result import corpus_facts, predicted_bytes
from jaxshard.core.layout import Layout, human_bytes
from jaxshard.core.layout import layout as make_layout
from jaxshard.cost.flops import train_flops
from jaxshard.data import windows
from jaxshard.data.corpus import Corpus
from jaxshard.data.source import Source
from jaxshard.data.windows import eval_batches
from jaxshard.models.decoder import Decoder, Size
from jaxshard.training.step import check_batch

EVAL_TOKENS = 2**16
"""How many held-out tokens an evaluation sees, evenly spaced over them."""


class Job(NamedTuple):
    """A model, its data, and how it is trained; `rows` are the shapes of a batch."""

    name: str
    how: Parallel
    size: Size
    corpus: Corpus
    seed: int
    network: Decoder
    tx: optax.GradientTransformation
    layout: Layout
    source: Source
    rows: Any
    held_out: list[dict[str, np.ndarray]]

    @property
    def seq(self) -> int:
        return self.size.shape["seq"]

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.size.recipe.batch * self.seq

    @property
    def flops(self) -> float | None:
        """Of a step."""
        shapes = self.layout.shapes
        return train_flops(self.network.loss, shapes.params, self.rows, shapes.key)

    @property
    def sequence(self) -> dict[str, Any]:
        """What decides the batches and learning rates of all steps, to go on with the same ones."""
        recipe, corpus = self.size.recipe, self.corpus
        return {
            "model": self.name,
            "batch": recipe.batch,
            "seq": self.seq,
            "seed": self.seed,
            "corpus": f"{corpus.name} ({corpus.digest})",
            "steps": recipe.steps,
            "lr": recipe.learning_rate,
        }

    @property
    def about(self) -> dict[str, Any]:
        """What is trained, for results."""
        mesh = self.how.mesh
        return {
            "model": self.name,
            "params": sum(x.size for x in jax.tree.leaves(self.layout.shapes.params)),
            "devices": mesh.size,
            "device_kind": mesh.devices.flat[0].device_kind,
            "mesh": dict(mesh.shape),
            **self.how.about,
            "seed": self.seed,
            "size": self.size.shape | {"vocab": self.corpus.vocab},
            "recipe": self.size.recipe._asdict(),
            "corpus": corpus_facts(self.corpus),
            "versions": versions(),
        }

    @property
    def shown(self) -> dict[str, str]:
        """What is trained, for the eye."""
        about, predicted = self.about, predicted_bytes(self.layout, self.rows)
        size, corpus, unit = about["size"], about["corpus"], f"{about['corpus']['unit']}s"
        parts = {"param": "params", "grad": "grads", "opt": "optimizer"}
        return {
            "model": f"{self.name}: {about['params']:,} parameters (width {size['width']}, {size['depth']} blocks)",
            "data": f"{corpus['name']}: {corpus['train_tokens']:,} {unit}, {corpus['held_out_tokens']:,} held out",
            "steps": f"{about['recipe']['steps']:,} of {about['recipe']['batch']} x {size['seq']} {unit}",
            "per device": ", ".join(f"{name} {human_bytes(predicted[role])}" for role, name in parts.items())
            + " (predicted)",
        }


def make_job(name: str, how: Parallel, size: Size, corpus: Corpus, seed: int) -> Job:
    """The job of training a size on a corpus.

    Raises:
      ValueError: what does not fit together: a batch that devices and micro-batches don't divide, a short corpus.
    """
    recipe, seq = size.recipe, size.shape["seq"]
    network, tx = size.model(vocab=corpus.vocab), recipe.optimizer()
    layout = make_layout(how.strategy, how.mesh, network.init, tx)
    source = windows(corpus.train, batch=recipe.batch, seq=seq, seed=seed, vocab=corpus.vocab)
    held_out = _held_out(corpus, 4 * recipe.batch // how.engine.microbatches, seq)
    rows = jax.eval_shape(lambda: source.rows(0, np.arange(recipe.batch)))
    check_batch(layout, rows, how.engine.microbatches)
    return Job(name, how, size, corpus, seed, network, tx, layout, source, rows, held_out)


def _held_out(corpus: Corpus, batch: int, seq: int) -> list[dict[str, np.ndarray]]:
    """About `EVAL_TOKENS` held-out tokens in batches, whole ones where there are enough."""
    count = EVAL_TOKENS // seq
    limit = max(batch, count - count % batch)
    return list(eval_batches(corpus.held_out, batch=batch, seq=seq, limit=limit, vocab=corpus.vocab))
