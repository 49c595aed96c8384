"""Extra arguments of an optimizer's update: the loss (`value`), the gradient (`grad`), the loss function (`value_fn`).

A step finds out by tracing which of these arguments an optax transform uses, and computes no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.jaxpr import Program, needed_equations
from jaxshard.core.transform import as_transform
from jaxshard.core.types import PyTree

_GIVEN = (("value", "grad", "value_fn"), ("value", "grad"), ("value",), ())
"""The sets of extra arguments to try, the largest first, since a transform may raise for arguments it does not know."""

LossAt = Callable[[PyTree], tuple[jax.Array, PyTree]]
"""`loss_at(parameters) -> (loss, gradients)` for the step's batch, in the shapes in which the optimizer has them."""


class ExtraArgs(NamedTuple):
    """The extra arguments that an optimizer's update uses.

    Attributes:
      names: the names of the arguments; empty if the update uses none.
      uses_loss: True if the update calls the loss function (`value_fn`), as a line search does.
    """

    names: tuple[str, ...] = ()
    uses_loss: bool = False

    def make(self, grads: PyTree, loss: jax.Array, loss_at: LossAt) -> dict[str, Any]:
        """Return {name: value} of the arguments, made from this step's loss and gradients.

        `loss_at(parameters)` computes (loss, gradients) at other parameters, for `value_fn`.
        """
        made = {"value": loss, "grad": grads, "value_fn": _make_value_fn(loss_at)}
        return {name: made[name] for name in self.names}

    def fill_in(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return a transform that calls `tx` with placeholders for the extra arguments.

        Proofs that read the jaxpr of an update trace this transform. The placeholder for the loss function sums the
        squares of all parameters, since a loss depends on all of them.
        """
        if not self.names:
            return tx

        def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
            extra = self.make(grads, jnp.float32(0.7), _stand_in)
            updated: tuple[PyTree, PyTree] = tx.update(grads, state, params, **extra)
            return updated

        return optax.GradientTransformation(tx.init, update)


def find_extra_args(tx: optax.GradientTransformation, params: PyTree) -> ExtraArgs:
    """Find the extra arguments that the update of a transform uses.

    Args:
      tx: an optax transform. If it needs other arguments than value, grad and value_fn, the result is empty, and
        tracing the step raises optax's error.
      params: the trained parameters, which may be abstract.
    """
    # Not by its class: `optax.MultiSteps` is none of optax's transforms, and takes extra arguments.
    parameters = inspect.signature(tx.update).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD or p.name in _GIVEN[0] for p in parameters):
        return ExtraArgs()
    state = jax.eval_shape(tx.init, params)
    for names in _GIVEN:
        asked: list[PyTree] = []

        def loss_at(at: PyTree, asked: list[PyTree] = asked) -> tuple[jax.Array, PyTree]:
            asked.append(at)
            return _stand_in(at)

        def update(grads: PyTree, state: PyTree, params: PyTree, value: jax.Array, grad: PyTree) -> PyTree:
            extra = ExtraArgs(names).make(grad, value, loss_at)  # noqa: B023, traced at once
            return tx.update(grads, state, params, **extra)

        try:
            scalar = jax.ShapeDtypeStruct((), jnp.float32)
            program = Program.trace(update, params, state, params, scalar, params)
        except (AttributeError, NameError, TypeError, ValueError):
            continue
        _, used = needed_equations(program.eqns, jax.tree.leaves(program.out), set())
        uses = asked or not used.isdisjoint(jax.tree.leaves(program.args[3:]))
        return ExtraArgs(names if uses else (), bool(asked))
    return ExtraArgs()


def take_fast_gradients(tx: optax.GradientTransformation, params: PyTree) -> optax.GradientTransformation:
    """Wrap `optax.lookahead` so that its update takes gradients of both the fast and the slow parameters.

    A step computes the gradients of all parameters, but the update of `optax.lookahead` itself takes only the gradients
    of the fast parameters.

    Args:
      tx: an optax transform; returned unchanged unless its parameters are an `optax.LookaheadParams`.
      params: the trained parameters, which may be abstract.

    Raises:
      TypeError: `tx` is a lookahead, and the parameters are no `optax.LookaheadParams`.
    """
    if not isinstance(params, optax.LookaheadParams):
        _refuse_lookahead(tx, params)
        return tx
    extended = as_transform(tx)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        updated: tuple[PyTree, PyTree] = extended.update(grads.fast, state, params, **extra)
        return updated

    try:
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    except (AttributeError, TypeError, ValueError):
        return optax.GradientTransformationExtraArgs(tx.init, update)
    return tx


def _refuse_lookahead(tx: optax.GradientTransformation, params: PyTree) -> None:
    def is_lookahead(x: Any) -> bool:
        return isinstance(x, optax.LookaheadState)

    # Optax's own `init` takes other parameters with a warning, and `update` then fails for want of an attribute.
    if any(map(is_lookahead, jax.tree.leaves(jax.eval_shape(tx.init, params), is_leaf=is_lookahead))):
        raise TypeError(
            f"optax.lookahead trains an optax.LookaheadParams, and the parameters are a {type(params).__name__}: let "
            "init_fn return optax.LookaheadParams.init_synced(params), and compute the loss of params.fast"
        )


def _make_value_fn(loss_at: LossAt) -> Callable[[PyTree], jax.Array]:
    """Make a loss function of parameters for line searches. It has a first derivative, in forward and reverse mode."""

    # A custom derivative: the engine computes value and gradient together, with its own collectives.
    @jax.custom_jvp
    def value_fn(params: PyTree) -> jax.Array:
        return loss_at(params)[0]

    def differentiate(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[jax.Array, jax.Array]:
        value, grads = loss_at(*primals)
        slopes = [jnp.sum(g * t, dtype=value.dtype) for g, t in zip(jax.tree.leaves(grads), jax.tree.leaves(*tangents))]
        return value, sum(slopes, start=jnp.zeros((), value.dtype))

    value_fn.defjvp(differentiate)
    return value_fn


def _stand_in(params: PyTree) -> tuple[jax.Array, PyTree]:
    leaves = jax.tree.leaves(params)
    return sum((jnp.sum(jnp.square(x), dtype=jnp.float32) for x in leaves), start=jnp.float32(0)), params
