"""Prepare a step that a command looks at before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from jaxshard.commands.errors import refusals, usage_errors
from jaxshard.commands.flags import Audit, Plan
from jaxshard.commands.named_model import NamedModel
from jaxshard.commands.parallel import Parallel, make_parallel
from jaxshard.commands.program import Program, program_of
from jaxshard.core.layout import Layout
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.training.step import Step, make_step


class Prepared(NamedTuple):
    """A step to look at before it runs.

    Attributes:
      how: mesh, strategy and engine.
      program: the model's functions, the optimizer and the batch.
      layout: the placement of every array.
      rows: the batch as shapes and dtypes.
    """

    how: Parallel
    program: Program
    layout: Layout
    rows: PyTree

    def step(self) -> Step:
        """Make the step, without compiling it."""
        with usage_errors(), refusals():
            return make_step(self.program.loss_fn, self.program.tx, self.layout, engine=self.how.engine)


def prepare(flags: Audit | Plan, topology: Callable[..., Mesh] | None) -> Prepared:
    """Make mesh, strategy, engine, program and layout from the flags of a command that looks at a step.

    Raises:
      UsageError: flags contradict each other, the model or the devices; or devices times micro-batches do not divide
        the batch.
    """
    with usage_errors():
        depth = NamedModel(flags.target, flags.change).depth
        how = make_parallel(
            flags, remat=flags.remat, precision=flags.precision, topology=topology, depth=depth, batch=flags.batch
        )
    program = program_of(
        flags.target,
        flags.change,
        lora=flags.lora,
        rows=flags.batch,
        seq=flags.seq,
        seed=None,
        rows_multiple=how.rows_multiple,
    )
    rows = abstract(program.batch)
    with usage_errors(), refusals():
        layout = how.layout(program.init_fn, program.tx)
        layout.plan_batch(rows).check(how.engine.microbatches)
    return Prepared(how, program, layout, rows)
