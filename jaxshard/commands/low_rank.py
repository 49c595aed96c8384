"""`--lora rank=8,...`: add low-rank factors to a frozen model."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxshard.adapt.lora import lora
from jaxshard.commands.pairs import read_pairs, readers_of
from jaxshard.commands.values import read_rate
from jaxshard.core.layout import Layout
from jaxshard.core.rules import ends_with
from jaxshard.core.tree import paths
from jaxshard.models.decoder import Decoder

_SYNTAX = "write rank=8, and if you like alpha=16, base=bf16 or base=int8, and match=q_proj/kernel, as often as needed"

_OF_PEFT = {
    "r": "did you mean rank?",
    "lora_alpha": "did you mean alpha?",
    "target_modules": "did you mean match?",
    "lora_dropout": "factors have no dropout",
    "load_in_8bit": "did you mean base=int8?",
    "load_in_4bit": "did you mean base=int8?",
    "torch_dtype": "did you mean base?",
}
"""Names of PEFT and of loading a model with transformers, with what to write in their place."""


def read_factors(text: str) -> dict[str, Any]:
    """Convert the value of --lora, such as "rank=8,alpha=16", to arguments of `js.lora`.

    Raises:
      ValueError: `text` is not understood, or has no rank.
    """
    own = {name: read for name, read in readers_of(lora).items() if name not in ("init_fn", "loss_fn")}
    readers = own | {"alpha": read_rate, "match": str}
    given = read_pairs("--lora", text, readers, _SYNTAX, repeated=["match"], elsewhere=_OF_PEFT)
    if "rank" not in given:
        raise ValueError(f"--lora {text}: there is no rank; {_SYNTAX}")
    return given


def add_factors(network: Decoder, text: str) -> Decoder:
    """Return the model with the low-rank factors that --lora describes, by default for all matrices of its blocks.

    Raises:
      ValueError: `text` is not understood, or `js.lora` refuses it for this model.
    """
    given = read_factors(text)
    try:
        tuned = lora(network.init, network.loss, **{"match": _matrices_of_blocks(network)} | given)
        jax.eval_shape(tuned.init, jax.random.key(0))
    except ValueError as error:
        raise ValueError(f"--lora {text}: {error}; {_SYNTAX}") from error
    return cast(Decoder, tuned.model)


def bytes_saved_by_bf16(layout: Layout) -> int:
    """Return the bytes per device by which base=bf16 would make the frozen matrices of a layout smaller."""
    base = (
        one
        for one in layout.placed()
        if one.role == "param" and ends_with(one.leaf.path, "base") and one.leaf.dtype == jnp.float32
    )
    return sum(one.placement.bytes_per_device(layout.mesh, one.leaf.dtype) // 2 for one in base)


def _matrices_of_blocks(network: Decoder) -> tuple[str, ...]:
    """Return the paths of all matrices in blocks, such as "blocks/q_proj/kernel", except those of MoE routers."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    found = (path for path in paths(shapes) if ends_with(path, "blocks/*/kernel"))
    return tuple(path for path in found if not ends_with(path, "router/kernel"))
