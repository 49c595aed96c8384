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

from jaxshard.adapt.stacked import evaluation, stacked_of
from jaxshard.core.constrain import constraining
from jaxshard.core.layout import Layout, join_model, merge, only
from jaxshard.core.loss import Max, Mean, Sum, combine, lowest
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.engines.accumulate import Engine
from jaxshard.engines.auto import auto, make_move
from jaxshard.engines.explicit import combined, explicit, manual_axes, sums_of
from jaxshard.engines.explicit import make_move as make_explicit_move
from jaxshard.engines.just_in_time import make_call, users_code
from jaxshard.engines.pipeline.evaluate import make_evaluate
from jaxshard.optim.averaging import averaged_params
from jaxshard.training.state import TrainState, check_run
from jaxshard.training.step import check_batch, moved, used

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
    weigh = _make_weights(eval_fn, layout)

    @jax.jit
    def full(run: TrainState, batch: PyTree) -> Results:
        return weigh(run, batch) if apart is None else apart(run, batch)

    @jax.jit
    def short(run: TrainState, batch: PyTree, rows: jax.Array) -> Results:
        if apart is not None:
            return apart(run, batch, rows)

        return _of_first_rows(partial(weigh, run), batch, jnp.arange(_row_count(batch)) < rows)

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
        model = join_model(used(layout, layout.params, run.params), used(layout, layout.state, run.state))
        with constraining(layout):
            return fn(model, *args)

    def apply(run: TrainState, *args: Any) -> Any:
        check_run(layout, run)
        return jax.block_until_ready(jitted(run, *args))

    return apply


def averaged(run: TrainState, layout: Layout) -> TrainState:
    """The run with its averaged parameters in place of its parameters, for `eval_step` and `apply`.

    The optimizer must be `js.optim.averaged(tx, decay)`, whose state holds the average. Frozen parameters are as they
    are, and every parameter has its own dtype. Collectives: an all-gather of each parameter whose optimizer state is
    split but which itself is not.

    Raises:
      ValueError: the optimizer keeps no average, or several; a run that does not fit the layout.
    """
    check_run(layout, run)

    @partial(jax.jit, out_shardings=layout.shardings(layout.params))
    def place(params: PyTree, opt_state: PyTree) -> PyTree:
        average = jax.tree.map(
            lambda x, old: x.astype(old.dtype), averaged_params(opt_state), only(layout.trainable, params)
        )
        placed = moved(layout, average, layout.opt_params, only(layout.trainable, layout.params))
        return merge(layout.trainable, placed, params)

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


def _make_apart(eval_fn: Callable, layout: Layout, engine: Engine | None) -> Callable[..., Results] | None:
    """`fn(run, batch, rows=None)` where devices evaluate rows, or blocks, by themselves."""
    if engine is not None and engine.reduction == "ordered":
        return _make_ordered(eval_fn, layout, engine)
    stacked = stacked_of(eval_fn)
    if stacked is None or layout.pipeline is None or eval_fn.__name__ != "evaluate":
        return None
    stages = make_evaluate(stacked, layout)
    return lambda run, batch, rows=None: stages(run.params, batch, rows)


def _make_ordered(eval_fn: Callable, layout: Layout, engine: Engine) -> Callable[..., Results]:
    sums, axes = sums_of(engine, layout), layout.batch_axes
    move = make_explicit_move(layout, explicit(reduction="ordered"))
    stacked = stacked_of(eval_fn)
    call = None
    if stacked is not None and eval_fn.__name__ == "evaluate":
        call = make_call(stacked.loss, layout, move, "everything")
    frozen = jax.tree.map(lambda _: None, layout.shapes.params)

    def weigh(params: PyTree, state: PyTree, batch: PyTree) -> Results:
        if call is not None:
            return evaluation(call(params, frozen, (), batch, None, 0))
        weights = jax.tree.map(lambda p, x: move(p, None).gather(x), layout.params, params)
        with users_code(layout):
            return _results(eval_fn(join_model(weights, state), batch))

    def on_device(params: PyTree, state: PyTree, batch: PyTree, rows: jax.Array | None) -> Results:
        if rows is None:
            found = weigh(params, state, batch)
        else:
            own = _row_count(batch)
            first = lax.axis_index(axes) * own if axes else 0
            found = _of_first_rows(partial(weigh, params, state), batch, first + jnp.arange(own) < rows)
        return {name: combined(metric, axes, sums) for name, metric in found.items()}

    def evaluate(run: TrainState, batch: PyTree, rows: jax.Array | None = None) -> Results:
        state, manual = used(layout, layout.state, run.state), manual_axes(layout)
        if not manual:
            return on_device(run.params, state, batch, rows)
        return jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=(
                jax.tree.map(lambda placement: placement.store, layout.params),
                PartitionSpec(),
                jax.tree.map(lambda x: layout.batch_placement(x).store, batch),
                PartitionSpec(),
            ),
            out_specs=PartitionSpec(),
            axis_names=manual,
            check_vma=False,
        )(run.params, state, batch, rows)

    return evaluate


def _of_first_rows(weigh: Callable[[PyTree], Results], batch: PyTree, counts: jax.Array) -> Results:
    """The results of those rows of a batch that count, bool[rows]."""

    def one(row: PyTree) -> Results:
        return weigh(jax.tree.map(lambda x, whole: x[None] if whole.ndim else x, row, batch))

    axes = jax.tree.map(lambda x: 0 if x.ndim else None, batch)
    each = jax.vmap(one, in_axes=(axes,))(batch)
    return {name: _masked(metric, counts) for name, metric in each.items()}


def _make_weights(eval_fn: Callable, layout: Layout) -> Callable[[TrainState, PyTree], Results]:
    stacked = stacked_of(eval_fn)
    if stacked is not None and eval_fn.__name__ == "evaluate" and layout.pipeline is None:
        call = make_call(stacked.loss, layout, make_move(layout, auto()), "everything")
        frozen = jax.tree.map(lambda _: None, layout.shapes.params)
        return lambda run, batch: evaluation(call(run.params, frozen, (), batch, None, 0))

    def weigh(run: TrainState, batch: PyTree) -> Results:
        model = join_model(used(layout, layout.params, run.params), used(layout, layout.state, run.state))
        with constraining(layout):
            return _results(eval_fn(model, batch))

    return weigh


def _results(output: Any) -> Results:
    if not isinstance(output, dict):
        raise TypeError(f"eval_fn must return a dict of js.Mean, js.Sum or js.Max, got {type(output).__name__}")
    bad = {name: type(x).__name__ for name, x in output.items() if not isinstance(x, (Mean, Sum, Max))}
    if bad:
        raise TypeError(f"eval_fn must return a dict of js.Mean, js.Sum or js.Max, got {bad}")
    return output


def _masked(metric: Mean | Sum | Max, counts: jax.Array) -> Mean | Sum | Max:
    """One metric of per-row ones, [rows] each; `where`, not a product, so that NaN in the padding can't leak."""
    if isinstance(metric, Max):
        return Max(jnp.max(jnp.where(counts, metric.value, lowest(metric.value.dtype))))
    return jax.tree.map(lambda x: jnp.sum(jnp.where(counts, x, 0)), metric)


def _place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A global array, of which every process has the whole; `device_put` would have the processes compare it."""
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def _row_count(batch: PyTree) -> int:
    return max((np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)), default=0)


def _round_up(rows: int, layout: Layout) -> int:
    parts = 1
    for axis in layout.batch_axes:
        parts *= layout.mesh.shape[axis]
    return rows + -rows % parts


def _pad_rows(x: Any, size: int) -> Any:
    """The rows repeated from the last one up to `size`: real data, so that nothing overflows in the padding."""
    if not np.ndim(x) or np.shape(x)[0] == size:
        return x
    return np.concatenate([np.asarray(x), np.repeat(np.asarray(x[-1:]), size - np.shape(x)[0], axis=0)])
