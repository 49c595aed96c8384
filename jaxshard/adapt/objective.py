"""The kinds of loss: a function, the loss of a `js.Stacked` model, and that of a Flax module with units.

A step resolves its loss once, and hands the value to the engine, the planner and the checks.
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
    """A loss of which nothing is known but how to call it: `loss_fn(model, batch, key)`."""

    loss_fn: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name of the loss in error messages."""
        return str(getattr(self.loss_fn, "__qualname__", self.loss_fn))

    @property
    def stacked_for_user(self) -> bool:
        """True if the user wrote single blocks, which were stacked."""
        return False

    @property
    def written(self) -> Callable[..., Any]:
        """The function that the user wrote."""
        return self.loss_fn

    @property
    def known(self) -> KnownModel | None:
        """The model that the library can look into; None if the loss is opaque."""
        return None


@dataclass(frozen=True)
class OfBlocks(Opaque):
    """The loss of a `js.Stacked` model: engines gather block by block, or run the blocks in stages."""

    model: Stacked

    @property
    def stacked_for_user(self) -> bool:
        """True if the user wrote single blocks, which were stacked."""
        return self.model.stacked_for_user

    @property
    def known(self) -> KnownModel | None:
        """The model."""
        return self.model


@dataclass(frozen=True)
class OfModule(Opaque):
    """The loss of a module from `js.linen` or `js.nnx`: engines gather the weights of units while each runs."""

    model: Adapted

    @property
    def written(self) -> Callable[..., Any]:
        """The function that the user wrote."""
        return self.model.loss_fn

    @property
    def known(self) -> KnownModel | None:
        """The model."""
        return self.model


Objective = Opaque | OfBlocks | OfModule
"""A resolved loss."""


def resolve(loss_fn: Callable[..., Any] | Objective) -> Objective:
    """Resolve a loss function to what is known of it; an objective is returned as it is."""
    if isinstance(loss_fn, Opaque):
        return loss_fn
    known = known_loss(loss_fn)
    if isinstance(known, Stacked):
        return OfBlocks(loss_fn, known)
    if isinstance(known, Adapted):
        return OfModule(loss_fn, known)
    return Opaque(loss_fn)
