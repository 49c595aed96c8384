"""The traced computation of a step, in global view: gradient, optimizer update, and the choice of old or new arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxshard.adapt.objective import resolve
from jaxshard.core.average import is_average
from jaxshard.core.collectives import all_max, sum_scalar
from jaxshard.core.known_model import models_run
from jaxshard.core.layout import Layout, put_back, select
from jaxshard.core.local import Local
from jaxshard.core.tree import BLOCKS, paths
from jaxshard.core.types import LossFn, PyTree
from jaxshard.engines.engine import Engine, Outcome
from jaxshard.engines.explicit import combine_over
from jaxshard.optim.ordered import with_ordered_sums
from jaxshard.optim.owners.own import owned_update
from jaxshard.optim.proof.elementwise import check_elementwise, check_stored
from jaxshard.optim.proof.non_finite import handles_non_finite
from jaxshard.optim.proof.stacking import require_same_stacked
from jaxshard.training.extra_args import find_extra_args, take_fast_gradients
from jaxshard.training.first_step import Evidence
from jaxshard.training.hyperparams import find_hyperparams
from jaxshard.training.non_finite import Bad, find_bad, keep_old_unless, sum_of_squares
from jaxshard.training.state import TrainState
from jaxshard.training.update import make_update
from jaxshard.training.views import cut_first, store, use_stored
from jaxshard.training.warm_up import join_in_warm_up

Metrics = dict[str, Any]
"""Scalars of the global batch by name, and under "bad" a `Bad`."""


class TracedStep:
    """The computation of one step, called in a trace as `step(run, batch) -> (run, metrics, evidence)`.

    `Step` compiles it, places batches, donates runs and compares processes.

    Attributes:
      layout: the layout.
      objective, elementwise, update_view, owned, guarded: as in `Step`.
      trained: the paths of the trained parameters.
      residuals: shapes of the engine's residuals of each gradient; empty without feedback.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        layout: Layout,
        engine: Engine,
        *,
        guarded: bool,
        replica_of: Local | None = None,
    ):
        self.layout, self._replica_of = layout, replica_of
        self._replicas: tuple[str, ...] = () if replica_of is None else replica_of.axis
        params = select(layout.trainable, layout.shapes.params)
        self.objective, self.trained = resolve(loss_fn), tuple(paths(params))
        tx = take_fast_gradients(tx, params)
        extra = find_extra_args(tx, params)
        readable = extra.fill_in(tx)
        # A line search tests whether trial losses are finite, which does not handle gradients that are not finite.
        self.guarded = guarded and not handles_non_finite(tx if extra.uses_loss else readable, params)
        self._tx, self._params, self._checked_stacking = readable, params, False
        if layout.stacked_for_user or self.objective.stacked_for_user:
            self._check_stacking()
        self._sums = engine.sums(layout)
        self.elementwise = check_stored(readable, params, layout.opt_params, layout.without_owners.opt_state)
        owned = None if layout.owners is None or extra.names else owned_update(layout, tx)
        self.owned = owned is not None
        # The optimizer runs on stored arrays if they equal the logical ones, or if it is elementwise. With ordered
        # sums, sums over all parameters (a global norm) are allowed too: they are replaced by ordered sums, to which
        # the zeros of the padding add nothing.
        stored = layout.owners is None and (self.elementwise is None or bool(self.elementwise))
        self._totals_in_order = self._sums.in_order and not check_elementwise(readable, params)
        if self._totals_in_order:
            if extra.names:
                raise ValueError(
                    "reduction='ordered' and 'checked' order the sums of an optimizer that takes gradients alone, but "
                    f"this one asks for {', '.join(extra.names)} too; use reduction='native'"
                )
            tx, stored = with_ordered_sums(tx, params, layout), True
        self._streamed = self._can_stream(stored=stored, uses_gradients_alone=not extra.names)
        self._update = make_update(
            tx, layout, self._sums, stored=stored, streamed=self._streamed, extra=extra, owned=owned
        )
        self._value_and_grad = engine.value_and_grad(self.objective, layout)
        self.residuals: PyTree = engine.residuals(layout)

    def _can_stream(self, *, stored: bool, uses_gradients_alone: bool) -> bool:
        """Return whether stacked state on the host can be updated block by block, as for elementwise optimizers."""
        on_host = self.layout.host_bytes_per_device() > 0
        plain = stored and uses_gradients_alone and not self._totals_in_order
        has_blocks = isinstance(self._params, dict) and BLOCKS in self._params
        return on_host and plain and has_blocks and bool(check_elementwise(self._tx, self._params))

    @property
    def update_view(self) -> str:
        """The arrays on which the optimizer runs, stored or logical, with the reason and the cost, as text."""
        if not (size := self.layout.host_bytes_per_device()):
            return self._view_on_device()
        how = "whole: only stacked blocks of an elementwise optimizer come one at a time"
        if self._streamed:
            how = "stacked arrays block by block, others whole"
        return f"{self._view_on_device()}; {size} bytes per device come from the host's memory and go back, {how}"

    def _view_on_device(self) -> str:
        if self.owned:
            matrices = sum(one.count for one in self.layout.owners.stacks) if self.layout.owners else 0
            return f"owners: {matrices} matrices are updated whole, each by one device (print(layout.owners))"
        if self._totals_in_order:
            return "stored view: the optimizer is elementwise but for sums over all parameters, which are ordered"
        if self.elementwise is None:
            return "stored view: every array is stored in its logical shape, so that the optimizer moves nothing"
        if self.elementwise:
            return "stored view: the optimizer is elementwise and moves nothing"
        moved = [p for p in self.layout.placed() if p.role == "opt" and p.placement.view.stored != p.leaf.shape]
        size = sum(p.placement.bytes_per_device(self.layout.mesh, p.leaf.dtype) for p in moved)
        return (
            f"logical view: the optimizer is {self.elementwise}; "
            f"{len(moved)} padded arrays of its state, {size} bytes per device, are unpadded and padded every step"
        )

    def _residuals_of(self, run: TrainState) -> tuple[PyTree, ...]:
        """Return the engine's argument for residuals; () for an engine without them."""
        return (run.residuals,) if jax.tree.leaves(self.residuals) else ()

    def __call__(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Evidence]:
        """Take one step; also return the sums of squares of single gradients, as evidence.

        1. The engine computes loss and gradients. Gradients are stored as the layout's `grads` say.
        2. Their sums of squares give the norm, and show which gradients are not finite.
        3. The optimizer updates parameters and state in the sharding of its state. The sums of squares of the changes
           give the norm of the update, and show which parameters became infinite or NaN.
        4. If the step was good, keep the new parameters, optimizer state, model state and residuals, else the old
           ones.
        """
        state, key = self._state_and_key(run)
        params, parts = self._cut_first(run.params)
        with models_run() as runs:
            outcome, grads = self._loss_and_grads(run, params, state, batch, key)
        if any(one.model.stacked_for_user for one in runs):
            self._check_stacking()

        def loss_at(params: PyTree) -> tuple[jax.Array, PyTree]:
            outcome, grads = self._loss_and_grads(run, params, state, batch, key)
            return outcome.value, grads

        squares = self._sum_squares(grads)
        found = find_bad(outcome.value, squares)
        ok = ~found.any() if self.guarded else jnp.ones((), bool)
        # Pass `ok` to the update, which selects old or new parameters while they have the sharding of the optimizer
        # state, and gathers them afterwards. A selection here, after the gather, would need both in full at once, and
        # the gather could not write into the donated array.
        params, opt_state, changes = self._update(params, parts, grads, run.opt_state, ok, outcome.value, loss_at)
        norms = {"grad_norm": jnp.sqrt(squares.sum()), "update_norm": jnp.sqrt(changes.sum())}
        metrics: Metrics = {"loss": outcome.value} | norms | find_hyperparams(opt_state)
        if self.guarded:
            metrics["bad"] = Bad(jnp.concatenate([found, jnp.isnan(changes)]), self.trained)
        metrics = jax.tree.map(partial(_mean_over, axes=self._replicas), metrics)
        metrics |= {name: combine_over(metric, self._replicas).value for name, metric in outcome.metrics.items()}
        state = keep_old_unless(ok, self._next_state(run, params, outcome.state), run.state)
        # A bad step counts too, so that later steps keep their batches and keys.
        residuals = keep_old_unless(ok, outcome.residuals, run.residuals)
        after = TrainState(run.step + 1, params, opt_state, state, run.key, residuals)
        return after, metrics, Evidence(outcome.value, squares)

    def find(self, run: TrainState, batch: PyTree) -> Evidence:
        """Compute the loss and gradients of a step, and return only their evidence."""
        state, key = self._state_and_key(run)
        outcome, grads = self._loss_and_grads(run, run.params, state, batch, key)
        return Evidence(outcome.value, self._sum_squares(grads))

    def _cut_first(self, params: PyTree) -> tuple[PyTree, PyTree | None]:
        """Return (parameters to compute with, their parts to update); see `cut_first`."""
        layout = self.layout
        trained, placements = select(layout.trainable, params), select(layout.trainable, layout.params)
        trained, parts = cut_first(layout, trained, placements, layout.opt_params)
        return put_back(layout.trainable, trained, params), parts

    def _loss_and_grads(self, run: TrainState, params: PyTree, *given: PyTree) -> tuple[Outcome, PyTree]:
        """Compute the loss of these parameters and its gradients; in the warm-up of `js.local` over all replicas."""
        value_and_grad = partial(self._value_and_grad, params, *given, *self._residuals_of(run))
        if self._replica_of is None:
            return value_and_grad()
        return join_in_warm_up(self._replica_of, self.layout, run.step, value_and_grad)

    def _state_and_key(self, run: TrainState) -> tuple[PyTree, jax.Array]:
        # Derived by fold_in, not split from a carried key: a restored or repeated step has the same key, bit for bit.
        return use_stored(self.layout, self.layout.state, run.state), jax.random.fold_in(run.key, run.step)

    def _next_state(self, run: TrainState, params: PyTree, state: PyTree) -> PyTree:
        """Return the model's new state as stored; averages are updated from the new parameters, on their shards."""

        def choose(old: Any, new: Any) -> Any:
            return old.next(params, run.step) if is_average(old) else new

        return jax.tree.map(choose, run.state, store(self.layout.state, state), is_leaf=is_average)

    def _sum_squares(self, grads: PyTree) -> jax.Array:
        """Compute the sum of squares of each gradient, f32[trained parameters]; padding is zero and adds nothing."""
        specs = [placement.store for placement in jax.tree.leaves(self.layout.grads)]
        return self._sums.stack_totals(sum_of_squares, jax.tree.leaves(grads), specs, self.layout.mesh)

    def _check_stacking(self) -> None:
        """Refuse an optimizer that updates blocks that the library stacked differently from single blocks.

        This runs before compiling: when the step is made, if layout or loss show that blocks were stacked, otherwise
        when the first step is traced and a model with stacked blocks has run inside the loss.
        """
        if self._checked_stacking:
            return
        if isinstance(self._params, dict) and BLOCKS in self._params:
            require_same_stacked(self._tx, self._params)
        elif not check_elementwise(self._tx, self._params):
            raise ValueError(
                "the blocks of a model in this loss were stacked, which may change what this optimizer does to them, "
                f'and they are not found: the parameters have no "{BLOCKS}" at their top. Return what model.init '
                "returns from init_fn, with other parameters beside it"
            )
        # Last, so that a step that was refused is refused again.
        self._checked_stacking = True


def _mean_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Average a scalar over replicas; take the maximum of integers and flags."""
    if not axes:
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return all_max(x, axes)
    mean: jax.Array = sum_scalar(x, axes) / lax.axis_size(axes)
    return mean
