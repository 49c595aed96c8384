"""A schedule: a verified table with its figures, its chart and its file."""

from __future__ import annotations

from jaxshard.schedules.stats import Costs, Stats, stats_of
from jaxshard.schedules.table import Table


class Schedule(Table):
    """What every device of a pipeline does in every tick, verified when it is made; `Op` entries in any order.

    Raises:
      ValueError: names every operation that is missing, doubled, out of range or premature.
    """

    def stats(self, costs: Costs = Costs()) -> Stats:  # noqa: B008 - frozen
        """Bubbles and stash at these costs: by default a backward takes twice as long as a forward."""
        return stats_of(self, costs)
