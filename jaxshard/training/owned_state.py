"""Convert runs between layouts with and without owners; checkpoints store them without."""

from __future__ import annotations

import jax

from jaxshard.core.layout import Layout
from jaxshard.core.settings import own_settings
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState
from jaxshard.training.views import store, store_state, unstore, unstore_state


def split_owned(run: TrainState, layout: Layout) -> TrainState:
    """Convert a run to `layout.without_owners`; arrays stored with owners move, all others are shared.

    The compiler chooses the collectives: an all-to-all of the state that is stored with owners.
    """
    if layout.owners is None:
        return run
    natural = layout.without_owners

    def split(opt_state: PyTree) -> PyTree:
        return store(natural.opt_state, unstore_state(layout, opt_state))

    with own_settings(layout.mesh):
        moved = jax.jit(split, out_shardings=natural.shardings(natural.opt_state))(run.opt_state)
    return run._replace(opt_state=moved)


def give_to_owners(run: TrainState, layout: Layout) -> TrainState:
    """Convert a run of `layout.without_owners` to `layout`: the inverse of `split_owned`."""
    if layout.owners is None:
        return run
    natural = layout.without_owners

    def give(opt_state: PyTree) -> PyTree:
        return store_state(layout, unstore(natural.opt_state, opt_state))

    with own_settings(layout.mesh):
        moved = jax.jit(give, out_shardings=layout.shardings(layout.opt_state))(run.opt_state)
    return run._replace(opt_state=moved)
