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
    """Replicas of `js.local` that divide their losses by a common weight in some steps.

    Attributes:
      now: bool[], True if the current step is such a step.
      axes: the mesh axes of the replicas.
      asked: recorded for each call of `weigh`: True if the loss had weights.
    """

    now: jax.Array
    axes: tuple[str, ...]
    asked: list[bool] = field(default_factory=list)

    def weigh(self, weights: Weights) -> Weights:
        """Sum the loss weights over all replicas if `now`; otherwise return them unchanged, without communication.

        Each call is recorded in `asked`.
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
        """Convert `fn(*given)` to a function of `(now, *given)`, for a nested `shard_map`.

        The `shard_map` can't close over the array `now`, so that it has to be an argument.
        """

        def call(now: jax.Array, *given: Any) -> Any:
            with joining(replace(self, now=now)):
                return fn(*given)

        return call


_joint: ContextVar[Joint | None] = ContextVar("joint", default=None)


def joint_in_force() -> Joint | None:
    """Return the `Joint` of the innermost `joining`; None outside of it."""
    return _joint.get()


@contextmanager
def joining(joint: Joint) -> Iterator[None]:
    """Make a context in which engines call `joint.weigh` on the weights of a loss before they divide by them."""
    token = _joint.set(joint)
    try:
        yield
    finally:
        _joint.reset(token)
