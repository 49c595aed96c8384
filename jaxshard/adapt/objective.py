"""Resolve a loss to one of three kinds: a plain function, the loss of a `js.Stacked` model, or of a Flax module.

A step resolves its loss once, and passes the result to the engine, the planner and the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxshard.adapt.stacked import Stacked
from jaxshard.adapt.units import Adapted
from jaxshard.core.known_model import KnownModel, known_loss


@dataclass(frozen=True)
class Opaque:
    """A plain loss function, `loss_fn(model, batch, key)`, into which engines cannot look."""

    loss_fn: Callable[..., Any]

    @property
    def name(self) -> str:
        """Return the name of the loss in error messages."""
        return str(getattr(self.loss_fn, "__qualname__", self.loss_fn))

    @property
    def stacked_for_user(self) -> bool:
        """Return True if the user wrote a single block, and jaxshard stacks its parameters."""
        return False

    @property
    def written(self) -> Callable[..., Any]:
        """Return the function that the user wrote."""
        return self.loss_fn

    @property
    def known(self) -> KnownModel | None:
        """Return the model whose loss this is; None for a plain function."""
        return None


@dataclass(frozen=True)
class OfBlocks(Opaque):
    """The loss of a `js.Stacked` model: engines gather one block's weights at a time, or run the blocks in stages."""

    model: Stacked

    @property
    def stacked_for_user(self) -> bool:
        return self.model.stacked_for_user

    @property
    def known(self) -> KnownModel | None:
        return self.model


@dataclass(frozen=True)
class OfModule(Opaque):
    """The loss of a module from `js.linen` or `js.nnx`: engines gather the weights of a unit while it runs."""

    model: Adapted

    @property
    def written(self) -> Callable[..., Any]:
        return self.model.loss_fn

    @property
    def known(self) -> KnownModel | None:
        return self.model


Objective = Opaque | OfBlocks | OfModule
"""A resolved loss: one of the three kinds."""


def resolve(loss_fn: Callable[..., Any] | Objective) -> Objective:
    """Find the model to which a loss function belongs, if any; return a resolved loss unchanged."""
    if isinstance(loss_fn, Opaque):
        return loss_fn
    known = known_loss(loss_fn)
    if isinstance(known, Stacked):
        return OfBlocks(loss_fn, known)
    if isinstance(known, Adapted):
        return OfModule(loss_fn, known)
    return Opaque(loss_fn)
