"""Let a known model (`js.Stacked`, `js.linen`, `js.nnx`) inside a user's loss gather its parameters block by block.

A user's loss may call `model.loss` of a known model: `lambda p, b, k: model.loss(p, b, k) + penalty(p)`. The engine
can't look into the loss, so it passes all parameters gathered, and makes an `Offer` to run a known model itself. If the
loss passes these parameters on to the model unchanged, the model accepts the offer: the engine runs the model on the
stored shards, and gathers each block's parameters just before use. Then only the penalty uses gathered parameters, and
the compiler removes the all-gathers of all parameters that the penalty does not use.
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
    """An engine's offer to a user's loss: a model that the loss calls may run on stored shards, not gathered weights.

    It is for known models (`js.Stacked`, `js.linen`, `js.nnx`), and only for calls in which the loss passes the
    parameters that it received to the model unchanged.

    Attributes:
      weights: the gathered parameters that the loss received.
      run: `run(known, model, batch, key) -> output of the model's loss`, computed from the stored shards.
      accepts: `accepts(known)` returns True if `run` can run the model.
      taken: the models that `run` ran; filled while the loss runs.
      missed: the models that ran on gathered parameters, since they received other arrays or `accepts` refused them;
        also filled while the loss runs.
    """

    weights: PyTree
    run: Callable[[KnownModel, PyTree, PyTree, Any], Any]
    accepts: Callable[[KnownModel], bool]
    taken: list[KnownModel] = field(default_factory=list)
    missed: list[KnownModel] = field(default_factory=list)

    def is_for(self, params: PyTree) -> bool:
        """Return True if all of `params` are the same objects (`is`) as the parameters that the loss received."""
        if not same_structure(self.weights, params):
            return False
        return all(a is b for a, b in zip(jax.tree.leaves(self.weights), jax.tree.leaves(params), strict=True))


_current: ContextVar[Offer | None] = ContextVar("offer", default=None)


@contextmanager
def offering(offer: Offer) -> Iterator[None]:
    """Enter a context in which `run_as_offered` finds this offer."""
    token = _current.set(offer)
    try:
        yield
    finally:
        _current.reset(token)


def run_as_offered(known: KnownModel, model: PyTree, batch: PyTree, key: Any, plain: Callable[[], Any]) -> Any:
    """Run a known model's loss on stored shards if the engine offers this for these parameters; else return `plain()`.

    The model is added to the offer's `taken` or `missed`.

    Args:
      known: the model.
      model: the model's parameters, or js.Model(params, state).
      batch: the batch: a device's own rows under `js.explicit`, else the global batch.
      key: the random key; None in evaluation.
      plain: runs the model's loss on the given parameters.
    """
    offer = _current.get()
    if offer is None:
        return plain()
    if not offer.is_for(split_model(model)[0]) or not offer.accepts(known):
        offer.missed.append(known)
        return plain()
    offer.taken.append(known)
    # The offer is for the outermost model; a model inside it runs on other weights and must not count as missed.
    token = _current.set(None)
    try:
        return offer.run(known, model, batch, key)
    finally:
        _current.reset(token)
