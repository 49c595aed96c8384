"""A step that a command looks at before anything runs: how it runs, its program, its layout, and its batch's shapes."""

from __future__ import annotations

from typing import NamedTuple

from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import PrecisionName, ShardingFlags, check_positive
from jaxshard.commands.parallel import Parallel, Topology, make_parallel
from jaxshard.commands.program import Program, depth_of, program_of
from jaxshard.core.layout import Layout
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.training.step import Step, make_step


class Prepared(NamedTuple):
    """A step by its parts; `rows` is the batch as shapes. Nothing is compiled, and no array is made."""

    how: Parallel
    program: Program
    layout: Layout
    rows: PyTree

    def step(self) -> Step:
        """Make the step."""
        with usage_errors(), refusals():
            return make_step(self.program.loss_fn, self.program.tx, self.layout, engine=self.how.engine)


def prepare(
    target: str,
    *,
    change: str | None,
    sharding: ShardingFlags,
    batch: int | None,
    seq: int | None,
    remat: str | None,
    precision: PrecisionName | None,
    topology: Topology | None,
) -> Prepared:
    """Resolve the flags of a command that looks at a step.

    Raises:
      UsageError: flags that do not fit together, to the model or to the devices; a batch that they do not divide.
    """
    with usage_errors():
        check_positive(batch=batch, seq=seq)
        depth = depth_of(target, change)
        how = make_parallel(sharding, remat=remat, precision=precision, topology=topology, depth=depth, batch=batch)
    program = program_of(target, change=change, rows=batch, seq=seq, seed=None, rows_multiple=how.rows_multiple)
    rows = abstract(program.batch)
    with usage_errors(), refusals():
        layout = make_layout(how.strategy, how.mesh, program.init_fn, program.tx)
        layout.plan_batch(rows).check(how.engine.microbatches)
    return Prepared(how, program, layout, rows)
