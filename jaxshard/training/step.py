"""The training step `js.make_step`: what it computes, how it is compiled once for batches of one shape, and called."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.adapt.objective import resolve
from jaxshard.compiler.executable import load_executable, save_executable
from jaxshard.core.average import is_average
from jaxshard.core.batch import check_no_lists, warn_of_patterns
from jaxshard.core.collectives import average_scalar
from jaxshard.core.compat import NonFiniteResult
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.jaxpr import trace_or_none
from jaxshard.core.known_model import check_call, check_is_function, models_run
from jaxshard.core.layout import Layout, check_layout, put_back, select
from jaxshard.core.mesh import check_is_here, shares_threads
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.settings import own_settings
from jaxshard.core.stored import store
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import abstract, check_same_tree, paths
from jaxshard.core.types import LossFn, PyTree
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import batch_facts, program_text
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine, Outcome, check_engine
from jaxshard.engines.explicit import combine_over
from jaxshard.optim.local import inside_replica, local_of
from jaxshard.proofs.parting import Choice, check_together
from jaxshard.training.first_step import Evidence, FirstStep, exchanges_ragged
from jaxshard.training.hyperparams import find_hyperparams
from jaxshard.training.last_call import LastCall
from jaxshard.training.local_step import check_engine_for_replicas, take_local_step
from jaxshard.training.model_flops import step_flops
from jaxshard.training.non_finite import Bad, find_bad, keep_old_unless, sum_of_squares
from jaxshard.training.optimizer import Optimizer
from jaxshard.training.residuals import check_residuals, with_residuals
from jaxshard.training.state import (
    TrainState,
    check_arrays_not_donated,
    check_is_run,
    check_not_donated,
    check_opt_state,
    check_run,
    run_shapes,
    run_shardings,
)
from jaxshard.training.views import cut_first, use_stored
from jaxshard.training.warm_up import join_in_warm_up

Metrics = dict[str, Any]
"""{name: scalar of the global batch}, and "bad": a `Bad`."""

_METRICS = ("loss", "grad_norm", "update_norm")
"""The metrics that every step can return."""

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
    metrics: Sequence[str] = _METRICS,
) -> Step:
    """Make the compiled training step `step(run, batch) -> (run, metrics)`.

    `run` is a `TrainState`. It is donated: its arrays can't be used afterwards, unless `donate=False`. The first call
    compiles; batches of another shape are refused rather than compiled again. The random key of a step depends on the
    run's key and the step's number.

    In a program of your own (`jax.jit(step)`, `jax.lax.scan(step, run, batches)` over batches [steps, rows, ...]) the
    step is traced as a part of that program, whose caller compiles it, donates arguments and waits for devices.

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
        keeping the old parameters too would need another pass over all parameters in every step. With False nothing is
        kept, and the metrics have no "bad". An optimizer that itself tests whether its gradients are finite, such as
        `optax.apply_if_finite` and `optax.zero_nans`, is never guarded, so that its own rule works as on one device
        (`Step.guarded` is False).
      donate: False keeps the input run valid, to go back to it later, or if it shares arrays with another run (two
        losses of the same parameters, as in a GAN); both the input and the output run are then in memory.
      check_exchange: if tokens are sent to experts by ragged all-to-alls (`js.expert` on GPUs and TPUs), compare the
        loss and the norm of each gradient of the first step with those of a program that pads all-to-alls to equal
        counts, because compilers have ordered ragged all-to-alls wrongly. It costs one more compilation and one more
        step; False leaves it out. Not done inside a program of your own.
      metrics: which of "loss", "grad_norm" and "update_norm" the step returns; "loss" must be among them. A norm reads
        every gradient or parameter once more. `metrics=("loss",)` with `guarded=False` leaves both passes out; a
        guarded step makes them anyway, to find what is not finite.

    Returns:
      The step. A batch is a tree of global arrays [rows, ...], whose number of rows must be divisible by the devices
      and micro-batches, and of scalars and arrays without rows (`js.without_rows`). If the loss sees the global batch
      (`js.auto()` without micro-batches), arrays with another first dimension need not be named as arrays without rows;
      a warning lists the arrays that are replicated.

      `metrics` has, as scalars of the global batch: "loss"; "grad_norm", the 2-norm of the full gradient;
      "update_norm", the 2-norm of the change of all parameters; hyperparameters of `optax.inject_hyperparams`, such
      as "learning_rate"; the metrics of a `js.Loss` by their names; and "bad", a `js.Bad`. The two norms can be left
      out.

      Collectives: those of the engine, and an all-gather of every parameter that is stored replicated while its
      optimizer state is split.

    Raises:
      TypeError: `loss_fn`, `tx` or `engine` has a wrong type; by the first call, a loss that is no scalar, `js.Mean`
        or `js.Loss`.
      ValueError: a run, `tx` or batch that does not fit the layout; a batch of another shape than the first; a `tx`
        that updates blocks stacked by `js.stack` differently from single blocks; unknown `metrics`.
      RuntimeError: by the first call, ragged all-to-alls gave wrong gradients (`check_exchange`); lists the parameters.
      js.distributed.Disagreement: by the first call in several processes, if their batches or programs differ.

    Example:
        step = js.make_step(loss_fn, tx, layout, engine=js.auto())
        for batch in js.batches(source, layout, start=run.step):
            run, metrics = step(run, batch)
    """
    return Step(
        loss_fn, tx, layout, engine or auto(),
        guarded=guarded, donate=donate, check_exchange=check_exchange, metrics=metrics,
    )  # fmt: skip


class Step:
    """A compiled training step for batches of one shape, called as `step(run, batch)`; made by `js.make_step`.

    Attributes:
      loss_fn: the loss function that the step was made with.
      tx: the optimizer that the step was made with.
      layout: the layout.
      engine: the engine, which computes the gradient.
      objective: the loss function in the form in which engines call it.
      elementwise: the proof that the optimizer is elementwise, or the reason why it is not; None if it was not
        needed, because every array is stored in its logical shape.
      owned: True if each matrix is updated by the device that owns it, as `layout.owners` says.
      guarded: True if a step whose loss or gradient is not finite changes only the step count; see `js.make_step`.
      donate: True if the step donates the input run.
      check_exchange: True if the first step is checked when tokens are sent to experts by ragged all-to-alls.
      metrics: which of "loss", "grad_norm" and "update_norm" the step returns.
      compile_seconds: the seconds that tracing and compiling took so far; 0.0 before.
      choices: after tracing, the branches and loops in which devices may take different paths, and for which only the
        compiled program shows whether they contain collectives; `js.audit` reads them.
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
        metrics: Sequence[str] = _METRICS,
    ):
        check_engine(engine)
        if "loss" not in metrics or not set(metrics) <= set(_METRICS):
            raise ValueError(
                f'metrics: got {metrics!r}; name "loss" and any of "grad_norm" and "update_norm", such as ("loss",)'
            )
        check_is_function("loss_fn", loss_fn, _CALL)
        check_transform(tx)
        check_layout("js.make_step(loss_fn, tx, layout)", layout)
        params = select(layout.trainable, layout.shapes.params)
        check_opt_state(layout, jax.eval_shape(partial(layout.start_optimizer, tx), params))
        self.loss_fn, self.tx, self.layout, self.engine = loss_fn, tx, layout, engine
        self.donate, self.metrics = donate, tuple(metrics)
        self._local, self._own = local_of(layout.strategy), layout
        if self._local is not None:
            check_engine_for_replicas(engine, layout)
            self._own = inside_replica(layout)
        self._replicas: tuple[str, ...] = () if self._local is None else self._local.axis
        self.objective, self._trained = resolve(loss_fn), tuple(paths(params))
        self._sums, self._residuals = engine.sums(self._own), engine.residuals(self._own)
        self._optimizer = Optimizer(tx, self._own, self._sums)
        if layout.stacked_for_user or self.objective.stacked_for_user:
            self._optimizer.check_stacking()
        self._value_and_grad = engine.value_and_grad(self.objective, self._own)
        check_call("loss_fn", loss_fn, _CALL)  # after the engine, which may require a known model
        self.elementwise, self.owned = self._optimizer.elementwise, self._optimizer.owned
        self.guarded = guarded and self._optimizer.can_guard
        self.check_exchange = check_exchange and self._local is None
        self._waits = shares_threads(layout.mesh)
        self._batch: PyTree = None
        self._rows: PyTree = None
        self._jitted: Any = None
        self._compiled: Any = None
        self._flops: int | None = None
        self.choices: tuple[Choice, ...] = ()
        self.compile_seconds, self._started = 0.0, False
        self._first: FirstStep | None = None
        self._last: LastCall | None = None

    @property
    def update_view(self) -> str:
        """A text that says on which arrays the optimizer runs, stored or logical, why, and what it costs."""
        return f"in each replica, {self._optimizer.view}" if self._local else self._optimizer.view

    # What a step computes: traced under jit, in global view.

    def _take(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take one step. Under `js.local` take it in each replica, then synchronise the replicas if that is due."""
        if self._local is None:
            return self._take_one(run, batch)[:2]
        return take_local_step(self.layout, self._local, lambda *given: self._take_one(*given)[:2], run, batch)

    def _take_one(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Evidence]:
        """Compute loss and gradients, and update parameters and optimizer state unless the step is bad.

        Arrays of the old and of the new TrainState are stored as the layout says. Under `js.local`, `run` is the
        TrainState of one replica.

        Returns:
          (the new TrainState, the metrics, the numbers that `FirstStep` compares).
        """
        params, parts = self._cut_first(run.params)
        # The engine gathers each parameter where the loss uses it, and reduces each gradient where it is computed.
        outcome, grads = self._loss_and_grads(run, params, batch)
        # The guard: a step whose loss or gradient is not finite keeps the old arrays.
        squares = self._sum_squares(grads)
        found = find_bad(outcome.value, squares)
        ok = ~found.any() if self.guarded else jnp.ones((), bool)

        def loss_at(params: PyTree) -> tuple[jax.Array, PyTree]:
            outcome, grads = self._loss_and_grads(run, params, batch)
            return outcome.value, grads

        # Pass `ok` to the update, which selects old or new parameters while they have the sharding of the optimizer
        # state, and gathers them afterwards. A selection here, after the gather, would need both in full at once, and
        # the gather could not write into the donated array.
        params, opt_state, changes = self._optimizer.update(
            params, parts, grads, run.opt_state, ok, outcome.value, loss_at
        )
        state = keep_old_unless(ok, self._next_state(run, params, outcome.state), run.state)
        residuals = keep_old_unless(ok, outcome.residuals, run.residuals)
        # A bad step counts too, so that later steps keep their batches and keys.
        after = TrainState(run.step + 1, params, opt_state, state, run.key, residuals)
        return after, self._metrics(outcome, found, squares, changes, opt_state), Evidence(outcome.value, squares)

    def _find(self, run: TrainState, batch: PyTree) -> Evidence:
        """Compute the loss and gradients of a step, without an update, and return what `FirstStep` compares."""
        outcome, grads = self._loss_and_grads(run, run.params, batch)
        return Evidence(outcome.value, self._sum_squares(grads))

    def _cut_first(self, params: PyTree) -> tuple[PyTree, PyTree | None]:
        """Slice, where it saves memory, the part of each parameter that this device updates; see `views.cut_first`.

        Return (the parameters for the loss, the slices, or None if nothing was sliced).
        """
        layout = self._own
        trained, placements = select(layout.trainable, params), select(layout.trainable, layout.params)
        trained, parts = cut_first(layout, trained, placements, layout.opt_params)
        return put_back(layout.trainable, trained, params), parts

    def _loss_and_grads(self, run: TrainState, params: PyTree, batch: PyTree) -> tuple[Outcome, PyTree]:
        """Compute the loss at `params` and its gradients; in the warm-up of `js.local`, over the rows of all replicas.

        If the loss ran a model whose blocks the library stacked, check the optimizer for stacked blocks.
        """
        state = use_stored(self._own, self._own.state, run.state)
        # Derived by fold_in, not split from a carried key: a restored or repeated step has the same key, bit for bit.
        key = jax.random.fold_in(run.key, run.step)
        carried = (run.residuals,) if jax.tree.leaves(self._residuals) else ()
        compute = partial(self._value_and_grad, params, state, batch, key, *carried)
        with models_run() as runs:
            if self._local is None:
                found = compute()
            else:
                found = join_in_warm_up(self._local, self._own, run.step, compute)
        if any(one.model.stacked_for_user for one in runs):
            self._optimizer.check_stacking()
        return found

    def _sum_squares(self, grads: PyTree) -> jax.Array:
        """Compute the sum of squares of each parameter's gradient, f32[trained parameters].

        Padding adds nothing, since it is zero.
        """
        specs = [placement.store for placement in jax.tree.leaves(self._own.grads)]
        return self._sums.stack_totals(sum_of_squares, jax.tree.leaves(grads), specs, self._own.mesh)

    def _next_state(self, run: TrainState, params: PyTree, state: PyTree) -> PyTree:
        """Return the model's state for the next step, stored as the layout says.

        The loss function computes it, except for averages of parameters (`is_average`), which are updated from the new
        parameters on each device's shards.
        """

        def choose(old: Any, new: Any) -> Any:
            return old.next(params, run.step) if is_average(old) else new

        return jax.tree.map(choose, run.state, store(self._own.state, state), is_leaf=is_average)

    def _metrics(
        self, outcome: Outcome, found: jax.Array, squares: jax.Array, changes: jax.Array, opt_state: PyTree
    ) -> Metrics:
        """Collect the metrics that a step returns: loss, norms, hyperparameters, "bad" and the metrics of a `js.Loss`.

        Under `js.local` they are combined over replicas: the metrics of a `js.Loss` as their types (`js.Mean`, ...)
        say, all others by their mean.
        """
        norms = {"grad_norm": jnp.sqrt(squares.sum()), "update_norm": jnp.sqrt(changes.sum())}
        own = {"loss": outcome.value} | norms  # the compiler drops what is not returned
        metrics: Metrics = {name: own[name] for name in self.metrics} | find_hyperparams(opt_state)
        if self.guarded:
            metrics["bad"] = Bad(jnp.concatenate([found, jnp.isnan(changes)]), self._trained)
        metrics = jax.tree.map(partial(average_scalar, axes=self._replicas), metrics)
        metrics |= {name: combine_over(one, self._replicas).value for name, one in outcome.metrics.items()}
        return metrics

    # How it is compiled and run.

    @waits_for_devices
    def __call__(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        if self._last is not None and self._last.is_like(run, batch):
            try:
                return self._run_program(run, batch)
            except (TypeError, ValueError):
                self._last = None  # the program refused the arguments: convert them, or say what is wrong with them
        if isinstance(batch, TrainState) and not isinstance(run, TrainState):
            raise TypeError("run and batch are swapped; write step(run, batch)")
        check_is_run(run)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((run, batch))):
            return self._call_inside(run, batch)
        return self._check_and_run(run, batch)

    @waits_for_devices
    def _check_and_run(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Check run and batch, compile for the first batch, place the batch on the devices, and take the step."""
        check_not_donated(run)
        batch = as_arrays("the batch", batch)
        check_narrowing(batch, "the batch")
        check_arrays_not_donated("the batch", batch)
        with own_settings(self.layout.mesh):
            run = self.with_residuals(run)
            if self._started:
                self._check_same(abstract(batch))
            else:
                self._start(run, batch)
            call = LastCall.of(run, batch, self._rows)
            try:
                after = self._run_program(run, jax.device_put(batch, self._rows))
            except (TypeError, ValueError):
                self._check_run(run)
                raise
        self._last = call or self._last
        return after

    @waits_for_devices
    def _run_program(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Run the compiled program; the first time, compare its results with those of `FirstStep`."""
        try:
            if self._first is not None:
                self._first.expect(run, batch)
            run, metrics, *evidence = self._compiled(run, batch)
        except NonFiniteResult as found:
            raise FloatingPointError(
                f"a step made {found.args[-1]}, and jax.debug_nans or jax.debug_infs is on. Run the same steps "
                "without them: metrics['bad'] then names the loss or the parameters whose gradients are not "
                "finite (js.fit(bad_steps='raise') does it for you), and a bad step changes nothing"
            ) from None
        if self._waits:
            # Two programs in flight can deadlock simulated devices, which share threads: XLA aborts after 40 s.
            jax.block_until_ready(metrics)
        if self._first is not None:
            self._first.check(*evidence)
            self._first = None
        return run, metrics

    def with_residuals(self, run: TrainState) -> TrainState:
        """Add zero residuals to a run without residuals if the engine keeps them; otherwise return the run itself.

        Residuals are the rounding errors of gradients under `js.wire.int8(feedback=True)`. The step itself calls this.
        Call it before a `jax.lax.scan` over steps, whose carry must have residuals before the first step too.

        Raises:
          ValueError: the run has residuals, but the engine keeps none.
        """
        return with_residuals(run, self.layout, self._residuals)

    def lower(self, batch: PyTree, run: TrainState | None = None) -> jax.stages.Lowered:
        """Lower the step to StableHLO without running it; only shapes are needed.

        Args:
          batch: global arrays or ShapeDtypeStructs.
          run: a TrainState or its shapes; by default the shapes of the layout.
        """
        check_is_here(self.layout.mesh)
        with own_settings(self.layout.mesh):
            lowered: jax.stages.Lowered = self.trace(batch, run).lower()
            return lowered

    def trace(self, batch: PyTree, run: TrainState | None = None) -> jax.stages.Traced:
        """Trace the step to its jaxpr without lowering it; works also for a mesh of devices that do not exist here.

        Args:
          batch: global arrays or ShapeDtypeStructs.
          run: a TrainState or its shapes; by default the shapes of the layout.
        """
        batch = as_arrays("the batch", batch)
        run = run_shapes(self.layout, self._residuals) if run is None else run
        with own_settings(self.layout.mesh):
            shapes = abstract(batch)
            if self._jitted is None or (self._compiled is None and shapes != self._batch):
                self._prepare(run, shapes)
            self._check_same(shapes)
            traced: jax.stages.Traced = self._jitted.trace(run, shapes)
            # No device may wait in a collective for one that takes another branch.
            self.choices = check_together(traced.jaxpr, "the step")
            return traced

    def compile(self, batch: PyTree) -> jax.stages.Compiled:
        """Compile the step without running it, and keep the executable, which later calls of the step run.

        Args:
          batch: global arrays or ShapeDtypeStructs.
        """
        batch = as_arrays("the batch", batch)
        if self._compiled is None:
            began = time.perf_counter()
            self._compiled = self.lower(batch).compile()
            self.compile_seconds += time.perf_counter() - began
        self._check_same(abstract(batch))
        compiled: jax.stages.Compiled = self._compiled
        return compiled

    def save_compiled(self, batch: PyTree, file: str | Path) -> None:
        """Compile the step and save the executable, so that `load_compiled` need not compile it on another machine.

        A step on a `js.plan.topology_mesh` is compiled for TPUs or GPUs that are not attached.

        Args:
          batch: global arrays or ShapeDtypeStructs.
          file: the file to write.

        Example:
            mesh = js.plan.topology_mesh("v5e:4x4", data=16)
            step = js.make_step(loss_fn, tx, js.layout(js.fsdp(), mesh, init_fn, tx))
            step.save_compiled(batch, "v5e.step")     # on the pod: step.load_compiled(batch, "v5e.step")
        """
        compiled = self.compile(batch)
        save_executable(Path(file), self.lower(batch), compiled, self.layout.mesh, self._options())

    def load_compiled(self, batch: PyTree, file: str | Path) -> None:
        """Load the executable that `save_compiled` wrote, in place of compiling; the step is still traced.

        Loading runs code from the file, which must therefore be the user's own, and writable by nobody else.

        Args:
          batch: global arrays or ShapeDtypeStructs.
          file: the file.

        Raises:
          PermissionError: another user owns the file or its folder, or may write them.
          ValueError: the file is damaged, or was compiled from another program, for other devices, or by other versions
            of jaxshard, JAX or the compiler; lists what differs.
        """
        began = time.perf_counter()
        lowered = self.lower(batch)
        self._compiled = load_executable(Path(file), lowered, self.layout.mesh, self._options())
        self.compile_seconds += time.perf_counter() - began

    def model_flops(self, batch: PyTree) -> int | None:
        """Count the model FLOPs of a step over all devices from a trace of the loss; see `js.plan.train_flops`.

        Args:
          batch: global arrays or ShapeDtypeStructs.

        Returns:
          Three times the FLOPs of the forward pass, less the gradients of frozen parameters; they are counted once per
          step. None if the loss can't be traced for the global batch (one that names mesh axes itself), or if a kernel
          or loop in it does not say what it costs.
        """
        if self._flops is None:
            shapes = abstract(as_arrays("the batch", batch))
            with own_settings(self.layout.mesh):
                self._flops = trace_or_none(lambda: step_flops(self.loss_fn, self.layout, shapes))
        return self._flops

    def _call_inside(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Trace one step as a part of the user's own jitted program, without compiling, donating or waiting."""
        self._check_run(run)
        self.layout.plan_batch(batch).check(self.engine.microbatches, whole=self.engine.shows_whole_batch)
        shardings = run_shardings(self.layout, self._residuals)
        in_shardings = shardings, self.layout.batch_shardings(batch)
        inside = jax.jit(self._take, in_shardings=in_shardings, out_shardings=(shardings, self._replicated()))
        check_together(inside.trace(run, batch).jaxpr, "the step")
        after: tuple[TrainState, Metrics] = inside(run, batch)
        return after

    def _start(self, run: TrainState, batch: PyTree) -> None:
        """Compile the step for its first call; first check that all processes have the same batch and program."""
        began = time.perf_counter()
        lowered = None if self._compiled is not None else self.lower(batch, run)
        self._check_same(abstract(batch))
        peers = peers_of(self.layout.mesh)
        if peers is not None:
            # Compare before anything runs: processes with different programs would wait for each other's collectives
            # forever. Wait again after compiling, because a collective times out while another process compiles.
            text = program_text(self.lower(batch, run) if lowered is None else lowered)
            peers.agree("the first step", batch_facts(batch) | {"program": text})
        if lowered is not None:
            self._compiled = lowered.compile()
        if self._first is not None:
            self._first.compile(run, abstract(batch))
        if peers is not None:
            peers.meet("the first step, compiled")
        self.compile_seconds += time.perf_counter() - began
        self._started = True

    def _prepare(self, run: TrainState, shapes: PyTree) -> None:
        """Check the batch and the run, and make the jitted step for batches of these shapes.

        If tokens are sent to experts by ragged all-to-alls, also make the `FirstStep` that checks the first call.
        """
        warn_of_patterns(self.layout.strategy, shapes)
        self.layout.plan_batch(shapes).check(self.engine.microbatches, whole=self.engine.shows_whole_batch)
        self._check_run(run)
        self._batch, self._rows = shapes, self.layout.batch_shardings(shapes)
        compares = self.check_exchange and exchanges_ragged(self.layout)
        shardings, everywhere = run_shardings(self.layout, self._residuals), self._replicated()
        inputs = (shardings, self._rows)
        options = self._options()
        self._jitted = jax.jit(
            self._take_one if compares else self._take,
            in_shardings=inputs,
            out_shardings=(shardings, everywhere, everywhere) if compares else (shardings, everywhere),
            donate_argnums=0 if self.donate else (),
            keep_unused=True,
            compiler_options=options,
        )
        if compares:
            self._first = FirstStep(
                self._find, self.layout, self._trained,
                in_shardings=inputs, out_shardings=everywhere, compiler_options=options,
            )  # fmt: skip

    def _options(self) -> dict[str, Any] | None:
        return self.engine.compiler_options(self.layout.mesh, self.layout.shapes.params)

    def _check_same(self, shapes: PyTree) -> None:
        """Raise ValueError if a batch has other shapes or dtypes than the batch for which the step was prepared."""
        if shapes != self._batch:
            check_no_lists("the batch", shapes)
            check_same_tree(
                self._batch, shapes, "the batch has other shapes or dtypes than the first, which would compile again",
                "make batches of one shape (drop or pad the last one), or another step for the other shape",
            )  # fmt: skip

    def _check_run(self, run: TrainState) -> None:
        check_run(self.layout, run)
        check_residuals(run, self.layout, self._residuals)

    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.layout.mesh, PartitionSpec())
