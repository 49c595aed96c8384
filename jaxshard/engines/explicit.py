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
from jaxshard.core.wire import Scaled
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
from jaxshard.engines.state_rules import Sharing, StateRules, find_state_rules, trace_step


@dataclass(frozen=True)
class Explicit(WholeModelEngine):
    """The engine of `js.explicit`, which issues exactly the collectives of the layout.

    Args:
      reduction: sums over devices in whatever order the hardware likes ("native"), or in one order ("ordered").
    """

    reduction: Reduction = "native"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.reduce_dtype, Scaled):
            if self.reduction != "native":
                raise ValueError(
                    f"reduction={self.reduction!r} orders the native sums, and reduce_dtype={self.reduce_dtype.name} "
                    "adds in one order by itself; leave one of them out"
                )
            if self.reduce_dtype.feedback and self.scatter != "end":
                raise ValueError(
                    "reduce_dtype: with feedback each gradient is reduced once a step, from its whole sum; write "
                    "js.explicit(scatter='end', ...), or leave feedback out"
                )
        if self.reduction not in ("native", "ordered"):
            raise ValueError(
                f"reduction must be 'native' or 'ordered', got {self.reduction!r}; js.parity compares a step with that "
                "of one device"
            )

    def manual_axes(self, layout: Layout) -> frozenset[str]:
        """Return the mesh axes over which the loss runs once per device."""
        return layout.manual_axes

    def sums(self, layout: Layout) -> Sums:
        """Return how shares are added over devices.

        Raises:
          ValueError: in one order, but over axes that the compiler handles.
        """
        if self.reduction == "native":
            return NATIVE
        axes = sorted({axis for p in jax.tree.leaves(layout.params) for axis in axes_of(p.use)})
        if axes or layout.pipeline is not None:
            what = f"a pipeline over {layout.pipeline.axis!r}" if layout.pipeline else f"weights used split over {axes}"
            raise ValueError(
                f"reduction={self.reduction!r} orders the sums over the axes {list(layout.sum_axes)}, but the layout "
                f"has {what}, whose sums the compiler orders as it likes; use reduction='native', or data axes alone"
            )
        if layout.context is not None and layout.context.how in ("gather", "usp"):
            raise ValueError(
                f"reduction={self.reduction!r} orders the sums over the axes {list(layout.sum_axes)}, but js.context "
                "gathers keys and values, whose gradients the hardware sums as it likes; use reduction='native', or "
                "js.context(..., how='ulysses')"
            )
        return ORDERED

    def describe(self) -> dict[str, Any]:
        """Return the engine's name and its choices, as commands print them and write them into JSON."""
        return super().describe() | {"reduction": self.reduction}

    def residuals(self, layout: Layout) -> PyTree:
        """Return how the residuals of the gradients are placed: f32, each device its own of the size of its share."""
        wire = self.reduce_dtype
        if not isinstance(wire, Scaled) or not wire.feedback:
            return ()
        return jax.tree.map(partial(place_residual, layout), layout.params, layout.grads)

    def state_rules(self, objective: Objective, layout: Layout, batch: PyTree) -> StateRules:
        """Find how the model states that devices and micro-batches return are combined."""
        found: list[StateRules] = []
        trace_step(self._value_and_grad(objective, layout, found.append), layout, batch)
        return found[0]

    def value_and_grad(self, objective: Objective, layout: Layout) -> ValueAndGrad:
        """Make the function that computes loss and gradient, each device on its own rows; see `ValueAndGrad`."""
        return self._value_and_grad(objective, layout, lambda rules: None)

    def _value_and_grad(
        self, objective: Objective, layout: Layout, report: Callable[[StateRules], None]
    ) -> ValueAndGrad:
        """Do what `value_and_grad` does, and `report` the rules of the model's state when the loss is traced."""
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
            batch = split_batch(layout, objective.known, batch)
            mask = layout.rows_mask(batch)
            cut = Cut(batch, mask, *_turns(select(mask, batch), self.microbatches, layout.batch_axes))

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
            outcome: Any = Outcome  # of specs
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

    The loss runs once per device, in a `jax.shard_map`, on that device's rows [batch / devices, ...] and on weights of
    the shape that the model knows. Choosing this engine asserts that the rows of a batch are independent and that the
    loss returns a `js.Mean`, alone or in a `js.Loss`; `js.parity` checks it.

    Collectives of a step, for each parameter:

    - an all-gather just before use, over the axes of its `store` that its `use` lacks: in the forward pass, and again
      in the backward pass for blocks of a `Stacked` model and for units;
    - a reduce-scatter of its gradient over the batch axes in the gradient's `store`, then an all-reduce of the shard
      over the other batch axes that `use` does not own. With scatter="each", as often as there are micro-batches.

    And an all-reduce of a few scalars: the loss, its weights, and the metrics; and one of each array of the model's
    state that is not the same on all devices (`js.Loss` says how states are combined).

    Args:
      microbatches: the number of turns in which the rows of a batch are computed, and their gradients added. A device's
        turn j has its rows from j * rows / microbatches on.
      scatter: reduce the gradient of each micro-batch ("each", least memory) or their sum once ("end", least traffic).
      precision: "bf16" is mixed precision in one word: parameters and optimizer state stay as they are (f32), weights
        are cast to bf16 before they are gathered, and gradients are reduced in bf16. A `reduce_dtype` beside it goes
        before (jnp.float32 keeps sums in f32); another `compute_dtype` is refused.
      compute_dtype: the dtype to which floating weights are cast before they are gathered; None leaves them.
      reduce_dtype: the dtype in which gradients are reduced; None takes the parameter's. `js.wire.int8()` and
        `js.wire.fp8()` send 8-bit numbers in blocks with an f32 scale, which are added in f32: an all-to-all in place
        of a reduce-scatter, that and an all-gather in place of an all-reduce, one axis of the mesh after the other.
        With `feedback=True` (and scatter="end") what rounding took is added in the next step: `run.residuals` holds an
        f32 array of the size of a device's share, the whole parameter under FSDP, on each device.
      gather_dtype: the dtype in which weights travel when they are gathered just before use, and are computed in
        `compute_dtype`, or the parameter's dtype, after it; `js.wire.int8()` and `js.wire.fp8()` too. The gradient is
        that of the rounded weights. None sends them as they are computed.
      remat: what the forward pass of a block of a `Stacked` model, or of a unit, saves: "nothing", "dots",
        "everything", a function of `jax.checkpoint_policies`, or what is done with each named activation,
        {"attention_out": "save", "mlp_hidden": "offload"}: kept on the device, moved to the host's memory and back, or
        computed again ("remat", as all that is not named). The names of `js.models` are in their docstrings, a model of
        your own gives them by `jax.ad_checkpoint.checkpoint_name`; "block_in" is what goes into a block. Gathered
        weights are never saved. By default what the model states (`js.models.make`), else "everything".
      units: classes of modules of a `js.linen` or `js.nnx` model, such as [Block]. While a module of these classes
        runs its parameters are whole: gathered just before, dropped after, gathered again in the backward pass. All
        other parameters are gathered at once. A unit inside another runs with the outer one; a class that never runs
        by itself is refused. The peak falls most with remat="nothing": activations are then one unit's too.
      reduction: "ordered" adds over devices in one order, so that losses and parameters are the same bits for every
        number of processes that the devices are spread over; "native" leaves the order to the hardware. Ordered, a
        reduce-scatter is an all-to-all, and an all-reduce an all-to-all and an all-gather: as many bytes, but each
        result is as large as the whole gradient until it is added up. Not beside tensor axes; the optimizer must be
        elementwise but for sums over all parameters (a global norm). What the loss itself sums over devices by axis
        name stays native.
      options: of the compiler, by name: {"xla_...": True}. They win over those that the engine sets for the chips of
        the mesh, which `print(engine)` shows; None takes one of these away. A name that the compiler does not know is
        its own error.

    Raises:
      ValueError, TypeError: an argument is not of those; names it. A loss that is no `js.Mean` is refused when the step
        is traced.

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
    """Make zeros like this device's gradients, with respect to which the loss is differentiated; see `just_in_time`."""
    manual = layout.manual_axes

    def sink(x: Any, param: Placement, grad: Placement | None) -> jax.Array | None:
        if grad is None:
            return None
        if scatter == "end":
            return jnp.zeros(used_shape(layout, param), x.dtype)
        # Inside shard_map an array is split over manual axes by its shape, over automatic ones by the compiler.
        mine = replace(grad, store=only_axes(grad.store, manual))
        return jnp.zeros(mine.shard_shape(layout.mesh), x.dtype)

    return jax.tree.map(sink, layout.shapes.params, layout.params, layout.grads)


def _turns(batch: PyTree, count: int, axes: tuple[str, ...]) -> tuple[PyTree, jax.Array]:
    """Cut this device's rows into [turns, rows, ...]; also return the global number of each turn's first row."""
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
    """Combine a metric of each device's rows to that of all rows. One all-reduce of each of its numbers."""
    if isinstance(metric, Max):
        return Max(all_max(metric.value, axes))
    combined: Mean | Sum = jax.tree.map(lambda x: sum_scalar(x.astype(sum_dtype(x.dtype)), axes, sums), metric)
    return combined
