"""Make a TrainState from another: a copy (`clone`), or one with other parameters (`replace_params`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.jaxpr import dependent_variables, inline_calls, open_jaxpr
from jaxshard.core.layout import Layout, select
from jaxshard.core.loss import Model
from jaxshard.core.settings import settings_of, with_own_settings
from jaxshard.core.text_table import first_words
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import paths
from jaxshard.core.types import PyTree
from jaxshard.training.placing import place_model
from jaxshard.training.state import (
    TrainState,
    check_is_run,
    check_not_donated,
    check_opt_state,
    check_run,
    init_opt_state,
)


def clone(run: TrainState) -> TrainState:
    """Copy a run with the same shardings, to donate it to the next step and keep the copy.

    Args:
      run: the run; it is not donated, and twice its memory is in use afterwards. All processes must call this.

    Returns:
      The copy.

    Raises:
      TypeError: `run` is no `TrainState`.
      ValueError: `run` was donated to a step.

    Example:
        before = js.clone(run)
        run, metrics = step(run, batch)     # takes the arrays of `run`, not those of `before`
    """
    check_is_run(run)
    check_not_donated(run)
    shardings = jax.tree.map(lambda x: x.sharding, run)
    with settings_of(run):
        copied: TrainState = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(run)
    return copied


@with_own_settings
def replace_params(
    run: TrainState,
    model: PyTree,
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    opt_state: Literal["keep", "reset"],
) -> TrainState:
    """Replace the parameters of a run, and keep its optimizer's state or reset it.

    Step and key do not change, nor does the model's state unless `model` is a `js.Model`.

    Args:
      run: the run. It is not donated; unchanged arrays are shared with the result, so copy the run (`js.clone`) to
        train both of them.
      model: parameters, or a `js.Model` with state, as `init_fn` returns them: NumPy or JAX arrays in model order.
      tx: the optax transform of the run.
      layout: its layout.
      opt_state: "keep" leaves the optimizer's state as it is: moments, counters, schedules and residuals of gradients
        go on. "reset" calls `tx.init` on the new parameters, and drops residuals.

    Returns:
      The run with the new parameters, stored as the layout says.

    Raises:
      ValueError: a run, model or `tx` that does not fit the layout; "keep" for an optimizer whose state was made
        from the old parameters (f32 copies, averages), which would restore them.
      TypeError: `tx` is no optax transform, or `run` no run.

    Example:
        run = js.replace_params(run, averaged_weights, tx, layout, opt_state="reset")
    """
    check_transform(tx)
    check_run(layout, run)
    if opt_state not in ("keep", "reset"):
        raise ValueError(f'replace_params: opt_state must be "keep" or "reset", got {opt_state!r}')
    trained = select(layout.trainable, layout.shapes.params)
    check_opt_state(layout, jax.eval_shape(partial(layout.start_optimizer, tx), trained))
    if opt_state == "keep" and (made := list(_made_from_params(partial(layout.start_optimizer, tx), trained))):
        raise ValueError(
            f"replace_params: the optimizer's state holds what was made from the old parameters: {first_words(made)}; "
            'kept, it would bring them back. Use opt_state="reset"'
        )
    whole = isinstance(model, Model)
    params, state = place_model(model, layout, "the model", with_state=whole)
    run = run._replace(params=params, state=state if whole else run.state)
    if opt_state == "keep":
        return run
    # Rounding errors of the old parameters' gradients are as useless as their moments.
    return run._replace(opt_state=init_opt_state(tx, layout, params), residuals=())


def _made_from_params(start: Callable[[PyTree], PyTree], params: PyTree) -> Iterable[str]:
    """Yield the paths of the arrays in the result of `start`, the optimizer's `init`, that depend on the parameters."""
    program, shapes = jax.make_jaxpr(start, return_shape=True)(params)
    jaxpr: Any = open_jaxpr(inline_calls(program))[0]
    dependent = dependent_variables(jaxpr.eqns, jaxpr.invars)
    for path, atom in zip(paths(shapes), jaxpr.outvars, strict=True):
        if not isinstance(atom, jax.extend.core.Literal) and atom in dependent:
            yield path
