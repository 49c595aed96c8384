"""A schedule: a verified table with its figures, its chart and its file."""

from __future__ import annotations

import os
from pathlib import Path

from jaxshard.schedules import file
from jaxshard.schedules.chart import WIDTH, chart
from jaxshard.schedules.stats import Costs, Stats, stats_of
from jaxshard.schedules.table import Table


class Schedule(Table):
    """What every device of a pipeline does in every tick, verified when it is made; `Op` entries in any order.

    p stages are the devices of the pipeline's axis, each with `chunks` parts of the model: part k = chunk * p + device.
    `print` shows the table.

    Raises:
      TypeError: an entry of `ops` is no operation.
      ValueError: names every operation that is missing, doubled, out of range or premature.
    """

    def stats(self, costs: Costs = Costs()) -> Stats:  # noqa: B008 - frozen
        """Bubbles and stash at these costs: by default a backward takes twice as long as a forward."""
        return stats_of(self, costs)

    def chart(self, *, width: int = WIDTH) -> str:
        """The table as text in lines of at most `width` characters; what does not fit is left out with a note."""
        return chart(self, width=width)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Schedule:
        """The schedule in a file with the columns tick,device,op,chunk,microbatch.

        Its first line may be a comment with sizes, `# stages=4 microbatches=16 chunks=2 name=mine`; a size that is not
        there is one more than the largest number of its column.

        Raises:
          OSError: the file can't be read.
          ValueError: names every line that is no operation, else every operation that is missing, doubled, out of
            range or premature.
        """
        return cls(*file.read(Path(path)))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that `from_csv` takes, sizes and name included."""
        file.write(Path(path), self)

    def __str__(self) -> str:
        return self.chart()
