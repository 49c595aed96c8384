"""During DiLoCo warm-up, divide each replica's loss by the total weight of all replicas.

The warm-up of `js.local` needs it. In a loss with several terms, such as `ce + 0.01 * aux`, each term has its own
weight, so that gradients of replicas can't be weighted after they are computed.
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
    """Sums the weights of a loss over the replicas of `js.local` in warm-up steps.

    Each replica then divides its loss by the total weight of all replicas, so that the sum of their losses is the mean
    over all rows.

    Attributes:
      now: bool[], True if the current step is a warm-up step.
      axes: the mesh axes of the replicas.
      asked: one entry for each call of `weigh` so far: True if the loss had weights.
    """

    now: jax.Array
    axes: tuple[str, ...]
    asked: list[bool] = field(default_factory=list)

    def weigh(self, weights: Weights) -> Weights:
        """Sum the weights of a loss over all replicas in a warm-up step; otherwise return them without communication.

        Each call appends an entry to `asked`: True if there were weights.
        """
        self.asked.append(bool(weights))
        if not weights:
            return ()

        def add(weights: Weights) -> Weights:
            return tuple(sum_scalar(one, self.axes) for one in weights)

        # In a `cond`: in other steps replicas may compute different numbers of losses, as a line search does.
        weighed: Weights = lax.cond(self.now, add, lambda own: own, weights)
        return weighed

    def inside(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Convert `fn(*args)` into a function of `(now, *args)`, for a nested `shard_map`.

        A nested `shard_map` can't close over the array `self.now`, so `now` is passed to it as an argument. `fn` then
        runs with a `Joint` that has this `now`.
        """

        def call(now: jax.Array, *given: Any) -> Any:
            with joining(replace(self, now=now)):
                return fn(*given)

        return call


_joint: ContextVar[Joint | None] = ContextVar("joint", default=None)


def joint_in_force() -> Joint | None:
    """Return the `Joint` of the innermost `with joining(...)` block; None outside of such a block."""
    return _joint.get()


@contextmanager
def joining(joint: Joint) -> Iterator[None]:
    """Make a context in which each engine passes a loss's weights to `joint.weigh` before it divides by them."""
    token = _joint.set(joint)
    try:
        yield
    finally:
        _joint.reset(token)
