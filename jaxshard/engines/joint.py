"""One mean over the rows of several replicas: what each divides its totals by, where `Joint` is in force.

The warm-up of `js.local` needs it. Of a loss with several terms, such as `ce + 0.01 * aux`, each has a weight of its
own, so that gradients of replicas can't be weighed any more once they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from jaxshard.core.collectives import sum_scalar

Weights = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Joint:
    """Replicas that compute one mean in some steps.

    Attributes:
      now: bool[], whether this is such a step.
      axes: those of the replicas.
      asked: for each time that an engine asked for weights, whether the loss had any.
    """

    now: jax.Array
    axes: tuple[str, ...]
    asked: list[bool] = field(default_factory=list)

    def weigh(self, weights: Weights) -> Weights:
        """Return the weights of all replicas' rows, in such a step; else those of this one's, and nothing moves."""
        self.asked.append(bool(weights))
        if not weights:
            return ()

        def add(weights: Weights) -> Weights:
            return tuple(sum_scalar(one, self.axes) for one in weights)

        # In a conditional: in other steps replicas may ask for losses in another number, as a line search does.
        weighed: Weights = lax.cond(self.now, add, lambda own: own, weights)
        return weighed

    def inside(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn(*given)` as `fn(now, *given)` for a nested `shard_map`, which takes no arrays but as arguments."""

        def call(now: jax.Array, *given: Any) -> Any:
            with joining(replace(self, now=now)):
                return fn(*given)

        return call


_joint: ContextVar[Joint | None] = ContextVar("joint", default=None)


def joint_in_force() -> Joint | None:
    """Return what `joining` was given; None outside of it."""
    return _joint.get()


@contextmanager
def joining(joint: Joint) -> Iterator[None]:
    """Make a context in which engines divide a loss by what `joint` makes of its weights."""
    token = _joint.set(joint)
    try:
        yield
    finally:
        _joint.reset(token)
