"""Evaluate a model on held-out batches, and predict with it.

The last batch of held-out data is rarely full. It is padded with copies of its last row, and the padding must not
count, but `eval_fn` returns sums over all rows. So a short batch is evaluated row by row (`vmap`), and only the results
of rows that are not padding are added: `_sum_first_rows`.
"""

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
from jaxshard.core.batch import check_several_batches, describe_differing, name_those_without, row_counts
from jaxshard.core.collectives import NATIVE, Sums
from jaxshard.core.foreign_arrays import as_arrays, convert_foreign
from jaxshard.core.known_model import check_function, known_evaluate
from jaxshard.core.layout import Layout, check_layout, join_model, put_back, select
from jaxshard.core.loss import Max, Mean, Sum, combine, lowest_value, on_host, sum_dtype
from jaxshard.core.mesh import axis_size
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.settings import own_settings, settings_of, with_own_settings
from jaxshard.core.tree import abstract, row_count
from jaxshard.core.types import PyTree
from jaxshard.engines.auto import auto, make_move
from jaxshard.engines.context import constrain_batch, split_batch
from jaxshard.engines.counted_rows import make_mean_check
from jaxshard.engines.engine import Engine
from jaxshard.engines.explicit import combine_over, explicit
from jaxshard.engines.just_in_time import MakeMove, make_opaque_run, users_code
from jaxshard.engines.manual import on_each_device, row_specs, stored_specs
from jaxshard.engines.moves import make_move as make_explicit_move
from jaxshard.engines.pipeline.evaluate import make_evaluate
from jaxshard.engines.positionwise import make_position_check
from jaxshard.optim.averaging import averaged_params
from jaxshard.optim.local import local_of
from jaxshard.training.checked_jit import checked_jit
from jaxshard.training.convert import convert_optimizer
from jaxshard.training.state import TrainState, check_run
from jaxshard.training.views import move_stored, use_stored

EvalFn = Callable[[PyTree, PyTree], "Results"]
Results = dict[str, Mean | Sum | Max]


def make_eval_step(
    eval_fn: Callable[[PyTree, PyTree], Results], layout: Layout, *, engine: Engine | None = None
) -> Callable[[TrainState, PyTree], Results]:
    """Make the compiled evaluation of a batch, `eval_step(run, batch) -> {name: js.Mean | js.Sum | js.Max}`.

    The first batch sets the number of rows. A shorter batch (such as the last one, of at least one row) is padded, and
    the padding has weight zero: `eval_fn` is then mapped over single rows, so it must compute each row independently,
    and every `Sum` and `Mean` must be a sum over rows.

    Args:
      eval_fn: `eval_fn(model, batch)`, where `model` is like the result of `init_fn` and the batch is global. If it is
        the method `evaluate` of a `js.Stacked` model, weights are gathered one block at a time, or the batch runs
        through the stages of a pipeline; for any other function all weights are gathered first.
      layout: the layout of each `TrainState` to evaluate.
      engine: `js.explicit(reduction="ordered")` makes every device evaluate its own rows, which must then always be
        independent, and sums the results over devices in a fixed order. Other engines make no difference.

    Returns:
      The function. Its results are those of the global batch, on every device; `js.combine` joins the results of
      several batches, and `js.evaluate` does this for all batches. The run is not donated. Collectives: all-gathers of
      the weights, and an all-reduce of each result.

    Raises:
      TypeError: by the first call, results that are not a dict of js.Mean, js.Sum or js.Max. By a call with a shorter
        batch, or with `reduction="ordered"`, a js.Mean whose weight is not a sum over the rows of the batch.
      ValueError: by a call, a batch with more rows than the first, or a run that does not fit the layout.

    Example:
        eval_step = js.make_eval_step(model.evaluate, layout)
        js.evaluate(eval_step, run, held_out)["loss"]
    """
    check_function("eval_fn", eval_fn, "eval_fn(model, batch)")
    check_layout("js.make_eval_step(eval_fn, layout)", layout)
    on_devices = _make_device_evaluation(eval_fn, layout, engine)
    compute_stored = make_compute(eval_fn, layout, make_move(layout, auto()))

    def compute(run: TrainState, batch: PyTree) -> Results:
        batch = constrain_batch(layout, known_evaluate(eval_fn), batch)
        return compute_stored(run.params, use_stored(layout, layout.state, run.state), batch)

    def compute_full(run: TrainState, batch: PyTree) -> Results:
        return compute(run, batch) if on_devices is None else on_devices(run, batch)

    def compute_short(run: TrainState, batch: PyTree, rows: jax.Array) -> Results:
        if on_devices is not None:
            return on_devices(run, batch, rows)

        mask = layout.rows_mask(batch)
        return _sum_first_rows(partial(compute, run), batch, mask, lambda own: jnp.arange(own) < rows)

    evaluate_full, evaluate_short = (checked_jit(fn, "the evaluation") for fn in (compute_full, compute_short))
    size, checked = 0, None
    check_single_rows: Callable[[PyTree], None]

    def eval_step(run: TrainState, batch: PyTree) -> Results:
        nonlocal size, checked, check_single_rows
        check_run(layout, run)
        batch = as_arrays("the batch", batch)
        mask, counts = layout.rows_mask(batch), row_counts(layout.strategy, batch)
        differ, rows = len(set(counts.values())) > 1, row_count(select(mask, batch))
        if differ and checked not in (None, abstract(batch)):
            fix = name_those_without(counts, rows)
            raise ValueError(f"{describe_differing(counts)}, so that none can be padded; {fix}")
        size = size or (rows if differ else _round_up(rows, layout))
        if rows > size:
            raise ValueError(
                f"an evaluation batch has {rows} rows, more than the {size} of the first one; put the largest first"
            )
        padded = jax.tree.map(lambda x, has_rows: _pad_rows(x, size) if has_rows else x, batch, mask)
        if abstract(padded) != checked:
            layout.plan_batch(padded).check(1, whole=on_devices is None)
            checked = abstract(padded)
            check_single_rows = make_mean_check(layout, eval_fn, size, frozenset(), with_key=False)
        check_narrowing(batch, "the batch")
        with own_settings(layout.mesh):
            if rows != size:
                check_single_rows(padded)
            placed = jax.tree.map(_place, padded, layout.batch_shardings(abstract(padded)))
            result: Results = evaluate_full(run, placed) if rows == size else evaluate_short(run, placed, rows)
        jax.block_until_ready(result)
        return result

    return eval_step


def make_apply(fn: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Compile a function of the model for calls with a sharded `TrainState` in place of the model: for predictions.

    Args:
      fn: `fn(model, *args)`, where `model` is like the result of `init_fn`. For a module of `js.linen` call `apply` of
        the object that `js.linen` returned, not of the Flax module, which takes variables.
      layout: the layout of each `TrainState`.

    Returns:
      `apply(run, *args)`, which returns `fn(model, *args)`. Arguments and results are replicated on every device.
      All weights are gathered first, by one all-gather each.

    Raises:
      ValueError: by a call, a run that does not fit the layout.
      TypeError: by a call, `fn` calls the Flax module itself on what `init` of `js.linen` returned.

    Example:
        apply = js.make_apply(lambda params, x: module.apply(params, x), layout)
        logits = apply(run, batch["x"])     # f32[rows, classes], replicated
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function fn(model, *args), got {type(fn).__name__}")
    check_layout("js.make_apply(fn, layout)", layout)

    def run_stored(run: TrainState, *args: Any) -> Any:
        params = use_stored(layout, layout.params, run.params)
        model = join_model(params, use_stored(layout, layout.state, run.state))
        with users_code(layout, "the function"):
            return fn(model, *args)

    jitted = checked_jit(run_stored, "the function of js.make_apply")

    def apply(run: TrainState, *args: Any) -> Any:
        check_run(layout, run)
        args = convert_foreign("the arguments", args)
        check_narrowing(args, "the arguments")
        with own_settings(layout.mesh):
            return jax.block_until_ready(jitted(run, *args))

    return apply


@with_own_settings
def averaged(run: TrainState, layout: Layout) -> TrainState:
    """Replace the parameters of a run by their average over training steps, for evaluation.

    `js.optim.averaged(tx, decay)` is another function, for training: it wraps the optimizer and keeps the average.
    This function reads the average from the optimizer's state. Frozen parameters do not change, and every average is
    cast to its parameter's dtype. Collectives: an all-gather of each parameter whose optimizer state is split but which
    itself is not.

    Args:
      run: a run whose optimizer keeps an average. It is not donated.
      layout: the layout that the run was made with.

    Returns:
      The run with averaged parameters, for `eval_step` and `apply`.

    Raises:
      ValueError: the optimizer keeps no average, or several; a run that does not fit the layout; under `js.local`,
        where averages are of each replica's own parameters.

    Example:
        tx = js.optim.averaged(optax.adamw(3e-4), 0.999)
        ...
        js.evaluate(eval_step, js.averaged(run, layout), held_out)
    """
    check_run(layout, run)
    if local_of(layout.strategy) is not None:
        raise ValueError(
            "averaged: replicas that train by themselves (js.local) keep an average each, of their own parameters, and "
            "none of the shared ones; evaluate the run itself, whose parameters are the shared ones"
        )
    given, run = run, convert_optimizer(run, layout, layout.without_owners)

    @partial(jax.jit, out_shardings=layout.shardings(layout.params))
    def place(params: PyTree, opt_state: PyTree) -> PyTree:
        average = jax.tree.map(
            lambda x, old: x.astype(old.dtype), averaged_params(opt_state), select(layout.trainable, params)
        )
        placed = move_stored(layout, average, layout.opt_params, select(layout.trainable, layout.params))
        return put_back(layout.trainable, placed, params)

    return given._replace(params=place(run.params, run.opt_state))


def evaluate(eval_step: Callable[[TrainState, PyTree], Results], run: TrainState, batches: Any) -> dict[str, float]:
    """Evaluate a run on all batches, and combine the results.

    Args:
      eval_step: made by `js.make_eval_step`.
      run: the run; it is not donated.
      batches: global batches, the largest first; the last may be shorter.

    Returns:
      {name: the exact mean, sum or maximum over all rows}, however the rows are spread over batches. The results of
      batches are added on the host, in int64 or f64, while the devices evaluate the next batch.

    Raises:
      ValueError: there are no batches.
      TypeError: a metric of several numbers, such as a histogram; combine these by `js.combine`.

    Example:
        js.evaluate(eval_step, run, held_out)     # {"loss": 3.21, "accuracy": 0.4}
    """
    if not callable(eval_step) or isinstance(eval_step, TrainState):
        raise TypeError(
            f"evaluate: eval_step must be what js.make_eval_step returns, got {type(eval_step).__name__}; write "
            "js.evaluate(eval_step, run, batches), in this order"
        )
    check_several_batches("evaluate", batches)
    total: Results = {}
    unread: Results = {}
    for batch in batches:
        result = eval_step(run, batch)
        # Read one batch late: reading waits for the devices, which already run the next batch.
        total, unread = _add_results(total, unread), result
    total = _add_results(total, unread)
    if not total:
        raise ValueError("there are no batches to evaluate: the held-out data is empty or the iterator is used up")
    return {name: _number(name, metric) for name, metric in total.items()}


def _add_results(total: Results, found: Results) -> Results:
    """Add the results of a batch to the total, on the host; return `total` itself if `found` is empty."""
    with settings_of(found):
        return {name: combine(total[name], one) if total else on_host(one) for name, one in found.items()} or total


def _number(name: str, metric: Mean | Sum | Max) -> float:
    """Convert a metric on the host to a number.

    A `js.Mean` may have several terms: its number is the sum of total / weight over all terms whose weight is not 0.
    """
    if isinstance(metric, Mean):
        terms = zip(metric.totals, metric.weights, strict=True)
        return sum((float(total) / float(weight) for total, weight in terms if weight != 0), start=0.0)
    if np.size(metric.value) != 1:
        raise TypeError(
            f"evaluate: the metric {name!r} has the shape {list(np.shape(metric.value))}, but a number is returned for "
            "each; add up the results of eval_step by js.combine yourself, or return its entries under names of their "
            "own"
        )
    return float(np.asarray(metric.value).item())


Evaluate = Callable[..., Results]
"""`fn(run, batch, rows=None)`: return the results of a batch, or only of its first `rows` rows."""


def _make_device_evaluation(eval_fn: EvalFn, layout: Layout, engine: Engine | None) -> Evaluate | None:
    """Make the evaluation that runs in a `shard_map`; None if neither ordered sums nor a pipeline need it."""
    sums = NATIVE if engine is None else engine.sums(layout)
    if sums.in_order:
        return _make_ordered(eval_fn, layout, sums)
    model = known_evaluate(eval_fn)
    if not isinstance(model, Stacked) or layout.pipeline is None:
        return None
    stages = make_evaluate(model, layout)
    return lambda run, batch, rows=None: stages(run.params, batch, rows)


def _make_ordered(eval_fn: EvalFn, layout: Layout, sums: Sums) -> Evaluate:
    """Make the evaluation in which every device evaluates its own rows, and results are summed in a fixed order."""
    rows_over, manual = layout.batch_axes, layout.manual_axes
    compute = make_compute(eval_fn, layout, make_explicit_move(layout, explicit()))
    check_positions = make_position_check(layout, eval_fn, known_evaluate(eval_fn), manual, with_key=False)
    check_means = make_mean_check(layout, eval_fn, axis_size(layout.mesh, rows_over), manual, with_key=False)

    def on_device(params: PyTree, state: PyTree, batch: PyTree, rows: jax.Array | None) -> Results:
        batch = split_batch(layout, known_evaluate(eval_fn), batch)
        if rows is None:
            found = compute(params, state, batch)
        else:
            place = lax.axis_index(rows_over) if rows_over else 0
            found = _sum_first_rows(
                partial(compute, params, state),
                batch,
                layout.rows_mask(batch),
                lambda own: place * own + jnp.arange(own) < rows,
            )
        return {name: combine_over(metric, layout.sum_axes, sums) for name, metric in found.items()}

    def evaluate(run: TrainState, batch: PyTree, rows: jax.Array | None = None) -> Results:
        check_positions(batch)
        check_means(batch)
        specs = stored_specs(layout.params, manual), PartitionSpec(), row_specs(layout, batch), PartitionSpec()
        spread = on_each_device(on_device, layout, manual, in_specs=specs, out_specs=PartitionSpec())
        results: Results = spread(run.params, use_stored(layout, layout.state, run.state), batch, rows)
        return results

    return evaluate


def make_compute(eval_fn: EvalFn, layout: Layout, make_move: MakeMove) -> Callable[[PyTree, PyTree, PyTree], Results]:
    """Make `fn(stored parameters, model state, batch) -> results`, which gathers weights and runs `eval_fn` under jit.

    Args:
      eval_fn: the user's function. The `evaluate` of a `Stacked` model, called by itself or inside `eval_fn`, gathers
        one block at a time; for any other function all weights are gathered at once.
      layout: the layout of the stored parameters.
      make_move: makes, for each parameter, the function that gathers its weight.
    """
    nothing_trained = jax.tree.map(lambda _: None, layout.shapes.params)
    run = make_opaque_run(lambda model, batch, key: eval_fn(model, batch), layout, make_move, "everything")

    def compute(params: PyTree, state: PyTree, batch: PyTree) -> Results:
        with users_code(layout):
            return _check_results(run(params, nothing_trained, state, batch, None, 0))

    return compute


def _sum_first_rows(
    compute: Callable[[PyTree], Results], batch: PyTree, mask: PyTree, counts: Callable[[int], jax.Array]
) -> Results:
    """Evaluate a batch row by row, and add only the results of rows that are not padding.

    Args:
      compute: evaluates a batch of one row.
      batch: the padded batch.
      mask: a tree like `batch`: True for arrays with rows, False for arrays that all rows share.
      counts: `counts(number of rows) -> bool[rows]`, False for padding.
    """
    rows = select(mask, batch)

    def evaluate_row(row: PyTree) -> Results:
        return compute(put_back(mask, jax.tree.map(lambda x: x[None], row), batch))

    each = jax.vmap(evaluate_row)(rows)
    return {name: _combine_rows(metric, counts(row_count(rows))) for name, metric in each.items()}


def _check_results(output: Any) -> Results:
    if not isinstance(output, dict):
        raise TypeError(f"eval_fn must return a dict of js.Mean, js.Sum or js.Max, got {type(output).__name__}")
    bad = {name: type(x).__name__ for name, x in output.items() if not isinstance(x, (Mean, Sum, Max))}
    if bad:
        raise TypeError(f"eval_fn must return a dict of js.Mean, js.Sum or js.Max, got {bad}")
    return output


def _combine_rows(metric: Mean | Sum | Max, counts: jax.Array) -> Mean | Sum | Max:
    """Combine the results of single rows, stacked along the first dimension, leaving out rows where `counts` is False.

    Rows are left out by `where`, not by a multiplication with 0, so that NaN in the padding can't reach the result.
    """

    def only(x: jax.Array, otherwise: Any) -> jax.Array:
        return jnp.where(counts.reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise)

    if isinstance(metric, Max):
        return Max(jnp.max(only(metric.value, lowest_value(metric.value.dtype)), 0))
    combined: Mean | Sum = jax.tree.map(lambda x: jnp.sum(only(x, 0), 0, dtype=sum_dtype(x.dtype)), metric)
    return combined


def _place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Place an array that every process has in full, without `device_put`, which would compare it across processes."""
    if isinstance(x, jax.Array):
        placed: jax.Array = jax.device_put(x, sharding)
        return placed
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def _round_up(rows: int, layout: Layout) -> int:
    return rows + -rows % axis_size(layout.mesh, layout.batch_axes)


def _pad_rows(x: Any, size: int) -> Any:
    """Pad with copies of the last row up to `size` rows; unlike zeros, they can't cause overflows or NaN."""
    if not np.ndim(x) or np.shape(x)[0] == size:
        return x
    return np.concatenate([np.asarray(x), np.repeat(np.asarray(x[-1:]), size - np.shape(x)[0], axis=0)])
