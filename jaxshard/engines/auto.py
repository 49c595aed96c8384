"""The automatic engine: global-view code in which the compiler inserts the collectives.

The loss runs once, on global arrays. Weights and gradients move by sharding constraints: a weight is constrained first
to its stored sharding and then to its sharding in use, between which the compiler inserts an all-gather; a gradient is
constrained to its stored sharding, for which the compiler inserts a reduce-scatter or an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.adapt.objective import Objective
from jaxshard.adapt.remat import RematPolicy
from jaxshard.core.keys import row_stride
from jaxshard.core.layout import Layout, select
from jaxshard.core.loss import Loss
from jaxshard.core.mesh import mesh_inside
from jaxshard.core.placement import Placement, spec_entry
from jaxshard.core.tree import map_with_path
from jaxshard.core.types import PyTree
from jaxshard.engines.accumulate import accumulate
from jaxshard.engines.compiler_options import Options
from jaxshard.engines.context import constrain_batch, position_entries
from jaxshard.engines.counted_rows import has_doubtful_mean, make_mean_check
from jaxshard.engines.engine import (
    Engine,
    Outcome,
    Precision,
    Scatter,
    ValueAndGrad,
    WholeModelEngine,
    precision_dtypes,
)
from jaxshard.engines.just_in_time import MakeMove, Move, cast_floats
from jaxshard.engines.part import Cut, Part
from jaxshard.engines.state_rules import Sharing, StateRules, find_state_rules, trace_state_rules
from jaxshard.engines.wide_sums import sum_in, widen_sums


@dataclass(frozen=True)
class Auto(WholeModelEngine):
    """The engine of `js.auto`: the compiler chooses the collectives, and the loss sees the global batch."""

    @property
    def compiler_chooses(self) -> bool:
        """Return True: under `js.auto` the compiler inserts the collectives."""
        return True

    @property
    def shows_whole_batch(self) -> bool:
        """True if the loss sees the global batch at once, which it does unless there are micro-batches."""
        return self.microbatches == 1

    def manual_axes(self, layout: Layout) -> frozenset[str]:
        """Return an empty set: no mesh axis is manual, since the loss is a global-view program."""
        return frozenset()

    def state_rules(self, objective: Objective, layout: Layout, batch: PyTree) -> StateRules | None:
        """Return the rules that combine the model states of several micro-batches; None for a single micro-batch."""
        if self.microbatches == 1:
            return None
        return trace_state_rules(partial(self._value_and_grad, objective, layout), layout, batch)

    def value_and_grad(self, objective: Objective, layout: Layout) -> ValueAndGrad:
        """Make the function that computes the loss `objective` and its gradient in global-view code.

        For its signature see `ValueAndGrad`.
        """
        return widen_sums(self._value_and_grad(objective, layout, lambda rules: None))

    def _value_and_grad(
        self, objective: Objective, layout: Layout, report: Callable[[StateRules], None]
    ) -> ValueAndGrad:
        """Make the result of `value_and_grad`. When traced, it calls `report` with the rules for the model's state."""
        call = self.make_call(objective, layout, make_move(layout, self))
        check_means = make_mean_check(
            layout, objective.loss_fn, self.microbatches, frozenset(), compute_dtype=self.compute_dtype
        )

        def loss_and_grads(
            params: PyTree, state: PyTree, batch: PyTree, key: jax.Array, residuals: PyTree = ()
        ) -> tuple[Outcome, PyTree]:
            del residuals  # this engine has none
            given = batch
            doubts: list[bool] = []
            batch = constrain_batch(layout, objective.known, batch)
            mask = layout.rows_mask(batch)
            cut = Cut(batch, mask, *_cut_rows(layout, select(mask, batch), self.microbatches))

            def loss_of(sinks: PyTree, params: PyTree, state: PyTree, batch: PyTree, row: Any) -> Loss:
                with row_stride(self.microbatches):
                    return call(params, sinks, state, batch, key, row)

            def read(part: Part) -> StateRules:
                doubts.append(has_doubtful_mean(part.program, part.loss, part.rows(mask)))
                rules = find_state_rules(part, Sharing.of(self, layout, mask))
                report(rules)
                return rules

            sinks = _sinks(layout, self.scatter)
            outcome, grads, rules = accumulate(
                loss_of, sinks, params, state, cut, lambda x: x, None if self.microbatches == 1 else read
            )
            if any(doubts):
                check_means(given)
            if rules is not None:
                new_state = rules.new_state(state, rules.combine(outcome.state, self.microbatches, ()))
                outcome = outcome._replace(state=new_state)
            if self.scatter == "end":

                def finish(grad: Placement, x: jax.Array) -> jax.Array:
                    stored = grad.view.apply(cast_floats(x, self.reduce_dtype))
                    return constrain(layout, stored, grad.store).astype(x.dtype)

                grads = jax.tree.map(finish, layout.grads, grads)
            return outcome, grads

        return loss_and_grads


def auto(
    *,
    microbatches: int = 1,
    scatter: Scatter = "each",
    precision: Precision | None = None,
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
    remat: RematPolicy | None = None,
    units: Sequence[type] = (),
    options: Options | None = None,
) -> Auto:
    """Make the engine in which the compiler chooses the collectives, with exactly the semantics of one device.

    The loss sees the global batch, so batch statistics, capacity limits and the like are computed over all rows. It may
    return a scalar, a `js.Mean` or a `js.Loss`. Every weight is constrained to the sharding in its placement's `use`,
    every gradient to `store`.

    Args:
      microbatches: the number of micro-batches, which are computed one after another and whose gradients are added.
        Micro-batch j has every `microbatches`-th row from row j on, on any mesh. Needs a loss with a `js.Mean`.
      scatter: constrain the gradient of each micro-batch ("each", least memory) or their sum once ("end", least
        traffic).
      precision: "bf16" for mixed precision: parameters and optimizer state keep their dtype (f32), weights are cast to
        bf16 before they are gathered, and gradients are reduced in bf16. A `reduce_dtype` overrides the latter
        (jnp.float32 keeps sums in f32); another `compute_dtype` is refused.
      compute_dtype: the dtype to which floating weights are cast before they are gathered; None leaves them.
      reduce_dtype: the dtype in which gradients are reduced; None takes the parameter's.
      remat: the activations that the forward pass of a block or unit saves; as in `js.explicit`.
      units: classes of modules that gather their own parameters; as in `js.explicit`.
      options: compiler options by name: {"xla_...": True}. They override the options that the engine sets for the chips
        of the mesh, which `print(engine)` shows; the value None removes one. The compiler itself refuses a name that
        it does not know.

    Raises:
      ValueError, TypeError: an argument has another value or type; the message names it. With micro-batches a loss that
        is no `js.Mean` is refused when the step is traced.

    Example:
          step = js.make_step(loss_fn, tx, layout, engine=js.auto(microbatches=4, precision="bf16"))
    """
    dtypes = precision_dtypes(precision, compute_dtype, reduce_dtype)
    return Auto(microbatches, scatter, *dtypes, remat, units, options=options or {})


def make_move(layout: Layout, engine: Engine) -> MakeMove:
    """Return a function that makes the `Move` of one weight, which gathers the weight and reduces its gradient.

    Under `js.auto` both are sharding constraints, for which the compiler inserts the collectives. A weight is
    constrained to the sharding in its placement's `use`, a gradient to the sharding in its placement's `store`.
    """

    # The compiler decides the order of a cast and an all-gather. A constraint to the stored sharding after the cast
    # forces the gather to come after it, in the smaller dtype.

    def make(param: Placement, grad: Placement | None) -> Move:
        def gather(stored: jax.Array) -> jax.Array:
            stored = constrain(layout, cast_floats(stored, engine.compute_dtype), param.store)
            return constrain(layout, param.view.invert(stored), param.use)

        def reduce(cotangent: jax.Array) -> jax.Array:
            assert grad is not None
            dtype = engine.reduce_dtype or cotangent.dtype
            if engine.scatter == "end":  # micro-batches are added in the parameter's dtype
                return sum_in(cotangent, jnp.promote_types(dtype, cotangent.dtype))
            return constrain(layout, grad.view.apply(sum_in(cotangent, dtype)), grad.store)

        return Move(gather, reduce, engine.reduced_dtype)

    return make


def constrain(layout: Layout, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrain an array to the sharding `spec` on the layout's mesh.

    The axes of `spec` must divide the dimensions of `x`. They do if `x` was padded for storage.
    """
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(mesh_inside(layout.mesh), spec))
    return constrained


def _sinks(layout: Layout, scatter: Scatter) -> PyTree:
    """Make zeros with the shapes of the gradients; the loss is differentiated with respect to them.

    With scatter="each" they have the shapes and shardings of the stored gradients. With scatter="end" they have the
    logical shapes and no sharding constraint, since gradients are reduced only after all micro-batches. Frozen
    parameters have None.
    """

    def sink(x: Any, grad: Placement | None) -> jax.Array | None:
        if grad is None:
            return None
        if scatter == "end":
            return jnp.zeros(grad.view.logical, x.dtype)
        return constrain(layout, jnp.zeros(grad.view.stored, x.dtype), grad.store)

    return jax.tree.map(sink, layout.shapes.params, layout.grads)


def _cut_rows(layout: Layout, batch: PyTree, count: int) -> tuple[PyTree, jax.Array]:
    """Cut the batch into `count` micro-batches without communication; micro-batch j has the rows j, j + count, ...

    Returns:
      (the batch as arrays [micro-batches, rows, ...], the index in the batch of each micro-batch's first row).
    """

    def split(path: Any, x: jax.Array) -> jax.Array:
        turns = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        spec = PartitionSpec(None, spec_entry(layout.batch_axes), *position_entries(layout, path, x.ndim)[1:])
        return constrain(layout, turns, spec)

    return map_with_path(split, batch), jnp.arange(count)
