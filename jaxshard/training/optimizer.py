"""The optimizer of a step. When the step is made, proofs about its update decide on which arrays it runs."""

from __future__ import annotations

import optax

from jaxshard.core.collectives import Sums
from jaxshard.core.layout import Layout, select
from jaxshard.core.tree import BLOCKS
from jaxshard.optim.ordered import with_ordered_sums
from jaxshard.optim.owners.own import owned_update
from jaxshard.optim.proof.elementwise import check_elementwise, check_stored
from jaxshard.optim.proof.non_finite import handles_non_finite
from jaxshard.optim.proof.stacking import require_same_stacked
from jaxshard.training.extra_args import find_extra_args, take_fast_gradients
from jaxshard.training.update import make_update


class Optimizer:
    """An optax transform and the arrays on which a step runs it.

    These are the stored arrays, or logical arrays (without padding, in model order). For a layout with owners they are
    full matrices, each on the only device that updates it.

    Args:
      tx: the optax transform.
      layout: the layout; under `js.local` the layout of one replica.
      sums: the functions that sum over devices, in the order that the hardware chooses or in a fixed order.

    Attributes:
      update: the function that `make_update` returns.
      elementwise: the proof that the optimizer is elementwise, or the reason why it is not; None if no proof was
        needed, because every array is stored in its logical shape.
      owned: True if each matrix is updated by the device that owns it.
      can_guard: False if the optimizer itself tests whether its gradients are finite.
    """

    def __init__(self, tx: optax.GradientTransformation, layout: Layout, sums: Sums):
        self._layout = layout
        self._params = select(layout.trainable, layout.shapes.params)
        tx = take_fast_gradients(tx, self._params)
        extra = find_extra_args(tx, self._params)
        self._readable, self._checked_stacking = extra.fill_in(tx), False
        # A line search tests whether trial losses are finite, which does not handle gradients that are not finite.
        self.can_guard = not handles_non_finite(tx if extra.uses_loss else self._readable, self._params)
        natural = layout.without_owners.opt_state
        self.elementwise = check_stored(self._readable, self._params, layout.opt_params, natural)
        owned = None if layout.owners is None or extra.names else owned_update(layout, tx)
        self.owned = owned is not None
        # The optimizer runs on stored arrays if they equal the logical ones, or if it is elementwise. With ordered
        # sums, sums over all parameters (a global norm) are allowed too: they are replaced by ordered sums, to which
        # the zeros of the padding add nothing.
        stored = layout.owners is None and (self.elementwise is None or bool(self.elementwise))
        self._totals_in_order = sums.in_order and not check_elementwise(self._readable, self._params)
        if self._totals_in_order:
            if extra.names:
                raise ValueError(
                    "reduction='ordered' orders the sums of an optimizer that takes gradients alone, but this one asks "
                    f"for {', '.join(extra.names)} too; use reduction='native'"
                )
            tx, stored = with_ordered_sums(tx, self._params, layout), True
        self._streamed = self._can_stream(stored=stored, uses_gradients_alone=not extra.names)
        self.update = make_update(tx, layout, sums, stored=stored, streamed=self._streamed, extra=extra, owned=owned)

    def _can_stream(self, *, stored: bool, uses_gradients_alone: bool) -> bool:
        """Return True if stacked optimizer state in the host's memory can be updated block by block.

        The optimizer must be elementwise, run on stored arrays and use no extra arguments.
        """
        on_host = self._layout.host_bytes_per_device() > 0
        plain = stored and uses_gradients_alone and not self._totals_in_order
        has_blocks = isinstance(self._params, dict) and BLOCKS in self._params
        return on_host and plain and has_blocks and bool(check_elementwise(self._readable, self._params))

    @property
    def view(self) -> str:
        """A text that says on which arrays the optimizer runs, stored or logical, why, and what it costs."""
        if not (size := self._layout.host_bytes_per_device()):
            return self._view_on_device()
        how = "whole: only stacked blocks of an elementwise optimizer come one at a time"
        if self._streamed:
            how = "stacked arrays block by block, others whole"
        return f"{self._view_on_device()}; {size} bytes per device come from the host's memory and go back, {how}"

    def _view_on_device(self) -> str:
        if self.owned:
            matrices = sum(one.count for one in self._layout.owners.stacks) if self._layout.owners else 0
            return f"owners: {matrices} matrices are updated whole, each by one device (print(layout.owners))"
        if self._totals_in_order:
            return "stored view: the optimizer is elementwise but for sums over all parameters, which are ordered"
        if self.elementwise is None:
            return "stored view: every array is stored in its logical shape, so that the optimizer moves nothing"
        if self.elementwise:
            return "stored view: the optimizer is elementwise and moves nothing"
        moved = [p for p in self._layout.placed() if p.role == "opt" and p.placement.view.stored != p.leaf.shape]
        size = sum(p.placement.bytes_per_device(self._layout.mesh, p.leaf.dtype) for p in moved)
        return (
            f"logical view: the optimizer is {self.elementwise}; "
            f"{len(moved)} padded arrays of its state, {size} bytes per device, are unpadded and padded every step"
        )

    def check_stacking(self) -> None:
        """Raise ValueError if the optimizer updates stacked blocks differently from the same blocks as separate arrays.

        One example is an optimizer that uses the norm of each array. Only the first call checks. The step calls this
        before it compiles, if the library stacked the blocks for the user.
        """
        if self._checked_stacking:
            return
        if isinstance(self._params, dict) and BLOCKS in self._params:
            require_same_stacked(self._readable, self._params)
        elif not check_elementwise(self._readable, self._params):
            raise ValueError(
                "the blocks of a model in this loss were stacked, which may change what this optimizer does to them, "
                f'and they are not found: the parameters have no "{BLOCKS}" at their top. Return what model.init '
                "returns from init_fn, with other parameters beside it"
            )
        # Last, so that a step that was refused is refused again.
        self._checked_stacking = True
