"""`Job`: all that the flags of `jaxshard train` decide, before anything is computed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxshard.commands.doctor import versions
from jaxshard.commands.low_rank import Factors
from jaxshard.commands.parallel import Parallel
from jaxshard.commands.pretrained import Pretrained
from jaxshard.commands.result import predicted_bytes
from jaxshard.commands.training_data import TrainingData
from jaxshard.core.layout import human_bytes
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.types import PyTree
from jaxshard.cost.flops import train_flops
from jaxshard.data.packing import Packed
from jaxshard.models.recipe import Size


class Job:
    """A model, its data, and how it is trained.

    Attributes:
      name: the name of the ready-made size, with what was changed of it.
      how: mesh, strategy and engine.
      size: the size's numbers and recipe, with those that were given by flags.
      data: the tokens.
      seed: of the parameters and the order of the data.
      base: the model whose weights it begins with, or None.
      factors: the low-rank factors that are trained in the place of all parameters, or None.
      seq: tokens in a row.
      tokens: tokens in a global batch.
      vocab: the rows of the model's token embedding.
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

    def __init__(
        self,
        name: str,
        how: Parallel,
        size: Size,
        data: TrainingData,
        seed: int,
        base: Pretrained | None = None,
        factors: Factors | None = None,
    ) -> None:
        self.name, self.how, self.size, self.data, self.seed, self.base = name, how, size, data, seed, base
        self.factors = factors
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
        # Rows may be shorter than those that a pretrained model takes, which may have an array of that length.
        own = {"vocab": data.corpus.vocab} if base is None else {"vocab": base.vocab, "seq": base.seq}
        self.vocab, self.network = own["vocab"], size.model(**own)
        if base is not None:
            self.network.config = base.config
        if factors is not None:
            self.network = factors.add_to(self.network)
        self.tx = self.network.optimizer(size.recipe.optimizer())
        self.layout = make_layout(how.strategy, how.mesh, self.network.init, self.tx)
        self.source = data.source(batch, self.seq, seed)
        self.held_out = data.held_out_batches(4 * batch // how.engine.microbatches, self.seq)
        self.rows: PyTree = jax.eval_shape(lambda: self.source.rows(0, np.arange(batch)))

    @property
    def flops(self) -> float | None:
        """Floating point operations of a step, on all devices together."""
        shapes = self.layout.shapes
        return train_flops(self.network.loss, shapes.params, self.rows, shapes.key)

    @property
    def sequence(self) -> dict[str, Any]:
        """The facts that decide the batches and learning rates of all steps, to go on with the same ones."""
        recipe, corpus = self.size.recipe, self.data.corpus
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
            **({} if self.factors is None else {"lora": self.factors._asdict()}),
            "device_kind": self.how.mesh.devices.flat[0].device_kind,
            **{name: fact for name, fact in about.items() if fact is not None},
            "seed": self.seed,
            "size": self.size.shape | {"vocab": self.vocab},
            "recipe": self.size.recipe._asdict(),
            "corpus": self.data.facts,
            **({"packing": self.source.facts} if isinstance(self.source, Packed) else {}),
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
            **({"packing": _describe_packing(about["packing"])} if "packing" in about else {}),
            "steps": f"{self.size.recipe.steps:,} of {self.size.recipe.batch} x {self.seq} {unit}",
            "per device": f"{per_device} (predicted)",
        }


def _describe_packing(packing: dict[str, float]) -> str:
    """Say in a line how documents fill rows."""
    return (
        f"{packing['documents']:,} documents of {packing['tokens_per_document']:.1f} tokens, {packing['cut']:,} cut, "
        f"in {packing['rows']:,} rows; {packing['padding']:.1%} padding, {packing['learned']:.1%} learned"
    )
