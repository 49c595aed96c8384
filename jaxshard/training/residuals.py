"""Residuals: what rounding took from the gradients of a step, carried in a run to the next one.

An engine that sends gradients as `js.wire.int8(feedback=True)` says how its residuals are placed (`Engine.residuals`).
They are of no layout: another mesh has other ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxshard.core.layout import Layout
from jaxshard.core.tree import abstract, check_same_tree
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState, check_is_run, residual_shapes


def with_residuals(run: TrainState, layout: Layout, placements: PyTree) -> TrainState:
    """Return the run with residuals of zeros where it has none yet; the run itself otherwise.

    Raises:
      ValueError: the run has residuals, and the engine has none.
    """
    check_is_run(run)
    wanted, found = (bool(jax.tree.leaves(tree)) for tree in (placements, run.residuals))
    if found and not wanted:
        raise ValueError(
            "the run has residuals of gradients, which an engine without feedback would drop; go on with "
            "reduce_dtype=js.wire.int8(feedback=True), or drop them: run._replace(residuals=())"
        )
    return run if found or not wanted else run._replace(residuals=zero_residuals(layout, placements))


def check_residuals(run: TrainState, layout: Layout, placements: PyTree) -> None:
    """Raise ValueError if a run has other residuals than the engine places, or none yet; names every leaf."""
    wanted, found = (bool(jax.tree.leaves(tree)) for tree in (placements, run.residuals))
    if wanted and not found:
        raise ValueError(
            "the engine has feedback, and the run no residuals yet; before the program of your own that has the step "
            "in it, call run = step.with_residuals(run)"
        )
    with_residuals(run, layout, placements)
    check_same_tree(
        abstract(residual_shapes(layout, placements)),
        abstract(run.residuals),
        "the run's residuals of gradients are of another layout or trainable=",
        "go on with the layout that made them, or drop them, and the next step makes new ones: "
        "run._replace(residuals=())",
    )


def zero_residuals(layout: Layout, placements: PyTree) -> PyTree:
    """Make the residuals of a run that has taken no step with feedback, every array born where it is placed."""

    def zeros() -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), residual_shapes(layout, placements))

    return jax.jit(zeros, out_shardings=layout.shardings(placements))()
