"""`NamedModel`: the model that `--model` or TARGET names, a ready-made size or one of Hugging Face, with `--change`."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxshard.commands.pairs import read_pairs, readers_of
from jaxshard.core.near_words import one_of
from jaxshard.models.recipe import Recipe, Size
from jaxshard.models.rope import RopeScaling
from jaxshard.models.sizes import SIZES
from jaxshard.storage.paths import AnyPath

PREFIX = "hf:"

_RECIPE = Recipe(batch=16, steps=100, learning_rate=2e-5, warmup=10, b2=0.999, weight_decay=0.0)
"""The recipe for fine-tuning a model of Hugging Face."""

_ROW = 1024
"""Tokens in a row of a model of Hugging Face without --seq, or fewer if the model takes fewer."""


class NamedModel(NamedTuple):
    """A model by its name, a ready-made size or "hf:PATH", with the arguments that --change replaces.

    Its properties raise ValueError or FileNotFoundError if there is no such model or argument.

    Attributes:
      target: the name, such as "gpt-1m".
      change: the value of --change.
    """

    target: str
    change: str | None = None

    def __str__(self) -> str:
        return self.target if self.change is None else f"{self.target} ({self.change})"

    @property
    def is_known(self) -> bool:
        """True for a ready-made size and "hf:PATH", False for any other name, such as a user's function."""
        return self.target in SIZES or self.target.startswith(PREFIX)

    @property
    def folder(self) -> AnyPath | None:
        """The folder of a Hugging Face model; None for a ready-made size."""
        return self.find_folder(weights=False)

    def find_folder(self, *, weights: bool) -> AnyPath | None:
        """Return the folder of a Hugging Face model, with its weights or perhaps without; None for other models."""
        if not self.target.startswith(PREFIX):
            return None
        path = self.target.removeprefix(PREFIX)
        if path.startswith("//"):
            name = f"{PREFIX}{path.lstrip('/')}"
            raise ValueError(f"{self.target} is an address; write {name}, the name of a model or its folder")
        from jaxshard.hf.folder import find_folder  # and with it what reads files, which no other model needs

        return find_folder(path, weights=weights)

    @property
    def size(self) -> Size:
        """The ready-made size without --change; for a Hugging Face model the sizes in its config.json."""
        if folder := self.folder:
            from jaxshard.hf.config import read_config

            config = read_config(folder)
            return Size(config.arguments, _RECIPE, config.family.make, "nothing")
        if self.target not in SIZES:
            raise ValueError(f"--model {self.target}: there is no such size; {one_of(self.target, SIZES)}, or hf:PATH")
        return SIZES[self.target]

    @property
    def changes(self) -> dict[str, Any]:
        """The value of --change as keyword arguments of the model.

        >>> NamedModel("llama-1m", "depth=4,tied=true,norm_epsilon=1e-6").changes
        {'depth': 4, 'tied': True, 'norm_epsilon': 1e-06}
        """
        if self.change is None:
            return {}
        readers = readers_of(self.size.make)
        if "rope_scaling" in readers:
            readers["rope_scaling"] = _read_scaling
        return read_pairs("--change", self.change, readers, "write each argument once, such as depth=4")

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of the model, such as "depth" and "vocab", after --change."""
        return self.size.shape | self.changes

    @property
    def depth(self) -> int | None:
        """The number of blocks; None for a user's function."""
        return self.shape.get("depth") if self.is_known else None

    def model(self, **more: Any) -> Any:
        """Build the model with the arguments `more`; --change overrides them."""
        try:
            return self.size.model(**more | self.changes)
        except (OverflowError, TypeError, ValueError) as error:
            where = f"--model {self.target}" if self.change is None else f"--change {self.change}"
            raise ValueError(f"{where}: {error}") from error

    def resize(self, *, seq: int | None, batch: int | None, rows_multiple: int) -> Size:
        """Return the model's size and recipe for a run: with --change, --seq and --batch.

        Args:
          seq: tokens in a row, the value of --seq.
          batch: rows of a batch, the value of --batch; by default the recipe's number of rows, rounded up.
          rows_multiple: the recipe's number of rows is rounded up to a multiple of this number.
        """
        self.model()  # refuses changes that do not fit together
        size, shape = self.size, self.shape
        if seq is not None and "seq" in self.changes:
            raise ValueError(f"--seq {seq} and --change {self.change} both say seq; leave one out")
        if self.folder is not None:
            if seq is not None and seq > shape["seq"]:
                most = shape["seq"]
                raise ValueError(f"--seq {seq}: the model takes at most {most} tokens in a row; give that or fewer")
            seq = seq or min(_ROW, shape["seq"])
        rows = batch or size.recipe.batch + -size.recipe.batch % rows_multiple
        return size._replace(shape=shape | {"seq": seq or shape["seq"]}, recipe=size.recipe._replace(batch=rows))


def _read_scaling(text: str) -> float | RopeScaling:
    """Read the scaling of rotary embeddings: "8", a factor, or "8:1:4:8192" for factor:low:high:original."""
    try:
        first, *others = [float(x) if set(x) & set(".en") else int(x) for x in text.split(":")]
        return RopeScaling(first, *others) if others else first  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError("give a factor, or factor:low:high:original") from None
