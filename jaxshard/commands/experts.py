"""How evenly a trained model uses its experts: the load of each one on held-out data, and those that are dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxshard.core.layout import Layout
from jaxshard.core.low_rank import has_low_rank
from jaxshard.core.types import PyTree
from jaxshard.engines.engine import Engine
from jaxshard.models.decoder import Decoder
from jaxshard.models.moe import RoutedDecoder
from jaxshard.training.evaluate import make_eval_step
from jaxshard.training.state import TrainState

DEAD = 0.01
"""An expert that is chosen less often than this times the mean is dead."""


def count_experts(
    network: Decoder,
    run: TrainState,
    layout: Layout,
    engine: Engine,
    batches: Sequence[PyTree],
    drop_rate: float | None,
) -> dict[str, Any] | None:
    """Count how often each expert is chosen, over batches of evaluation.

    Returns:
      "load", for each block a list of the experts' loads over their mean; "dead", the names of those with next to none;
      "drop_rate" as it was given. None for a model without experts or with low-rank factors, and without batches.
    """
    if not isinstance(network, RoutedDecoder) or not batches or has_low_rank(layout.shapes.params):
        return None
    step = make_eval_step(network.routing.evaluate, layout, engine=engine)
    counts = sum(np.asarray(step(run, batch)["load"].value, np.float64) for batch in batches)
    load = np.asarray(counts) / np.mean(counts, -1, keepdims=True)
    dead = [f"block {block} expert {expert}" for block, expert in np.argwhere(load < DEAD)]
    return {"load": np.round(load, 4).tolist(), "dead": dead, "drop_rate": drop_rate}
