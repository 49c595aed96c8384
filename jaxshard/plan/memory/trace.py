"""The program of a whole training step, traced and not lowered, with where each of its arguments lives."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from jaxshard.core.layout import Layout
from jaxshard.core.settings import own_settings
from jaxshard.core.tree import abstract, path_str
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.engine import Engine
from jaxshard.plan.memory.shards import Split, spec_split
from jaxshard.training.state import TrainState, run_shapes
from jaxshard.training.step import make_step


class Traced(NamedTuple):
    """A traced step.

    Attributes:
      closed: the closed jaxpr of `step(run, batch) -> (run, metrics)`.
      arguments: split over the axes of the mesh, role and path of each argument.
    """

    closed: Any
    arguments: tuple[tuple[Split, str, str], ...]


_ROLES = {"params": "parameters", "opt_state": "optimizer state", "state": "model state", "residuals": "gradients"}


def trace_step(
    layout: Layout, loss_fn: LossFn, tx: optax.GradientTransformation, engine: Engine, batch: PyTree
) -> Traced:
    """Trace the step that `make_step` would compile for a batch; nothing is lowered, compiled or allocated."""
    step = make_step(loss_fn, tx, layout, engine=engine)
    run, rows = run_shapes(layout, engine.residuals(layout)), abstract(batch)
    # Checks the batch as a step does, and gives the shardings that it would compile with.
    with own_settings(layout.mesh):
        closed = jax.make_jaxpr(step)(run, rows)
    return Traced(closed, tuple(_arguments(layout, run, rows)))


def _arguments(layout: Layout, run: TrainState, batch: PyTree) -> list[tuple[Split, str, str]]:
    axes = frozenset(axis for axis, size in layout.mesh.shape.items() if size > 1)
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(run):
        name = path_str(path)
        role = next((role for field, role in _ROLES.items() if name.startswith(field)), "batch")
        found.append((spec_split(x.sharding.spec, len(x.shape), axes), role, name))
    placements = jax.tree.leaves(layout.batch_placements(batch))
    for (path, x), placement in zip(jax.tree_util.tree_leaves_with_path(batch), placements, strict=True):
        found.append((spec_split(placement.store, len(x.shape), axes), "batch", f"batch/{path_str(path)}"))
    return found
