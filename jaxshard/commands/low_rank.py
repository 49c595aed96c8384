"""`--lora rank=8,...`: what a training adds to a frozen model, read from the flag."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax

from jaxshard.adapt.lora import lora
from jaxshard.core.low_rank import BaseDtype
from jaxshard.core.rules import ends_with
from jaxshard.core.tree import paths
from jaxshard.models.decoder import Decoder

_SYNTAX = "write rank=8, and if you like alpha=16, base=bf16 or base=int8, and match=q_proj/kernel, as often as needed"


class Factors(NamedTuple):
    """The arguments of `js.lora`.

    Attributes:
      rank: of the factors.
      alpha: of the gain alpha / rank.
      base: the dtype in which adapted matrices are stored, or None for f32.
      match: patterns of paths; none for all matrices of blocks but those of routers and experts.
    """

    rank: int
    alpha: float | None
    base: BaseDtype | None
    match: tuple[str, ...]

    def add_to(self, network: Decoder) -> Decoder:
        """Return the model with factors.

        Raises:
          ValueError: as making the parameters of `js.lora`.
        """
        match = self.match or _matrices_of_blocks(network)
        tuned = lora(network.init, network.loss, rank=self.rank, match=match, alpha=self.alpha, base=self.base)
        try:
            jax.eval_shape(tuned.init, jax.random.key(0))
        except ValueError as error:
            raise ValueError(f"--{error}") from error  # "lora: ..."
        return cast(Decoder, tuned.model)


def parse_factors(text: str) -> Factors:
    """Parse the value of --lora.

        >>> parse_factors("rank=8,match=q_proj/kernel,match=v_proj/kernel")
        Factors(rank=8, alpha=None, base=None, match=('q_proj/kernel', 'v_proj/kernel'))

    Raises:
      ValueError: a part that is not name=value, an unknown name, one that comes twice, or a value that is none.
    """
    given: dict[str, Any] = {"alpha": None, "base": None}
    match: list[str] = []
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        try:
            if name == "match" and value:
                match.append(value)
            elif name == "base" and value in ("bf16", "int8") and given["base"] is None:
                given["base"] = value
            elif name == "alpha" and 0 < float(value) < float("inf") and given["alpha"] is None:
                given["alpha"] = float(value)
            elif name == "rank" and 0 < int(value) < 2**31 and "rank" not in given:
                given["rank"] = int(value)
            else:
                raise ValueError
        except ValueError:
            raise ValueError(f"--lora {text}: {part.strip()!r} can't be; {_SYNTAX}") from None
    if "rank" not in given:
        raise ValueError(f"--lora {text}: there is no rank; {_SYNTAX}")
    return Factors(**given, match=tuple(match))


def _matrices_of_blocks(network: Decoder) -> tuple[str, ...]:
    """Return the paths of the matrices that all rows of a block are multiplied with; routers choose, and stay."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    found = (path for path in paths(shapes) if ends_with(path, "blocks/*/kernel"))
    return tuple(path for path in found if not ends_with(path, "router/kernel"))
