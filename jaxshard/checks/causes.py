"""Find why a sharded step differs from one device, by small experiments on one device.

An engine that gives each device its own rows is right if the total and the weight of a `js.Mean` are sums over rows. So
the batch is cut into one part for each device and micro-batch, and the loss of each part is computed by itself. The
totals and weights of the parts are added up, and compared with those of the batch:

    total / weight of all parts is the mean of the batch           this term is right (a penalty on the parameters)
    the weights of the parts do not add up to that of the batch    the weight counts something other than rows
    the totals do not add up, and the loss draws random numbers    the loss draws them for all rows at once, or from
                                                                   a key that is the same on all devices
    the totals do not add up otherwise                             the rows are not independent (BatchNorm)
    both add up, but the result is off by a constant factor        the loss sums over devices itself

A constant factor is also compared with the sizes of the mesh's axes: "8 times too large, and 8 is the size of axis
'data'".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxshard.adapt.objective import OfBlocks
from jaxshard.checks.difference import CLOSE, Difference
from jaxshard.core.keys import advance
from jaxshard.core.layout import Layout, select, split_model
from jaxshard.core.loss import Mean, as_loss, explain_weight
from jaxshard.core.mesh import axis_size
from jaxshard.core.text_table import first_words
from jaxshard.core.tree import row_count
from jaxshard.core.types import PyTree
from jaxshard.training.step import Step

Bind = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function that names mesh axes so that it runs on one device."""


def find_causes(
    failures: Sequence[Difference], step: Step, model: PyTree, batch: PyTree, key: jax.Array, bind: Bind
) -> tuple[str, ...]:
    """Find out why a sharded step and the same step on one device give different results.

    The search compiles and evaluates the loss a few times on one device.

    Args:
      failures: the arrays that differ, with their errors.
      step: the sharded step.
      model: the parameters, or the `js.Model`, that `init_fn` returned, on one device.
      batch: the global batch, NumPy arrays.
      key: the random key of the step.
      bind: wraps the loss so that it can run on one device even if it names mesh axes.

    Returns:
      For each likely cause a sentence or two with the remedy; () if no cause is found.
    """
    failed = {one.what for one in failures}
    if failed == {"update"}:
        return (
            "given the same gradients the optimizer alone differs: an update that amplifies rounding (tolerance= "
            "allows for it), or one that depends on how arrays are split",
        )
    factors = _describe_factors(failures, step.layout)
    found = _compare_parts(step, model, batch, key, bind) if failed & {"loss", "gradient"} else ()
    statistics = _explain_statistics(step)
    if "state" in failed and not step.engine.compiler_chooses and not any(statistics in text for text in found):
        found = (
            *found,
            "the model's new state is the mean of what each device computes from its own rows: return state that adds "
            f"up over rows as js.Sum in js.Loss(state=...); {statistics}",
        )
    if not found and factors:
        found = (
            "the loss does add up over the rows, so something is summed over devices twice, or never: leave "
            "collectives over the batch's axes (psum, pmean) in the loss to the engine",
        )
    return (*factors, *found)


def _name_part(step: Step) -> str:
    """Name what computes the loss of one part of the batch: a device, a micro-batch, or both."""
    if step.engine.compiler_chooses:
        return "micro-batch"
    return "device" if step.engine.microbatches == 1 else "device and micro-batch"


def _advise_auto(step: Step) -> str:
    """Say how to make the loss see the whole batch at once, which is right for any loss."""
    if step.engine.compiler_chooses:
        return "use js.auto() without microbatches="
    return "use js.auto() without js.pipeline" if step.layout.pipeline else "use js.auto()"


def _explain_statistics(step: Step) -> str:
    """Say how to compute statistics from all rows of the batch."""
    whole = f"{_advise_auto(step)}, which is right for any loss"
    if step.engine.compiler_chooses:
        return whole
    return f"under js.explicit() give normalisations the mesh axis (nn.BatchNorm(axis_name=...)), or {whole}"


def _describe_factors(failures: Sequence[Difference], layout: Layout) -> tuple[str, ...]:
    """Describe each constant factor between sharded and expected loss or gradients; one sentence per factor."""
    by_factor: dict[str, list[str]] = {}
    for one in failures:
        if one.what in ("loss", "gradient") and one.factor is not None:
            # A single number is always off by some factor, which means something only if it is the size of an axis.
            other = f"{one.factor:.4g} times what one device has" if one.size > 1 else None
            if text := _match_axes(one.factor, layout) or other:
                by_factor.setdefault(text, []).append(one.name)
    return tuple(f"off by a constant factor: {first_words(names, 4)}: {text}" for text, names in by_factor.items())


def _match_axes(factor: float, layout: Layout) -> str | None:
    """Explain a factor by mesh axes: "8 times too large, and 8 is the size of axis 'data'"; None if no axes fit."""
    shape = layout.mesh.shape
    axes = [name for name, size in shape.items() if size > 1]
    for count in range(1, len(axes) + 1):
        for names in itertools.combinations(axes, count):
            size = math.prod(shape[name] for name in names)
            for way, ratio in (("large", factor), ("small", 1 / factor if factor else math.inf)):
                if abs(ratio / size - 1) <= CLOSE:
                    what = f"axis {names[0]!r}" if count == 1 else "axes " + " x ".join(map(repr, names))
                    return f"{size} times too {way}, and {size} is the size of {what}"
    return None


def loss_of_parts(step: Step, model: PyTree, batch: PyTree, key: jax.Array, bind: Bind) -> float:
    """Compute, on one device, the loss that the sharded step would compute.

    The batch is cut into one part for each device and micro-batch. The totals and weights of all parts are added up,
    and the loss is total / weight.

    Args:
      step: the sharded step, whose loss returns a `js.Mean`. It is not run, and may be one that the engine refuses.
      model: the parameters, or the `js.Model`, that `init_fn` returned, on one device.
      batch: the global batch, NumPy arrays.
      key: the random key of the step.
      bind: wraps the loss so that it can run on one device even if it names mesh axes.
    """
    totals, weights = _add_parts(jax.jit(bind(_terms_of(step, model))), _parts_of(step, batch), key)
    return float(np.divide(totals, weights, out=np.zeros_like(totals), where=weights != 0).sum())


def _parts_of(step: Step, batch: PyTree) -> list[tuple[int, PyTree]]:
    """Cut a batch into one part for each device and micro-batch; return (index of the first row, rows) of each part."""
    devices = 1 if step.engine.compiler_chooses else axis_size(step.layout.mesh, step.layout.batch_axes)
    mask = step.layout.rows_mask(batch)
    rows = row_count(select(mask, batch))
    size = rows // (step.engine.microbatches * devices)
    return [(first, _slice_rows(batch, mask, first, size)) for first in range(0, rows, size)]


def _add_parts(
    run: Callable[..., Any], parts: Sequence[tuple[int, PyTree]], key: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate the loss on each part; return the sums (totals, weights), float64[number of terms in the loss] each."""
    apart = [run(rows, key, first) for first, rows in parts]
    totals, weights = (np.sum([np.asarray(one[i], np.float64) for one in apart], axis=0) for i in (0, 1))
    return totals, weights


def _compare_parts(step: Step, model: PyTree, batch: PyTree, key: jax.Array, bind: Bind) -> tuple[str, ...]:
    """Compare the loss of the full batch with the sums over its parts; return the causes of a difference, in words."""
    pieces = _parts_of(step, batch)
    parts = len(pieces)
    evaluate = bind(_terms_of(step, model))
    run = jax.jit(evaluate)
    whole = None if parts == 1 else run(batch, key, 0)
    if whole is None:
        return ()
    totals, weights = _add_parts(run, pieces, key)
    whole_totals, whole_weights = (np.asarray(x, np.float64) for x in whole)
    # A term whose mean is that of the parts is right whatever its weight, as a penalty on the parameters with weight 1.
    with np.errstate(invalid="ignore", divide="ignore"):
        off = ~np.isclose(totals / weights, whole_totals / whole_weights, rtol=1e-5, atol=0)
    totals, weights, whole_totals, whole_weights = (x[off] for x in (totals, weights, whole_totals, whole_weights))
    if not _near(weights, whole_weights):
        return (explain_weight(_as_sum(whole_weights), parts, _as_sum(weights)),)
    if _near(totals, whole_totals):
        return ()
    sums = (
        f"the total of the loss over the whole batch is {_as_sum(whole_totals)}, those of its {parts} parts add up to "
        f"{_as_sum(totals)}"
    )
    part = _name_part(step)
    # All of JAX's random numbers are made by this primitive, whatever generator makes the bits.
    if "random_bits" in str(jax.make_jaxpr(evaluate)(pieces[0][1], key, 0)):
        # Another key, the same numbers: the loss does not draw them from the key that it receives.
        other = run(batch, jax.random.fold_in(key, 1), 0)
        if _near(np.asarray(other[0], np.float64)[off], whole_totals):
            return (
                f"{sums}: the loss draws random numbers from a key of its own, which repeat on every {part}; "
                "draw them from the key that loss_fn receives, row by row with js.row_keys(key, rows)",
            )
        return (
            f"{sums}: the loss draws random numbers for all rows at once (nn.Dropout does), and each {part} draws for "
            f"its own rows; draw them row by row with js.row_keys(key, rows), or {_advise_auto(step)}",
        )
    return (
        f"{sums}: the rows are not independent (batch statistics, a capacity limit over the rows of a {part}, a "
        f"mean of local means): {_explain_statistics(step)}",
    )


def _terms_of(step: Step, model: PyTree) -> Callable[..., Any]:
    """Make the function `fn(rows, key, first_row)`, which evaluates the loss on some rows of the batch.

    `first_row` is the index of the first of these rows in the global batch; random keys of rows depend on it. `fn`
    returns (totals, weights) of a `js.Mean`, one number for each term of the loss; None for a scalar loss.
    """
    objective = step.objective

    def fn(batch: PyTree, key: jax.Array, row: Any) -> Any:
        if isinstance(objective, OfBlocks):
            loss = as_loss(objective.model.run(split_model(model)[0], batch, key, row=row))
        else:
            loss = as_loss(step.loss_fn(model, batch, advance(key, row)))
        return (loss.value.totals, loss.value.weights) if isinstance(loss.value, Mean) else None

    return fn


def _slice_rows(batch: PyTree, mask: PyTree, first: int, size: int) -> PyTree:
    return jax.tree.map(lambda x, has_rows: x[first : first + size] if has_rows else x, batch, mask)


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=0))


def _as_sum(numbers: Iterable[float]) -> str:
    return " + ".join(f"{number:.6g}" for number in numbers)
