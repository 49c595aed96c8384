"""Residuals: the rounding errors of gradients that are sent as int8, which are added to the next step's gradients.

They are a part of the `TrainState`. The engine says which residuals it keeps, and their placements
(`Engine.residuals`): none, unless gradients are sent as `js.wire.int8(feedback=True)`. Residuals can't be converted to
another layout, since their shape depends on the mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxshard.core.layout import Layout
from jaxshard.core.tree import abstract, check_same_tree
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState, check_is_run, residual_shapes


def with_residuals(run: TrainState, layout: Layout, placements: PyTree) -> TrainState:
    """Add zero residuals (rounding errors of gradients) to a run without them, if the engine keeps residuals.

    Otherwise return the run itself.

    Args:
      run: the TrainState.
      layout: its layout.
      placements: the placements of the engine's residuals; without leaves if it keeps none.

    Raises:
      ValueError: the run has residuals, but the engine keeps none.
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
    """Raise ValueError if a run's residuals (rounding errors of gradients) differ from the engine's `placements`.

    The message names every array that differs.
    """
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
    """Make zero residuals (rounding errors of gradients) for a run without them, each created with its sharding."""

    def zeros() -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), residual_shapes(layout, placements))

    return jax.jit(zeros, out_shardings=layout.shardings(placements))()
