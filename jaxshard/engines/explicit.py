"""The explicit engine: `shard_map` over the batch and shard axes, with exactly the collectives of the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.adapt.objective import Objective
from jaxshard.adapt.remat import RematPolicy
from jaxshard.core.collectives import NATIVE, Sums, all_max, sum_scalar
from jaxshard.core.layout import Layout, select
from jaxshard.core.loss import Loss, Max, Mean, Sum, sum_dtype
from jaxshard.core.mesh import axis_size
from jaxshard.core.ordered_sums import ORDERED
from jaxshard.core.placement import Placement, axes_of, only_axes
from jaxshard.core.tree import row_count
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.core.wire import Format
from jaxshard.engines.accumulate import accumulate
from jaxshard.engines.compiler_options import Options
from jaxshard.engines.context import split_batch
from jaxshard.engines.counted_rows import has_doubtful_mean, make_mean_check
from jaxshard.engines.engine import (
    Outcome,
    Precision,
    Reduction,
    Scatter,
    ValueAndGrad,
    WholeModelEngine,
    precision_dtypes,
)
from jaxshard.engines.manual import (
    on_each_device,
    row_specs,
    stored_specs,
    used_shape,
    used_specs,
)
from jaxshard.engines.moves import make_move, place_residual, reduce_all
from jaxshard.engines.part import Cut, Part
from jaxshard.engines.positionwise import make_position_check
from jaxshard.engines.rounded_weights import round_stored
from jaxshard.engines.state_rules import Sharing, StateRules, find_state_rules, trace_state_rules


@dataclass(frozen=True)
class Explicit(WholeModelEngine):
    """The engine of `js.explicit`, which issues exactly the collectives of the layout.

    Args:
      reduction: sums over devices in the order that the hardware chooses ("native"), or in a fixed order ("ordered").
    """

    reduction: Reduction = "native"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.reduce_dtype, Format) and self.reduction != "native":
            raise ValueError(
                f"reduction={self.reduction!r} orders the native sums, and reduce_dtype={self.reduce_dtype.name} "
                "has a fixed order by itself; leave one of them out"
            )
        if self.feedback and self.scatter != "end":
            raise ValueError(
                "reduce_dtype: with feedback each gradient is reduced once a step, after all micro-batches; write "
                "js.explicit(scatter='end', ...), or leave feedback out"
            )
        if self.reduction not in ("native", "ordered"):
            raise ValueError(
                f"reduction must be 'native' or 'ordered', got {self.reduction!r}; js.parity compares a step with that "
                "of one device"
            )

    def manual_axes(self, layout: Layout) -> frozenset[str]:
        """Return the mesh axes over which the loss runs once per device, in a `shard_map`."""
        return layout.manual_axes

    def sums(self, layout: Layout) -> Sums:
        """Return the functions that sum over devices, in the hardware's or in a fixed order, as `reduction` says.

        Raises:
          ValueError: reduction="ordered" for a layout with sums whose order the compiler chooses: over tensor axes,
            over a pipeline, or of the keys and values that `js.context` gathers.
        """
        if self.reduction == "native":
            return NATIVE
        axes = sorted({axis for p in jax.tree.leaves(layout.params) for axis in axes_of(p.use)})
        if axes or layout.pipeline is not None:
            what = f"a pipeline over {layout.pipeline.axis!r}" if layout.pipeline else f"weights used split over {axes}"
            raise ValueError(
                f"reduction={self.reduction!r} orders the sums over the axes {list(layout.sum_axes)}, but the layout "
                f"has {what}, whose sums the compiler orders; use reduction='native', or data axes alone"
            )
        if layout.context is not None and layout.context.how in ("gather", "usp"):
            raise ValueError(
                f"reduction={self.reduction!r} orders the sums over the axes {list(layout.sum_axes)}, but js.context "
                "gathers keys and values, whose gradients are summed in any order; use reduction='native', or "
                "js.context(..., how='ulysses')"
            )
        return ORDERED

    def describe(self) -> dict[str, Any]:
        """Return the engine's name and settings in a dict, for commands to print or write as JSON."""
        return super().describe() | {"reduction": self.reduction}

    def residuals(self, layout: Layout) -> PyTree:
        """Return the placements of the gradients' rounding errors; () unless `reduce_dtype` has feedback.

        Each rounding error is one f32 array per device, with the shape of the device's gradient before its reduction.
        """
        if not self.feedback:
            return ()
        return jax.tree.map(partial(place_residual, layout), layout.params, layout.grads)

    def state_rules(self, objective: Objective, layout: Layout, batch: PyTree) -> StateRules:
        """Return the rules that combine the model states of all devices and micro-batches."""
        return trace_state_rules(partial(self._value_and_grad, objective, layout), layout, batch)

    def value_and_grad(self, objective: Objective, layout: Layout) -> ValueAndGrad:
        """Make the function that computes the loss `objective` and its gradient, each device on its own rows.

        For its signature see `ValueAndGrad`.
        """
        return self._value_and_grad(objective, layout, lambda rules: None)

    def _value_and_grad(
        self, objective: Objective, layout: Layout, report: Callable[[StateRules], None]
    ) -> ValueAndGrad:
        """Make the result of `value_and_grad`. When traced, it calls `report` with the rules for the model's state."""
        axes, sums = layout.sum_axes, self.sums(layout)
        manual = self.manual_axes(layout)
        call = self.make_call(objective, layout, make_move(layout, self))
        check_positions = make_position_check(
            layout,
            objective.loss_fn,
            objective.known,
            manual,
            microbatches=self.microbatches,
            compute_dtype=self.compute_dtype,
        )
        parts = self.microbatches * axis_size(layout.mesh, layout.batch_axes)
        check_means = make_mean_check(layout, objective.loss_fn, parts, manual, compute_dtype=self.compute_dtype)

        placed = self.residuals(layout)

        def on_device(
            doubts: list[bool], params: PyTree, state: PyTree, batch: PyTree, key: jax.Array, residuals: PyTree
        ) -> tuple[Outcome, PyTree]:
            if self.gathers_rounded:
                params = round_stored(layout, params)
            batch = split_batch(layout, objective.known, batch)
            mask = layout.rows_mask(batch)
            cut = Cut(batch, mask, *_cut_rows(select(mask, batch), self.microbatches, layout.batch_axes))

            def loss_of(sinks: PyTree, params: PyTree, state: PyTree, batch: PyTree, row: Any) -> Loss:
                return _check_mean(call(params, sinks, state, batch, key, row))

            def read(part: Part) -> StateRules:
                doubts.append(has_doubtful_mean(part.program, part.loss, part.rows(mask)))
                rules = find_state_rules(part, Sharing.of(self, layout, mask))
                report(rules)
                return rules

            sinks = _sinks(layout, self.scatter)
            outcome, grads, rules = accumulate(
                loss_of, sinks, params, state, cut, lambda x: sum_scalar(x, axes, sums), read
            )
            assert rules is not None, "the rows of one device are a part"
            if self.scatter == "end":
                grads, residuals = reduce_all(layout, self, grads, residuals)
            metrics = {name: combine_over(metric, axes, sums) for name, metric in outcome.metrics.items()}
            value = sum_scalar(outcome.value, axes, sums)
            new_state = rules.new_state(state, rules.combine(outcome.state, self.microbatches, axes, sums))
            return Outcome(value, metrics, new_state, residuals), grads

        def loss_and_grads(
            params: PyTree, state: PyTree, batch: PyTree, key: jax.Array, residuals: PyTree = ()
        ) -> tuple[Outcome, PyTree]:
            check_positions(batch)
            if not jax.tree.leaves(residuals):
                residuals = jax.tree.map(lambda one: jnp.zeros(one.view.stored), placed)
            whole, kept = PartitionSpec(), stored_specs(placed, manual)
            states = used_specs(layout.state, manual)
            in_specs = stored_specs(layout.params, manual), states, row_specs(layout, batch), whole, kept
            outcome: Any = Outcome  # with specs in place of arrays
            out_specs = outcome(whole, whole, states, kept), stored_specs(layout.grads, manual)
            doubts: list[bool] = []
            run = on_each_device(partial(on_device, doubts), layout, manual, in_specs=in_specs, out_specs=out_specs)
            results: tuple[Outcome, PyTree] = run(params, state, batch, key, residuals)
            if any(doubts):
                check_means(batch)
            return results

        return loss_and_grads


def explicit(
    *,
    microbatches: int = 1,
    scatter: Scatter = "each",
    precision: Precision | None = None,
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
    gather_dtype: Any = None,
    remat: RematPolicy | None = None,
    units: Sequence[type] = (),
    reduction: Reduction = "native",
    options: Options | None = None,
) -> Explicit:
    """Make the engine that issues exactly the collectives of the layout.

    The loss runs once per device, in a `jax.shard_map`, on that device's rows [batch / devices, ...] and on gathered
    weights of their logical shape. Choosing this engine asserts that the rows of a batch are independent and that the
    loss returns a `js.Mean`, alone or in a `js.Loss`; `js.parity` checks it.

    Collectives of a step, for each parameter:

    - an all-gather just before use, over the axes that split the stored parameter (its `store`) but not the weight in
      use (its `use`). It is issued in the forward pass, and for blocks of a `Stacked` model and for units again in the
      backward pass;
    - a reduce-scatter of its gradient over the batch axes in the gradient's `store`, then an all-reduce of the shard
      over all other batch axes but those in its `use`. With scatter="each" both are issued for every micro-batch.

    Besides, there is an all-reduce of a few scalars (the loss, its weights and the metrics), and an all-reduce of each
    array of the model's state that is not proven equal on all devices (see `js.Loss`).

    Args:
      microbatches: the number of micro-batches, which are computed one after another and whose gradients are added. A
        device's micro-batch j has its rows from j * rows / microbatches on.
      scatter: reduce the gradient of each micro-batch ("each", least memory) or their sum once ("end", least traffic).
      precision: "bf16" for mixed precision: parameters and optimizer state keep their dtype (f32), weights are cast to
        bf16 before they are gathered, and gradients are reduced in bf16. A `reduce_dtype` overrides the latter
        (jnp.float32 keeps sums in f32); another `compute_dtype` is refused.
      compute_dtype: the dtype to which floating weights are cast before they are gathered; None leaves them.
      reduce_dtype: the dtype in which gradients are reduced; None takes the parameter's dtype. `js.wire.int8()` and
        `js.wire.fp8()` send 8-bit numbers in blocks with an f32 scale, which are added in f32: an all-to-all replaces
        a reduce-scatter, an all-to-all and an all-gather replace an all-reduce, one mesh axis after another. Formats of
        your own (`js.wire.Format`) do the same. With `feedback=True` (and scatter="end") the rounding error is added in
        the next step: `run.residuals` holds an f32 array of the size of a device's share (under FSDP the size of the
        full parameter) on each device.
      gather_dtype: the dtype, or format of `js.wire`, in which weights are gathered just before use.
        They are then cast to `compute_dtype`, or the parameter's dtype. The gradient is computed at the rounded
        weights.
        "quant" is for models with `quant=`, and gathers the weights that they round in these 8 bits, rounded once a
        step. Products round them again to the same numbers, but in bf16 4 to 12 % of int8 numbers move by one or two.
        Rules of qwix must round weights as `js.models.quant_rules` does.
        None gathers weights in the dtype of computation.
      remat: the activations that the forward pass of a block of a `Stacked` model, or of a unit, saves: "nothing",
        "dots", "everything", a function of `jax.checkpoint_policies`, or {name of an activation: what to do with it},
        such as {"attention_out": "save", "mlp_hidden": "offload"}. "save" keeps it on the device, "offload" moves it to
        the host's memory and back, "remat" computes it again, like all activations that are not named. The names in
        `js.models` are in their docstrings; your own model gives names by `jax.ad_checkpoint.checkpoint_name`;
        "block_in" is the input of a block. Gathered weights are never saved. The default is the model's own choice
        (`js.models.make`), or else "everything".
      units: classes of modules of a `js.linen` or `js.nnx` model, such as [Block]. The parameters of a module of these
        classes are gathered just before it runs, freed after it, and gathered again in the backward pass. All other
        parameters are gathered at once. A unit inside another unit runs with the outer unit; a class that only runs
        inside other units is refused. Peak memory falls most with remat="nothing", which keeps the activations of only
        one unit.
      reduction: "ordered" adds over devices in a fixed order, so that losses and parameters are the same bits for every
        number of processes; "native" leaves the order to the hardware. Ordered, an all-to-all replaces a
        reduce-scatter, and an all-to-all and an all-gather replace an all-reduce: the same bytes, but each result is
        as large as the unreduced gradient until it is added. Not together with tensor axes; the optimizer must be
        elementwise except for sums over all parameters (a global norm). Sums by axis name in the loss itself stay
        native.
      options: compiler options by name: {"xla_...": True}. They override the options that the engine sets for the chips
        of the mesh, which `print(engine)` shows; the value None removes one. The compiler itself refuses a name that
        it does not know.

    Raises:
      ValueError, TypeError: an argument has another value or type; the message names it. A loss that is no `js.Mean` is
        refused when the step is traced.

    Source:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5, for
      the gathers and reductions; Zhao et al. 2023, "PyTorch FSDP", section 3, for units.

    Example:
          engine = js.explicit(microbatches=4, remat="nothing", precision="bf16")
          step = js.make_step(loss_fn, tx, layout, engine=engine)
    """
    dtypes = precision_dtypes(precision, compute_dtype, reduce_dtype)
    return Explicit(
        microbatches,
        scatter,
        *dtypes,
        remat,
        units,
        reduction,
        gather_dtype=gather_dtype,
        options=options or {},
    )


def _sinks(layout: Layout, scatter: Scatter) -> PyTree:
    """Make zeros with the shapes of this device's gradients; its loss is differentiated with respect to them.

    With scatter="each" they have the shapes of this device's shards of the stored gradients. With scatter="end" they
    have the shapes of the weights in use, since gradients are reduced only after all micro-batches. Frozen parameters
    have None.
    """
    manual = layout.manual_axes

    def sink(x: Any, param: Placement, grad: Placement | None) -> jax.Array | None:
        if grad is None:
            return None
        if scatter == "end":
            return jnp.zeros(used_shape(layout, param), x.dtype)
        # Inside shard_map the shape is that of a shard over manual axes, but global over automatic axes.
        mine = replace(grad, store=only_axes(grad.store, manual))
        return jnp.zeros(mine.shard_shape(layout.mesh), x.dtype)

    return jax.tree.map(sink, layout.shapes.params, layout.params, layout.grads)


def _cut_rows(batch: PyTree, count: int, axes: tuple[str, ...]) -> tuple[PyTree, jax.Array]:
    """Cut this device's rows into `count` micro-batches of consecutive rows; `axes` are the mesh axes that split rows.

    Returns:
      (the arrays as [micro-batches, rows, ...], the index in the global batch of each micro-batch's first row).
    """
    rows = row_count(batch)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    first = lax.axis_index(axes) * rows if axes else 0
    return jax.tree.map(split, batch), first + jnp.arange(count) * (rows // count)


def _check_mean(loss: Loss) -> Loss:
    if not isinstance(loss.value, Mean):
        raise Unsuited(
            "js.explicit needs a loss that says its weight; return js.Mean(total, weight), summed over devices and "
            "divided once; a scalar is opaque and runs under js.auto()"
        )
    return loss


def combine_over(metric: Mean | Sum | Max, axes: tuple[str, ...], sums: Sums = NATIVE) -> Mean | Sum | Max:
    """Combine a metric of one device's rows into the metric of all rows, by an all-reduce of each of its arrays."""
    if isinstance(metric, Max):
        return Max(all_max(metric.value, axes))
    combined: Mean | Sum = jax.tree.map(lambda x: sum_scalar(x.astype(sum_dtype(x.dtype)), axes, sums), metric)
    return combined
