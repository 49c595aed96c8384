"""Make the optimizer from flags: `--optimizer`, `--lr`, `--warmup`, `--decay` and `--clip`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax

from jaxshard.commands.pairs import read_pairs, readers_of
from jaxshard.core.near_words import did_you_mean
from jaxshard.models.recipe import Recipe
from jaxshard.optim.eight_bit import adam8bit

_LAST = 20
"""A decay ends at this fraction of the highest learning rate, as that of `Recipe.optimizer` does."""

Maker = Callable[..., optax.GradientTransformation]


def make_optimizer(recipe: Recipe, optimizer: str | None, decay: str | None) -> optax.GradientTransformation:
    """Make the optimizer of a recipe, or another one with the recipe's steps, learning rate, warm-up and clip.

    Args:
      recipe: steps, learning rate, warm-up and clip, and AdamW's arguments; flags are already applied.
      optimizer: the value of --optimizer, a name and arguments, such as "lion,b2=0.98".
      decay: the value of --decay.

    Raises:
      ValueError: an unknown name or argument, or a value that is refused.
    """
    name, _, text = (optimizer or "adamw").partition(",")
    make = _find(name.strip())
    arguments: dict[str, Any] = {"b2": recipe.b2, "weight_decay": recipe.weight_decay} if name == "adamw" else {}
    if text:
        readers = {key: read for key, read in readers_of(make).items() if key != "learning_rate"}
        arguments |= read_pairs(f"--optimizer {name}, with", text, readers, "write its arguments after the name")
    try:
        tx = make(make_rate(recipe, decay or "cosine"), **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--optimizer {optimizer}: {error}") from error
    return tx if recipe.clip is None else optax.chain(optax.clip_by_global_norm(recipe.clip), tx)


def make_rate(recipe: Recipe, decay: str) -> optax.Schedule:
    """Make the learning-rate schedule: a linear warm-up, then cosine or linear decay to a twentieth, or a constant."""
    warmup, peak = recipe.warmup, recipe.learning_rate
    start, end = peak / (warmup + 1), max(recipe.steps, warmup + 1)
    if decay == "cosine":
        return optax.warmup_cosine_decay_schedule(start, peak, warmup, end, peak / _LAST)
    last = peak if decay == "constant" else peak / _LAST
    parts = [optax.linear_schedule(start, peak, warmup), optax.linear_schedule(peak, last, end - warmup)]
    return optax.join_schedules(parts, [warmup])


def _find(name: str) -> Maker:
    """Find a function of optax, optax.contrib or js.optim whose first argument is a learning rate, such as `lion`."""
    makers: dict[str, Maker] = {"adam8bit": adam8bit}
    for library in (optax.contrib, optax):
        for key, value in inspect.getmembers(library, inspect.isfunction):
            first = next(iter(inspect.signature(value).parameters), "")
            if first == "learning_rate" and not key.startswith(("_", "scale_by_")):
                makers[key] = value
    if name not in makers:
        near = did_you_mean(name, makers) or "use a name such as adamw, lion or muon"
        raise ValueError(f"--optimizer {name}: optax, optax.contrib and js.optim have no such optimizer; {near}")
    return makers[name]
