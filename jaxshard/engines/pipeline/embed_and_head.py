"""The two ends of a pipeline: embedding and head, each micro-batch on one device of the ring, none on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.adapt.stacked import evaluation
from jaxshard.core.jaxpr import eliminate_dead_code
from jaxshard.core.loss import Loss, Max, Mean, Sum, as_loss, lowest, weighted_sum
from jaxshard.core.types import PyTree

Metrics = dict[str, Mean | Sum | Max]


class Totals(NamedTuple):
    """What the ends add up: this device's share of the loss, its metrics, and the gradients of the rest.

    `grads` has an array per trained parameter outside the blocks, None for the others.
    """

    value: jax.Array
    metrics: Metrics
    grads: PyTree


@dataclass(frozen=True)
class Ends:
    """Embedding and head on whole weights.

    Attributes:
      embed: `embed(rest, rows, key) -> x`.
      head: `head(rest, x, rows, key) -> Loss`.
      rest: the weights outside the blocks.
      trained: for each of them whether it is trained.
      rows_of: `rows_of(microbatch)`, the batch's rows.
      key_of: `key_of(call, microbatch)`.
      last: the number of the head's call.
      weights: the global weights of the loss's terms.
    """

    embed: Callable[..., PyTree]
    head: Callable[..., Loss]
    rest: PyTree
    trained: PyTree
    rows_of: Callable[[jax.Array], PyTree]
    key_of: Callable[[jax.Array | int, jax.Array], Any]
    last: int
    weights: tuple[jax.Array, ...] = ()

    def enter(self, microbatch: jax.Array) -> PyTree:
        """What the first stage takes in."""
        return self.embed(self.rest, self.rows_of(microbatch), self.key_of(0, microbatch))

    def leave(self, microbatch: jax.Array, y: PyTree, totals: Totals, active: jax.Array) -> tuple[PyTree, Totals]:
        """(the cotangent of the last stage's output, the totals with the micro-batch added where `active`).

        Gradients are taken of the weights that the totals have sums for.
        """
        floats, others = _parted(y)

        def objective(trained: PyTree, floats: list[Any]) -> tuple[jax.Array, Loss]:
            loss = self._loss(self._with(trained), _joined(y, floats, others), microbatch)
            return weighted_sum(loss.value, self.weights), loss

        value_and_grad = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (value, loss), (grads, cotangents) = value_and_grad(self._trained(totals.grads), floats)
        metrics = _all_added(totals.metrics, loss.metrics, active)
        totals = Totals(totals.value + jnp.where(active, value, 0), metrics, _sum(totals.grads, grads, active))
        return _joined(y, cotangents, others), totals

    def enter_grad(self, microbatch: jax.Array, dx: PyTree, sums: PyTree, active: jax.Array) -> PyTree:
        """The sums with the embedding's gradients of the micro-batch added where `active`."""

        def forward(trained: PyTree) -> list[Any]:
            rows, key = self.rows_of(microbatch), self.key_of(0, microbatch)
            return _parted(self.embed(self._with(trained), rows, key))[0]

        _, pullback = jax.vjp(forward, self._trained(sums))
        (grads,) = pullback(_parted(dx)[0])
        return _sum(sums, grads, active)

    def used(self) -> tuple[PyTree, PyTree]:
        """For every trained weight whether embed reads it, and whether head does: elsewhere its gradient is zero."""
        trained, zero = self._trained(), jnp.int32(0)
        leaves, tree = jax.tree.flatten(trained)

        def reads(fn: Callable[[PyTree], Any]) -> PyTree:
            traced = jax.make_jaxpr(lambda *leaves: fn(self._with(jax.tree.unflatten(tree, leaves))))(*leaves)
            return jax.tree.unflatten(tree, eliminate_dead_code(traced)[1])

        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(self.enter, zero))
        embed = reads(lambda rest: _parted(self.embed(rest, self.rows_of(zero), self.key_of(0, zero)))[0])
        return embed, reads(lambda rest: self._loss(rest, x, zero).value.totals)

    def zeros(self, sums: PyTree) -> Totals:
        """Totals of nothing; `sums` are the zeros of the gradients."""
        metrics = self.no_metrics()
        value = metrics.pop("loss")
        return Totals(jnp.zeros((), jnp.result_type(jnp.float32, *jax.tree.leaves(value))), metrics, sums)

    def judge(self, microbatch: jax.Array, y: PyTree, metrics: Metrics, active: jax.Array) -> Metrics:
        """The metrics with a micro-batch's loss and metrics added where `active`; the gradient is nobody's business."""
        return _all_added(metrics, evaluation(self._loss(self.rest, y, microbatch)), active)

    def no_metrics(self) -> Metrics:
        """The loss and the metrics of no rows."""
        example = jax.eval_shape(lambda: evaluation(self._loss(self.rest, self.enter(jnp.int32(0)), jnp.int32(0))))
        return {name: jax.tree.map(_nothing(metric), metric) for name, metric in example.items()}

    def own_weights(self, microbatch: jax.Array) -> tuple[jax.Array, ...]:
        """The weights of the loss's terms on a micro-batch, which must be known before any output is.

        Raises:
          TypeError: they depend on the model's activations.
        """
        x = jax.eval_shape(self.enter, microbatch)
        leaves, tree = jax.tree.flatten(x)

        def weigh(*leaves: Any) -> tuple[jax.Array, ...]:
            return self._loss(self.rest, jax.tree.unflatten(tree, leaves), microbatch).value.weights

        traced = jax.make_jaxpr(weigh)(*leaves)
        if any(eliminate_dead_code(traced)[1][-len(leaves) :]):
            raise TypeError(
                "the weight of the loss depends on activations, but a pipeline divides by it before they are all "
                "there: compute the weight of js.Mean(total, weight) from the batch alone"
            )
        return weigh(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves))

    def _loss(self, rest: PyTree, x: PyTree, microbatch: jax.Array) -> Loss:
        loss = as_loss(self.head(rest, x, self.rows_of(microbatch), self.key_of(self.last, microbatch)))
        if not isinstance(loss.value, Mean):
            raise TypeError(
                "a pipeline needs a head that says its weight: return js.Mean(total, weight), summed over "
                "micro-batches and devices and divided once, instead of a scalar"
            )
        if loss.state is not None:
            raise TypeError("the head returned js.Loss(state=...), but a js.Stacked model has no state")
        return loss

    def _trained(self, sums: PyTree = None) -> PyTree:
        """The weights that have a sum; all that are trained without any."""
        if sums is None:
            return jax.tree.map(lambda x, own: x if own else None, self.rest, self.trained)
        return jax.tree.map(lambda total, x: None if total is None else x, sums, self.rest, is_leaf=_is_none)

    def _with(self, trained: PyTree) -> PyTree:
        """All weights, those of the given tree among them."""
        return filled(trained, self.rest)


def filled(some: PyTree, everything: PyTree) -> PyTree:
    """The leaves of `some`, and where it has None those of `everything`."""
    return jax.tree.map(lambda new, x: x if new is None else new, some, everything, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def _parted(x: PyTree) -> tuple[list[Any], list[Any]]:
    leaves = jax.tree.leaves(x)
    floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    return [a for a, f in zip(leaves, floating) if f], [a for a, f in zip(leaves, floating) if not f]


def _joined(like: PyTree, floats: list[Any], others: list[Any]) -> PyTree:
    given, rest = iter(floats), iter(others)
    return jax.tree.map(lambda x: next(given if jnp.issubdtype(x.dtype, jnp.inexact) else rest), like)


def _sum(sums: PyTree, grads: PyTree, active: jax.Array) -> PyTree:
    return jax.tree.map(lambda total, x: total + jnp.where(active, x, 0).astype(total.dtype), sums, grads)


def _all_added(totals: Metrics, metrics: Metrics, active: jax.Array) -> Metrics:
    return {name: _added(totals[name], metric, active) for name, metric in metrics.items()}


def _added(total: Any, metric: Any, active: jax.Array) -> Any:
    if isinstance(metric, Max):
        return Max(jnp.where(active, jnp.maximum(total.value, metric.value), total.value))
    return jax.tree.map(lambda a, b: a + jnp.where(active, b, 0), total, metric)


def _nothing(metric: Mean | Sum | Max) -> Callable[[Any], jax.Array]:
    def of(x: Any) -> jax.Array:
        if isinstance(metric, Max):
            return jnp.full(x.shape, lowest(x.dtype), x.dtype)
        # Many micro-batches are added up: not in less than f32.
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32) if floating else x.dtype)

    return of
