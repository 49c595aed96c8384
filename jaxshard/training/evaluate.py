"""What a run is asked besides training: evaluation on held-out rows, and predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.collectives import NATIVE, Sums
from jaxshard.core.constrain import follow_layout
from jaxshard.core.known_model import known_evaluate
from jaxshard.core.layout import Layout, join_model, put_back, select
from jaxshard.core.loss import Max, Mean, Sum, combine, lowest_value
from jaxshard.core.mesh import axis_size
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.engines.auto import auto, make_move
from jaxshard.engines.engine import Engine
from jaxshard.engines.explicit import combine_over, explicit
from jaxshard.engines.explicit import make_move as make_explicit_move
from jaxshard.engines.just_in_time import MakeMove, make_opaque_run, users_code
from jaxshard.engines.manual import data_axes, on_each_device, row_specs, stored_specs
from jaxshard.engines.pipeline.evaluate import make_evaluate
from jaxshard.optim.averaging import averaged_params
from jaxshard.training.state import TrainState, check_run
from jaxshard.training.step import check_batch
from jaxshard.training.views import move_stored, use_stored

EvalFn = Callable[[PyTree, PyTree], "Results"]
Results = dict[str, Mean | Sum | Max]


def make_eval_step(
    eval_fn: Callable[[PyTree, PyTree], Results], layout: Layout, *, engine: Engine | None = None
) -> Callable[[TrainState, PyTree], Results]:
    """`eval_step(run, batch) -> {name: js.Mean | js.Sum | js.Max}` of the whole batch; `js.combine` adds batches up.

    `eval_fn(model, batch)` receives what `init_fn` returned and a global batch. All batches have the rows of the
    first one; a shorter one (the last, of any size from one row on) is padded to it and the padding counts with
    weight zero: there `eval_fn` is mapped over single rows, so it must treat rows independently, and every `Sum` and
    `Mean` must be a sum over rows, to be evaluated on a short batch. The method `evaluate` of a `Stacked` model gathers
    one block at a time, or runs through the stages of a pipeline; other functions have all weights gathered first.

    With the engine `js.explicit(reduction="ordered")` every device evaluates its own rows, which must then be
    independent always, and the sums over devices are taken in one order; other engines make no difference.
    """
    apart = _make_apart(eval_fn, layout, engine)
    weigh_stored = _make_weigh(eval_fn, layout, make_move(layout, auto()))

    def weigh(run: TrainState, batch: PyTree) -> Results:
        return weigh_stored(run.params, use_stored(layout, layout.state, run.state), batch)

    @jax.jit
    def full(run: TrainState, batch: PyTree) -> Results:
        return weigh(run, batch) if apart is None else apart(run, batch)

    @jax.jit
    def short(run: TrainState, batch: PyTree, rows: jax.Array) -> Results:
        if apart is not None:
            return apart(run, batch, rows)

        return _sum_first_rows(partial(weigh, run), batch, jnp.arange(_row_count(batch)) < rows)

    size = 0

    def eval_step(run: TrainState, batch: PyTree) -> Results:
        nonlocal size
        check_run(layout, run)
        rows = _row_count(batch)
        size = size or _round_up(rows, layout)
        if rows > size:
            raise ValueError(
                f"an evaluation batch has {rows} rows, more than the {size} of the first one; put the largest first"
            )
        padded = jax.tree.map(lambda x: _pad_rows(x, size), batch) if rows < size else batch
        check_batch(layout, abstract(padded), 1)
        placed = jax.tree.map(_place, padded, layout.batch_shardings(abstract(padded)))
        result = full(run, placed) if rows == size else short(run, placed, rows)
        return jax.block_until_ready(result)

    return eval_step


def make_apply(fn: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """`apply(run, *args) -> fn(model, *args)`, compiled: predictions or samples from a run as it is stored.

    The weights are gathered first (bytes: those of the parameters); the arguments and results are ordinary arrays, on
    every device.
    """

    @jax.jit
    def jitted(run: TrainState, *args: Any) -> Any:
        params = use_stored(layout, layout.params, run.params)
        model = join_model(params, use_stored(layout, layout.state, run.state))
        with follow_layout(layout):
            return fn(model, *args)

    def apply(run: TrainState, *args: Any) -> Any:
        check_run(layout, run)
        return jax.block_until_ready(jitted(run, *args))

    return apply


def averaged(run: TrainState, layout: Layout) -> TrainState:
    """Return the run with the average of its parameters in their place (for evaluation).

    `js.optim.averaged(tx, decay)` is another function, for training: it wraps the optimizer and keeps the average.
    This one takes it out of the optimizer's state, for `eval_step` and `apply`. Frozen parameters are as they are, and
    every parameter has its own dtype. Collectives: an all-gather of each parameter whose optimizer state is split but
    which itself is not.

    Raises:
      ValueError: the optimizer keeps no average, or several; a run that does not fit the layout.
    """
    check_run(layout, run)

    @partial(jax.jit, out_shardings=layout.shardings(layout.params))
    def place(params: PyTree, opt_state: PyTree) -> PyTree:
        average = jax.tree.map(
            lambda x, old: x.astype(old.dtype), averaged_params(opt_state), select(layout.trainable, params)
        )
        placed = move_stored(layout, average, layout.opt_params, select(layout.trainable, layout.params))
        return put_back(layout.trainable, placed, params)

    return run._replace(params=place(run.params, run.opt_state))


def evaluate(eval_step: Callable[[TrainState, PyTree], Results], run: TrainState, batches: Any) -> dict[str, float]:
    """{name: value} over all batches: the exact mean, sum or maximum over all rows."""
    total: Results = {}
    for batch in batches:
        result = eval_step(run, batch)
        total = {name: combine(total[name], metric) for name, metric in result.items()} if total else result
    if not total:
        raise ValueError("there are no batches to evaluate: the held-out data is empty or the iterator is used up")
    return {name: float(metric.value) for name, metric in total.items()}


Evaluate = Callable[..., Results]
"""`fn(run, batch, rows=None)`: the results of a batch, or of its first rows."""


def _make_apart(eval_fn: EvalFn, layout: Layout, engine: Engine | None) -> Evaluate | None:
    """Make the evaluation in which devices evaluate their rows, or their blocks, by themselves; None elsewhere."""
    sums = NATIVE if engine is None else engine.sums(layout)
    if sums.in_order:
        return _make_ordered(eval_fn, layout, sums)
    model = known_evaluate(eval_fn)
    if not isinstance(model, Stacked) or layout.pipeline is None:
        return None
    stages = make_evaluate(model, layout)
    return lambda run, batch, rows=None: stages(run.params, batch, rows)


def _make_ordered(eval_fn: EvalFn, layout: Layout, sums: Sums) -> Evaluate:
    """Make the evaluation in which every device evaluates its own rows and sums are taken in one order."""
    axes, manual = layout.batch_axes, data_axes(layout)
    weigh = _make_weigh(eval_fn, layout, make_explicit_move(layout, explicit()))

    def on_device(params: PyTree, state: PyTree, batch: PyTree, rows: jax.Array | None) -> Results:
        if rows is None:
            found = weigh(params, state, batch)
        else:
            own = _row_count(batch)
            first = lax.axis_index(axes) * own if axes else 0
            found = _sum_first_rows(partial(weigh, params, state), batch, first + jnp.arange(own) < rows)
        return {name: combine_over(metric, axes, sums) for name, metric in found.items()}

    def evaluate(run: TrainState, batch: PyTree, rows: jax.Array | None = None) -> Results:
        specs = stored_specs(layout.params, manual), PartitionSpec(), row_specs(layout, batch), PartitionSpec()
        spread = on_each_device(on_device, layout, manual, in_specs=specs, out_specs=PartitionSpec())
        results: Results = spread(run.params, use_stored(layout, layout.state, run.state), batch, rows)
        return results

    return evaluate


def _make_weigh(eval_fn: EvalFn, layout: Layout, make_move: MakeMove) -> Callable[[PyTree, PyTree, PyTree], Results]:
    """Make `fn(stored parameters, model state, batch) -> results`, weights gathered as an engine gathers them.

    The `evaluate` of a `Stacked` model, called by itself or inside `eval_fn`, gathers one block at a time; any other
    function has all weights gathered at once.
    """
    nothing_trained = jax.tree.map(lambda _: None, layout.shapes.params)
    run = make_opaque_run(lambda model, batch, key: eval_fn(model, batch), layout, make_move, "everything")

    def weigh(params: PyTree, state: PyTree, batch: PyTree) -> Results:
        with users_code(layout):
            return _check_results(run(params, nothing_trained, state, batch, None, 0))

    return weigh


def _sum_first_rows(weigh: Callable[[PyTree], Results], batch: PyTree, counts: jax.Array) -> Results:
    """The results of those rows of a batch that count, bool[rows]."""

    def one(row: PyTree) -> Results:
        return weigh(jax.tree.map(lambda x, whole: x[None] if whole.ndim else x, row, batch))

    axes = jax.tree.map(lambda x: 0 if x.ndim else None, batch)
    each = jax.vmap(one, in_axes=(axes,))(batch)
    return {name: _masked(metric, counts) for name, metric in each.items()}


def _check_results(output: Any) -> Results:
    if not isinstance(output, dict):
        raise TypeError(f"eval_fn must return a dict of js.Mean, js.Sum or js.Max, got {type(output).__name__}")
    bad = {name: type(x).__name__ for name, x in output.items() if not isinstance(x, (Mean, Sum, Max))}
    if bad:
        raise TypeError(f"eval_fn must return a dict of js.Mean, js.Sum or js.Max, got {bad}")
    return output


def _masked(metric: Mean | Sum | Max, counts: jax.Array) -> Mean | Sum | Max:
    """One metric of per-row ones, [rows] each; `where`, not a product, so that NaN in the padding can't leak."""
    if isinstance(metric, Max):
        return Max(jnp.max(jnp.where(counts, metric.value, lowest_value(metric.value.dtype))))
    return jax.tree.map(lambda x: jnp.sum(jnp.where(counts, x, 0)), metric)


def _place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A global array, of which every process has the whole; `device_put` would have the processes compare it."""
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def _row_count(batch: PyTree) -> int:
    return max((np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)), default=0)


def _round_up(rows: int, layout: Layout) -> int:
    return rows + -rows % axis_size(layout.mesh, layout.batch_axes)


def _pad_rows(x: Any, size: int) -> Any:
    """The rows repeated from the last one up to `size`: real data, so that nothing overflows in the padding."""
    if not np.ndim(x) or np.shape(x)[0] == size:
        return x
    return np.concatenate([np.asarray(x), np.repeat(np.asarray(x[-1:]), size - np.shape(x)[0], axis=0)])
