"""A training step: value and gradient from an engine, the optimizer's update, and everything back to where it rests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.adapt.objective import resolve
from jaxshard.core.known_model import models_run
from jaxshard.core.layout import Layout, check_transform, select
from jaxshard.core.mesh import axis_size
from jaxshard.core.tree import BLOCKS, abstract, check_same_tree, map_with_path, path_str, paths
from jaxshard.core.types import LossFn, PyTree
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import batch_facts, program_text
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.optim.ordered import with_ordered_sums
from jaxshard.optim.proof.elementwise import check_elementwise, check_stored
from jaxshard.optim.proof.stacking import require_same_stacked
from jaxshard.training.non_finite import bad_of, keep, sum_of_squares
from jaxshard.training.state import TrainState, check_opt_state, check_run, run_shapes, run_shardings
from jaxshard.training.update import make_update
from jaxshard.training.views import store, use_stored

Metrics = dict[str, Any]
"""Global scalars by name, and what was bad."""


def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    engine: Engine | None = None,
    guarded: bool = True,
) -> Step:
    """The compiled training step `step(run, batch) -> (run, metrics)`.

    `batch` is a tree of global arrays, [rows, ...] each; the run that goes in is donated. `metrics` has "loss",
    "grad_norm" (the global 2-norm of the gradient) and what the loss reports, as global scalars, and "bad", which says
    whether loss and gradients were finite, parameter by parameter (see `js.check_finite`). If they were not, the run
    that comes out is the one that went in, bit for bit, but for its step; `guarded=False`, without "bad", leaves what
    is not finite to `tx`, such as `optax.zero_nans` and `optax.apply_if_finite`. The optimizer runs on the stored
    arrays where it is proven elementwise, else on logical ones (see `Step.update_view`). The random key of a step
    depends on the run's key and the step's number alone. Collectives: those of the engine, and an
    all-gather of every parameter whose optimizer state is split but which itself is not.

    Raises:
      ValueError: a run, `tx` or batch that does not fit the layout; a batch of another shape than the first; a `tx`
        that does something else to blocks that `js.stack` stacked than to single ones.
      TypeError: a loss that is no scalar, `js.Mean` or `js.Loss`.
      js.distributed.Disagreement: in several processes, by the first call: one has another batch or program.
    """
    return Step(loss_fn, tx, layout, engine or auto(), guarded=guarded)


class Step:
    """A training step of one batch shape, which it remembers so that nothing recompiles unseen; see `make_step`."""

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        layout: Layout,
        engine: Engine,
        *,
        guarded: bool = True,
    ):
        if not isinstance(engine, Engine):
            got = type(engine).__name__
            raise TypeError(f"engine must be js.auto(...), js.explicit(...) or js.pipelined(...), got {got}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function loss_fn(model, batch, key), got {type(loss_fn).__name__}")
        self.loss_fn, self.layout, self.engine, self._guarded = loss_fn, layout, engine, guarded
        check_transform(tx)
        params = select(layout.trainable, layout.shapes.params)
        check_opt_state(layout, jax.eval_shape(tx.init, params))
        self.objective = resolve(loss_fn)
        self._tx, self._params, self._checked_stacking = tx, params, False
        if layout.stacked_for_user or self.objective.stacked_for_user:
            self._check_stacking()
        self._sums = engine.sums(layout)
        self.elementwise = check_stored(tx, params, layout.opt_params, layout.opt_state)
        stored = self.elementwise is None or bool(self.elementwise)
        self._totals_in_order = self._sums.in_order and not check_elementwise(tx, params)
        if self._totals_in_order:
            tx, stored = with_ordered_sums(tx, params, layout), True
        self._update = make_update(tx, layout, stored=stored)
        self._trained = tuple(paths(params))
        self._value_and_grad = engine.value_and_grad(self.objective, layout)
        self._batch: PyTree = None
        self._rows: PyTree = None
        self._jitted: Any = None
        self._compiled: Any = None
        self._met = False

    @property
    def update_view(self) -> str:
        """On which view the optimizer runs, why, and what that costs."""
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
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(run)):
            # The compiled program would crash the process instead of saying so.
            raise ValueError(
                "this run was donated to an earlier step, which took its arrays; go on with the run it returned"
            )
        program = self._compile(run, batch) if self._met else self._compile_together(run, batch)
        try:
            run, metrics = program(run, jax.device_put(batch, self._rows))
        except (TypeError, ValueError):
            check_run(self.layout, run)
            raise
        if self.layout.mesh.devices.flat[0].platform == "cpu" and self.layout.mesh.size > 1:
            # Simulated devices starve each other when two programs are in flight: the rendezvous aborts after 40 s.
            jax.block_until_ready(metrics)
        return run, metrics

    def lower(self, batch: PyTree, run: TrainState | None = None) -> jax.stages.Lowered:
        """The lowered step for a batch of arrays or ShapeDtypeStructs; needs no run."""
        run = run_shapes(self.layout) if run is None else run
        return self._program(run, batch).lower(run, abstract(batch))

    def compile(self, batch: PyTree) -> jax.stages.Compiled:
        """The compiled step for a batch of arrays or ShapeDtypeStructs: made once, and what every call runs."""
        return self._compile(run_shapes(self.layout), batch)

    def _compile(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        program = self._program(run, batch)
        if self._compiled is None:
            self._compiled = program.lower(run, abstract(batch)).compile()
        return self._compiled

    def _compile_together(self, run: TrainState, batch: PyTree) -> jax.stages.Compiled:
        """The compiled step once all processes have the same one, and are there to run it."""
        peers = peers_of(self.layout.mesh)
        if peers is not None:
            lowered = self._program(run, batch).lower(run, abstract(batch))
            peers.agree("the first step", batch_facts(batch) | {"program": program_text(lowered)})
            self._compile(run, batch)
            peers.meet("the first step, compiled")
        self._met = True
        return self._compile(run, batch)

    def _program(self, run: TrainState, batch: PyTree) -> Any:
        shapes = abstract(batch)
        if self._jitted is None or (self._compiled is None and shapes != self._batch):
            check_batch(self.layout, shapes, self.engine.microbatches)
            check_run(self.layout, run)
            shardings = run_shardings(self.layout)
            self._batch, self._rows = shapes, self.layout.batch_shardings(shapes)
            self._jitted = jax.jit(
                self._step,
                in_shardings=(shardings, self._rows),
                out_shardings=(shardings, NamedSharding(self.layout.mesh, PartitionSpec())),
                donate_argnums=0,
                keep_unused=True,
                compiler_options=self.engine.compiler_options(self.layout.mesh),
            )
        elif shapes != self._batch:
            check_same_tree(
                self._batch, shapes, "the batch has other shapes or dtypes than the first, which would compile again",
                "make batches of one shape (drop or pad the last one), or another step for the other shape",
            )  # fmt: skip
        return self._jitted

    def _step(self, run: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        layout = self.layout
        state = use_stored(layout, layout.state, run.state)
        key = jax.random.fold_in(run.key, run.step)
        with models_run() as runs:
            outcome, grads = self._value_and_grad(run.params, state, batch, key)
        if any(one.model.stacked_for_user for one in runs):
            self._check_stacking()
        squares = self._squares(grads)
        bad = bad_of(outcome.value, squares, self._trained)
        ok = ~bad.flags.any() if self._guarded else jnp.ones((), bool)
        params, opt_state = self._update(run.params, grads, run.opt_state, ok)
        metrics: Metrics = {"loss": outcome.value, "grad_norm": jnp.sqrt(squares.sum())}
        metrics |= {"bad": bad} if self._guarded else {}
        metrics |= {name: metric.value for name, metric in outcome.metrics.items()}
        state = keep(ok, store(layout.state, outcome.state), run.state)
        return TrainState(run.step + 1, params, opt_state, state, run.key), metrics

    def _squares(self, grads: PyTree) -> jax.Array:
        """The sum of squares of each gradient, f32[trained parameters]; padding is zero and counts nothing."""
        specs = [placement.store for placement in jax.tree.leaves(self.layout.grads)]
        return self._sums.stack_totals(sum_of_squares, jax.tree.leaves(grads), specs, self.layout.mesh)

    def _check_stacking(self) -> None:
        """Refuse an optimizer that treats blocks that were stacked for the user differently from single blocks.

        Done before anything is compiled: with the step where layout or loss tell that blocks were stacked, else when
        the first step is traced and a model with stacked blocks has run inside the loss.
        """
        if self._checked_stacking:
            return
        self._checked_stacking = True
        if isinstance(self._params, dict) and BLOCKS in self._params:
            require_same_stacked(self._tx, self._params)
        elif not check_elementwise(self._tx, self._params):
            raise ValueError(
                "the blocks of a model in this loss were stacked, which may change what this optimizer does to them, "
                f'and they are not found: the parameters have no "{BLOCKS}" at their top. Return what model.init '
                "returns from init_fn, with other parameters beside it"
            )


def check_batch(layout: Layout, batch: PyTree, microbatches: int) -> None:
    """Raises unless the arrays of a batch have the same number of rows, which devices and micro-batches divide."""
    rows = {path: x.shape[0] for path, x in _rows(batch)}
    if not rows:
        raise ValueError("the batch has no array with rows: expected a tree of arrays [rows, ...]")
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{path}: {count}" for path, count in rows.items())
        raise ValueError(f"the arrays of a batch must have the same number of rows (dim 0), got {listed}")
    layout.batch_shardings(batch)
    count = next(iter(rows.values()))
    parts = microbatches * axis_size(layout.mesh, layout.batch_axes)
    if count == 0 or count % parts:
        raise ValueError(
            f"a batch of {count} rows does not divide into {microbatches} micro-batches over {parts // microbatches} "
            f"devices; use a multiple of {parts} rows, such as {max(parts, count + -count % parts)}"
        )


def _rows(batch: PyTree) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    map_with_path(lambda path, x: found.append((path_str(path), x)) if x.ndim else None, batch)
    return found
