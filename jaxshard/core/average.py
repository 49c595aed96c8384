"""`Average`: a moving average of the parameters in the model's state, which the loss may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.tree import path_str, raise_all
from jaxshard.core.types import PyTree

Decay = float | Callable[[jax.Array], jax.Array]
"""The decay of an average: a number, or an optax schedule `decay(step) -> f32[]` with steps counted from 0."""


@jax.tree_util.register_pytree_with_keys_class
class Average:
    """An exponential moving average of the parameters, for the loss to read: a teacher (Mean Teacher, BYOL, DINO).

    Put it into the state that `init_fn` returns. After each step, from the new parameters,

        average = decay * average + (1 - decay) * params

    The loss reads `.params` and never writes it. Each array of the average has the sharding of its parameter. Under
    FSDP it is stored sharded, and updated on its shards without a collective. An array that the loss reads is
    all-gathered before the loss. A step that is skipped because of a bad batch does not change the average.

    Args:
      params: the first value of the average: the parameters, or some of them under their own paths
        ({"encoder": params["encoder"]}). bf16 and f16 arrays are averaged in f32.
      decay: a number between 0 and 1 (0.999 averages about 1000 steps), or a schedule `decay(step)` such as
        `optax.cosine_decay_schedule(...)`. Make the schedule outside of `init_fn`: each trace of `init_fn` would make
        another schedule.

    Attributes:
      params: the average, a tree like the one given.
      decay: the decay.

    Raises:
      ValueError: a decay outside [0, 1]; by `js.layout`, an array that has no parameter of its path and shape.

    Example:
        def init_fn(key):
            params = init_params(key)
            return js.Model(params, {"teacher": js.Average(params, 0.99)})

        def loss_fn(model, batch, key):
            target = jax.lax.stop_gradient(predict(model.state["teacher"].params, batch["view"]))
            errors = ((predict(model.params, batch["x"]) - target) ** 2).sum(-1)
            return js.Mean(errors.sum(), errors.size)

    Source:
      Tarvainen and Valpola 2017, "Mean teachers are better role models", section 2.
    """

    params: PyTree
    decay: Decay

    def __init__(self, params: PyTree, decay: Decay):
        check_decay("Average", decay)
        self.params, self.decay = jax.tree.map(_as_average, params), decay

    def __repr__(self) -> str:
        return f"Average({self.params!r}, decay={self.decay!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, PyTree]], Decay]:
        return ((jax.tree_util.GetAttrKey("params"), self.params),), self.decay

    @classmethod
    def tree_unflatten(cls, decay: Decay, children: tuple[PyTree]) -> Average:
        # Without __init__: as a pytree it may hold shapes, placements or anything else.
        made = object.__new__(cls)
        (made.params,), made.decay = children, decay
        return made

    def over(self, params: PyTree) -> Average:
        """Return an `Average` with the same decay and another tree of averages, `params`."""
        return Average.tree_unflatten(self.decay, (params,))

    def next(self, params: PyTree, step: jax.Array) -> Average:
        """Return the `Average` after a training step: decay * average + (1 - decay) * params, elementwise.

        Args:
          params: the parameters after the step, in the form of the average: both stored sharded, or both not. The tree
            may have further parameters.
          step: the index of the step, from 0 on.
        """
        return self.over(blend(self.params, find_averaged(params, self.params), self.decay, step))


def is_average(x: Any) -> bool:
    """Return whether a node of a tree is an `Average`."""
    return isinstance(x, Average)


def find_averaged(params: PyTree, averaged: PyTree, what: str = "") -> PyTree:
    """Select the leaves of `params` that an average holds: the leaves at the same paths.

    For an average of {"encoder": w} this is {"encoder": params["encoder"]}.

    Args:
      params: a tree with a leaf for each parameter, such as its array or its placement.
      averaged: the tree in an `Average`.
      what: where the average is, such as " at teacher", for the error message.

    Raises:
      ValueError: no parameter has the path of some array of the average; the message lists these paths.
    """
    known = dict(jax.tree_util.tree_leaves_with_path(params))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(averaged)]
    raise_all(
        (path_str(path) for path in paths if path not in known),
        ValueError,
        f"js.Average{what} must hold parameters under their own paths, such as js.Average(params, 0.99) or "
        'js.Average({"encoder": params["encoder"]}, 0.99); no parameter has the path',
    )
    return jax.tree.unflatten(jax.tree.structure(averaged), [known[path] for path in paths])


def average_dtype(x: Any) -> Any:
    """Return the dtype in which a parameter is averaged: f32 for bf16 and f16, in which small changes would be lost."""
    return jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype


def check_decay(name: str, decay: Decay | jax.Array) -> None:
    """Raise ValueError if a decay is a number outside [0, 1]; schedules and arrays may be traced, and are not checked.

    Args:
      name: the name of the public function or class, for the message.
      decay: the decay.
    """
    if not callable(decay) and not isinstance(decay, jax.Array) and not 0 <= decay <= 1:
        raise ValueError(f"{name}: decay must lie between 0 and 1, got {decay}; 0.999 averages about 1000 steps")


def blend(average: PyTree, params: PyTree, decay: Decay | jax.Array, step: Any) -> PyTree:
    """Return `decay * average + (1 - decay) * params`, each array in the dtype of `average`; integers are copied.

    Args:
      average: the average before the step.
      params: the parameters after the step, a tree like `average`.
      decay: a number, an array of shape [], or a schedule.
      step: the index of the step, from 0 on; only a schedule reads it.
    """
    number = decay(step) if callable(decay) else decay

    def blend_array(old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(old.dtype, jnp.inexact):
            return new
        # In this form the average of two equal numbers is exactly that number, without a rounding error.
        moved: jax.Array = old + (1 - number) * (new.astype(old.dtype) - old)
        return moved.astype(old.dtype)

    return jax.tree.map(blend_array, average, params)


def _as_average(x: Any) -> jax.Array:
    return jnp.array(x, average_dtype(jnp.asarray(x)))
