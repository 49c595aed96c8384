"""`row_axes`: the mesh axes over which the rows of a batch are split if the loss sees only some of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

from jaxshard.core.constrain import activations_in_force

_in_turns = jax.make_user_context(default_value=False)


def taking_turns() -> AbstractContextManager[None]:
    """Make a context in which `row_axes` raises, because the loss is computed one micro-batch after another."""
    context: AbstractContextManager[None] = _in_turns(True)
    return context


def row_axes() -> tuple[str, ...]:
    """Return the mesh axes that split the rows of the batch here, for statistics of all rows.

    Under `js.explicit` a mean over a device's rows, averaged over these axes with `jax.lax.pmean`, is the mean of the
    global batch. Under `js.auto`, in evaluation and outside of jaxshard's steps the function sees all rows, and there
    are no axes: (). No collectives.

    Raises:
      ValueError: the engine computes micro-batches one after another. Statistics of all rows can't be computed then,
        because the other rows of the batch are not on another device but in another micro-batch.

    Example:
      Batch normalisation with the statistics of the global batch under either engine:

        x = nn.BatchNorm(use_running_average=not train, axis_name=js.row_axes() or None)(x)
    """
    activations = activations_in_force()
    if activations is None:
        return ()
    layout, (_, manual) = activations.layout, activations.mesh()
    if _in_turns.value or (layout.pipeline is not None and manual):
        raise ValueError(
            "row_axes: micro-batches are computed one after another, so statistics of all rows (batch normalisation) "
            "can't be computed; leave out microbatches=, and use js.auto() or js.explicit() instead of a "
            "pipeline"
        )
    return tuple(axis for axis in layout.batch_axes if axis in manual)
