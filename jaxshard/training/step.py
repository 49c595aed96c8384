"""A training step: check it, compile it once for batches of one shape, compare it across processes, and run it.

The layout places the arrays, the engine computes the gradient, and the optimizer updates the parameters; `TracedStep`
is their joint computation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.core.batch import check_no_lists, warn_of_patterns
from jaxshard.core.compat import NonFiniteResult
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.known_model import check_call, check_is_function
from jaxshard.core.layout import Layout, check_layout, select
from jaxshard.core.mesh import check_is_here, shares_threads
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.settings import own_settings
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import abstract, check_same_tree
from jaxshard.core.types import LossFn, PyTree
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import batch_facts, program_text
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine, check_engine
from jaxshard.proofs.parting import Choice, check_together
from jaxshard.training.first_step import FirstStep, exchanges_ragged
from jaxshard.training.local_step import LocalStep
from jaxshard.training.residuals import check_residuals, with_residuals
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
from jaxshard.training.traced_step import Metrics, TracedStep

_CALL = "loss_fn(model, batch, key)"


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

    The input run is donated: its arrays are gone afterwards, unless `donate=False`. The first call compiles; batches of
    another shape are refused rather than compiled again. The random key of a step depends on the run's key
    and the step's number.

    Inside a program of your own (`jax.jit(step)`, `jax.lax.scan(step, run, batches)` over batches [steps, rows, ...])
    the step is a part of that program, which compiles, donates and waits for its devices itself.

    Args:
      loss_fn: `loss_fn(model, batch, key) -> scalar | js.Mean | js.Loss`, where `model` is like the result of
        `init_fn`.
      tx: an optax transform. If it needs extra arguments (`value`, `grad`, `value_fn`: line searches, Polyak's step,
        reduction on a plateau), it receives the loss of this batch, as a scalar and as a function; `optax.lookahead`
        receives the gradients of the fast parameters. It runs on the stored arrays if it is proven elementwise,
        otherwise on logical arrays (`Step.update_view` tells which, and the cost).
      layout: the layout.
      engine: `js.auto(...)` (the default), `js.explicit(...)` or `js.pipelined(...)`: how the gradient is computed.
      guarded: a step whose loss or gradient is not finite returns the input run bit for bit, except for the step count.
        If a step makes a parameter infinite or NaN from a finite gradient, "bad" is set, but the run is spoiled:
        keeping the old parameters too would need another pass over all parameters in every step. False leaves this to
        `tx`, without "bad" in the metrics. An optimizer that itself tests whether its gradients are finite, such as
        `optax.apply_if_finite` and `optax.zero_nans`, is never guarded, so that its own rule works as on one device
        (`Step.guarded` is False).
      donate: False keeps the input run valid, for two runs that share arrays (two losses of the same parameters, as in
        a GAN) or to return to it; both runs are then in memory.
      check_exchange: if experts exchange rows by ragged all-to-alls (`js.expert` on GPUs and TPUs), compare the loss
        and the norm of each gradient of the first step with a step that exchanges equal counts, because compilers have
        ordered such exchanges wrongly. It costs one more compilation and one more step; False leaves it out. Not done
        inside a program of your own.

    Returns:
      The step. A batch is a tree of global arrays [rows, ...] whose rows divide into devices and micro-batches, and of
      scalars and arrays without rows (`js.without_rows`). If the loss sees the global batch (`js.auto()` without
      micro-batches), arrays with other first sizes need not be named; a warning lists those that are replicated.

      `metrics` has, as scalars of the global batch: "loss"; "grad_norm", the 2-norm of the full gradient;
      "update_norm", the 2-norm of the change of all parameters; hyperparameters of `optax.inject_hyperparams`, such
      as "learning_rate"; the metrics of a `js.Loss` by their names; and "bad", a `js.Bad`.

      Collectives: those of the engine, and an all-gather of every parameter that is stored replicated while its
        optimizer
      state is split.

    Raises:
      TypeError: `loss_fn`, `tx` or `engine` is something else; by the first call, a loss that is no scalar, `js.Mean`
        or `js.Loss`.
      ValueError: a run, `tx` or batch that does not fit the layout; a batch of another shape than the first; a `tx`
        that updates blocks stacked by `js.stack` differently from single blocks.
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
      elementwise: the proof that the optimizer is elementwise, or the reason why it is not; None if it was not
        needed, because every array is stored in its logical shape.
      update_view: the arrays on which the optimizer runs, stored or logical, with the reason and the cost.
      owned: True if matrices are updated by their owners, as `layout.owners` says.
      guarded: True if a step whose loss or gradient is not finite changes nothing; see `js.make_step`.
      donate: True if the step donates the input run.
      check_exchange: True if the first step is checked when experts exchange rows by ragged all-to-alls.
      choices: after lowering, the branches and loops on which devices may decide differently, and for which only the
        compiled program shows whether they communicate; `js.audit` reads them.
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
    ):
        check_engine(engine)
        check_is_function("loss_fn", loss_fn, _CALL)
        check_transform(tx)
        check_layout("js.make_step(loss_fn, tx, layout)", layout)
        params = select(layout.trainable, layout.shapes.params)
        check_opt_state(layout, jax.eval_shape(partial(layout.start_optimizer, tx), params))
        self.loss_fn, self.tx, self.layout, self.engine, self.donate = loss_fn, tx, layout, engine, donate
        made = TracedStep if layout.local is None else LocalStep
        self._traced: TracedStep | LocalStep = made(loss_fn, tx, layout, engine, guarded=guarded)
        check_call("loss_fn", loss_fn, _CALL)  # after the engine, which may require a known model
        self.objective, self.elementwise = self._traced.objective, self._traced.elementwise
        self.owned, self.guarded = self._traced.owned, self._traced.guarded
        self.check_exchange = check_exchange and layout.local is None
        self._residuals = self._traced.residuals
        self._forget_programs()

    def _forget_programs(self) -> None:
        self._batch: PyTree = None
        self._rows: PyTree = None
        self._jitted: Any = None
        self._compiled: Any = None
        self.choices: tuple[Choice, ...] = ()
        self._peers_agreed = False
        self._first: FirstStep | None = None

    @property
    def update_view(self) -> str:
        """The arrays on which the optimizer runs, stored or logical, with the reason and the cost, as text."""
        return self._traced.update_view

    @waits_for_devices
    def __call__(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        if isinstance(batch, TrainState) and not isinstance(run, TrainState):
            raise TypeError("run and batch are swapped; write step(run, batch)")
        check_is_run(run)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((run, batch))):
            return self._call_inside(run, batch)
        check_not_donated(run)
        batch = as_arrays("the batch", batch)
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
                check_residuals(run, self.layout, self._residuals)
                raise
            except NonFiniteResult as found:
                raise FloatingPointError(
                    f"a step made {found.args[-1]}, and jax.debug_nans or jax.debug_infs is on. Run the same steps "
                    "without them: metrics['bad'] then names the loss or the parameters whose gradients are not "
                    "finite (js.fit(bad_steps='raise') does it for you), and a bad step changes nothing"
                ) from None
        if shares_threads(self.layout.mesh):
            # Two programs in flight can deadlock simulated devices, which share threads: XLA aborts after 40 s.
            jax.block_until_ready(metrics)
        if self._first is not None:
            self._first.check(*evidence)
            self._first = None
        return run, metrics

    def with_residuals(self, run: TrainState) -> TrainState:
        """Add zero residuals to a run without any if the engine has feedback; otherwise return the run itself.

        The step itself calls this. Call it before a `jax.lax.scan` over steps, whose carry must have the same arrays
        before the first step.

        Raises:
          ValueError: the run has residuals, and the engine has no feedback.
        """
        return with_residuals(run, self.layout, self._residuals)

    def _call_inside(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Trace one step as a part of the user's program: do not compile, donate or wait."""
        check_run(self.layout, run)
        check_residuals(run, self.layout, self._residuals)
        self.layout.plan_batch(batch).check(self.engine.microbatches, whole=self.engine.shows_whole_batch)
        shardings = run_shardings(self.layout, self._residuals)
        in_shardings, everywhere = (shardings, self.layout.batch_shardings(batch)), self._whole()
        inside = jax.jit(self._step, in_shardings=in_shardings, out_shardings=(shardings, everywhere))
        check_together(inside.trace(run, batch).jaxpr, "the step")
        after: tuple[TrainState, Metrics] = inside(run, batch)
        return after

    def lower(self, batch: PyTree, run: TrainState | None = None) -> jax.stages.Lowered:
        """Lower the step without running it; needs no run.

        Args:
          batch: global arrays or ShapeDtypeStructs.
          run: a run or its shapes; by default the shapes of the layout.
        """
        check_is_here(self.layout.mesh)
        with own_settings(self.layout.mesh):
            lowered: jax.stages.Lowered = self.trace(batch, run).lower()
            return lowered

    def trace(self, batch: PyTree, run: TrainState | None = None) -> jax.stages.Traced:
        """Trace the step to its jaxpr without lowering it; works for planned devices too.

        Args:
          batch: global arrays or ShapeDtypeStructs.
          run: a run or its shapes; by default the shapes of the layout.
        """
        batch = as_arrays("the batch", batch)
        run = run_shapes(self.layout, self._residuals) if run is None else run
        with own_settings(self.layout.mesh):
            return self._trace(self._program(run, batch), run, batch)

    def compile(self, batch: PyTree) -> jax.stages.Compiled:
        """Compile the step once, without running it; later calls run the result.

        Args:
          batch: global arrays or ShapeDtypeStructs.
        """
        batch = as_arrays("the batch", batch)
        with own_settings(self.layout.mesh):
            return self._compile(run_shapes(self.layout, self._residuals), batch)

    def _compile(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        check_is_here(self.layout.mesh)
        program = self._program(run, batch)
        if self._compiled is None:
            self._compiled = self._lower(program, run, batch).compile()
        compiled: jax.stages.Compiled = self._compiled
        return compiled

    def _lower(self, program: Any, run: TrainState, batch: PyTree) -> jax.stages.Lowered:
        lowered: jax.stages.Lowered = self._trace(program, run, batch).lower()
        return lowered

    def _trace(self, program: Any, run: TrainState, batch: PyTree) -> jax.stages.Traced:
        """Trace the step, and check that no device can wait in a collective for one that takes another branch."""
        traced: jax.stages.Traced = program.trace(run, abstract(batch))
        self.choices = check_together(traced.jaxpr, "the step")
        return traced

    def _compile_together(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        """Compile the step after a check that all processes have the same one; then wait for all of them."""
        peers = peers_of(self.layout.mesh)
        if peers is not None:
            lowered = self._lower(self._program(run, batch), run, batch)
            # Compare before anything runs: processes with different programs would wait for each other's collectives
            # forever. Wait again after compiling, because a collective times out while another process compiles.
            peers.agree("the first step", batch_facts(batch) | {"program": program_text(lowered)})
            self._compile_all(run, batch)
            peers.meet("the first step, compiled")
        self._peers_agreed = True
        return self._compile_all(run, batch)

    def _compile_all(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        """Compile the step and, if there is one, the reference for its first results."""
        compiled = self._compile(run, batch)
        if self._first is not None:
            self._first.compile(run, abstract(batch))
        return compiled

    def _program(self, run: TrainState, batch: PyTree) -> Any:
        shapes = abstract(batch)
        if self._jitted is None or (self._compiled is None and shapes != self._batch):
            warn_of_patterns(self.layout.strategy, shapes)
            self.layout.plan_batch(shapes).check(self.engine.microbatches, whole=self.engine.shows_whole_batch)
            check_run(self.layout, run)
            check_residuals(run, self.layout, self._residuals)
            shardings = run_shardings(self.layout, self._residuals)
            self._batch, self._rows = shapes, self.layout.batch_shardings(shapes)
            compares = self.check_exchange and exchanges_ragged(self.layout)
            whole = self._whole()
            options = self.engine.compiler_options(self.layout.mesh, self.layout.shapes.params)
            inputs = (shardings, self._rows)
            self._jitted = jax.jit(
                self._traced if compares else self._step,
                in_shardings=inputs,
                out_shardings=(shardings, whole, whole) if compares else (shardings, whole),
                donate_argnums=0 if self.donate else (),
                keep_unused=True,
                compiler_options=options,
            )
            if compares:
                self._first = FirstStep(
                    self._traced.find, self.layout, self._traced.trained,
                    in_shardings=inputs, out_shardings=whole, compiler_options=options,
                )  # fmt: skip
        elif shapes != self._batch:
            check_no_lists("the batch", shapes)
            check_same_tree(
                self._batch, shapes, "the batch has other shapes or dtypes than the first, which would compile again",
                "make batches of one shape (drop or pad the last one), or another step for the other shape",
            )  # fmt: skip
        return self._jitted

    def _whole(self) -> NamedSharding:
        return NamedSharding(self.layout.mesh, PartitionSpec())

    def _step(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take one step; traced under jit, in global view."""
        return self._traced(run, batch)[:2]
