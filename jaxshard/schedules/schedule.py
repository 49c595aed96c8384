"""A schedule: a verified table with its figures, its chart and its file."""

from __future__ import annotations

import os

from jaxshard.core import text_table
from jaxshard.core.local_path import local_path
from jaxshard.schedules import file
from jaxshard.schedules.chart import WIDTH, draw_chart
from jaxshard.schedules.stats import Costs, Stats, compute_stats
from jaxshard.schedules.table import Table


class Schedule(Table):
    """A schedule of a pipeline: a table of operations, verified when it is made.

    p = `stages` devices form the pipeline, each with `chunks` parts of the model: part k = chunk * p + device. `print`
    shows the table:

        print(js.schedules.one_f_one_b(2, 3))

        one_f_one_b: 2 stages, 3 micro-batches; a cell is micro-batch
        tick       0 1 2 3 4 5
        device 0 F 0 1 2
                 B       0 1 2
        device 1 F   0 1 2
                 B     0 1 2

    Args:
      name: one line of text.
      stages: the devices of the pipeline.
      microbatches: into how many micro-batches a batch is cut.
      chunks: parts of the model on each device.
      ops: `Op` entries (tick, device, kind, chunk, microbatch), in any order.

    Raises:
      TypeError: an entry of `ops` is no operation.
      ValueError: names every operation that is missing, doubled, out of range or premature.
    """

    def stats(self, costs: Costs = Costs()) -> Stats:  # noqa: B008 - frozen
        """Return bubbles and stash at these costs; by default a backward takes twice as long as a forward."""
        return compute_stats(self, costs)

    def chart(self, *, width: int = WIDTH) -> str:
        """Return the table as text in lines of at most `width` characters; a note tells what does not fit."""
        return draw_chart(self, width=width)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read the schedule in a file with the columns tick,device,op,chunk,microbatch.

        Its first line may be a comment with sizes, `# stages=4 microbatches=16 chunks=2 name=mine`; a size that is not
        there is one more than the largest number of its column.

        Raises:
          OSError: the file can't be read.
          ValueError: names every line that is no operation, else every operation that is missing, doubled, out of
            range or premature.
        """
        return cls(*file.read_csv(local_path(path)))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the file that `from_csv` reads, sizes and name included."""
        file.write_csv(local_path(path), self)

    def __str__(self) -> str:
        return self.chart()

    def _repr_html_(self) -> str:
        """Show the chart and the figures in a notebook; `js.schedules.schedule_figure` draws it."""
        return text_table.page(self.chart(), text_table.Table([*self.stats().facts.items()]))
