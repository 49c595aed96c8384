"""The offer that an engine makes to a loss that it cannot look into.

A loss of the user's own may call `model.loss` of a known model: `lambda p, b, k: model.loss(p, b, k) + penalty(p)`. The
engine has handed it whole weights, gathered at once. If the loss passes these on as they are, the model can do better:
it asks the engine to run it on the arrays behind them, each block's weights gathered just before use. The whole weights
are then used by the penalty alone, and the compiler drops the gathers of those that nothing uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxshard.core.known_model import KnownModel
from jaxshard.core.layout import split_model
from jaxshard.core.tree import same_structure
from jaxshard.core.types import PyTree


@dataclass
class Offer:
    """A better way to run a known model, valid for the very weights that a loss received.

    Attributes:
      weights: the parameters that the loss received.
      run: `run(known, model, batch, key) -> what the model's loss returns`, on the arrays behind the weights.
      accepts: whether `run` can run this model.
      taken: the models that were run so.
      missed: the models that were run on other arrays, or could not be run so.
    """

    weights: PyTree
    run: Callable[[KnownModel, PyTree, PyTree, Any], Any]
    accepts: Callable[[KnownModel], bool]
    taken: list[KnownModel] = field(default_factory=list)
    missed: list[KnownModel] = field(default_factory=list)

    def is_for(self, params: PyTree) -> bool:
        """Return whether the parameters are the offered weights themselves, array by array."""
        if not same_structure(self.weights, params):
            return False
        return all(a is b for a, b in zip(jax.tree.leaves(self.weights), jax.tree.leaves(params), strict=True))


_current: ContextVar[Offer | None] = ContextVar("offer", default=None)


@contextmanager
def offering(offer: Offer) -> Iterator[None]:
    """A context in which known models see the offer."""
    token = _current.set(offer)
    try:
        yield
    finally:
        _current.reset(token)


def run_as_offered(known: KnownModel, model: PyTree, batch: PyTree, key: Any, plain: Callable[[], Any]) -> Any:
    """Run a known model's loss the way an engine offers for these weights, else as `plain()` does.

    Args:
      known: the model.
      model: its parameters, or js.Model(params, state).
      batch: the rows at hand.
      key: the random key; None in evaluation.
      plain: runs the model's loss on `model` as it is.
    """
    offer = _current.get()
    if offer is None:
        return plain()
    if not offer.is_for(split_model(model)[0]) or not offer.accepts(known):
        offer.missed.append(known)
        return plain()
    offer.taken.append(known)
    # The offer is for the outermost model. One that runs inside it, on other weights, would be counted as missed.
    token = _current.set(None)
    try:
        return offer.run(known, model, batch, key)
    finally:
        _current.reset(token)
