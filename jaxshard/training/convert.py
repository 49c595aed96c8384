"""Convert optimizer state between a layout that shards it and one that stores it on the devices that own matrices."""

from __future__ import annotations

import jax

from jaxshard.core.layout import Layout
from jaxshard.core.settings import own_settings
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState


def convert_optimizer(run: TrainState, source: Layout, target: Layout) -> TrainState:
    """Convert the optimizer state of a TrainState to another layout of the same model.

    A layout may give each matrix to one device (its owner), which stores the optimizer state of the matrix; `target`
    may be the same layout without owners (`layout.without_owners`). Parameters and all other arrays are shared with
    `run`. The compiler chooses the collectives: an all-to-all of the optimizer state that owners store. If both layouts
    store the state alike, return `run` itself.
    """
    if source.carried == target.carried:
        return run

    def convert(opt_state: PyTree) -> PyTree:
        return target.store_optimizer(source.unstore_optimizer(opt_state))

    with own_settings(source.mesh):
        moved = jax.jit(convert, out_shardings=target.shardings(target.opt_state))(run.opt_state)
    return run._replace(opt_state=moved)
