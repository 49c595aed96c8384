"""`Job`: all that the flags of `jaxshard train` decide, before anything is computed."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxshard.commands.doctor import versions
from jaxshard.commands.flags import DataFlags, check_not_empty
from jaxshard.commands.parallel import Parallel
from jaxshard.commands.result import corpus_facts, predicted_bytes
from jaxshard.core.layout import human_bytes
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.types import PyTree
from jaxshard.cost.flops import train_flops
from jaxshard.data import corpus as corpora
from jaxshard.data import windows
from jaxshard.data.corpus import Corpus
from jaxshard.data.windows import eval_batches
from jaxshard.models.recipe import Size

EVAL_TOKENS = 2**16
"""The number of held-out tokens in an evaluation, evenly spaced over all of them."""


class Job:
    """A model, its data, and how it is trained.

    Attributes:
      name: the name of the ready-made size, with what was changed of it.
      how: mesh, strategy and engine.
      size: the size's numbers and recipe, with those that were given by flags.
      corpus: the tokens.
      seed: of the parameters and the order of the data.
      seq: tokens in a row.
      tokens: tokens in a global batch.
      network: the model.
      tx: the recipe's optimizer.
      layout: where every array lives.
      source: the batches to train on.
      rows: the shapes and dtypes of a global batch.
      held_out: the batches to evaluate on.

    Raises:
      ValueError: a batch that devices and micro-batches do not divide, a length that the devices of a context do not,
        or a corpus that is too short.
    """

    def __init__(self, name: str, how: Parallel, size: Size, corpus: Corpus, seed: int):
        self.name, self.how, self.size, self.corpus, self.seed = name, how, size, corpus, seed
        batch, self.seq = size.recipe.batch, size.shape["seq"]
        if batch % how.rows_multiple:
            parts = f"{how.rows_multiple}, the devices that share the rows times the micro-batches"
            fitting = batch + -batch % how.rows_multiple
            raise ValueError(f"--batch {batch}: use a multiple of {parts}, such as {fitting}")
        if self.seq % how.seq_multiple:
            near = self.seq + -self.seq % how.seq_multiple
            raise ValueError(
                f"--seq {self.seq}: use a multiple of {how.seq_multiple}, two chunks for each device of the axis "
                f"context, such as {near}"
            )
        self.tokens = batch * self.seq
        self.network = size.model(vocab=corpus.vocab)
        self.tx = self.network.optimizer(size.recipe.optimizer())
        self.layout = make_layout(how.strategy, how.mesh, self.network.init, self.tx)
        self.source = windows(corpus.train, batch=batch, seq=self.seq, seed=seed, vocab=corpus.vocab)
        self.held_out = _held_out(corpus, 4 * batch // how.engine.microbatches, self.seq)
        self.rows: PyTree = jax.eval_shape(lambda: self.source.rows(0, np.arange(batch)))

    @property
    def flops(self) -> float | None:
        """Floating point operations of a step, on all devices together."""
        shapes = self.layout.shapes
        return train_flops(self.network.loss, shapes.params, self.rows, shapes.key)

    @property
    def sequence(self) -> dict[str, Any]:
        """The facts that decide the batches and learning rates of all steps, to go on with the same ones."""
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
        """The facts that the command writes into its JSON object."""
        about = self.how.about
        if "remat" in about:  # of an engine that takes what the model states where it is not told
            about["remat"] = about["remat"] or self.network.remat
        return {
            "model": self.name,
            "params": sum(x.size for x in jax.tree.leaves(self.layout.shapes.params)),
            "device_kind": self.how.mesh.devices.flat[0].device_kind,
            **{name: fact for name, fact in about.items() if fact is not None},
            "seed": self.seed,
            "size": self.size.shape | {"vocab": self.corpus.vocab},
            "recipe": self.size.recipe._asdict(),
            "corpus": corpus_facts(self.corpus),
            "versions": versions(),
        }

    @property
    def shown(self) -> dict[str, str]:
        """The facts that the command prints, by name."""
        about, predicted = self.about, predicted_bytes(self.layout, self.rows)
        size, corpus, unit = about["size"], about["corpus"], f"{about['corpus']['unit']}s"
        roles = {"param": "params", "grad": "grads", "opt": "optimizer"}
        per_device = ", ".join(f"{name} {human_bytes(predicted[role])}" for role, name in roles.items())
        return {
            "model": f"{self.name}: {about['params']:,} parameters (width {size['width']}, {size['depth']} blocks)",
            "data": f"{corpus['name']}: {corpus['train_tokens']:,} {unit}, {corpus['held_out_tokens']:,} held out",
            "steps": f"{self.size.recipe.steps:,} of {self.size.recipe.batch} x {self.seq} {unit}",
            "per device": f"{per_device} (predicted)",
        }


def load_corpus(console: Console, flags: DataFlags) -> Corpus:
    """Load the corpus that the flags name; print a note about what loading leaves out.

    Raises:
      ValueError: a flag for files of token ids without such a file, or a dtype that does not exist.
      OSError: a file that can't be read.
    """
    check_not_empty(data=flags.data)
    if flags.data is None:
        if flags.dtype is not None or flags.vocab is not None:
            raise ValueError("--dtype and --vocab describe a file of token ids; name it with --data")
        return corpora.stdlib()
    try:
        dtype = None if flags.dtype is None else np.dtype(flags.dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"--dtype {flags.dtype}: there is no such dtype; use one such as uint16 or int32") from error
    if dtype is not None and dtype.kind not in "iu":
        raise ValueError(f"--dtype {flags.dtype}: token ids are integers; use one such as uint16 or int32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loaded = corpora.load(flags.data, dtype=dtype, vocab=flags.vocab)
    for warning in caught:
        console.print(f"note: {warning.message}")
    return loaded


def _held_out(corpus: Corpus, batch: int, seq: int) -> list[dict[str, np.ndarray]]:
    """About `EVAL_TOKENS` held-out tokens in batches, all of the same size if there are enough tokens."""
    count = EVAL_TOKENS // seq
    limit = max(batch, count - count % batch)
    return list(eval_batches(corpus.held_out, batch=batch, seq=seq, limit=limit, vocab=corpus.vocab))
