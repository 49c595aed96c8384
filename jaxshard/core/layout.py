"""`Layout`: a strategy applied to the shapes of a run. The one value that training, planning and pictures share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxshard.core.compat import avoid_compilation_cache, warn_if_untested
from jaxshard.core.loss import Model
from jaxshard.core.mesh import axis_names
from jaxshard.core.placement import Placement, axes_of, whole
from jaxshard.core.strategy import (
    MIN_SIZE,
    Pipeline,
    Strategy,
    Tensor,
    ddp,
    fsdp,
    hsdp,
    parts_of,
    pipeline,
    pipeline_of,
    tensor,
    zero1,
    zero2,
)
from jaxshard.core.tree import BLOCKS, Leaf, bytes_of, leaf_of, map_with_path, path_str, raise_all, same_structure
from jaxshard.core.types import ROLES, InitFn, PyTree, Role


class Placed(NamedTuple):
    """One array of a layout: its role, its shape and where it lives."""

    role: Role
    leaf: Leaf
    placement: Placement


@dataclass(frozen=True)
class Layout:
    """Where every array of a training run lives, per role. Made by `layout`; holds shapes, never values.

    `params`, `grads`, `opt_state` and `state` are trees of `Placement`. `grads` and `opt_params` (where the optimizer
    sees a parameter and its gradient) have None for frozen parameters. `shapes` holds the logical shapes: of the
    model's parameters and state and of the optimizer state.
    """

    mesh: Mesh
    strategy: Strategy
    params: PyTree
    grads: PyTree
    opt_params: PyTree
    opt_state: PyTree
    state: PyTree
    shapes: Shapes
    trainable: PyTree

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that the blocks are placed in; None without."""
        return pipeline_of(self.strategy)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of a batch, major first."""
        return _batch_axes(self.strategy, self.mesh)

    def batch_placement(self, array: Any, path: tuple[Any, ...] = ()) -> Placement:
        """Where a global batch array lives; an error if its rows do not divide."""
        leaf = leaf_of(path, array)
        return self.strategy("batch", leaf, whole(leaf), self.mesh)

    def batch_sharding(self, array: Any) -> NamedSharding:
        """How a global batch array (or its ShapeDtypeStruct) is spread: rows over the batch axes."""
        return self.batch_placement(array).sharding(self.mesh)

    def batch_shardings(self, batch: PyTree) -> PyTree:
        """How every array of a global batch is spread."""
        return map_with_path(lambda path, x: self.batch_placement(x, path).sharding(self.mesh), batch)

    def shardings(self, placements: PyTree) -> PyTree:
        """The tree of `NamedSharding` of a tree of placements."""
        return jax.tree.map(lambda placement: placement.sharding(self.mesh), placements)

    def placed(self) -> list[Placed]:
        """Every array with its role, in the order parameters, gradients, optimizer state, model state."""
        trees: list[tuple[Role, PyTree, PyTree]] = [
            ("param", self.shapes.params, self.params),
            ("grad", only(self.trainable, self.shapes.params), self.grads),
            ("opt", self.shapes.opt_state, self.opt_state),
            ("state", self.shapes.state, self.state),
        ]
        return [
            Placed(role, leaf_of(path, array), placement)
            for role, arrays, placements in trees
            for (path, array), placement in zip(
                jax.tree_util.tree_leaves_with_path(arrays), jax.tree.leaves(placements), strict=True
            )
        ]

    def bytes_per_device(self) -> dict[Role, int]:
        """Bytes on one device by role: "param", "grad", "opt", "state"."""
        total: dict[Role, int] = {"param": 0, "grad": 0, "opt": 0, "state": 0}
        for role, leaf, placement in self.placed():
            total[role] += placement.bytes_per_device(self.mesh, leaf.dtype)
        return total

    def argument_bytes(self, batch: PyTree) -> int:
        """Bytes per device of the arguments of a step: parameters, optimizer and model state, step, key and batch."""
        resting = sum(count for role, count in self.bytes_per_device().items() if role != "grad")
        rows = sum(self.batch_placement(x).bytes_per_device(self.mesh, x.dtype) for x in jax.tree.leaves(batch))
        return resting + rows + bytes_of((), jnp.int32) + bytes_of((), self.shapes.key.dtype)

    def sharded_fraction(self, role: Role) -> float:
        """The share of a role's elements that is split over at least one mesh axis of more than one device."""
        placed = [p for p in self.placed() if p.role == role]
        split = sum(p.leaf.size for p in placed if any(self.mesh.shape[a] > 1 for a in axes_of(p.placement.store)))
        return split / max(1, sum(p.leaf.size for p in placed))

    def explain(self) -> str:
        """A table of every array: role, path, shape, dtype, spec, bytes per device, why it is whole or padded."""
        return _explain(self)

    def __str__(self) -> str:
        return self.explain()


class Shapes(NamedTuple):
    """The logical shapes behind a layout: trees of ShapeDtypeStruct."""

    params: PyTree
    opt_state: PyTree
    state: PyTree
    key: Any


def layout(
    strategy: Strategy,
    mesh: Mesh,
    init_fn: InitFn,
    tx: Any,
    *,
    trainable: PyTree | Callable[[str], bool] = lambda path: True,
) -> Layout:
    """The `Layout` of a training run; traces `init_fn` and `tx.init` on shapes only and touches no device.

    On several CPU devices JAX's persistent compilation cache is turned off, with a warning: programs that come out of
    it can hang there.

    `trainable` freezes parameters: a function of the path ("blocks/attention/kernel") or a tree of booleans like the
    parameters. A frozen parameter has no gradient and no optimizer state.

    Raises:
      TypeError: `tx` is no optax GradientTransformation, `strategy` or `init_fn` no function, `mesh` no mesh, a
        trainable parameter not floating.
      ValueError: no parameters, none trainable, an axis that the mesh lacks or that is not Auto, a strategy applied
        twice to one dimension.
    """
    warn_if_untested()
    check_transform(tx)
    if not callable(strategy):
        raise TypeError(f"strategy must be a strategy such as js.fsdp('data'), got {type(strategy).__name__}")
    if strategy in (ddp, zero1, zero2, fsdp, hsdp, tensor, pipeline):
        name = strategy.__name__
        raise TypeError(
            f"strategy must be a strategy, not the function that makes one: write js.{name}(...), not js.{name}"
        )
    if not callable(init_fn):
        raise TypeError(f"init_fn must be a function of a key, got {type(init_fn).__name__}")
    _check_mesh(mesh)
    avoid_compilation_cache(mesh)
    _batch_axes(strategy, mesh)  # an error about rows now rather than with the first batch
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = jax.eval_shape(init_fn, key)
    params, state = split_model(model)
    if not jax.tree.leaves(params):
        raise ValueError(
            "init_fn returned no parameters: expected a tree of floating-point arrays or js.Model(params, state)"
        )
    mask = map_with_path(lambda path, _: trainable(path_str(path)), params) if callable(trainable) else trainable
    _check_trainable(params, mask)
    leaves = _named(strategy, map_with_path(leaf_of, params, _dim_names(init_fn, params)))
    _check_blocks(strategy, leaves)

    def place(role: Role) -> PyTree:
        return jax.tree.map(lambda leaf: strategy(role, leaf, whole(leaf), mesh), leaves, is_leaf=_is_leaf)

    placed = {role: place(role) for role in ROLES if role in ("param", "grad", "opt")}
    opt_params = only(mask, placed["opt"])
    opt_state = jax.eval_shape(tx.init, only(mask, params))

    def place_plain(role: Role) -> Callable[[Any, Any], Placement]:
        return lambda path, x: strategy(role, leaf_of(path, x), whole(leaf_of(path, x)), mesh)

    made = Layout(
        mesh=mesh,
        strategy=strategy,
        params=placed["param"],
        grads=only(mask, placed["grad"]),
        opt_params=opt_params,
        opt_state=_place_opt_state(opt_state, only(mask, params), opt_params, place_plain("opt")),
        state=map_with_path(place_plain("state"), state),
        shapes=Shapes(params, opt_state, state, key),
        trainable=mask,
    )
    if idle := _idle_axes(made):
        warnings.warn(
            f"the mesh axis {', '.join(map(repr, idle))} splits nothing: its devices repeat one another's work; use it "
            "in the strategy or leave it out of the mesh",
            stacklevel=2,
        )
    return made


STACKED_EXAMPLE = """model = js.Stacked(embed, block, head, num_blocks=24, init=init)   # or js.stack(...)
    #   embed(params, batch, key) -> x     block(block_params, x, key) -> x     head(params, x, batch, key) -> js.Mean
    layout = js.layout(strategy, mesh, model.init, tx)
    step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=8))"""
"""How a model is described to a pipeline, for errors."""


def _check_blocks(strategy: Strategy, leaves: PyTree) -> None:
    records = jax.tree.leaves(leaves, is_leaf=_is_leaf)
    if pipeline_of(strategy) is not None and not any(leaf.names[:1] == (BLOCKS,) for leaf in records):
        raise ValueError(
            "pipeline: no parameter is stacked by blocks, so there is nothing to place in stages; describe the model "
            f"as js.Stacked and pass its method init itself:\n    {STACKED_EXAMPLE}"
        )


def _idle_axes(layout: Layout) -> list[str]:
    used = set(layout.batch_axes).union(*(axes_of(placed.placement.store) for placed in layout.placed()))
    return [name for name, size in layout.mesh.shape.items() if size > 1 and name not in used]


def check_transform(tx: Any) -> None:
    """Raises unless `tx` has the two functions of an optax transform."""
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise TypeError(f"tx must be an optax GradientTransformation such as optax.adam(1e-3), got {type(tx).__name__}")


def split_model(model: PyTree) -> tuple[PyTree, PyTree]:
    """(params, state) of what an `init_fn` returned; the state is () where there is none."""
    return (model.params, model.state) if isinstance(model, Model) else (model, ())


def join_model(params: PyTree, state: PyTree) -> PyTree:
    """What the user's functions receive: the inverse of `split_model`."""
    return params if isinstance(state, tuple) and state == () else Model(params, state)


def only(mask: PyTree, tree: PyTree) -> PyTree:
    """The tree with None instead of the leaves whose mask is False."""
    return jax.tree.map(lambda keep, x: x if keep else None, mask, tree)


def merge(mask: PyTree, chosen: PyTree, rest: PyTree) -> PyTree:
    """The leaves of `chosen` where the mask is True, those of `rest` elsewhere."""
    return jax.tree.map(lambda keep, a, b: a if keep else b, mask, chosen, rest, is_leaf=lambda x: x is None)


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh must be a jax.sharding.Mesh such as js.make_mesh(data=-1), got {type(mesh).__name__}")
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Auto]
    if explicit:
        raise ValueError(
            f"mesh: axis {', '.join(map(repr, explicit))} is not of type Auto, so unmodified Flax modules do not run "
            "on it; make the mesh with js.make_mesh"
        )


def _batch_axes(strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
    probe = Leaf("(batch)", (mesh.size,), jnp.float32, (None,))
    return axes_of(strategy("batch", probe, whole(probe), mesh).store)


def _check_trainable(params: PyTree, mask: PyTree) -> None:
    if not same_structure(mask, params):
        raise ValueError(
            f"trainable must be a function of the path or a tree of booleans like the parameters, "
            f"{jax.tree.structure(params)}, got {jax.tree.structure(mask)}"
        )
    if not any(jax.tree.leaves(mask)):
        raise ValueError("trainable froze every parameter: nothing is left to train")
    chosen = jax.tree_util.tree_leaves_with_path(only(mask, params))
    bad = [leaf for leaf in (leaf_of(path, x) for path, x in chosen) if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    raise_all(
        (f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in bad),
        TypeError,
        "trainable parameters must be real floating-point arrays; move these to the state of js.Model(params, state), "
        "or freeze them with trainable=",
    )


def _dim_names(init_fn: InitFn, params: PyTree) -> PyTree:
    """Logical dimension names, from the model whose method `init_fn` is where it knows them."""
    dim_names = getattr(getattr(init_fn, "__self__", None), "dim_names", None)
    if dim_names is not None:
        return dim_names(params)
    return jax.tree.map(lambda x: (None,) * x.ndim, params)


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def _named(strategy: Strategy, leaves: PyTree) -> PyTree:
    """The parameters with the names that the rules of `tensor` give their dimensions; warns of what no rule split."""
    records, tree = jax.tree.flatten(leaves, is_leaf=_is_leaf)
    for part in parts_of(strategy):
        if isinstance(part, Tensor):
            records = part.rules.resolve(records)
            _report(part, records)
    return jax.tree.unflatten(tree, records)


def _report(part: Tensor, leaves: list[Leaf]) -> None:
    missed = [f"{leaf.path} {list(leaf.shape)}" for leaf in leaves if leaf.size >= MIN_SIZE and not leaf.named_by]
    if missed:
        warnings.warn(
            f"tensor: no rule took {', '.join(missed)}: copied whole over {part.axis!r}; name the dimensions with a "
            f"rule such as ('{missed[0].split()[0]}', ('embed', 'mlp')), or say ('*/{missed[0].split()[0]}', 'whole')",
            stacklevel=4,
        )
    if unused := part.rules.unused(leaves):
        warnings.warn(
            f"tensor: rules without effect: {'; '.join(unused)}; take them out or correct them (print(layout) shows "
            "every path)",
            stacklevel=4,
        )


def _place_opt_state(opt_state: PyTree, params: PyTree, placements: PyTree, fill: Callable[..., Placement]) -> PyTree:
    """Placements of optimizer state, never by the class of the state.

    A leaf whose path ends with a parameter's path and that has its shape lives where that parameter's optimizer state
    lives (the longest such path wins); scalars, integers and keys stay whole; any other array is filled on its own.
    """
    known = {
        path: (x.shape, placement)
        for (path, x), placement in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(placements), strict=True
        )
    }

    def place(path: tuple[Any, ...], x: Any) -> Placement:
        for start in range(len(path) + 1):
            shape, placement = known.get(path[start:], (None, None))
            if placement is not None and shape == x.shape:
                return placement
        leaf = leaf_of(path, x)
        if leaf.is_floating and leaf.shape:
            return fill(path, x)
        return replace(whole(leaf), why="not a floating-point array" if leaf.shape else "one element")

    return map_with_path(place, opt_state)


_UNITS = ("B", "kB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """1536000 -> "1.54 MB" (decimal units)."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"


def spec_str(placement: Placement) -> str:
    """The stored spec as text: "whole", or which dimension is split over what."""
    splits = [f"dim {dim} over {' x '.join(axis_names(e))}" for dim, e in enumerate(placement.store) if e is not None]
    return ", ".join(splits) or "whole"


def _note(placement: Placement) -> str:
    padded = f"padded to {list(placement.view.padded)}" if placement.view.is_padded else ""
    if placement.view.cut:
        padded = "; ".join(filter(None, (padded, f"in pipeline order {list(placement.view.stored)}")))
    why = placement.why or ("the strategy keeps it whole" if spec_str(placement) == "whole" else "")
    return "; ".join(filter(None, (placement.rule, why, padded)))


def _explain(layout: Layout) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    rows = [("role", "array", "shape", "dtype", "spec", "bytes/device", "why")]
    for role, leaf, placement in layout.placed():
        size = human_bytes(placement.bytes_per_device(layout.mesh, leaf.dtype))
        rows.append(
            (role, leaf.path, str(list(leaf.shape)), str(leaf.dtype), spec_str(placement), size, _note(placement))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    totals = ", ".join(f"{role} {human_bytes(count)}" for role, count in layout.bytes_per_device().items())
    rows_over = " x ".join(layout.batch_axes) or "nothing"
    head = [f"mesh: {mesh}; batch rows over {rows_over}", *_stages(layout)]
    return "\n".join([*head, *lines, f"per device: {totals}"])


def _stages(layout: Layout) -> list[str]:
    """Which device of the pipeline holds which blocks, a line per device."""
    pipe = layout.pipeline
    if pipe is None:
        return []
    blocks = jax.tree.leaves(layout.shapes.params[BLOCKS])[0].shape[0]
    held: dict[int, list[str]] = {}
    for device, _, run in pipe.holders(blocks, layout.mesh):
        held.setdefault(device, []).append(_run_str(run))
    each = pipe.per_stage(blocks, layout.mesh)
    odd = pipe.stages(layout.mesh) * each - blocks
    padding = f", the last ones padded with {odd} identities" if odd else ""
    lines = [f"pipeline: {blocks} blocks in {pipe.stages(layout.mesh)} stages of {each}{padding}"]
    return lines + [f"  {pipe.axis}={device}: blocks {', '.join(runs)}" for device, runs in held.items()]


def _run_str(run: range) -> str:
    if not run:
        return "none"
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
