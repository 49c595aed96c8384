"""`Job`: the model, data, optimizer and layout of `jaxshard train`, before anything is computed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxshard.commands.flags import Train
from jaxshard.commands.low_rank import add_factors, read_factors
from jaxshard.commands.named_model import NamedModel
from jaxshard.commands.optimizer import make_optimizer
from jaxshard.commands.packages import versions
from jaxshard.commands.parallel import Parallel
from jaxshard.commands.pretrained import Pretrained
from jaxshard.commands.result import predicted_bytes
from jaxshard.commands.stops import Stops, ends_of_text
from jaxshard.commands.training_data import load_data
from jaxshard.core.layout import human_bytes
from jaxshard.core.types import PyTree
from jaxshard.data.packing import Packed


class Job:
    """A model, its data, and how it is trained.

    Attributes:
      flags: the flags of `jaxshard train`.
      how: mesh, strategy and engine.
      name: the name of the ready-made size, with the value of --change.
      size: the arguments of the model and its recipe (steps, batch, learning rate ...), with the values of flags.
      data: the tokens to train on and to evaluate on.
      base: the Hugging Face model whose weights the training starts from, or None.
      seq: tokens in a row.
      tokens: tokens in a global batch.
      vocab: the number of rows of the model's token embedding.
      network: the model.
      tx: the optimizer.
      layout: the placement of every array.
      source: the batches to train on.
      rows: the shapes and dtypes of a global batch.
      held_out: the batches to evaluate on.

    Raises:
      ValueError: the batch is not a multiple of devices times micro-batches, or the sequence length not of the devices
        of the context axis; the corpus is too short; or another flag is refused.
    """

    def __init__(self, console: Console, flags: Train, how: Parallel) -> None:
        self.flags, self.how = flags, how
        named = NamedModel(flags.model, flags.change)
        size = named.resize(seq=flags.seq, batch=flags.batch, rows_multiple=how.rows_multiple)
        given: dict[str, Any] = {
            "steps": flags.steps,
            "learning_rate": flags.lr,
            "warmup": flags.warmup,
            "clip": flags.clip,
        }
        recipe: Any = size.recipe._replace(**{name: value for name, value in given.items() if value is not None})
        self.size, self.seq = size._replace(recipe=recipe), size.shape["seq"]
        if "vocab" in named.changes:
            raise ValueError(f"--change {flags.change}: the vocabulary is that of the corpus; leave vocab out")
        folder, shape = named.find_folder(weights=True), named.shape
        self.name = str(named)
        self.base = None if folder is None else Pretrained(folder, shape["vocab"], shape["seq"])
        if flags.lora is not None:
            if self.base is None:
                raise ValueError(
                    f"--lora {flags.lora}: there is nothing to freeze; give the weights, as --model hf:PATH"
                )
            self.name += f" --lora {flags.lora}"
        self.tx = make_optimizer(recipe, flags.optimizer, flags.decay)
        self.data = load_data(console, flags, self.base)
        self._check_rows()
        self.tokens = recipe.batch * self.seq
        # A pretrained model may have an array of its own length of rows, and be trained on shorter ones.
        corpus = self.data.corpus
        own = {"vocab": corpus.vocab} if self.base is None else {"vocab": self.base.vocab, "seq": self.base.seq}
        self.vocab, self.network = own["vocab"], self.size.model(**own)
        if self.base is not None:
            self.network.config = self.base.config
        if flags.lora is not None:
            self.network = add_factors(self.network, flags.lora)
        self.tx = self.network.optimizer(self.tx)
        self.layout = how.layout(self.network.init, self.tx)
        self.source = self.data.source(recipe.batch, self.seq, flags.seed)
        self.held_out = self.data.held_out_batches(4 * recipe.batch // how.engine.microbatches, self.seq)
        self.rows: PyTree = jax.eval_shape(lambda: self.source.rows(0, np.arange(recipe.batch)))

    @property
    def stops(self) -> Stops:
        """The token ids at which generated text ends."""
        return Stops(ends_of_text(self.data.tokenizer, None if self.base is None else self.base.folder))

    @property
    def sequence(self) -> dict[str, Any]:
        """The values that determine batches and updates, such as "seed" and "lr"; saved, and compared on --resume."""
        recipe: Any = self.size.recipe
        corpus = self.data.corpus
        return {
            "model": self.name,
            "batch": recipe.batch,
            "seq": self.seq,
            "seed": self.flags.seed,
            "corpus": f"{corpus.name} ({corpus.digest})",
            "steps": recipe.steps,
            "lr": recipe.learning_rate,
            "warmup": recipe.warmup,
            "decay": self.flags.decay or "cosine",
            "clip": recipe.clip,
            "optimizer": self.flags.optimizer or "adamw",
        }

    @property
    def about(self) -> dict[str, Any]:
        """The entries about model, data, mesh and recipe that `jaxshard train` writes into its JSON object."""
        about = self.how.about
        if "remat" in about:  # the model states it for an engine that has no own
            about["remat"] = about["remat"] or self.network.remat
        optimizer = {name: self.sequence[name] for name in ("optimizer", "decay")}
        return {
            "model": self.name,
            "params": sum(x.size for x in jax.tree.leaves(self.layout.shapes.params)),
            **({} if self.flags.lora is None else {"lora": read_factors(self.flags.lora)}),
            "device_kind": self.how.mesh.devices.flat[0].device_kind,
            **{name: fact for name, fact in about.items() if fact is not None},
            "seed": self.flags.seed,
            "size": self.size.shape | {"vocab": self.vocab},
            "recipe": self.size.recipe._asdict() | optimizer,
            "corpus": self.data.facts,
            **({"packing": self.source.facts} if isinstance(self.source, Packed) else {}),
            "versions": versions(),
        }

    @property
    def shown(self) -> dict[str, str]:
        """The lines that `jaxshard train` prints at its start, by name, such as "model" and "data"."""
        about, predicted, recipe = self.about, predicted_bytes(self.layout, self.rows), self.size.recipe
        size, corpus, unit = about["size"], about["corpus"], f"{about['corpus']['unit']}s"
        roles = {"param": "params", "grad": "grads", "opt": "optimizer"}
        per_device = ", ".join(f"{name} {human_bytes(predicted[role])}" for role, name in roles.items())
        params, frozen = jax.tree.leaves(self.layout.shapes.params), jax.tree.leaves(self.layout.base)
        trained = sum(x.size for x, is_frozen in zip(params, frozen, strict=True) if not is_frozen)
        count = f"{about['params']:,} parameters" + (f", of which {trained:,} train" if any(frozen) else "")
        by = "" if self.flags.optimizer is None else f" by {self.flags.optimizer}"
        return {
            "model": f"{self.name}: {count} (width {size['width']}, {size['depth']} blocks)",
            "data": f"{corpus['name']}: {corpus['train_tokens']:,} {unit}, {corpus['held_out_tokens']:,} held out",
            **({"packing": _describe_packing(about["packing"])} if "packing" in about else {}),
            "steps": f"{recipe.steps:,} of {recipe.batch} x {self.seq} {unit}{by}",
            "per device": f"{per_device} (predicted)",
        }

    def _check_rows(self) -> None:
        """Raise ValueError if --batch or --seq is not a multiple of what the mesh and micro-batches need."""
        of_rows, of_tokens = self.how.rows_multiple, self.how.seq_multiple
        for flag, count, multiple, why in (
            ("--batch", self.size.recipe.batch, of_rows, "the devices that share the rows times the micro-batches"),
            ("--seq", self.seq, of_tokens, "two chunks for each device of the axis context"),
        ):
            if count % multiple:
                raise ValueError(
                    f"{flag} {count}: use a multiple of {multiple}, {why}, such as {count + -count % multiple}"
                )


def _describe_packing(packing: dict[str, float]) -> str:
    """Describe in a line how documents are packed into rows: how many, their length, cuts and padding."""
    return (
        f"{packing['documents']:,} documents of {packing['tokens_per_document']:.1f} tokens, {packing['cut']:,} cut, "
        f"in {packing['rows']:,} rows; {packing['padding']:.1%} padding, {packing['learned']:.1%} of tokens in the loss"
    )
