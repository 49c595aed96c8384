"""Find what engines may know about a loss: it is a plain function, or the loss of a `js.Stacked` or a Flax model.

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
    """A plain loss function, `loss_fn(model, batch, key)`: an engine can only call it, with all parameters gathered."""

    loss_fn: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name of the loss in error messages."""
        return str(getattr(self.loss_fn, "__qualname__", self.loss_fn))

    @property
    def stacked_for_user(self) -> bool:
        """True if jaxshard stacked the parameters of the user's separate blocks, as `js.stack` does."""
        return False

    @property
    def written(self) -> Callable[..., Any]:
        """The loss function that the user wrote."""
        return self.loss_fn

    @property
    def known(self) -> KnownModel | None:
        """The model whose loss this is; None for a plain function."""
        return None


@dataclass(frozen=True)
class OfBlocks(Opaque):
    """The loss of a `js.Stacked` model, whose parameters can be gathered block by block or split into stages."""

    model: Stacked

    @property
    def stacked_for_user(self) -> bool:
        return self.model.stacked_for_user

    @property
    def known(self) -> KnownModel | None:
        return self.model


@dataclass(frozen=True)
class OfModule(Opaque):
    """The loss of a `js.linen` or `js.nnx` module, whose submodules' parameters can be gathered while they run."""

    model: Adapted

    @property
    def written(self) -> Callable[..., Any]:
        return self.model.loss_fn

    @property
    def known(self) -> KnownModel | None:
        return self.model


Objective = Opaque | OfBlocks | OfModule
"""The result of `resolve`: a loss of one of the three kinds."""


def resolve(loss_fn: Callable[..., Any] | Objective) -> Objective:
    """Find out whether a loss function belongs to a `js.Stacked` model, to a Flax model, or to none.

    Return an `OfBlocks`, an `OfModule` or an `Opaque`. An argument that is one of these is returned unchanged.
    """
    if isinstance(loss_fn, Opaque):
        return loss_fn
    known = known_loss(loss_fn)
    if isinstance(known, Stacked):
        return OfBlocks(loss_fn, known)
    if isinstance(known, Adapted):
        return OfModule(loss_fn, known)
    return Opaque(loss_fn)
