"""Convert the optimizer state of a run between layouts that carry it differently."""

from __future__ import annotations

import jax

from jaxshard.core.layout import Layout
from jaxshard.core.settings import own_settings
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState


def convert_optimizer(run: TrainState, source: Layout, target: Layout) -> TrainState:
    """Convert a run from one layout to another of the same arrays, such as `layout.without_owners`.

    All arrays but those of the optimizer state are shared. The compiler chooses the collectives: an all-to-all of the
    state that is stored with owners of matrices.
    """
    if source.carried == target.carried:
        return run

    def convert(opt_state: PyTree) -> PyTree:
        return target.store_optimizer(source.unstore_optimizer(opt_state))

    with own_settings(source.mesh):
        moved = jax.jit(convert, out_shardings=target.shardings(target.opt_state))(run.opt_state)
    return run._replace(opt_state=moved)
