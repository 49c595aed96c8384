"""`value_and_grad`: the loss and gradient of a step without its update, for custom updates."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxshard.adapt.objective import resolve
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.known_model import check_function
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.settings import own_settings
from jaxshard.core.stored import unstore
from jaxshard.core.types import LossFn, PyTree
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine, check_engine
from jaxshard.optim.local import local_of
from jaxshard.training.checked_jit import checked_jit
from jaxshard.training.residuals import check_residuals, with_residuals
from jaxshard.training.state import TrainState, check_run
from jaxshard.training.views import use_stored


def value_and_grad(
    loss_fn: LossFn, layout: Layout, engine: Engine | None = None
) -> Callable[[TrainState, PyTree], tuple[jax.Array, PyTree]]:
    """Make `fn(run, batch) -> (loss, gradients)`, which computes what the next step of `js.make_step` would.

    Args:
      loss_fn: `loss_fn(model, batch, key) -> scalar | js.Mean | js.Loss`. Of a `js.Loss` only the loss is returned.
      layout: the layout of the TrainState.
      engine: how the gradient is computed; `js.auto()` by default.

    Returns:
      The function. It does not donate the run. The gradients are in model order without padding, as `jax.grad` gives
      them on one device, with None for frozen parameters; the compiler chooses their sharding. If the engine keeps
      residuals (`js.wire.int8(feedback=True)`), the run's residuals are added to the gradients, as the next step would
      add them, and do not change. Collectives: those of the engine. The first call with each batch shape compiles.

    Raises:
      TypeError: `loss_fn` is no function, or `engine` no engine.
      ValueError: a layout with `js.local`; by a call, a run or batch that does not fit the layout, or a run with
        residuals, though the engine keeps none.

    Example:
        gradient = js.value_and_grad(loss_fn, layout, js.explicit())
        loss, grads = gradient(run, batch)
    """
    engine = engine or auto()
    check_engine(engine)
    check_function("loss_fn", loss_fn, "loss_fn(model, batch, key)")
    check_layout("js.value_and_grad(loss_fn, layout)", layout)
    if local_of(layout.strategy) is not None:
        raise ValueError(
            "value_and_grad: replicas that train by themselves (js.local) have a loss and gradients each, of their own "
            "parameters; make the layout of the strategy inside a replica, without js.local"
        )
    compute, residuals = engine.value_and_grad(resolve(loss_fn), layout), engine.residuals(layout)

    def run_once(run: TrainState, batch: PyTree) -> tuple[jax.Array, PyTree]:
        state, key = use_stored(layout, layout.state, run.state), jax.random.fold_in(run.key, run.step)
        outcome, grads = compute(run.params, state, batch, key, run.residuals)
        return outcome.value, unstore(layout.grads, grads)

    options = engine.compiler_options(layout.mesh, layout.shapes.params)
    jitted = checked_jit(run_once, "js.value_and_grad", compiler_options=options)

    @waits_for_devices
    def gradient(run: TrainState, batch: PyTree) -> tuple[jax.Array, PyTree]:
        check_run(layout, run)
        batch = as_arrays("the batch", batch)
        layout.plan_batch(batch).check(engine.microbatches, whole=engine.shows_whole_batch)
        check_narrowing(batch, "the batch")
        with own_settings(layout.mesh):
            run = with_residuals(run, layout, residuals)
            check_residuals(run, layout, residuals)
            results: tuple[jax.Array, PyTree] = jitted(run, jax.device_put(batch, layout.batch_shardings(batch)))
        jax.block_until_ready(results)
        return results

    return gradient
