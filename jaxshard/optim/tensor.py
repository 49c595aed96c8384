"""Tensor parallelism in a user's own `shard_map` loop: gradients that are partial over an axis summed, norms right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxshard.core.collectives import all_sum
from jaxshard.core.compat import varying_axes
from jaxshard.core.mesh import axis_names
from jaxshard.core.placement import axes_of, spec_entry
from jaxshard.core.tree import abstract, map_with_path, path_str, paths, raise_all, same_structure
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.proof.elementwise import require_elementwise
from jaxshard.optim.proof.trace import param_at_end
from jaxshard.optim.sharded import OnParts, axis_parts, is_checked, shard_shape, split_of


def tensor(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    specs: PyTree,
    *,
    partial: PyTree | Callable[[str], bool] | None = None,
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`tx` inside `shard_map` over a tensor axis, where some parameters are split and the others whole.

    `specs` is a tree of `PartitionSpec` like the parameters: those with which they enter `shard_map`. Updates enter as
    each device's gradient of its share of the loss (the loss is the sum of the shares over the axis), in the shapes of
    this device's parameters:

      - a parameter whose spec has the axis is split: its gradient is this device's own, and left alone;
      - one whose spec lacks it is whole. Where the loss uses it on activations that are split over the axis (a layer
        norm between sequence-parallel layers, a bias after a reduce-scatter), each device knows a part of its gradient:
        it is *partial*, and summed here, one all-reduce per array. Otherwise every device has the same, whole gradient.

    Which are partial is known from their types under `check_vma=True`: those that vary over the axis. Under
    `check_vma=False` types say nothing, and `partial` must name them: a function of the path ("blocks/norm/scale") or a
    tree of booleans like the parameters; `partial=lambda path: False` for none.

    `js.optim.clip_by_global_norm(max_norm, axis_name)` inside `tx` counts split parameters over all shards and whole
    ones once (wrappers in between must pass extra arguments on, as optax's do). Over a data axis as well, put ZeRO
    inside, and give the clipping inside it the data axis:

        tx = js.optim.tensor(js.optim.zero2(optax.adamw(3e-4), "data"), "tensor", specs)

    The state is that of `tx` on this device's parameters; `tensor_state_specs` gives its specs.

    Arguments:
      extra_args: the extra arguments that `tx.update` requires, for the check of `init`; see `check_elementwise`.

    Raises (from init and update):
      ValueError: the axis is not bound; `tx` is not elementwise (from init); `specs` have other leaves than the
        parameters; a gradient that is already summed, as its type says, but named partial; a gradient of a split
        parameter whose type does not vary over the axis; no `partial` under `check_vma=False`.
    """
    names = axis_names(axis_name)
    tx = optax.with_extra_args_support(tx)
    known = {path_str(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)}
    split = {path: tuple(name for name in names if name in axes_of(spec)) for path, spec in known.items()}

    def init_fn(params: PyTree) -> Any:
        axis_parts(names, "tensor")
        _check_tree(split, params)
        if not isinstance(tx, OnParts):
            whole = map_with_path(lambda path, x: _grown(x, known[path_str(path)], names), params)
            require_elementwise(tx, params, axis_name=names, extra_args=extra_args, views=whole)
        return tx.init(params)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        axis_parts(names, "tensor")
        _check_tree(split, updates)
        missing = _missing_sums(updates, split, names, _named(partial, updates))
        grads = map_with_path(lambda path, g: all_sum(g, missing[path_str(path)]), updates)
        outer = extra.pop("split_axes", lambda path, axes: axes)

        def split_axes(path: str, axes: tuple[str, ...]) -> tuple[str, ...]:
            rest = tuple(axis for axis in outer(path, axes) if axis not in names)
            return (*rest, *split[path])

        return tx.update(grads, state, params, split_axes=split_axes, **extra)

    return OnParts(init_fn, update_fn)


def tensor_state_specs(
    tx: optax.GradientTransformation, params: PyTree, specs: PyTree, mesh: Mesh, *, zero_axis: AxisName | None = None
) -> PyTree:
    """The `PartitionSpec` of every array of the state of `tx = js.optim.tensor(...)`, for `in_specs` and `out_specs`.

    `params` are whole, and may be abstract; `specs` are those of `tensor`. `zero_axis` is the axis (or tuple of axes)
    of ZeRO inside: its split comes on top, so that one dimension may be split over both, tensor axes major. An array
    whose path ends with a parameter's path and that has its shape on one device is split as the parameter is; all
    others are the same on all devices.
    """
    zero = axis_names(zero_axis)
    count = math.prod(mesh.shape[name] for name in zero)
    sizes = dict(mesh.shape)
    local = jax.tree.map(lambda x, spec: _resized(x, spec, lambda d, parts: d // parts, sizes), abstract(params), specs)
    known = jax.tree_util.tree_leaves_with_path(local)
    known_specs = jax.tree.leaves(specs, is_leaf=_is_spec)
    _, state = jax.make_jaxpr(tx.init, axis_env=list(sizes.items()), return_shape=True)(local)

    def spec(path: Any, x: Any) -> PartitionSpec:
        index = param_at_end(path, [p for p, _ in known])
        if index is None:
            return PartitionSpec()
        shape = known[index][1].shape
        if x.shape not in (shape, shard_shape(shape, count)):
            return PartitionSpec()
        own, further = known_specs[index], split_of(shape, count) if zero else None
        if further is None:
            return own
        entries = [*own, *[None] * (len(shape) - len(own))]
        entries[further.dim] = spec_entry((*axis_names(entries[further.dim]), *zero))
        return PartitionSpec(*entries)

    return map_with_path(spec, state)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _grown(x: Any, spec: PartitionSpec, names: tuple[str, ...]) -> jax.ShapeDtypeStruct:
    """The shape of the whole array of which `x` is this device's part over the axes."""
    return _resized(x, spec, lambda size, parts: size * parts, {name: lax.axis_size(name) for name in names})


def _resized(
    x: Any, spec: PartitionSpec, resize: Callable[[int, int], int], sizes: Mapping[str, int]
) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    for dim, entry in enumerate(spec):
        parts = math.prod(sizes.get(name, 1) for name in axis_names(entry))
        shape[dim] = resize(shape[dim], parts)
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _named(partial: PyTree | Callable[[str], bool] | None, tree: PyTree) -> dict[str, bool] | None:
    """For every path whether the user calls it partial; None where the user says nothing."""
    if partial is None or callable(partial):
        return None if partial is None else {path: bool(partial(path)) for path in paths(tree)}
    if not same_structure(partial, tree):
        raise ValueError(
            "tensor: partial must be a function of the path or a tree of booleans like the parameters, "
            f"{jax.tree.structure(tree)}, got {jax.tree.structure(partial)}"
        )
    return dict(zip(paths(tree), map(bool, jax.tree.leaves(partial)), strict=True))


Axes = dict[str, tuple[str, ...]]
"""For every path some of the axes."""


def _missing_sums(grads: PyTree, split: Axes, names: tuple[str, ...], named: dict[str, bool] | None) -> Axes:
    """Over which axes each gradient must still be summed; errors where types and what was named contradict."""
    checked = is_checked(names)
    if named is None and not checked:
        raise ValueError(
            "tensor: under check_vma=False types do not say which gradients of whole parameters are partial, that is, "
            "of parameters used on activations split over the axis; name them with partial=lambda path: ..., or none "
            "with partial=lambda path: False"
        )
    whole = {path: tuple(name for name in names if name not in axes) for path, axes in split.items()}
    raise_all(
        (f"{path}: split over {', '.join(split[path])}" for path in split if named and named[path] and not whole[path]),
        ValueError,
        "tensor: only whole parameters can be partial; every device has the gradient of its own part of these, take "
        "them out of partial",
    )
    if not checked:
        assert named is not None
        return {path: axes if named[path] else () for path, axes in whole.items()}
    varying = {path: varying_axes(g) for path, g in zip(paths(grads), jax.tree.leaves(grads), strict=True)}
    raise_all(
        (f"{path}: does not vary over {axes}" for path, axes in split.items() if set(axes) - varying[path]),
        ValueError,
        "tensor: by their specs these parameters are split, but their gradients are the same on all devices; pass the "
        "specs with which the parameters enter shard_map",
    )
    missing = {path: tuple(axis for axis in axes if axis in varying[path]) for path, axes in whole.items()}
    raise_all(
        (f"{path}: does not vary over {whole[path]}" for path in whole if named and named[path] and not missing[path]),
        ValueError,
        "tensor: these gradients are named partial but already summed over the axis: with check_vma=True jax.grad with "
        "respect to a replicated parameter sums over the devices, and another sum would make them too large. Leave "
        "partial out: types say what is partial",
    )
    raise_all(
        (f"{path}: varies over {axes}" for path, axes in missing.items() if axes and named and not named[path]),
        ValueError,
        "tensor: these gradients are not named partial, but each device has another one, and the parameters would "
        "drift apart. Leave partial out: types say what is partial",
    )
    return missing


def _check_tree(split: Axes, tree: PyTree) -> None:
    found = paths(tree)
    problems = [f"{path}: no spec" for path in found if path not in split]
    problems += [f"{path}: a spec without a parameter" for path in split if path not in set(found)]
    raise_all(problems, ValueError, "tensor: specs must be a tree of PartitionSpec like the parameters")
