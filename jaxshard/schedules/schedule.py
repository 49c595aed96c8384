"""`Schedule`: a verified table with statistics, a chart and a CSV file."""

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

    The pipeline has p = `stages` devices, each with `chunks` parts of the model: part k = chunk * p + device. `print`
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
      stages: the number of devices of the pipeline.
      microbatches: the number of micro-batches of a batch.
      chunks: the number of parts of the model on each device.
      ops: `Op` entries (tick, device, kind, chunk, microbatch), in any order.

    Raises:
      TypeError: an entry of `ops` is not an operation.
      ValueError: names every operation that is missing, duplicated, out of range or too early.
    """

    def stats(self, costs: Costs = Costs()) -> Stats:  # noqa: B008 - frozen
        """Return bubble, stored residuals and other statistics; by default a backward takes twice a forward."""
        return compute_stats(self, costs)

    def chart(self, *, width: int = WIDTH) -> str:
        """Return the table as text, in lines of at most `width` characters; a note counts the ticks that do not fit."""
        return draw_chart(self, width=width)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a schedule from a CSV file with the columns tick,device,op,chunk,microbatch.

        Its first line may be a comment with sizes, `# stages=4 microbatches=16 chunks=2 name=mine`; a missing size is
        one more than the largest value in its column.

        Raises:
          OSError: the file can't be read.
          ValueError: names every line that is not an operation, else every operation that is missing, duplicated, out
            of range or too early.
        """
        return cls(*file.read_csv(local_path(path)))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule, with its sizes and name, to a CSV file that `from_csv` reads."""
        file.write_csv(local_path(path), self)

    def __str__(self) -> str:
        return self.chart()

    def _repr_html_(self) -> str:
        """Show the chart and the statistics in a notebook."""
        return text_table.page(self.chart(), text_table.Table([*self.stats().facts.items()]))
