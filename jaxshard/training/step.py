"""A training step: value and gradient from an engine, the optimizer's update, and everything back to where it rests.

The layout says where arrays live, the engine how the gradient is computed, the optimizer what is done with it. `Step`
joins them into one compiled program and knows the inside of none of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.adapt.objective import resolve
from jaxshard.core.batch_rows import (
    warn_of_patterns,
)
from jaxshard.core.compat import NonFiniteResult
from jaxshard.core.known_model import check_function, models_run
from jaxshard.core.layout import Layout, select
from jaxshard.core.local import Local
from jaxshard.core.mesh import check_is_here
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.settings import own_settings
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import BLOCKS, abstract, check_arrays, check_same_tree, paths
from jaxshard.core.types import LossFn, PyTree
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import batch_facts, program_text
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine, check_engine
from jaxshard.engines.explicit import combine_over
from jaxshard.optim.ordered import with_ordered_sums
from jaxshard.optim.owners.own import owned_update
from jaxshard.optim.proof.elementwise import check_elementwise, check_stored
from jaxshard.optim.proof.non_finite import handles_non_finite
from jaxshard.optim.proof.stacking import require_same_stacked
from jaxshard.training.batch import check_batch
from jaxshard.training.extra_args import find_extra_args, take_fast_gradients
from jaxshard.training.first_step import Evidence, FirstStep, exchanges_ragged
from jaxshard.training.hyperparams import find_hyperparams
from jaxshard.training.local_step import mean_over, take_local_step
from jaxshard.training.non_finite import Bad, find_bad, keep_old_unless, sum_of_squares
from jaxshard.training.residuals import check_has_residuals, with_residuals
from jaxshard.training.state import (
    TrainState,
    check_batch_not_donated,
    check_is_run,
    check_not_donated,
    check_opt_state,
    check_run,
    run_shapes,
    run_shardings,
)
from jaxshard.training.update import make_update
from jaxshard.training.views import store, use_stored

Metrics = dict[str, Any]
"""Scalars of the global batch by name, and under "bad" a `Bad`."""


def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    engine: Engine | None = None,
    guarded: bool = True,
    donate: bool = True,
    check_exchange: bool = True,
) -> Step:
    """Make the compiled training step `step(run, batch) -> (run, metrics)`.

    The run that goes in is donated: its arrays are gone afterwards, unless `donate=False`. The first call compiles;
    batches of another shape are refused rather than compiled again. The random key of a step depends on the run's key
    and the step's number.

    Inside a program of your own (`jax.jit(step)`, `jax.lax.scan(step, run, batches)` over batches [steps, rows, ...])
    the step is a part of that program, which compiles, donates and waits for its devices itself.

    Args:
      loss_fn: `loss_fn(model, batch, key) -> scalar | js.Mean | js.Loss`, where `model` is what `init_fn` returned.
      tx: an optax transform. One that asks for more than gradients (`value`, `grad`, `value_fn`: line searches,
        Polyak's step, a rate that falls on a plateau) is given the loss of this batch, as a number and as a function,
        and `optax.lookahead` the gradients of the fast parameters. It runs on the stored arrays where it is proven
        elementwise, otherwise on logical ones (`Step.update_view` tells which, and the cost).
      layout: says where everything lives.
      engine: `js.auto(...)` (the default), `js.explicit(...)` or `js.pipelined(...)`: how the gradient is computed.
      guarded: a step whose loss or gradient is not finite returns the run that it received, bit for bit, with only its
        step counted on. Of a step that makes a parameter infinite or NaN from a finite gradient "bad" tells, but its
        run is spoiled: keeping the old one as well would need another pass over all parameters in every step. False
        leaves all that to `tx`, and there is no "bad" among the metrics. An optimizer that itself tests whether its
        gradients are finite, such as `optax.apply_if_finite` and `optax.zero_nans`, is always left to its own rule,
        which then does what it does on one device (`Step.guarded` is False).
      donate: False leaves the run that goes in as it is, for two runs that share arrays (two losses of one set of
        parameters, as of a GAN) and for going back; both runs are then in memory.
      check_exchange: where experts exchange rows by ragged all-to-alls (`js.expert` on GPUs and TPUs), compare the loss
        and the norm of each gradient of the first step with those of rows that are exchanged by equal counts, because
        compilers have ordered such exchanges wrongly. It costs one more compilation and one more step; False leaves it
        out. Not inside a program of your own.

    Returns:
      The step. A batch is a tree of global arrays [rows, ...] whose rows devices and micro-batches divide, beside
      scalars and arrays without rows (`js.without_rows`). Where the loss sees the whole batch (`js.auto()` without
      micro-batches) arrays may have other first sizes unnamed; a warning says which of them are whole.

      `metrics` has, as scalars of the global batch: "loss"; "grad_norm", the 2-norm of the whole gradient;
      "update_norm", that of what the parameters changed by; the hyperparameters of an `optax.inject_hyperparams`, such
      as "learning_rate"; the metrics of a `js.Loss` by their names; and "bad", a `js.Bad`.

      Collectives: those of the engine, and an all-gather of every parameter that rests whole while its optimizer state
      is split.

    Raises:
      TypeError: `loss_fn`, `tx` or `engine` is something else; by the first call, a loss that is no scalar, `js.Mean`
        or `js.Loss`.
      ValueError: a run, `tx` or batch that does not fit the layout; a batch of another shape than the first; a `tx`
        that does something else to blocks that `js.stack` stacked than to single ones.
      RuntimeError: by the first call, ragged exchanges whose gradients are wrong (`check_exchange`), by name.
      js.distributed.Disagreement: in several processes, by the first call: one has another batch or program.

    Example:
        step = js.make_step(loss_fn, tx, layout, engine=js.auto())
        for batch in js.batches(source, layout, start=run.step):
            run, metrics = step(run, batch)
    """
    return Step(loss_fn, tx, layout, engine or auto(), guarded=guarded, donate=donate, check_exchange=check_exchange)


class Step:
    """A compiled training step for batches of one shape, called as `step(run, batch)`; made by `js.make_step`.

    Attributes:
      loss_fn: the loss function that it was made with.
      tx: the optimizer that it was made with.
      layout: the layout.
      engine: the engine.
      objective: the loss as engines see it.
      elementwise: the proof that the optimizer is elementwise, or the reason why it is not; None where it was not
        needed, because every array is stored as the model knows it.
      update_view: the arrays on which the optimizer runs, stored or logical, with the reason and the cost.
      owned: True if matrices are updated by their owners, as `layout.owners` says.
      guarded: True if a step whose loss or gradient is not finite changes nothing; see `js.make_step`.
      donate: True if the step takes the arrays of the run that goes in.
      check_exchange: True if the first step is compared where experts exchange rows by ragged all-to-alls.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        layout: Layout,
        engine: Engine,
        *,
        guarded: bool = True,
        donate: bool = True,
        check_exchange: bool = False,
        replicas: tuple[str, ...] = (),
    ):
        check_engine(engine)
        check_function("loss_fn", loss_fn, "loss_fn(model, batch, key)")
        self.loss_fn, self.tx, self.layout, self.engine, self.donate = loss_fn, tx, layout, engine, donate
        self.guarded = guarded
        self.check_exchange, self._replicas = check_exchange, replicas
        check_transform(tx)
        params = select(layout.trainable, layout.shapes.params)
        self._inside: Step | None = None
        if layout.local is not None:
            self._be_local(layout.local, params)
            return
        check_opt_state(layout, jax.eval_shape(tx.init, params))
        self.objective = resolve(loss_fn)
        tx = take_fast_gradients(tx, params)
        extra = find_extra_args(tx, params)
        readable = extra.fill_in(tx)
        # A line search tests whether the losses that it tries are finite, which is no rule for gradients that are not.
        self.guarded = guarded and not handles_non_finite(tx if extra.uses_loss else readable, params)
        self._tx, self._params, self._checked_stacking = readable, params, False
        if layout.stacked_for_user or self.objective.stacked_for_user:
            self._check_stacking()
        self._sums = engine.sums(layout)
        self.elementwise = check_stored(readable, params, layout.opt_params, layout.without_owners.opt_state)
        owned = None if layout.owners is None or extra.names else owned_update(layout, tx)
        self.owned = owned is not None
        # The optimizer runs on stored arrays where it can't tell them from logical ones: none of them differs, or it is
        # elementwise. Where sums are taken in one order, sums over all parameters (a global norm) are no obstacle: they
        # are replaced by ordered ones, to which the zeros of the padding add nothing.
        stored = layout.owners is None and (self.elementwise is None or bool(self.elementwise))
        self._totals_in_order = self._sums.in_order and not check_elementwise(readable, params)
        if self._totals_in_order:
            if extra.names:
                raise ValueError(
                    "reduction='ordered' orders the sums of an optimizer that takes gradients alone, but this one "
                    f"asks for {', '.join(extra.names)} too; use reduction='native'"
                )
            tx, stored = with_ordered_sums(tx, params, layout), True
        self._streamed = self._can_stream(stored=stored, uses_gradients_alone=not extra.names)
        self._update = make_update(
            tx, layout, self._sums, stored=stored, streamed=self._streamed, extra=extra, owned=owned
        )
        self._trained = tuple(paths(params))
        self._value_and_grad = engine.value_and_grad(self.objective, layout)
        self._residuals: PyTree = engine.residuals(layout)
        self._forget_programs()

    def _be_local(self, local: Local, params: PyTree) -> None:
        """Be the step of replicas that train by themselves: an ordinary step inside each of them does the work."""
        layout = self.layout
        check_opt_state(layout, jax.eval_shape(partial(layout.start_optimizer, self.tx), params))
        if self.engine.sums(layout).in_order:
            raise ValueError("local: reduction='ordered' is not supported under js.local; use reduction='native'")
        if jax.tree.leaves(self.engine.residuals(layout.inside_replica())):
            raise ValueError(
                "local: replicas that train by themselves keep no residuals of gradients; leave feedback out of "
                "reduce_dtype"
            )
        self._residuals = ()
        inside = Step(
            self.loss_fn, self.tx, layout.inside_replica(), self.engine, guarded=self.guarded, replicas=local.axis
        )
        self._inside, self.guarded = inside, inside.guarded
        self.objective, self.elementwise, self.owned = inside.objective, inside.elementwise, inside.owned
        self._totals_in_order, self.check_exchange, self._trained = False, False, tuple(paths(params))
        self._forget_programs()

    def _forget_programs(self) -> None:
        self._batch: PyTree = None
        self._rows: PyTree = None
        self._jitted: Any = None
        self._compiled: Any = None
        self._peers_agreed = False
        self._first: FirstStep | None = None

    def _can_stream(self, *, stored: bool, uses_gradients_alone: bool) -> bool:
        """Whether state on the host is brought to the devices block by block: elementwise optimizers alone can be."""
        on_host = self.layout.host_bytes_per_device() > 0
        plain = stored and uses_gradients_alone and not self._totals_in_order
        return on_host and plain and bool(check_elementwise(self._tx, self._params))

    @property
    def update_view(self) -> str:
        """The arrays on which the optimizer runs, stored or logical, with the reason and the cost, as text."""
        if self._inside is not None:
            return f"in each replica, {self._inside.update_view}"
        if not (size := self.layout.host_bytes_per_device()):
            return self._view_on_device()
        how = "block by block" if self._streamed else "whole, as not every optimizer can be run in blocks"
        return f"{self._view_on_device()}; {size} bytes per device come from the host's memory and go back, {how}"

    def _view_on_device(self) -> str:
        if self.owned:
            matrices = sum(one.count for one in self.layout.owners.stacks) if self.layout.owners else 0
            return f"owners: {matrices} matrices are updated whole, each by one device (print(layout.owners))"
        if self._totals_in_order:
            return "stored view: the optimizer is elementwise but for sums over all parameters, which are ordered"
        if self.elementwise is None:
            return "stored view: every array is stored as the model knows it, so that the optimizer moves nothing"
        if self.elementwise:
            return "stored view: the optimizer is elementwise and moves nothing"
        moved = [p for p in self.layout.placed() if p.role == "opt" and p.placement.view.stored != p.leaf.shape]
        size = sum(p.placement.bytes_per_device(self.layout.mesh, p.leaf.dtype) for p in moved)
        return (
            f"logical view: the optimizer is {self.elementwise}; "
            f"{len(moved)} padded arrays of its state, {size} bytes per device, are unpadded and padded every step"
        )

    @waits_for_devices
    def __call__(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        if isinstance(batch, TrainState) and not isinstance(run, TrainState):
            raise TypeError("run and batch are swapped; write step(run, batch)")
        check_is_run(run)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((run, batch))):
            return self._call_inside(run, batch)
        check_not_donated(run)
        check_narrowing(batch, "the batch")
        check_batch_not_donated(batch)
        with own_settings(self.layout.mesh):
            run = self.with_residuals(run)
            program = self._compile(run, batch) if self._peers_agreed else self._compile_together(run, batch)
            try:
                batch = jax.device_put(batch, self._rows)
                if self._first is not None:
                    self._first.expect(run, batch)
                run, metrics, *evidence = program(run, batch)
            except (TypeError, ValueError):
                check_run(self.layout, run)
                raise
            except NonFiniteResult as found:
                raise FloatingPointError(
                    f"a step made {found.args[-1]}, and jax.debug_nans or jax.debug_infs is on. Run the same steps "
                    "without them: metrics['bad'] then names the loss or the parameters whose gradients are not "
                    "finite (js.fit(bad_steps='raise') does it for you), and a bad step changes nothing"
                ) from None
        if self.layout.mesh.devices.flat[0].platform == "cpu" and self.layout.mesh.size > 1:
            # Simulated devices starve each other when two programs are in flight: the rendezvous aborts after 40 s.
            jax.block_until_ready(metrics)
        if self._first is not None:
            self._first.check(*evidence)
            self._first = None
        return run, metrics

    def _residuals_of(self, run: TrainState) -> tuple[PyTree, ...]:
        """The argument of the engine's function for residuals; an engine without them takes none."""
        return (run.residuals,) if jax.tree.leaves(self._residuals) else ()

    def with_residuals(self, run: TrainState) -> TrainState:
        """Return the run with residuals of zeros if the engine has feedback and the run has none; else the run itself.

        The step itself calls this. Only a `jax.lax.scan` over steps needs it before: what is carried has the same
        arrays before the first step.

        Raises:
          ValueError: the run has residuals, and the engine has no feedback.
        """
        return with_residuals(run, self.layout, self._residuals)

    def _call_inside(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take one step as a part of the program that the user traces: nothing is compiled, donated or waited for."""
        check_run(self.layout, run)
        check_has_residuals(run, self._residuals)
        check_batch(self.layout, abstract(batch), self.engine.microbatches, whole=self.engine.shows_whole_batch)
        shardings = run_shardings(self.layout, self._residuals)
        in_shardings, everywhere = (shardings, self.layout.batch_shardings(batch)), self._whole()
        inside = jax.jit(self._step, in_shardings=in_shardings, out_shardings=(shardings, everywhere))
        after: tuple[TrainState, Metrics] = inside(run, batch)
        return after

    def lower(self, batch: PyTree, run: TrainState | None = None) -> jax.stages.Lowered:
        """Lower the step without running it; needs no run and no devices that hold one.

        Args:
          batch: global arrays or ShapeDtypeStructs.
          run: a run or its shapes; by default the shapes of the layout.
        """
        check_is_here(self.layout.mesh)
        run = run_shapes(self.layout, self._residuals) if run is None else run
        with own_settings(self.layout.mesh):
            lowered: jax.stages.Lowered = self._program(run, batch).lower(run, abstract(batch))
        return lowered

    def compile(self, batch: PyTree) -> jax.stages.Compiled:
        """Compile the step without running it: made once, and what every call then runs.

        Args:
          batch: global arrays or ShapeDtypeStructs.
        """
        with own_settings(self.layout.mesh):
            return self._compile(run_shapes(self.layout, self._residuals), batch)

    def _compile(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        check_is_here(self.layout.mesh)
        program = self._program(run, batch)
        compiled: jax.stages.Compiled = self._compiled or program.lower(run, abstract(batch)).compile()
        self._compiled = compiled
        return compiled

    def _compile_together(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        """Compile the step, once all processes have the same one and are there to run it."""
        peers = peers_of(self.layout.mesh)
        if peers is not None:
            lowered = self._program(run, batch).lower(run, abstract(batch))
            # Compared before anything runs: processes with different programs wait for each other's collectives for
            # ever. They meet again once all have compiled, because a collective times out while a peer compiles.
            peers.agree("the first step", batch_facts(batch) | {"program": program_text(lowered)})
            self._compile_all(run, batch)
            peers.meet("the first step, compiled")
        self._peers_agreed = True
        return self._compile_all(run, batch)

    def _compile_all(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        """Compile the step and, where there is one, what its first results are compared with."""
        compiled = self._compile(run, batch)
        if self._first is not None:
            self._first.compile(run, abstract(batch))
        return compiled

    def _program(self, run: TrainState, batch: PyTree) -> Any:
        check_arrays("the batch", batch)
        shapes = abstract(batch)
        if self._jitted is None or (self._compiled is None and shapes != self._batch):
            warn_of_patterns(self.layout.strategy, shapes)
            check_batch(self.layout, shapes, self.engine.microbatches, whole=self.engine.shows_whole_batch)
            check_run(self.layout, run)
            shardings = run_shardings(self.layout, self._residuals)
            self._batch, self._rows = shapes, self.layout.batch_shardings(shapes)
            compares = self.check_exchange and exchanges_ragged(self.layout)
            whole = self._whole()
            options = self.engine.compiler_options(self.layout.mesh, self.layout.shapes.params)
            inputs = (shardings, self._rows)
            self._jitted = jax.jit(
                self._step_with_evidence if compares else self._step,
                in_shardings=inputs,
                out_shardings=(shardings, whole, whole) if compares else (shardings, whole),
                donate_argnums=0 if self.donate else (),
                keep_unused=True,
                compiler_options=options,
            )
            if compares:
                self._first = FirstStep(
                    self._find, self.layout, self._trained,
                    in_shardings=inputs, out_shardings=whole, compiler_options=options,
                )  # fmt: skip
        elif shapes != self._batch:
            check_same_tree(
                self._batch, shapes, "the batch has other shapes or dtypes than the first, which would compile again",
                "make batches of one shape (drop or pad the last one), or another step for the other shape",
            )  # fmt: skip
        return self._jitted

    def _whole(self) -> NamedSharding:
        return NamedSharding(self.layout.mesh, PartitionSpec())

    def _step(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take one step; traced under jit, in global view."""
        return self._step_with_evidence(run, batch)[:2]

    def trace(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take one step of arrays that are being traced, as a part of the program around it; nothing is checked."""
        return self._step(run, batch)

    def _find(self, run: TrainState, batch: PyTree) -> Evidence:
        """Compute the loss and gradients that a step would, for their evidence alone."""
        state, key = self._state_and_key(run)
        outcome, grads = self._value_and_grad(run.params, state, batch, key, *self._residuals_of(run))
        return Evidence(outcome.value, self._sum_squares(grads))

    def _step_with_evidence(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Evidence]:
        """Take one step, and tell apart the gradients that `metrics` has the norm of.

        1. The engine computes loss and gradients. Gradients come as the layout's `grads` store them.
        2. Their sums of squares give the norm, and say which of them are not finite.
        3. The optimizer updates parameters and state where its state lives. The sums of squares of what changed give
           the norm of the update, and say which parameters it spoiled.
        4. Of parameters, optimizer state, model state and residuals the new ones are kept if the step was good, else
           the old ones.
        """
        layout = self.layout
        if self._inside is not None and layout.local is not None:
            after, of_all = take_local_step(layout, layout.local, self._inside.trace, run, batch)
            return after, of_all, Evidence(of_all["loss"], of_all["grad_norm"])  # of no first step
        state, key = self._state_and_key(run)
        with models_run() as runs:
            outcome, grads = self._value_and_grad(run.params, state, batch, key, *self._residuals_of(run))
        if any(one.model.stacked_for_user for one in runs):
            self._check_stacking()

        def loss_at(params: PyTree) -> tuple[jax.Array, PyTree]:
            outcome, grads = self._value_and_grad(params, state, batch, key, *self._residuals_of(run))
            return outcome.value, grads

        squares = self._sum_squares(grads)
        found = find_bad(outcome.value, squares)
        ok = ~found.any() if self.guarded else jnp.ones((), bool)
        # `ok` goes into the update, which chooses parameters while they are still split as the optimizer's state is and
        # gathers them after that. Chosen out here, after the gather, the old and the new parameter would both be
        # needed whole at once, and the gather could not write into the donated array.
        params, opt_state, changes = self._update(run.params, grads, run.opt_state, ok, outcome.value, loss_at)
        norms = {"grad_norm": jnp.sqrt(squares.sum()), "update_norm": jnp.sqrt(changes.sum())}
        metrics: Metrics = {"loss": outcome.value} | norms | find_hyperparams(opt_state)
        if self.guarded:
            metrics["bad"] = Bad(jnp.concatenate([found, jnp.isnan(changes)]), self._trained)
        metrics = jax.tree.map(partial(mean_over, axes=self._replicas), metrics)
        metrics |= {name: combine_over(metric, self._replicas).value for name, metric in outcome.metrics.items()}
        state = keep_old_unless(ok, store(layout.state, outcome.state), run.state)
        # The step counts on in any case, so that the next one has the batch and the key that it would have had.
        residuals = keep_old_unless(ok, outcome.residuals, run.residuals)
        after = TrainState(run.step + 1, params, opt_state, state, run.key, residuals)
        return after, metrics, Evidence(outcome.value, squares)

    def _state_and_key(self, run: TrainState) -> tuple[PyTree, jax.Array]:
        # Not split off a key that the run carries on: a restored or repeated step has the same key, bit for bit.
        return use_stored(self.layout, self.layout.state, run.state), jax.random.fold_in(run.key, run.step)

    def _sum_squares(self, grads: PyTree) -> jax.Array:
        """Compute the sum of squares of each gradient, f32[trained parameters]; padding is zero and adds nothing."""
        specs = [placement.store for placement in jax.tree.leaves(self.layout.grads)]
        return self._sums.stack_totals(sum_of_squares, jax.tree.leaves(grads), specs, self.layout.mesh)

    def _check_stacking(self) -> None:
        """Refuse an optimizer that treats blocks that were stacked for the user differently from single blocks.

        Done before anything is compiled: with the step where layout or loss tell that blocks were stacked, else when
        the first step is traced and a model with stacked blocks has run inside the loss.
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
