"""Embedding and head: each micro-batch is computed by one device of the ring, so that no device works in vain.

They belong to no stage. All devices run the same program, so if device 0 ran the embedding in a tick, the others would
compute it too, on meaningless data. Instead embedding and head run on up to p micro-batches at a time
(`schedules/runs.py`), each device on another micro-batch. With p = 2 and the run of micro-batches (0, 1):

    device 0:  x0 = embed(rows of 0) ───────────────> inbox of device 0: x0, x1 ──> stages ──> ...
    device 1:  x1 = embed(rows of 1) ── permuted ───>

    ... ──> outbox of device 1: y0, y1 ── permuted ──> device 0: loss and dy of 0 ── permuted ──> outbox of device 1
                                                       device 1: loss and dy of 1 ─────────────>

(`tick_loop.py` moves the values.) The loss is a sum over micro-batches divided by a weight that is also a sum over all
micro-batches, and its gradient is needed before the last micro-batch's forward. So the weights of the loss are summed
first, and must not depend on activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.adapt.stacked import evaluation
from jaxshard.core.jaxpr import Program, eliminate_dead_code, results_alone
from jaxshard.core.loss import Loss, Max, Mean, Sum, as_loss, combine, lowest_value, sum_dtype, weighted_sum
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.pipeline.floats import fill, floats_of

Metrics = dict[str, Mean | Sum | Max]


class Totals(NamedTuple):
    """This device's share of the loss, the metrics and the gradients of embedding and head, summed over micro-batches.

    Attributes:
      value: the loss.
      metrics: the metrics by name.
      grads: an array per trained weight outside the blocks, None for the others.
    """

    value: jax.Array
    metrics: Metrics
    grads: PyTree


@dataclass(frozen=True)
class EmbedAndHead:
    """The embedding and head of a pipelined model, as functions of a micro-batch, on gathered weights.

    Attributes:
      embed: `embed(params, rows, key) -> x`.
      head: `head(params, x, rows, key) -> js.Mean | js.Loss`.
      params: the weights outside the blocks.
      trained: for each of these weights True if it is trained.
      rows_of: `rows_of(microbatch) -> rows` of the batch.
      key_of: `key_of(call, microbatch)` returns the random key of a call: 0 for the embedding, `head_call` for the
        head.
      head_call: the number of the head's call, which follows those of the blocks.
      loss_weights: the weight of each term of the loss, summed over the global batch; () before it is known.
    """

    embed: Callable[..., PyTree]
    head: Callable[..., Mean | Loss]
    params: PyTree
    trained: PyTree
    rows_of: Callable[[jax.Array], PyTree]
    key_of: Callable[[jax.Array | int, jax.Array], Any]
    head_call: int
    loss_weights: tuple[jax.Array, ...] = ()

    def run_embed(self, microbatch: jax.Array) -> PyTree:
        """Embed a micro-batch: return the input of the first stage."""
        return self._embed(self.params, microbatch)

    def run_head(self, microbatch: jax.Array, y: PyTree, totals: Totals, active: jax.Array) -> tuple[PyTree, Totals]:
        """Compute the loss of a micro-batch and its gradients.

        Args:
          microbatch: the index of the micro-batch.
          y: the output of the last block.
          totals: the loss, metrics and gradients of earlier micro-batches. Only weights with an array in `totals.grads`
            get a gradient.
          active: if False, nothing is added to the totals.

        Returns:
          (the gradient of the loss with respect to `y`, the new totals).
        """

        def objective(own: PyTree, floats: PyTree) -> tuple[jax.Array, Loss]:
            loss = self._loss(fill(own, self.params), fill(floats, y), microbatch)
            return weighted_sum(loss.value, self.loss_weights), loss

        own = self._with_sums(totals.grads)
        value_and_grad = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (value, loss), (grads, dy) = value_and_grad(own, floats_of(y))
        value = totals.value + jnp.where(active, value, 0)
        metrics = _add_metrics(totals.metrics, loss.metrics, active)
        return fill(dy, y), Totals(value, metrics, _add_gradients(totals.grads, grads, active))

    def add_embed_gradients(self, microbatch: jax.Array, dx: PyTree, sums: PyTree, active: jax.Array) -> PyTree:
        """Compute the gradients of the embedding's weights for a micro-batch, and add them to `sums` if `active`.

        `dx` is the gradient with respect to the embedding's output. Return the new sums.
        """

        def forward(own: PyTree) -> PyTree:
            return floats_of(self._embed(fill(own, self.params), microbatch))

        _, pullback = jax.vjp(forward, self._with_sums(sums))
        (grads,) = pullback(floats_of(dx))
        return _add_gradients(sums, grads, active)

    def add_metrics(self, microbatch: jax.Array, y: PyTree, metrics: Metrics, active: jax.Array) -> Metrics:
        """Compute loss and metrics of a micro-batch from the last block's output `y`; add them if `active`.

        For evaluation only. Return the new metrics.
        """
        return _add_metrics(metrics, evaluation(self._loss(self.params, y, microbatch)), active)

    def readers(self) -> tuple[PyTree, PyTree]:
        """Return (which trained weights the embedding reads, which the head reads), two trees of booleans.

        The gradient of a weight that is not read is zero, so its accumulator need not pass through the conditional in
        which the tick loop runs embedding or head.
        """
        own = jax.tree.map(lambda x, trained: x if trained else None, self.params, self.trained)
        leaves, tree = jax.tree.flatten(own)
        zero = jnp.int32(0)

        def is_read(fn: Callable[[PyTree], Any]) -> PyTree:
            traced = jax.make_jaxpr(lambda *leaves: fn(fill(jax.tree.unflatten(tree, leaves), self.params)))(*leaves)
            return jax.tree.unflatten(tree, eliminate_dead_code(traced)[1])

        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(self.run_embed, zero))
        by_embed = is_read(lambda params: floats_of(self._embed(params, zero)))
        return by_embed, is_read(lambda params: self._loss(params, x, zero).value.totals)

    def zero_totals(self, grads: PyTree) -> Totals:
        """Return accumulators for loss, metrics and gradients; `grads` are the zeros for the gradients."""
        metrics = self.zero_metrics()
        value = metrics.pop("loss")
        return Totals(jnp.zeros((), jnp.result_type(jnp.float32, *jax.tree.leaves(value))), metrics, grads)

    def zero_metrics(self) -> Metrics:
        """Return the loss and the metrics of an empty batch."""
        zero = jnp.int32(0)
        example = jax.eval_shape(lambda: evaluation(self._loss(self.params, self.run_embed(zero), zero)))
        return {name: jax.tree.map(_nothing(metric), metric) for name, metric in example.items()}

    def trace_loss(self) -> Program:
        """Trace the loss of one micro-batch, a function of (rows, key, the last block's output).

        Raises:
          Unsuited: a weight of the loss depends on the last block's output. A pipeline needs the weights before any
            block has run.
        """
        zero = jnp.int32(0)
        x = jax.eval_shape(self.run_embed, zero)
        program = Program.trace(partial(self._loss_of_rows, self.params), *self.rows_and_key(zero), x)
        _, used = results_alone(program.closed, program.out.value.weights)
        if any(used[len(used) - len(jax.tree.leaves(x)) :]):
            raise Unsuited(
                "the weight of the loss depends on activations, but a pipeline divides by it before all forwards "
                "have run: compute the weight of js.Mean(total, weight) from the batch alone"
            )
        return program

    def rows_and_key(self, microbatch: jax.Array) -> tuple[PyTree, Any]:
        """Return (the rows, the random key) of the head's call for a micro-batch."""
        return self.rows_of(microbatch), self.key_of(self.head_call, microbatch)

    def _embed(self, params: PyTree, microbatch: jax.Array) -> PyTree:
        return self.embed(params, self.rows_of(microbatch), self.key_of(0, microbatch))

    def _loss(self, params: PyTree, x: PyTree, microbatch: jax.Array) -> Loss:
        return self._loss_of_rows(params, *self.rows_and_key(microbatch), x)

    def _loss_of_rows(self, params: PyTree, rows: PyTree, key: Any, x: PyTree) -> Loss:
        loss = as_loss(self.head(params, x, rows, key))
        if not isinstance(loss.value, Mean):
            raise Unsuited(
                "a pipeline needs a head that says its weight: return js.Mean(total, weight), summed over "
                "micro-batches and devices and divided once, instead of a scalar"
            )
        if loss.state is not None:
            raise Unsuited("the head returned js.Loss(state=...), but a js.Stacked model has no state")
        return loss

    def _with_sums(self, sums: PyTree) -> PyTree:
        """Return the weights outside the blocks, with None for weights that have no gradient accumulator in `sums`."""
        return jax.tree.map(lambda s, x: None if s is None else x, sums, self.params, is_leaf=lambda x: x is None)


def _add_gradients(sums: PyTree, grads: PyTree, active: jax.Array) -> PyTree:
    return jax.tree.map(lambda old, new: old + jnp.where(active, new, 0).astype(old.dtype), sums, grads)


def _add_metrics(totals: Metrics, metrics: Metrics, active: jax.Array) -> Metrics:
    # Selected after adding, so that a NaN of a device without a micro-batch is dropped.
    added = {name: combine(totals[name], metric) for name, metric in metrics.items()}
    before = {name: totals[name] for name in added}
    after: Metrics = jax.tree.map(lambda new, old: jnp.where(active, new, old), added, before)
    return after


def _nothing(metric: Mean | Sum | Max) -> Callable[[Any], jax.Array]:
    def of(x: Any) -> jax.Array:
        if isinstance(metric, Max):
            return jnp.full(x.shape, lowest_value(x.dtype), x.dtype)
        return jnp.zeros(x.shape, sum_dtype(x.dtype))

    return of
