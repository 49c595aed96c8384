"""`js.transfer` and `js.plan_transfer`: a run or its parameters from one layout to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.core.keys import keys_of, words_of
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.mesh import check_is_here, mesh_str
from jaxshard.core.offload import HOST
from jaxshard.core.placement import Placement, View
from jaxshard.core.settings import no_mesh, own_settings
from jaxshard.core.tree import check_same_tree, path_str
from jaxshard.core.types import PyTree
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import run_facts
from jaxshard.reshard.blocks import Side
from jaxshard.reshard.plan import Move, TransferPlan
from jaxshard.reshard.programs import is_here, move, union_mesh
from jaxshard.training.convert import convert_optimizer
from jaxshard.training.state import (
    TrainState,
    check_arrays_not_donated,
    check_run,
    check_stored,
    run_arrays,
    run_shapes,
)


def plan_transfer(source_layout: Layout, target_layout: Layout) -> TransferPlan:
    """Compute the bytes and the peak memory of moving a run from one layout to another; nothing is moved or compiled.

    Args:
      source_layout: the layout of the run.
      target_layout: the layout to store it in, made from the same model. Without an optimizer
        (`js.layout(strategy, mesh, init_fn)`) the optimizer's state is left out.

    Returns:
      The plan. `print(plan)` shows the totals; `plan.bytes` is what all devices receive from others, the least that is
      possible; `plan.sent`, `plan.received` and `plan.peak` are the bytes of each device.

    Raises:
      ValueError: the layouts are of different models; the message names every array that differs. Or their devices are
        not of one world: simulated, planned or of another platform.

    Example:
        mesh = js.make_mesh(jax.devices()[:4], data=4)
        sampler = js.layout(js.tensor(), js.make_mesh(jax.devices()[4:], tensor=4), init_fn)
        print(js.plan_transfer(js.layout(js.fsdp(), mesh, init_fn, tx), sampler))
    """
    _check_layouts("js.plan_transfer(source_layout, target_layout)", source_layout, target_layout)
    source, target, shapes = _run_places(source_layout.without_owners, target_layout.without_owners)
    return TransferPlan(_moves(shapes, source, target, source_layout.mesh, target_layout.mesh))


def transfer(run_or_params: PyTree, source_layout: Layout, target_layout: Layout) -> Any:
    """Move a run or its parameters from one layout to another, bit for bit, also to other devices and processes.

    Every process that has devices of either layout calls this. Each device receives every byte that it lacks once, from
    one of the devices that have it, in pieces: the peak of a device is its shards of both layouts and the largest block
    (see `js.plan_transfer`). Nothing is gathered, neither on a device nor on a host. The optimizer state of owners of
    matrices is converted to the same layout without owners, and back, by an all-to-all on each side.

    Collectives: permutes over the devices of both layouts. A second transfer between the same layouts compiles nothing.

    Args:
      run_or_params: a run, or a tree of parameters like `run.params`, as `source_layout` stores them. They are not
        donated, and share no memory with the result. In a process without devices of the source: None for a run, and
        `source_layout.shapes.params` for parameters.
      source_layout: the layout of the run.
      target_layout: the layout to store it in, made from the same model: other strategies, a mesh of other devices. If
        it was made without an optimizer, the run's optimizer state is left out.

    Returns:
      The run or the parameters, as `target_layout` stores them. In a process without devices of the target the arrays
      have no shards.

    Raises:
      ValueError: the run is not of `source_layout`, was donated or has residuals of gradients; see also
        `js.plan_transfer`.
      js.distributed.Disagreement: in several processes, if they differ in versions, flags or layouts.

    Example:
        sampler = js.layout(js.tensor(), js.make_mesh(jax.devices()[:4], tensor=4), model.init)
        params = js.transfer(run.params, layout, sampler)
        tokens = js.generate(model, params, sampler, [[1, 5, 9]], length=8)
    """
    _check_layouts("js.transfer(run, source_layout, target_layout)", source_layout, target_layout)
    is_run = run_or_params is None or isinstance(run_or_params, TrainState)
    here = is_here(source_layout.mesh)
    if here:
        (_check_run if is_run else _check_params)(source_layout, run_or_params)
    plain, target = source_layout.without_owners, target_layout.without_owners
    before, after, shapes = _run_places(plain, target)
    expected = run_shapes(target_layout)
    if not is_run:
        before, after, shapes, expected = before.params, after.params, shapes.params, expected.params
    with own_settings(target.mesh):
        arrays = run_or_params if here else shapes
        if here and is_run and target.shapes.opt_state is None:
            arrays = arrays._replace(opt_state=None)
        elif here and is_run:
            arrays = convert_optimizer(arrays, source_layout, plain)
        moved = _move_tree(arrays, shapes, before, after, plain, target)
        if not is_here(target.mesh):
            return jax.tree.map(_without_shards, expected)
        return convert_optimizer(moved, target, target_layout) if is_run else moved


def _move_tree(tree: PyTree, shapes: PyTree, before: PyTree, after: PyTree, source: Layout, target: Layout) -> PyTree:
    """Move a tree of stored arrays.

    Args:
      tree: the stored arrays; anything with as many leaves in a process without devices of the source.
      shapes: their logical shapes.
      before: their placements in the layout `source`.
      after: their placements in the layout `target`.
    """
    plan = TransferPlan(_moves(shapes, before, after, source.mesh, target.mesh))
    if (peers := peers_of(union_mesh(source.mesh, target.mesh))) is not None:
        facts = ((side, run_facts(layout)) for side, layout in (("source", source), ("target", target)))
        peers.agree("js.transfer", {f"{side}: {name}": text for side, of in facts for name, text in of.items()})
    leaves, structure = jax.tree.flatten(shapes)
    moved = move_arrays(jax.tree.leaves(tree), [x.dtype for x in leaves], plan)
    return jax.tree.unflatten(structure, moved)


def move_arrays(arrays: Sequence[Any], dtypes: Sequence[Any], plan: TransferPlan) -> list[jax.Array]:
    """Move stored arrays one after another, as planned; every process that has devices of either side calls this.

    Args:
      arrays: the stored arrays, in the order of `plan.moves`; not read in a process without devices of the source.
      dtypes: their dtypes; a key dtype for random keys, which the plan has as words.
      plan: the plan.
    """
    moved = []
    with no_mesh():
        for x, dtype, one in zip(arrays, dtypes, plan.moves, strict=True):
            if is_here(one.source.mesh):
                x = words_of(jax.device_put(x, one.source.sharding) if one.source.memory else x)
            x = move(x, one.dtype, one.source, one.target, plan.schedule(one).batches)
            if is_here(one.target.mesh):
                x = keys_of(x, dtype)
                if one.target.memory:
                    x = jax.device_put(x, one.target.sharding.with_memory_kind(one.target.memory))
            moved.append(jax.block_until_ready(x))
    return moved


def transfer_array(x: jax.Array, view: View, placement: Placement, mesh: Mesh) -> jax.Array:
    """Move one array from the mesh that it is on to a placement on another mesh.

    Every process that has devices of either mesh calls this.

    Args:
      x: a stored array with a `NamedSharding`.
      view: its stored shape.
      placement: the placement of the result.
      mesh: the mesh of the result.
    """
    before, shape = x.sharding, jax.ShapeDtypeStruct(view.logical, x.dtype)
    assert isinstance(before, NamedSharding)
    assert isinstance(before.mesh, Mesh)
    spec = PartitionSpec(*before.spec, *(None,) * (x.ndim - len(before.spec)))
    memory = before.memory_kind if before.memory_kind == HOST else ""
    source = make_side(Placement(view, spec, spec, memory=memory), before.mesh, shape)
    dtype = jnp.dtype(words_of(shape).dtype)
    plan = TransferPlan([Move("", dtype, source, make_side(placement, mesh, shape))])
    return move_arrays([x], [x.dtype], plan)[0]


def make_side(placement: Placement, mesh: Mesh, shape: Any) -> Side:
    """Return how an array is stored; of random keys, how their words are.

    Args:
      placement: the placement of the array.
      mesh: the mesh.
      shape: its logical shape and dtype.
    """
    words, view = words_of(jax.ShapeDtypeStruct(shape.shape, shape.dtype)).shape[len(shape.shape) :], placement.view
    view = View(view.logical + words, view.padded + words, view.stored + words, view.extra_dims)
    return Side(view, mesh, PartitionSpec(*placement.store, *(None,) * len(words)), placement.memory)


def _run_places(source: Layout, target: Layout) -> tuple[Any, Any, Any]:
    """Return three TrainStates: placements in the source, placements in the target, logical shapes.

    Raises:
      ValueError: the layouts are of different models or optimizers.
    """
    shapes, before = run_arrays(source)
    wanted, after = run_arrays(target)
    if target.shapes.opt_state is None:
        shapes, before = shapes._replace(opt_state=None), before._replace(opt_state=None)
    check_same_tree(
        wanted,
        shapes,
        "js.transfer: the source layout has other arrays than the target layout expects",
        "make both layouts from the same init_fn, tx and trainable=, or the target without tx, js.layout(strategy, "
        "mesh, init_fn), to leave the optimizer's state out",
    )
    return before, after, shapes


def _moves(shapes: PyTree, before: PyTree, after: PyTree, source: Mesh, target: Mesh) -> Iterable[Move]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, x), was, will in zip(leaves, jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        dtype = jnp.dtype(words_of(jax.ShapeDtypeStruct((), x.dtype)).dtype)
        yield Move(path_str(path), dtype, make_side(was, source, x), make_side(will, target, x))


def _without_shards(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)


def _check_layouts(call: str, source: Layout, target: Layout) -> None:
    for layout in (source, target):
        check_layout(call, layout)
        check_is_here(layout.mesh)
    platforms = sorted({device.platform for layout in (source, target) for device in layout.mesh.devices.flat})
    if len(platforms) > 1:
        raise ValueError(
            f"js.transfer: the layouts have devices of several platforms, {', '.join(platforms)}, which no collective "
            "connects; move the run by js.save and js.restore"
        )
    world = set(jax.devices()) if jax.default_backend() == platforms[0] else set()
    for name, layout in (("source", source), ("target", target)):
        if strange := [str(device) for device in layout.mesh.devices.flat if device not in world]:
            raise ValueError(
                f"js.transfer: {len(strange)} of {layout.mesh.size} devices of the {name} layout "
                f"({mesh_str(layout.mesh)}), such as {strange[0]}, are not among the {jax.device_count()} "
                f"{jax.default_backend()} devices of this program; make its mesh by js.make_mesh, or move the run "
                "between two programs by js.save and js.restore"
            )


def _check_run(layout: Layout, run: TrainState) -> None:
    check_run(layout, run)
    if jax.tree.leaves(run.residuals):
        raise ValueError(
            "js.transfer: the run has residuals of gradients, which belong to the devices that made them; leave them "
            "out, run._replace(residuals=()), or move the run by js.save and js.restore, which divide them anew"
        )


def _check_params(layout: Layout, params: PyTree) -> None:
    check_arrays_not_donated("the parameters", params)
    fix = "give run.params of a run of this layout, or the whole run"
    check_stored(run_shapes(layout).params, params, "the tree of parameters", fix)
