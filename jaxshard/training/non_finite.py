"""Bad steps: steps whose loss, gradient or new parameters are not finite.

A step detects a loss or gradient that is not finite on the device, and then returns the old TrainState, with only its
step count changed (`find_bad`, `keep_old_unless`). It also detects parameters that the update made infinite or NaN, but
only when they have replaced the old parameters, so training can't continue from that TrainState: it is spoiled. Both
are reported as flags in the metrics (`Bad`), so that the device does not wait for the host. The host reads the flags
later and decides what to do: `check_finite` in a user's own loop, a policy in `js.fit` (see `recovery.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState


@partial(jax.tree_util.register_dataclass, data_fields=["flags"], meta_fields=["paths"])
@dataclass(frozen=True, repr=False)
class Bad:
    """Flags that say which arrays of a step were not finite: `metrics["bad"]`.

    `bool(bad)` is True and `float(bad)` is 1.0 for a bad step. Both wait for the device. For several steps in one
    program (`jax.lax.scan`) they tell whether any step was bad.

    Attributes:
      flags: bool[..., 1 + 2 * trained parameters]: whether the loss is not finite, then for each parameter whether its
        gradient is not finite, then for each parameter whether the update made a finite element infinite or NaN.
        Leading dimensions are those of a `scan` or `vmap` over steps.
      paths: the paths of the trained parameters, in the order of the flags.

    Example:
        run, metrics = step(run, batch)
        if metrics["bad"]:
            print(metrics["bad"].grads)     # ("blocks/attention/kernel", "head/bias")
    """

    flags: Bool[Array, " arrays"]
    paths: tuple[str, ...]

    def __repr__(self) -> str:
        """Show whether the step is bad and which arrays are not finite; while JAX traces, show the traced booleans."""
        if not isinstance(self.flags, jax.Array | np.ndarray) or isinstance(self.flags, jax.core.Tracer):
            return f"Bad(flags={self.flags!r})"
        named = [f", {what}={found!r}" for what in ("grads", "params") if (found := getattr(self, what))]
        return f"Bad(bad={bool(self)}{''.join(named)})"

    def __bool__(self) -> bool:
        return bool(np.asarray(self.flags).any())

    def __float__(self) -> float:
        return float(bool(self))

    @property
    def grads(self) -> tuple[str, ...]:
        """The parameters whose gradient was not finite."""
        return self._paths_from(1)

    @property
    def params(self) -> tuple[str, ...]:
        """The parameters that the update made infinite or NaN, though loss and gradients were finite."""
        return self._paths_from(1 + len(self.paths))

    def _paths_from(self, start: int) -> tuple[str, ...]:
        each = np.asarray(self.flags).reshape(-1, 1 + 2 * len(self.paths))
        flags: np.ndarray = each[:, start : start + len(self.paths)].max(axis=0)
        return tuple(path for path, flag in zip(self.paths, flags, strict=True) if flag)


class BadStep(FloatingPointError):
    """A loss, gradient or new parameter that is not finite.

    Attributes:
      what: the step and the arrays that were not finite, without the advice at the end of the message.
      step: the number of the bad step, or None if unknown.
      run: the TrainState after the latest step, if `js.fit` raised the exception, else None. Training can go on with
        it, because a bad step changes only the step count, unless the message says that the run is spoiled.

    Example:
        run, metrics = step(run, batch)
        try:
            js.check_finite(metrics)
        except js.BadStep as error:
            print(error)    # names the arrays that hold inf or NaN
    """

    exit_status = 1

    def __init__(self, what: str, advice: str = "", step: int | None = None, run: TrainState | None = None):
        super().__init__(f"{what}. {advice}" if advice else what)
        self.what, self.step, self.run = what, step, run


@dataclass(frozen=True)
class Rollback:
    """The policy of `js.fit` that goes back to a saved run and repeats the steps since then without the bad batch.

    Skipped batches are remembered until `js.fit` returns. Not supported under `js.local`, since a skipped step may be
    a step after which replicas synchronise.

    Attributes:
      restore: `restore() -> (run, position)`, such as the method of a `js.Checkpointer`. `position` is the saved state
        of the batches; with any other value, such as None, the batches continue from the run's step.
      limit: how many times `js.fit` goes back to the same saved step; a further bad step raises `BadStep`.

    Example:
        with js.Checkpointer("run", layout, every=1000) as checkpointer:
            run = js.fit(run, step, js.batches(source, layout), steps=10_000, on_run=[checkpointer],
                         bad_steps=js.Rollback(checkpointer.restore))
    """

    restore: Callable[[], tuple[TrainState, Any]]
    limit: int = 5


BadSteps = Literal["raise", "skip"] | Rollback
"""The policies of `js.fit` for bad steps: raise `BadStep`, skip the batch, or go back to a saved run."""

IN_A_ROW = 50
"""The number of bad steps in a row after which the policy "skip" raises `BadStep`."""


def find_bad(loss: Float[Array, ""], squares: Float32[Array, " params"]) -> Bool[Array, " 1+params"]:
    """Return flags for the loss and for each gradient: True if it is not finite.

    Args:
      loss: the loss of the global batch.
      squares: the result of `sum_of_squares` for each gradient.
    """
    return jnp.concatenate([~jnp.isfinite(loss).reshape(1), jnp.isnan(squares)])


@partial(jax.jit, inline=True)  # traced once per shape, not once per array
def sum_of_squares(x: Float[Array, "*dims"]) -> Float32[Array, ""]:
    """Sum the squared elements in f32; the result is NaN if and only if an element is not finite.

    So a single scalar gives both the norm and the flag for `Bad`. Infinite elements count as NaN, so that they differ
    from finite elements whose squares overflow, for which the sum is infinite.
    """
    x = jnp.abs(x)
    return jnp.sum(jnp.where(jnp.isfinite(x), jnp.square(x.astype(jnp.float32)), jnp.nan))


def keep_old_unless(ok: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Return the new arrays if `ok`, else the old arrays bit for bit; elementwise, without communication."""
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, old)


def check_finite(metrics: Mapping[str, Any], *, step: int | None = None) -> None:
    """Raise `BadStep` if the step that returned these metrics was bad; wait for the device.

    For loops without `js.fit`. A bad step returns the run unchanged except for its step count, unless the message says
    that the run is spoiled.

    Args:
      metrics: the metrics that a step of `js.make_step` returned.
      step: the number of the step, for the message.

    Raises:
      BadStep: the loss, a gradient or a new parameter was not finite; the message names every such parameter.
      ValueError: the metrics have no "bad": they are not from `js.make_step`, or `Step.guarded` is False.

    Example:
        run, metrics = step(run, batch)
        js.check_finite(metrics)
    """
    if not isinstance(metrics.get("bad"), Bad):
        raise ValueError(
            f'check_finite: expected the metrics of a js.make_step, with "bad", got {sorted(metrics)}; a step with '
            "guarded=False, or whose optimizer has a rule of its own for what is not finite, has none"
        )
    bad = metrics["bad"]
    if bad:
        raise BadStep(describe_bad(bad, np.asarray(metrics["loss"]).tolist(), step), advise(bad), step)


_GO_ON = (
    'Parameters, optimizer and model state are as before the step. Look at its batch; js.fit(..., bad_steps="skip") '
    "leaves such batches out, bad_steps=js.Rollback(checkpointer.restore) goes back to a saved run first"
)

_GO_BACK = (
    "The run is spoiled. Go back to a saved one, by js.restore or with bad_steps=js.Rollback(checkpointer.restore); "
    "a lower learning rate or smaller updates may keep it from happening"
)


_LABELS = (
    "A loss alone that is NaN often comes from labels outside of the vocabulary, such as -100: leave them out by "
    "where= or ignore_index= of js.cross_entropy, or by weights of 0. "
)


def advise(bad: Bad) -> str:
    """Return the sentences of a `BadStep` message that say what to do about it."""
    if bad.params:
        return _GO_BACK
    return _GO_ON if bad.grads else _LABELS + _GO_ON


def describe_bad(bad: Bad, loss: float | list[Any], step: int | None) -> str:
    """Describe in one line what was not finite, in a step or in several steps with stacked metrics."""
    if not bad.grads:
        found = "all gradients are finite"
    elif len(bad.grads) == len(bad.paths) > 1:
        found = f"the gradients of all {len(bad.grads)} parameters are not finite"
    else:
        found = f"the gradient is not finite of {', '.join(bad.grads)}"
    if bad.params:
        every = len(bad.params) == len(bad.paths) > 1
        which = f"all {len(bad.params)} parameters" if every else ", ".join(bad.params)
        found += f", but the update made infinite or NaN {which}"
    return f"{'this step' if step is None else f'step {step}'} is bad: loss {loss}, {found}"


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats])) if floats else jnp.ones((), bool)


def is_finite(tree: PyTree) -> bool:
    """Return True if all elements of the tree's floating arrays are finite; wait for the devices."""
    return bool(_all_finite(tree))
