"""Trace the loss of a part of a batch: the rows that one device computes at a time.

    js.auto()                  the part is the global batch: the trace is not read
    js.explicit()              the rows of one device
    microbatches=n             1/n of these rows

`accumulate` runs this trace, and the checks (the weights of means in `counted_rows.py`, the model's state in
`state_rules.py`) read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.core.jaxpr import Program, trace_or_none
from jaxshard.core.layout import put_back, select
from jaxshard.core.loss import Loss
from jaxshard.core.types import PyTree


class Cut(NamedTuple):
    """One device's rows, cut into micro-batches.

    Attributes:
      batch: this device's batch, before the cut.
      mask: True for every array of the batch that has rows.
      turns: the arrays with rows, cut to [micro-batches, rows, ...]; None for the others.
      first_rows: [micro-batches], the index in the global batch of each micro-batch's first row.
    """

    batch: PyTree
    mask: PyTree
    turns: PyTree
    first_rows: jax.Array

    def part(self, rows: PyTree) -> PyTree:
        """Return one micro-batch: its arrays with rows, given as `rows`, and the arrays that have no rows."""
        return put_back(self.mask, rows, self.batch)

    def first(self) -> tuple[PyTree, jax.Array]:
        """Return the first micro-batch, and the global index of its first row."""
        return self.part(jax.tree.map(lambda x: x[0], self.turns)), self.first_rows[0]


class Part(NamedTuple):
    """The loss of a part of the batch (one device's rows, or one micro-batch of them), with its trace.

    Attributes:
      fn: `fn(params, state, batch, row) -> (js.Loss, *others)`; `row` is the global index of the part's first row.
      args: the arguments of `fn`, arrays or their shapes.
      program: the trace of `fn`, a jaxpr.
    """

    fn: Callable[..., tuple[Any, ...]]
    args: tuple[PyTree, PyTree, PyTree, Any]
    program: Program

    @classmethod
    def trace(cls, fn: Callable[..., tuple[Any, ...]], *args: Any) -> Part:
        """Trace `fn(*args)`; return the trace together with `fn` and `args`."""
        return cls(fn, args, Program.trace(fn, *args))

    @property
    def loss(self) -> Loss:
        """The loss that `fn` returns, with variables of the jaxpr in place of arrays."""
        loss: Loss = self.program.out[0]
        return loss

    def rows(self, mask: PyTree) -> PyTree:
        """Return the jaxpr's input variables for batch arrays that have rows (`mask` is True), None for the others."""
        return select(mask, self.program.args[2])

    def run(self) -> tuple[Any, ...]:
        """Compute `fn(*args)` under jit, which finds the trace in JAX's cache instead of tracing again."""
        results: tuple[Any, ...] = jax.jit(self.fn)(*self.args)
        return results

    def of_twice_the_rows(self, mask: PyTree) -> Program | None:
        """Trace `fn` for a batch with twice as many rows; return None if `fn` does not support them.

        Args:
          mask: True for every array of the batch that has rows.
        """

        def twice(x: Any, has_rows: bool) -> jax.ShapeDtypeStruct:
            shape = jnp.shape(x)
            return jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]) if has_rows else shape, jnp.result_type(x))

        params, state, batch, row = self.args
        return trace_or_none(lambda: Program.trace(self.fn, params, state, jax.tree.map(twice, batch, mask), row))
