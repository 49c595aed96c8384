"""Bad steps: those whose loss or gradient is not finite. A step leaves the run as it was; a policy says what then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState


@partial(jax.tree_util.register_dataclass, data_fields=["flags"], meta_fields=["paths"])
@dataclass(frozen=True)
class Bad:
    """What was not finite in a step: `metrics["bad"]`.

    `flags` is bool[1 + parameters]: the loss, then the gradient of each trained parameter in the order of `paths`.
    `float(bad)` is 1.0 for a bad step, else 0.0.
    """

    flags: jax.Array
    paths: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(np.asarray(self.flags).any())

    def __float__(self) -> float:
        return float(bool(self))

    @property
    def grads(self) -> tuple[str, ...]:
        """The parameters whose gradient was not finite."""
        flags = np.asarray(self.flags)[1:]
        return tuple(path for path, flag in zip(self.paths, flags, strict=True) if flag)


class BadStep(FloatingPointError):
    """A loss or gradient that is not finite.

    Attributes:
      what: the step and what was not finite, without the advice that the message ends with.
      step: the number of the step, or None where it is not known.
      run: from `js.fit`, the run as the steps left it, to go on with: the bad one changed nothing but its step.
    """

    def __init__(self, what: str, advice: str = "", step: int | None = None, run: TrainState | None = None):
        super().__init__(f"{what}. {advice}" if advice else what)
        self.what, self.step, self.run = what, step, run


@dataclass(frozen=True)
class Rollback:
    """The policy that goes back to a saved run and takes its steps again without the batch that was bad.

    Where the run itself is no longer finite, the batch before is to blame and left out instead. `restore` returns
    (run, the position of its batches as they say it; anything else means the step): the method of a `js.Checkpointer`.
    What was left out
    is remembered as long as the call of `js.fit` lasts. After `limit` returns to the same step the bad step raises.
    """

    restore: Callable[[], tuple[TrainState, Any]]
    limit: int = 5


BadSteps = Literal["raise", "skip"] | Rollback

IN_A_ROW = 50
"""After so many bad steps one after the other skipping has not helped."""


def bad_of(loss: jax.Array, squares: jax.Array, paths: tuple[str, ...]) -> Bad:
    """What is not finite, from the loss and the sums of squares of the gradients (see `sum_of_squares`)."""
    return Bad(jnp.concatenate([~jnp.isfinite(loss).reshape(1), jnp.isnan(squares)]), paths)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """The sum of squared elements in f32: NaN if an element is not finite, and only then.

    So one number says both: the squares of finite elements may overflow to infinity, which makes no NaN.
    """
    x = jnp.abs(x)
    return jnp.sum(jnp.where(jnp.isfinite(x), jnp.square(x.astype(jnp.float32)), jnp.nan))


def keep(ok: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """The new arrays where all is well, else bit for bit the old ones."""
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, old)


def check_finite(metrics: Mapping[str, Any], *, step: int | None = None) -> None:
    """Nothing where the step that returned these metrics was finite; reads them, so it waits for the device.

    For loops without `js.fit`. The run after a bad step is the one before it, but for its step.

    Raises:
      BadStep: the loss or a gradient was not finite; every parameter concerned is named.
      ValueError: the metrics are not those of `js.make_step`.
    """
    if not isinstance(metrics.get("bad"), Bad):
        raise ValueError(f'check_finite: expected the metrics of a js.make_step, with "bad", got {sorted(metrics)}')
    if metrics["bad"]:
        raise BadStep(explain(metrics["bad"], float(metrics["loss"]), step), GO_ON, step)


GO_ON = (
    'Parameters, optimizer and model state are as before the step. Look at its batch; js.fit(..., bad_steps="skip") '
    "leaves such batches out, bad_steps=js.Rollback(checkpointer.restore) goes back to a saved run first"
)


def explain(bad: Bad, loss: float, step: int | None) -> str:
    """What was not finite, in one line."""
    grads = bad.grads
    if not grads:
        found = "all gradients are finite"
    elif len(grads) == len(bad.paths) > 1:
        found = f"the gradients of all {len(grads)} parameters are not finite"
    else:
        found = f"the gradient is not finite of {', '.join(grads)}"
    return f"{'this step' if step is None else f'step {step}'} is bad: loss {loss}, {found}"


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats])) if floats else jnp.ones((), bool)


def is_finite(tree: PyTree) -> bool:
    """Whether all floating numbers of arrays on the devices are finite; waits for them."""
    return bool(_all_finite(tree))
