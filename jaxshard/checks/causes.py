"""Why a sharded step differs from one device: the usual causes, told apart by small experiments on one device.

An engine that gives each device its own rows is right where the total and the weight of the loss are sums over rows.
So the loss of the whole batch is compared with those of its parts: what does not add up is the cause.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxshard.adapt.objective import OfBlocks, resolve
from jaxshard.core.keys import advance
from jaxshard.core.layout import Layout, split_model
from jaxshard.core.loss import Mean, as_loss
from jaxshard.core.mesh import axis_size
from jaxshard.core.tree import row_count
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.engine import Engine

_CLOSE = 1e-3
"""Relative: what is a constant factor, and what adds up."""


class Ratio(NamedTuple):
    """A number or gradient that differs, sharded and on one device."""

    name: str
    ours: np.ndarray
    theirs: np.ndarray

    @property
    def factor(self) -> float | None:
        """By what constant factor ours is off; None where it is by none, or nothing is finite."""
        a, b = self.ours.astype(np.float64).ravel(), self.theirs.astype(np.float64).ravel()
        if not (np.isfinite(a).all() and np.isfinite(b).all() and b.any()):
            return None
        factor = float(a @ b / (b @ b))
        close = np.abs(a - factor * b).max() <= _CLOSE * np.abs(a).max()
        return factor if close and abs(factor - 1) > _CLOSE else None


class Suspect(NamedTuple):
    """The loss with all that it was called with; `bind` makes what names mesh axes runnable on one device."""

    loss_fn: LossFn
    model: PyTree
    batch: PyTree
    key: jax.Array
    layout: Layout
    engine: Engine
    bind: Callable[[Callable], Callable]


def causes(failed: set[str], ratios: list[Ratio], suspect: Suspect) -> tuple[str, ...]:
    """The likely causes, a sentence or two each, with the way out; `failed` holds the kinds of arrays that differ."""
    if failed == {"update"}:
        return (
            "given the same gradients the optimizer alone differs: an update that amplifies rounding (tolerance= "
            "allows for it), or one that depends on how arrays are split",
        )
    factors = _factors(ratios, suspect.layout)
    found = _rows(suspect) if failed & {"loss", "gradient"} else ()
    if "state" in failed and not suspect.engine.compiler_chooses and not any(_STATISTICS in text for text in found):
        found = (*found, f"the model's new state is computed by each device from its own rows: {_STATISTICS}")
    if not found and factors:
        found = (
            "the loss does add up over the rows, so something is summed over devices twice, or never: leave "
            "collectives over the batch's axes (psum, pmean) in the loss to the engine",
        )
    return (*factors, *found)


_STATISTICS = (
    "under js.explicit() give normalisations the mesh axis (nn.BatchNorm(axis_name=...)), or use js.auto(), which is "
    "right for any loss (and takes no js.pipeline)"
)


def _factors(ratios: list[Ratio], layout: Layout) -> tuple[str, ...]:
    """ "the loss and gradient w are 8 times too large: 8 = the size of axis 'data'", once per factor."""
    by_factor: dict[str, list[str]] = {}
    for ratio in ratios:
        text = None if ratio.factor is None else _factor(ratio.factor, layout)
        # A single number is always off by some factor.
        if text is None and ratio.factor is not None and ratio.theirs.size > 1:
            text = f"{ratio.factor:.4g} times what one device has"
        if text is not None:
            by_factor.setdefault(text, []).append(ratio.name)
    return tuple(f"off by a constant factor: {_some(names)}: {text}" for text, names in by_factor.items())


def _factor(factor: float, layout: Layout) -> str | None:
    """The factor as the size of some of the mesh's axes; None where it is not."""
    shape = layout.mesh.shape
    axes = [name for name, size in shape.items() if size > 1]
    for count in range(1, len(axes) + 1):
        for names in itertools.combinations(axes, count):
            size = math.prod(shape[name] for name in names)
            for way, whole in (("large", factor), ("small", 1 / factor if factor else math.inf)):
                if abs(whole / size - 1) <= _CLOSE:
                    what = f"axis {names[0]!r}" if count == 1 else "axes " + " x ".join(map(repr, names))
                    return f"{size} times too {way}, and {size} is the size of {what}"
    return None


def _rows(suspect: Suspect) -> tuple[str, ...]:
    """What the loss of the parts of the batch, computed on their own, says about the rows."""
    loss_fn, _, batch, key, layout, engine, bind = suspect
    parts = engine.microbatches * (1 if engine.compiler_chooses else axis_size(layout.mesh, layout.batch_axes))
    rows = row_count(batch)
    size = rows // parts
    run = jax.jit(bind(_open(loss_fn, suspect.model)))
    if parts == 1 or run(batch, key, 0) is None:
        return ()
    apart = [run(_cut(batch, first, size), key, first) for first in range(0, rows, size)]
    totals, weights = (np.sum([np.asarray(one[i], np.float64) for one in apart], axis=0) for i in (0, 1))
    whole_totals, whole_weights = (np.asarray(x, np.float64) for x in run(batch, key, 0))
    if not _near(weights, whole_weights):
        return (
            f"the weight of js.Mean is no sum over rows: that of the whole batch is {_listed(whole_weights)}, those of "
            f"its {parts} parts add up to {_listed(weights)}; return js.Mean(total, weight) with the sum of the "
            "weighted values and the sum of the weights of the rows at hand",
        )
    random = "random_bits" in str(jax.make_jaxpr(bind(_open(loss_fn, suspect.model)))(_cut(batch, 0, size), key, 0))
    if _near(totals, whole_totals):
        return ()
    numbers = (
        f"the total of the loss over the whole batch is {_listed(whole_totals)}, those of its {parts} parts add up to "
        f"{_listed(totals)}"
    )
    if random:
        other = run(batch, jax.random.fold_in(key, 1), 0)
        if _near(np.asarray(other[0], np.float64), whole_totals):
            return (
                f"{numbers}: the loss draws random numbers from a key of its own, which repeat on every device; draw "
                "them from the key that loss_fn receives, row by row with js.row_keys(key, rows)",
            )
        return (
            f"{numbers}: the loss draws random numbers for all rows at once (nn.Dropout does), which are others where "
            "each device draws for its own rows; draw them row by row with js.row_keys(key, rows), or use js.auto() "
            "(which takes no js.pipeline)",
        )
    return (
        f"{numbers}: the rows are not independent (batch statistics, a limit of capacity over the rows at hand, a mean "
        f"of local means): {_STATISTICS}",
    )


def _open(loss_fn: LossFn, model: PyTree) -> Callable[..., Any]:
    """`fn(rows, key, first row) -> (totals, weights)` of a `js.Mean` as an engine calls the loss; None for a scalar."""
    objective = resolve(loss_fn)

    def fn(batch: PyTree, key: jax.Array, row: Any) -> Any:
        if isinstance(objective, OfBlocks):
            loss = as_loss(objective.model.run(split_model(model)[0], batch, key, row=row))
        else:
            loss = as_loss(loss_fn(model, batch, advance(key, row)))
        return (loss.value.totals, loss.value.weights) if isinstance(loss.value, Mean) else None

    return fn


def _cut(batch: PyTree, first: int, size: int) -> PyTree:
    return jax.tree.map(lambda x: x[first : first + size] if x.ndim else x, batch)


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=0))


def _listed(numbers: Iterable[float]) -> str:
    return " + ".join(f"{number:.6g}" for number in numbers)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
