"""Descriptions of ready-made models: a `Size` has the arguments of a model, and a `Recipe` how to train it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import optax

from jaxshard.adapt.remat import RematPolicy
from jaxshard.core.near_words import one_of


class Recipe(NamedTuple):
    """Training settings of a ready-made size.

    Attributes:
      batch: rows per step over all devices.
      steps: optimizer steps.
      learning_rate: the highest learning rate of the schedule.
      warmup: steps of linear warm-up.
      b2: decay of AdamW's second moment.
      weight_decay: AdamW's decoupled weight decay.
      clip: the largest global norm of the gradients; None does not clip.

    Example:
        recipe = js.models.SIZES["gpt-1m"].recipe
        layout = js.layout(js.fsdp(), mesh, model.init, recipe.optimizer(steps=100))
    """

    batch: int
    steps: int
    learning_rate: float
    warmup: int
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float | None = None

    def optimizer(self, steps: int | None = None) -> optax.GradientTransformation:
        """Make AdamW with a linear warm-up and a cosine decay to a twentieth of the peak.

        The warm-up does not depend on `steps`, so training runs of different planned length warm up equally.

        Args:
          steps: the step at which the decay ends; by default the recipe's own number of steps.

        Returns:
          An elementwise transformation, which can run on parameters however they are sharded.
        """
        steps = self.steps if steps is None else steps
        warmup, peak = self.warmup, self.learning_rate
        end = max(steps, warmup + 1)
        rate = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, end, peak / 20)
        tx = optax.adamw(rate, b2=self.b2, weight_decay=self.weight_decay)
        return tx if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), tx)


class Size(NamedTuple):
    """A ready-made model.

    Attributes:
      shape: the keyword arguments of `make`, such as {"vocab": 256, "width": 144, ...}.
      recipe: how the model is trained unless the user says otherwise.
      make: the function that builds the model, such as `js.models.gpt`.
      remat: the default of the argument `remat` of `js.explicit` and `js.auto`, which says what activations a block
        saves: "everything" for small models, "nothing" for models that are sharded for lack of memory.
        (`js.pipelined` has the default "nothing" for every size: it saves only each block's input.)

    Example:
        size = js.models.SIZES["gpt-1m"]
        size.shape["width"], size.recipe.batch
        model = size.model()
    """

    shape: dict[str, Any]
    recipe: Recipe
    make: Callable[..., Any]
    remat: RematPolicy

    def model(self, **changes: Any) -> Any:
        """Build the model, with some arguments of `make` replaced: `SIZES["gpt2"].model(vocab=256)`.

        Raises:
          ValueError: `make` has no such argument, or refuses its value.
        """
        self.check_changes(changes)
        model = self.make(**self.shape | changes)
        model.remat = self.remat
        return model

    def check_changes(self, changes: Iterable[str]) -> None:
        """Raise ValueError if a name in `changes` is no argument of `make`; the message lists the arguments."""
        known = inspect.signature(self.make).parameters
        if unknown := [name for name in changes if name not in known]:
            raise ValueError(
                f"js.models.{self.make.__name__} has no {', '.join(map(repr, unknown))}; {one_of(unknown[0], known)}"
            )
