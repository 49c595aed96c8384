"""`TrainState`: all arrays that training carries from step to step, created with the layout's shardings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.keys import typed_key
from jaxshard.core.known_model import check_function
from jaxshard.core.layout import Layout, check_layout, put_back, select, split_model
from jaxshard.core.low_rank import has_low_rank
from jaxshard.core.placement import Placement, whole
from jaxshard.core.settings import with_own_settings
from jaxshard.core.stored import store, unstore
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import abstract, check_same_tree, leaf_of, path_str, raise_all
from jaxshard.core.types import InitFn, PyTree
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import key_fact, run_facts
from jaxshard.training.placing import place_base, place_model
from jaxshard.training.state_page import state_page

_DONATED = (
    "this run was donated to an earlier step, which took its arrays; go on with the run it returned, or make the "
    "step with js.make_step(..., donate=False), which leaves the run as it is"
)


class TrainState(NamedTuple):
    """The arrays of a training run, as its layout stores them. Functions of jaxshard call a TrainState `run`.

    It is an immutable pytree: a step returns another TrainState. `js.logical` converts it to model order.

    Attributes:
      step: int32[], the number of optimizer steps taken.
      params: the parameters, each f[*stored], split as `layout.params` says.
      opt_state: the result of `tx.init` for the trained parameters, stored as `layout.opt_state` says.
      state: the model's own mutable state; () without one.
      key: the run's random key. A step's key depends only on this key and the step's number.
      residuals: the rounding errors of the last step's gradients, f32[devices, *stored] for each parameter, under
        `reduce_dtype=js.wire.int8(feedback=True)`; else (). They are () until the first step, which starts from zeros.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    state: PyTree
    key: jax.Array
    residuals: PyTree = ()

    def __repr__(self) -> str:
        """Show the fields, or say that the run was donated."""
        if _taken_arrays(self):
            return f"TrainState({_DONATED})"
        return f"TrainState({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

    def _repr_html_(self) -> str:
        """Show step, shapes and bytes in a notebook, without copying arrays to the host."""
        return state_page(self)


@with_own_settings
def init(
    init_fn: InitFn,
    tx: optax.GradientTransformation | None,
    layout: Layout,
    key: jax.Array | int,
    *,
    init_from: PyTree = None,
) -> TrainState:
    """Make a `TrainState` at step 0, with every array created as the layout stores it.

    No device ever holds all of a sharded array. The parameters are bit for bit those of `init_fn(key)` on one device.

    Args:
      init_fn: `init_fn(key) -> params | js.Model(params, state)`, the one that the layout was made from.
      tx: the optax transform that the layout was made with; None for a layout without one.
      layout: the layout.
      key: a seed or a `jax.random` key. `init_fn` receives it; the keys of steps are derived from it.
      init_from: parameters to start from in place of `init_fn(key)`, such as pretrained parameters: a tree like the
        result of `init_fn`, of NumPy or JAX arrays in model order, which are copied directly to their shards. For a
        model of `js.lora`, the parameters of the model without factors: its matrices are cast as `base=` of `js.lora`
        says, and the factors come from `init_fn(key)`.

    Returns:
      The run.

    Raises:
      ValueError: `init_fn`, `tx` or `init_from` do not fit the layout; the message names every leaf that differs.
      js.distributed.Disagreement: in several processes, if they differ in versions, flags, mesh, layout or key.

    Example:
        layout = js.layout(js.fsdp(), mesh, init_fn, tx)
        run = js.init(init_fn, tx, layout, 0)
    """
    check_function("init_fn", init_fn, "init_fn(key)")
    check_layout("js.init(init_fn, tx, layout, key)", layout)
    if tx is not None and layout.shapes.opt_state is None:
        check_transform(tx)
        raise ValueError(f"this layout was made without an optimizer, and js.init was given one; {_WITH_TX}")
    if layout.shapes.opt_state is not None:
        check_transform(tx)
    key = typed_key(key)
    peers = peers_of(layout.mesh)
    if peers is not None:
        peers.agree("js.init", run_facts(layout) | key_fact(key))
    if init_from is None:
        program = init_program(init_fn, tx, layout)
        if peers is not None:
            program = program.lower(key).compile()
            peers.meet("js.init, compiled")
        run: TrainState = program(key)
        return run
    if has_low_rank(layout.shapes.params) and not has_low_rank(init_from):
        base, state = place_base(init_from, layout, "init_from")
        params = put_back(layout.factors, _draw_factors(init_fn, layout, key), base)
    else:
        params, state = place_model(init_from, layout, "init_from")
    step, key = _make_step_and_key(layout, key)
    return TrainState(step, params, init_opt_state(tx, layout, params), state, key)


def _draw_factors(init_fn: InitFn, layout: Layout, key: jax.Array) -> PyTree:
    """Compute only the low-rank factors of `init_fn(key)`; all other leaves of the result are None."""
    factors = select(layout.factors, layout.params)

    def draw(key: jax.Array) -> PyTree:
        return store(factors, select(layout.factors, split_model(init_fn(key))[0]))

    return jax.jit(draw, out_shardings=layout.shardings(factors))(key)


def init_opt_state(tx: optax.GradientTransformation | None, layout: Layout, params: PyTree) -> PyTree:
    """Make the optimizer's first state for stored parameters, with every array created as the layout stores it."""

    def start(params: PyTree) -> PyTree:
        trained = select(layout.trainable, unstore(layout.params, params))
        opt_state = None if tx is None else layout.start_optimizer(tx, trained)
        check_opt_state(layout, opt_state)
        return layout.store_optimizer(opt_state)

    return jax.jit(start, out_shardings=layout.shardings(layout.opt_state))(params)


def init_program(init_fn: InitFn, tx: optax.GradientTransformation | None, layout: Layout) -> Any:
    """Make the jitted function `key -> TrainState` that `init` calls, so that callers can also lower and compile it."""

    def init_run(key: jax.Array) -> TrainState:
        params, state = split_model(init_fn(key))
        check_model(layout, params, state)
        opt_state = None if tx is None else layout.start_optimizer(tx, select(layout.trainable, params))
        check_opt_state(layout, opt_state)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=store(layout.params, params),
            opt_state=layout.store_optimizer(opt_state),
            state=store(layout.state, state),
            key=run_key(key),
        )

    return jax.jit(init_run, out_shardings=run_shardings(layout))


def run_key(key: jax.Array) -> jax.Array:
    """Derive `TrainState.key`, from which step keys are made, so that it differs from the key that `init_fn` gets."""
    return jax.random.fold_in(key, 1)


def run_shardings(layout: Layout, residuals: PyTree = ()) -> Any:
    """Return a TrainState of shardings: the sharding of each array in place of the array.

    `residuals` are the placements of the gradients' rounding errors, () for none.
    """
    _, placements = run_arrays(layout)
    shardings: Any = layout.shardings(placements._replace(residuals=residuals))
    return shardings


def run_arrays(layout: Layout) -> tuple[Any, Any]:
    """Return two TrainStates: the logical shape of each array (a ShapeDtypeStruct), and its `Placement`."""
    make: Any = TrainState  # the types of its fields would allow only arrays
    step, shapes = jax.ShapeDtypeStruct((), jnp.int32), layout.shapes
    alone = whole(leaf_of((), step))
    return (
        make(step, shapes.params, shapes.opt_state, shapes.state, shapes.key),
        make(alone, layout.params, layout.opt_state, layout.state, alone),
    )


def run_shapes(layout: Layout, residuals: PyTree = ()) -> Any:
    """Return a TrainState of ShapeDtypeStructs: the stored shape and sharding of each array in place of the array.

    `residuals` are the placements of the gradients' rounding errors, () for none.
    """

    def stored(x: Any, placement: Placement) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(placement.view.stored, x.dtype, sharding=placement.sharding(layout.mesh))

    shapes: Any = jax.tree.map(stored, *run_arrays(layout))
    return shapes._replace(residuals=residual_shapes(layout, residuals))


def residual_shapes(layout: Layout, placements: PyTree) -> PyTree:
    """Return ShapeDtypeStructs with the stored shapes and shardings of residuals (rounding errors of gradients)."""

    def stored(placement: Placement) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(placement.view.stored, jnp.float32, sharding=placement.sharding(layout.mesh))

    return jax.tree.map(stored, placements)


@with_own_settings
def logical(run: TrainState, layout: Layout) -> TrainState:
    """Convert a run to model order without padding, the shapes that `init_fn` and `tx.init` have on one device.

    The compiler chooses the collectives, and the shardings of the results.

    Args:
      run: a run as the layout stores it. It is not donated.
      layout: the layout that the run was made with.

    Returns:
      A TrainState whose arrays have the logical shapes, without residuals, which have no logical shape.

    Raises:
      ValueError: the run is not of this layout; the message names every leaf that differs.

    Example:
        weights = js.logical(run, layout).params["blocks"]["attention"]["kernel"]     # [blocks, ...], not padded
    """
    check_run(layout, run)
    run = run._replace(residuals=())

    @jax.jit
    def convert(run: TrainState) -> TrainState:
        return run._replace(
            params=unstore(layout.params, run.params),
            opt_state=layout.unstore_optimizer(run.opt_state),
            state=unstore(layout.state, run.state),
        )

    converted: TrainState = convert(run)
    return converted


_WITH_TX = "make it with the optimizer, js.layout(strategy, mesh, init_fn, tx)"
_REMAKE = "make the layout again from the same init_fn and tx"


def check_model(layout: Layout, params: PyTree, state: PyTree) -> None:
    """Raise ValueError unless logical parameters and state have the layout's shapes and dtypes; list differences."""
    shapes = layout.shapes
    check_same_tree(shapes.params, abstract(params), "the parameters changed since the layout was made", _REMAKE)
    check_same_tree(shapes.state, abstract(state), "the model's state changed since the layout was made", _REMAKE)


def check_opt_state(layout: Layout, opt_state: PyTree) -> None:
    """Raise ValueError unless a logical optimizer state has the shapes that `tx.init` gave for the layout."""
    shapes = layout.shapes.opt_state
    if shapes is None and opt_state is not None:
        raise ValueError(f"this layout was made without an optimizer; {_WITH_TX}")
    check_same_tree(shapes, abstract(opt_state), "tx is not the one that the layout was made for", _REMAKE)


def check_is_run(run: Any) -> None:
    """Raise TypeError unless `run` is a `TrainState`."""
    if isinstance(run, TrainState):
        return
    if isinstance(run, tuple) and run and isinstance(run[0], TrainState):
        raise TypeError("run is the pair that a step returned; take it apart: run, metrics = step(run, batch)")
    order = "; the arguments are in another order, for a run comes before its layout" if isinstance(run, Layout) else ""
    raise TypeError(f"run must be a js.TrainState, as js.init and a step return it, got {type(run).__name__}{order}")


def check_not_donated(run: TrainState) -> None:
    """Raise ValueError if a run's arrays were donated: a program that reads them would crash the process."""
    taken = _taken_arrays(run)
    if not taken:
        return
    if len(taken) < len(jax.tree.leaves((run.params, run.opt_state, run.state))):
        raise ValueError(
            f"arrays of this run were donated to an earlier step, with another run that shares them: {_few(taken)}; "
            "take them from the run that the step returned (run._replace(params=...)), or make the steps of runs that "
            "share arrays with js.make_step(..., donate=False)"
        )
    raise ValueError(_DONATED)


def check_arrays_not_donated(what: str, tree: PyTree) -> None:
    """Raise ValueError if arrays of a tree were donated, such as parameters with their run; `what` names the tree."""
    if taken := _taken_arrays(tree):
        raise ValueError(
            f"arrays of {what} were donated to an earlier step, with a run that held them: {_few(taken)}; take them "
            "from the run that the step returned, or make that step with js.make_step(..., donate=False)"
        )


def _taken_arrays(tree: PyTree) -> list[str]:
    def is_taken(x: Any) -> bool:
        return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()

    if not any(map(is_taken, jax.tree.leaves(tree))):  # runs before every step: make paths only for an error
        return []
    return [path_str(path) for path, x in jax.tree_util.tree_leaves_with_path(tree) if is_taken(x)]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_run(layout: Layout, run: TrainState) -> None:
    """Raise if the run was donated or any array's shape, dtype or sharding differs from the layout; list all."""
    check_is_run(run)
    check_not_donated(run)
    # Residuals belong to the engine, not to the layout.
    run = run._replace(residuals=())
    check_stored(run_shapes(layout), run, "the run", "make it with js.init and the same layout")


def check_stored(expected: PyTree, found: PyTree, what: str, fix: str) -> None:
    """Raise if any array's shape, dtype or sharding differs from its ShapeDtypeStruct in `expected`; list all.

    `what` names the arrays, such as "the run", and `fix` says how to get the right ones.
    """
    check_same_tree(abstract(expected), abstract(found), f"{what} does not fit the layout", fix)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    elsewhere = [
        f"{path_str(path)}: {x.sharding}, expected {want.sharding}"
        for (path, x), want in pairs
        if isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)  # inside the user's program the compiler moves it
        and not x.sharding.is_equivalent_to(want.sharding, x.ndim)
    ]
    raise_all(elsewhere, ValueError, f"arrays of {what} have other shardings than the layout; {fix}")


def _make_step_and_key(layout: Layout, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    shardings = run_shardings(layout)
    made: tuple[jax.Array, jax.Array] = jax.jit(
        lambda key: (jnp.zeros((), jnp.int32), run_key(key)), out_shardings=(shardings.step, shardings.key)
    )(key)
    return made
