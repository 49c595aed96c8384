"""Tensor parallelism in a user's own `shard_map` loop: sum partial gradients, and count every parameter once in norms.

A tensor axis splits some parameters; the others are replicated over it. If a replicated parameter is used on split
activations, such as the scale of a layer norm between sequence-parallel layers, every device computes only the part of
the gradient from its own activations: the gradient is *partial*, and the full gradient is the sum over the devices.
"""

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
from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.placement import axes_of, spec_entry
from jaxshard.core.transform import as_transform, check_transform
from jaxshard.core.tree import abstract, map_with_path, path_str, paths, raise_all, same_structure
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.parts import Parts, specs_of_state, split_of, types_are_checked
from jaxshard.optim.proof.elementwise import require_elementwise
from jaxshard.optim.zero import OnParts


def tensor(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    specs: PyTree,
    *,
    partial: PyTree | Callable[[str], bool] | None = None,
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer for parameters that a tensor axis splits or replicates, inside `shard_map`.

    Pass `update` each device's gradient of its share of the loss (the loss is the sum of the shares over the axis),
    with the shapes of the device's own parameters:

      - A parameter whose spec has the axis is split. Its gradient is this device's own, and used unchanged.
      - A parameter whose spec lacks the axis is replicated. If the loss uses it on activations that are split over the
        axis (a layer norm between sequence-parallel layers, a bias after a reduce-scatter; Korthikanti et al. 2022,
        "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2), its gradient is partial, and
        summed here by one all-reduce. Otherwise every device has the same full gradient, which is used unchanged.

    `js.optim.clip_by_global_norm(max_norm, axis_name)` inside `tx` counts split parameters over all shards and
    replicated parameters once (wrappers in between must pass extra arguments on, as optax's wrappers do). The state is
    the state of `tx` for this device's parameters; `tensor_state_specs` returns its specs.

    Args:
      tx: An elementwise transform, or an elementwise transform in `js.optim.zero1`, `zero2` or `fsdp` over a data axis.
      axis_name: The tensor axis, or a tuple of axes.
      specs: A tree of `PartitionSpec` like the parameters: their `in_specs` in `shard_map`. [1024, 4096] with
        the spec P(None, "tensor") is [1024, 512] on each of 8 devices.
      partial: The replicated parameters whose gradients are partial: a function from the path ("blocks/norm/scale") to
        True or False, or a tree of booleans like the parameters. Leave it out under `check_vma=True`, where the types
        of partial gradients vary over the axis. It is required under `check_vma=False`, where types do not show it;
        pass `lambda path: False` if no gradient is partial.
      extra_args: The extra arguments that `tx.update` requires, for the check of `init`; see `check_elementwise`.

    Raises (from init and update):
      ValueError: The axis is not bound; `tx` is not elementwise (from init); `specs` have other leaves than the
        parameters; a gradient that `partial` names although its type says that it is already summed; a gradient of a
        split parameter whose type does not vary over the axis; no `partial` under `check_vma=False`.

    Example:
        # ZeRO over a data axis goes inside `tensor`. The clipping inside ZeRO has the data axis.
        clip = js.optim.clip_by_global_norm(1.0, "data")
        zero = js.optim.zero2(optax.chain(clip, optax.adamw(3e-4)), "data")
        tx = js.optim.tensor(zero, "tensor", specs)
        states = js.optim.tensor_state_specs(tx, params, specs, mesh, zero_axis="data")
    """
    axes = axis_names(axis_name)
    tx = as_transform(tx)
    known = {path_str(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)}
    split = {path: tuple(axis for axis in axes if axis in axes_of(spec)) for path, spec in known.items()}

    def init_fn(params: PyTree) -> Any:
        Parts.bound(axes, "tensor")
        _check_tree(split, params)
        if not isinstance(tx, OnParts):
            sizes = {axis: lax.axis_size(axis) for axis in axes}
            whole = map_with_path(
                lambda path, x: _resize(x, known[path_str(path)], lambda size, parts: size * parts, sizes), params
            )
            require_elementwise(tx, params, axis_name=axes, extra_args=extra_args, views=whole)
        return tx.init(params)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> Any:
        Parts.bound(axes, "tensor")
        _check_tree(split, updates)
        missing = _find_missing_sums(updates, split, axes, _read_partial(partial, updates))
        grads = map_with_path(lambda path, g: all_sum(g, missing[path_str(path)]), updates)
        # `split_axes` tells a `clip_by_global_norm` inside `tx` over which axes each array is split. An outer `tensor`
        # may have passed one already, which is extended.
        outer = extra.pop("split_axes", lambda path, names: names)

        def split_axes(path: str, names: tuple[str, ...]) -> tuple[str, ...]:
            rest = tuple(name for name in outer(path, names) if name not in axes)
            return (*rest, *split[path])

        return tx.update(grads, state, params, split_axes=split_axes, **extra)

    return OnParts(init_fn, update_fn)


def tensor_state_specs(
    tx: optax.GradientTransformation, params: PyTree, specs: PyTree, mesh: Mesh, *, zero_axis: AxisName | None = None
) -> PyTree:
    """Return the `PartitionSpec` of every array of the state of `tx = js.optim.tensor(...)`.

    Use these specs as `in_specs` and `out_specs` of the `shard_map` around the loop. A state array is split like a
    parameter if its path ends with the parameter's path, and if it has the shape of the parameter on one device, or of
    a part of it with `zero_axis`; all other arrays are replicated.

    Args:
      tx: The transform that `js.optim.tensor` returned.
      params: The full parameters, which may be abstract.
      specs: The specs passed to `js.optim.tensor`.
      mesh: The mesh with all axes.
      zero_axis: The axis, or a tuple of axes, of a ZeRO transform inside. ZeRO splits a device's arrays further, so one
        dimension may be split over both axes, over the tensor axis first.

    Example:
        # w: [1024, 4096] with the spec P(None, "tensor") on data=2, tensor=4: moments of P("data", "tensor"),
        # [512, 1024] on each device.
        states = js.optim.tensor_state_specs(tx, params, specs, mesh, zero_axis="data")
    """
    check_transform(tx)
    zero = axis_names(zero_axis)
    count = axis_size(mesh, zero)
    sizes = dict(mesh.shape)
    local = jax.tree.map(
        lambda x, spec: _resize(x, spec, lambda size, parts: size // parts, sizes), abstract(params), specs
    )

    def add_zero(x: Any, spec: PartitionSpec) -> PartitionSpec:
        split = split_of(x.shape, count) if zero else None
        if split is None:
            return spec
        entries = [*spec, *[None] * (len(x.shape) - len(spec))]
        entries[split.dim] = spec_entry((*axis_names(entries[split.dim]), *zero))
        return PartitionSpec(*entries)

    split_further = jax.tree.leaves(jax.tree.map(add_zero, local, specs), is_leaf=_is_spec)
    return specs_of_state(tx, local, split_further, sizes, count)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _resize(
    x: Any, spec: PartitionSpec, resize: Callable[[int, int], int], sizes: Mapping[str, int]
) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of `x` with the size of each dimension replaced by `resize(size, parts)`.

    `parts` is the number of parts into which `spec` splits the dimension; `sizes` has the size of each mesh axis.
    """
    shape = list(x.shape)
    for dim, entry in enumerate(spec):
        shape[dim] = resize(shape[dim], math.prod(sizes.get(axis, 1) for axis in axis_names(entry)))
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _read_partial(partial: PyTree | Callable[[str], bool] | None, tree: PyTree) -> dict[str, bool] | None:
    """Convert the user's argument `partial` to {path of a parameter: True if its gradient is partial}; None stays None.

    A gradient is partial if the full gradient is the sum over the devices of the tensor axis.
    """
    if partial is None or callable(partial):
        return None if partial is None else {path: bool(partial(path)) for path in paths(tree)}
    if not same_structure(partial, tree):
        raise ValueError(
            "tensor: partial must be a function of the path or a tree of booleans like the parameters, "
            f"{jax.tree.structure(tree)}, got {jax.tree.structure(partial)}"
        )
    return dict(zip(paths(tree), map(bool, jax.tree.leaves(partial)), strict=True))


AxesByPath = dict[str, tuple[str, ...]]
"""{path of a parameter: mesh axes}."""


def _find_missing_sums(
    grads: PyTree, split: AxesByPath, axes: tuple[str, ...], named: dict[str, bool] | None
) -> AxesByPath:
    """Return the mesh axes over which each gradient must still be summed: {path: axes}.

    Raise ValueError if JAX's types contradict the user's `partial`.

    With checked types (`check_vma=True`), a gradient is treated as follows over each axis that does not split its
    parameter:

        the gradient's type   partial is True          partial is False                   no `partial`
        varies                summed                   refused: the devices' copies of    summed
                                                       the parameter would drift apart
        does not vary         refused: summed twice    used unchanged                     used unchanged

    Args:
      grads: the gradients.
      split: {path of a parameter: the axes that split it}.
      axes: the tensor axes.
      named: {path of a parameter: True if the user says that its gradient is partial}; None if the user does not say.
    """
    checked = types_are_checked(axes)
    if named is None and not checked:
        raise ValueError(
            "tensor: under check_vma=False types do not say which gradients of whole parameters are partial, that is, "
            "of parameters used on activations split over the axis; name them with partial=lambda path: ..., or none "
            "with partial=lambda path: False"
        )
    whole = {path: tuple(axis for axis in axes if axis not in own) for path, own in split.items()}
    raise_all(
        (f"{path}: split over {', '.join(split[path])}" for path in split if named and named[path] and not whole[path]),
        ValueError,
        "tensor: only whole parameters can be partial; every device has the gradient of its own part of these, take "
        "them out of partial",
    )
    if not checked:
        assert named is not None
        return {path: others if named[path] else () for path, others in whole.items()}
    varying = {path: varying_axes(g) for path, g in zip(paths(grads), jax.tree.leaves(grads), strict=True)}
    raise_all(
        (f"{path}: does not vary over {own}" for path, own in split.items() if set(own) - varying[path]),
        ValueError,
        "tensor: by their specs these parameters are split, but their gradients are the same on all devices; pass the "
        "specs with which the parameters enter shard_map",
    )
    missing = {path: tuple(axis for axis in others if axis in varying[path]) for path, others in whole.items()}
    raise_all(
        (f"{path}: does not vary over {whole[path]}" for path in whole if named and named[path] and not missing[path]),
        ValueError,
        "tensor: these gradients are named partial but already summed over the axis: with check_vma=True jax.grad with "
        "respect to a replicated parameter sums over the devices, and another sum would make them too large. Leave "
        "partial out: types say what is partial",
    )
    raise_all(
        (f"{path}: varies over {found}" for path, found in missing.items() if found and named and not named[path]),
        ValueError,
        "tensor: these gradients are not named partial, but each device has another one, and the parameters would "
        "drift apart. Leave partial out: types say what is partial",
    )
    return missing


def _check_tree(split: AxesByPath, tree: PyTree) -> None:
    found = paths(tree)
    problems = [f"{path}: no spec" for path in found if path not in split]
    problems += [f"{path}: a spec without a parameter" for path in split if path not in set(found)]
    raise_all(problems, ValueError, "tensor: specs must be a tree of PartitionSpec like the parameters")
