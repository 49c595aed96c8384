"""`layout`: apply a strategy to the shapes of a run.

Everything is made from shapes: `init_fn` and `tx.init` are traced, never run. Parameters first get names for their
dimensions (from known models, then the rules of `js.tensor`), then the strategy is called for each of them in the
roles "param", "grad" and "opt". Optimizer state is placed last, by finding the parameter that each of its arrays
belongs to (`_place_optimizer`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxshard.core.apply_strategy import Placer
from jaxshard.core.average import find_averaged, is_average
from jaxshard.core.compat import avoid_compilation_cache, warn_if_untested
from jaxshard.core.dim_names import is_leaf, name_dims
from jaxshard.core.known_model import KnownModel, ModelRun, check_function, models_run
from jaxshard.core.layout import Layout, Shapes, select, split_model, split_rows
from jaxshard.core.low_rank import choose_trained
from jaxshard.core.narrowing import check_narrowing
from jaxshard.core.placement import Placement, axes_of, whole
from jaxshard.core.settings import own_mesh
from jaxshard.core.strategy import check_strategy
from jaxshard.core.strategy_parts import Context, Pipeline, Strategy, part_of
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import (
    BLOCKS,
    find_by_suffix,
    leaf_of,
    map_with_path,
    path_str,
    paths,
    raise_all,
    same_structure,
)
from jaxshard.core.types import ROLES, InitFn, PyTree, Role


def layout(
    strategy: Strategy,
    mesh: Mesh,
    init_fn: InitFn,
    tx: Any = None,
    *,
    trainable: PyTree | Callable[[str], bool] | None = None,
) -> Layout:
    """Make the layout of a training run: call the strategy for every array, and collect the placements.

    `js.layout` calls this function, and then assigns matrices to owners or adds the replicas of `js.local`. It traces
    `init_fn` and `tx.init` on shapes alone and touches no device.

    Args:
      strategy, mesh, init_fn, tx, trainable: as in `js.layout`.

    Returns:
      The layout, in which each array of the optimizer's state has a placement of its own.

    Raises:
      TypeError, ValueError: as `js.layout` does.
    """
    warn_if_untested()
    if tx is not None:
        check_transform(tx)
    if isinstance(strategy, (Mesh, AbstractMesh)):
        raise TypeError("strategy is a mesh; write js.layout(strategy, mesh, init_fn, tx), in this order")
    check_strategy(strategy)
    check_function("init_fn", init_fn, "init_fn(key)")
    _check_mesh(mesh)
    avoid_compilation_cache(mesh)
    _check_rows(strategy, mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    with own_mesh(mesh), models_run() as runs:
        model = _shapes_of_model(init_fn, key)
    params, state = split_model(model)
    if not jax.tree.leaves(params):
        raise ValueError(
            "init_fn returned no parameters: expected a tree of floating-point arrays or js.Model(params, state)"
        )
    mask = choose_trained(params, trainable) if trainable is None or callable(trainable) else trainable
    _check_trainable(params, mask)
    with own_mesh(mesh):
        leaves = name_dims(strategy, mesh, runs, params)
    _check_blocks(strategy, leaves)
    placer = Placer(strategy, mesh)

    def place(role: Role) -> PyTree:
        return jax.tree.map(lambda leaf: placer.place(role, leaf), leaves, is_leaf=is_leaf)

    placed = {role: place(role) for role in ROLES if role in ("param", "grad", "opt")}
    # The update runs with the sharding of the optimizer state, so parameters and gradients enter it in that sharding.
    opt_params = select(mask, placed["opt"])
    opt_state, opt_places = None, None
    if tx is not None:
        opt_state, opt_places = _place_optimizer(placer, tx, select(mask, params), opt_params)
    made = Layout(
        mesh=mesh,
        strategy=strategy,
        params=placed["param"],
        grads=select(mask, placed["grad"]),
        opt_params=jax.tree.map(Placement.on_device, opt_params),  # only the state may be in the host's memory
        opt_state=opt_places,
        state=_place_state(state, placed["param"], lambda path, x: placer.place("state", leaf_of(path, x))),
        shapes=Shapes(params, opt_state, state, key),
        trainable=mask,
        stacked_for_user=any(run.model.stacked_for_user for run in runs),
        model=_find_model(runs, params),
    )
    placer.raise_problems()
    return made


def place_optimizer(layout: Layout, tx: Any) -> tuple[PyTree, PyTree]:
    """Return the shapes and placements of the state of the optimizer `tx`, for the trained parameters of a layout.

    Returns:
      (shapes, placements), two trees like the result of `tx.init`.
    """
    placer = Placer(layout.strategy, layout.mesh)
    placed = _place_optimizer(placer, tx, select(layout.trainable, layout.shapes.params), layout.opt_params)
    placer.raise_problems()
    return placed


STACKED_EXAMPLE = """model = js.Stacked(embed, block, head, num_blocks=24, init=init)   # or js.stack(...)
    #   embed(params, batch, key) -> x     block(block_params, x, key) -> x     head(params, x, batch, key) -> js.Mean
    layout = js.layout(strategy, mesh, model.init, tx)
    step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=8))"""
"""An example of a model for a pipeline, for error messages."""


def _find_model(runs: Sequence[ModelRun], params: PyTree) -> KnownModel | None:
    """Return the `KnownModel`, such as a `js.Stacked`, that a layout is made from; None if none or several match.

    This is the model whose `init` made all parameters. If there is no such model, it is the only known model whose
    `init` ran, such as the model that `js.lora` adapts.
    """
    whole = [run for run in runs if same_structure(split_model(run.tree)[0], params)] or runs
    return whole[0].model if len(whole) == 1 else None


def _check_blocks(strategy: Strategy, leaves: PyTree) -> None:
    records = jax.tree.leaves(leaves, is_leaf=is_leaf)
    if part_of(strategy, Pipeline) is not None and not any(leaf.names[:1] == (BLOCKS,) for leaf in records):
        raise ValueError(
            "pipeline: no parameter is stacked by blocks, so there is nothing to place in stages; describe the model "
            f"as js.Stacked and pass its method init itself:\n    {STACKED_EXAMPLE}"
        )


def _check_rows(strategy: Strategy, mesh: Mesh) -> None:
    """Raise ValueError if the strategy can't split the rows of batches; the first batch would show it too late."""
    axes, context = split_rows(strategy, mesh), part_of(strategy, Context)
    if both := [axis for axis in axes if context is not None and axis in context.axis]:
        raise ValueError(
            f"context: the strategy splits rows over {', '.join(map(repr, both))} too, over which js.context splits "
            "their positions; combine them by js.compose, which does not split rows there, or use another axis"
        )


def warn_of_idle_axes(layout: Layout) -> None:
    """Warn of mesh axes whose devices all compute the same. The warning names the line that called `js.layout`."""
    placements = [placed.placement for placed in layout.placed()]
    stored = set().union(*(axes_of(placement.store) for placement in placements))
    computing = set(layout.sum_axes).union(*(axes_of(placement.use) for placement in placements))
    if layout.pipeline is not None:
        computing.add(layout.pipeline.axis)
    idle = [name for name, size in layout.mesh.shape.items() if size > 1 and name not in computing]
    if unused := [name for name in idle if name not in stored]:
        warnings.warn(
            f"the mesh axis {', '.join(map(repr, unused))} splits nothing: its devices repeat one another's work; use "
            "it in the strategy or leave it out of the mesh",
            stacklevel=3,
        )
    if storing := [name for name in idle if name in stored]:
        warnings.warn(
            f"the mesh axis {', '.join(map(repr, storing))} splits stored arrays but no rows: its devices compute the "
            f"same gradients; split rows over it too, as js.compose(js.batch({storing[0]!r}), ...) does",
            stacklevel=3,
        )


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh must be a jax.sharding.Mesh such as js.make_mesh(data=-1), got {type(mesh).__name__}")
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Auto]
    if explicit:
        raise ValueError(
            f"mesh: axis {', '.join(map(repr, explicit))} is not of type Auto, so unmodified Flax modules do not run "
            "on it; make the mesh with js.make_mesh"
        )


def _check_trainable(params: PyTree, mask: PyTree) -> None:
    if not same_structure(mask, params):
        raise ValueError(
            f"trainable must be a function of the path or a tree of booleans like the parameters, "
            f"{jax.tree.structure(params)}, got {jax.tree.structure(mask)}"
        )
    if not any(jax.tree.leaves(mask)):
        raise ValueError("trainable froze every parameter: nothing is left to train")
    chosen = jax.tree_util.tree_leaves_with_path(select(mask, params))
    bad = [leaf for leaf in (leaf_of(path, x) for path, x in chosen) if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    raise_all(
        (
            f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}; train its two halves as real parameters, such as 're' and "
            "'im', and put them together in the loss: jax.lax.complex(params['re'], params['im'])"
            for leaf in bad
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        ),
        TypeError,
        "trainable parameters must be real: complex numbers differ in what their gradient and their square mean",
    )
    raise_all(
        (f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in bad),
        TypeError,
        "trainable parameters must be real floating-point arrays; move these to the state of js.Model(params, state), "
        "or freeze them with trainable=",
    )


def _shapes_of_model(init_fn: InitFn, key: Any) -> PyTree:
    """Return the shapes and dtypes of the result of `init_fn`; raise TypeError for leaves that are no arrays."""
    headline = (
        "init_fn must return a tree of arrays. Return the arrays alone and let loss_fn put the rest back; of an "
        "Equinox module, eqx.partition and eqx.combine do that (docs/guides/models.md). These leaves are none:"
    )

    def checked(key: Any) -> PyTree:
        model = init_fn(key)
        check_narrowing(model, "the model")
        return model

    return _shapes_of(checked, key, headline)


def _shapes_of_opt_state(tx: Any, params: PyTree) -> PyTree:
    return _shapes_of(tx.init, params, "tx.init must return a tree of arrays; these leaves are none:")


def _shapes_of(fn: Callable[[Any], Any], argument: Any, headline: str) -> PyTree:
    others: dict[str, str] = {}

    def note_others(argument: Any) -> tuple[()]:
        for path, x in jax.tree_util.tree_leaves_with_path(fn(argument)):
            if not isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
                others[path_str(path)] = f"{type(x).__name__} {getattr(x, '__name__', repr(x)[:40])}"
        return ()

    try:
        return jax.eval_shape(fn, argument)
    except TypeError:
        with contextlib.suppress(TypeError):
            jax.eval_shape(note_others, argument)
        raise_all((f"{path}: {what}" for path, what in others.items()), TypeError, headline)
        raise


def _place_state(state: PyTree, params: PyTree, fill: Callable[..., Placement]) -> PyTree:
    """Place the arrays of the model's state: averages (`js.Average`) like their parameters, others by `fill`.

    Args:
      state: the shapes of the model's state.
      params: the placements of the parameters.
      fill: `fill(path, array)` returns the placement of an array that belongs to no average.

    Raises:
      ValueError: an array of an average has no parameter of its path and shape.
    """

    def place(path: tuple[Any, ...], node: Any) -> Any:
        if not is_average(node):
            return fill(path, node)
        found = find_averaged(params, node.params, f" at {path_str(path)}")
        shapes = [x.shape for x in jax.tree.leaves(node)]
        raise_all(
            (
                f"{name}: the average is {list(shape)}, the parameter {list(placement.view.logical)}"
                for name, shape, placement in zip(paths(node.params), shapes, jax.tree.leaves(found), strict=True)
                if shape != placement.view.logical
            ),
            ValueError,
            f"js.Average at {path_str(path)} must have the shapes of the parameters",
        )
        return node.over(found)

    return map_with_path(place, state, is_leaf=is_average)


def _place_optimizer(placer: Placer, tx: Any, params: PyTree, placements: PyTree) -> tuple[PyTree, PyTree]:
    """Place every array of an optimizer's state by its path and shape, whatever the classes of the state.

    An array whose path ends with a parameter's path and that has its shape gets that parameter's placement in the role
    "opt"; of several such parameters the longest path wins. For a parameter "layer/w" [64, 64] Adam's state is:

        0/count         []          ends with no parameter's path: a scalar integer, replicated
        0/mu/layer/w    [64, 64]    ends with "layer/w" and has its shape: as the parameter
        0/nu/layer/w    [64, 64]    the same

    The shape matters too: Adafactor's "v_row/layer/w" is [64], so it is placed as an array of its own. An array with a
    value for each block of the parameter's elements, such as "mu_scales/layer/w" [64, 4] of 8-bit Adam, is split like
    the blocks (`Placement.of_blocks`) if no device boundary cuts a block.
    (`optax.tree_map_params`, the obvious tool, raises for muon, masked and partition.)

    Args:
      placer: places arrays that belong to no parameter.
      tx: the optimizer.
      params: the shapes of the trained parameters.
      placements: the placements of the trained parameters in the role "opt".

    Returns:
      (shapes, placements), two trees like the result of `tx.init`.
    """
    with own_mesh(placer.mesh):
        opt_state = _shapes_of_opt_state(tx, params)
    known = {
        path: (x.shape, placement)
        for (path, x), placement in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(placements), strict=True
        )
    }

    def place(path: tuple[Any, ...], x: Any) -> Placement:
        placement: Placement | None = find_by_suffix(known, path, x.shape)
        if placement is not None:
            return placement
        leaf = leaf_of(path, x)
        owner: Placement | None = next((known[path[i:]][1] for i in range(len(path)) if path[i:] in known), None)
        of_blocks = owner.of_blocks(leaf.shape, placer.mesh) if owner is not None and leaf.is_floating else None
        if of_blocks is not None:
            return of_blocks
        if leaf.is_floating and leaf.shape:
            return placer.place("opt", leaf)
        return replace(whole(leaf), why="not a floating-point array" if leaf.shape else "one element")

    return opt_state, map_with_path(place, opt_state)
