"""ZeRO for a user's own `shard_map` loop: `zero1`, `zero2` and `fsdp` as ordinary optax transforms.

An array is split over the axis along one dimension (`split_of`): the one where padding costs least, the largest of
equals, so the largest that divides if any does. Otherwise it is padded with zeros at the end; it is never left whole.
Scalars are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core.collectives import all_sum, gather, scatter_sum
from jaxshard.core.compat import varying_axes
from jaxshard.core.mesh import axis_names
from jaxshard.core.tree import abstract, map_with_path, path_str, raise_all
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.proof.elementwise import require_elementwise
from jaxshard.optim.proof.trace import param_at_end

Reduce = Literal["mean", "sum"]


class OnParts(optax.GradientTransformationExtraArgs):
    """A transform for `shard_map` that checks by itself what it runs on this device's parts."""


class Split(NamedTuple):
    """The dimension along which an array is split, its size, and its size on one device."""

    dim: int
    size: int
    local: int


def split_of(shape: tuple[int, ...], parts: int) -> Split | None:
    """How an array of this shape is split into parts of equal size; None for scalars and arrays without elements."""
    if not math.prod(shape) or not shape:
        return None

    def local(size: int) -> int:
        # A part of a single element gets two places, so that no part has the shape of its whole array: `fsdp` tells
        # them apart by shape.
        return 2 if size == 1 and parts > 1 else -(-size // parts)

    dim = min(range(len(shape)), key=lambda d: (local(shape[d]) * parts / shape[d], -shape[d]))
    return Split(dim, shape[dim], local(shape[dim]))


def shard_shape(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The shape of one device's part."""
    split = split_of(shape, parts)
    return shape if split is None else (*shape[: split.dim], split.local, *shape[split.dim + 1 :])


def param_specs(params: PyTree, axis_name: AxisName, axis_size: int) -> PyTree:
    """The `PartitionSpec` of every parameter as `shard_params` returns it: `in_specs` and `out_specs` of `fsdp` loops.

    `params` are whole, and may be abstract; `axis_size` is the number of devices along the axis (or tuple of axes).
    """
    return jax.tree.map(lambda x: _spec(x.shape, axis_names(axis_name), axis_size), params)


def state_specs(tx: optax.GradientTransformation, params: PyTree, axis_name: AxisName, axis_size: int) -> PyTree:
    """The `PartitionSpec` of every array of the optimizer state, for `in_specs` and `out_specs`.

    `tx` is the wrapped transform, or the one inside; `params` are whole, and may be abstract. An array whose path
    ends with a parameter's path and that has its shape (or that of a part) is split as the parameter is; all others
    are the same on all devices.
    """
    names = axis_names(axis_name)
    params = abstract(params)
    known = jax.tree_util.tree_leaves_with_path(params)
    # Any sizes with the right product do: only the number of parts matters.
    env = list(zip(names, (axis_size, *[1] * (len(names) - 1)), strict=True))
    _, state = jax.make_jaxpr(tx.init, axis_env=env, return_shape=True)(params)

    def spec(path: Any, x: Any) -> PartitionSpec:
        index = param_at_end(path, [p for p, _ in known])
        whole = () if index is None else known[index][1].shape
        return _spec(whole, names, axis_size) if x.shape in (whole, shard_shape(whole, axis_size)) else PartitionSpec()

    return map_with_path(spec, state)


def shard_params(params: PyTree, axis_name: AxisName = "data") -> PyTree:
    """This device's part of every whole parameter, inside `shard_map`; zeros where it is padded. No collectives."""
    names = axis_names(axis_name)
    parts = axis_parts(names, "shard_params")
    return jax.tree.map(lambda x: _part(x, names, parts), params)


def gather_params(shards: PyTree, like: PyTree, axis_name: AxisName = "data") -> PyTree:
    """The whole parameters of which `shards` are this device's parts, inside `shard_map`, padding removed.

    `like` has the whole shapes (arrays or ShapeDtypeStructs). One all-gather per array. Under `jax.grad` it becomes
    one reduce-scatter: the gradient with respect to the shards is the sum over the devices of each device's gradient.
    Call it in the loss, just before use.

    Raises:
      ValueError: a shard whose shape is not that of a part of its array.
    """
    names = axis_names(axis_name)
    parts = axis_parts(names, "gather_params")
    raise_all(
        (
            f"{path_str(path)}: {list(x.shape)}, expected {list(part)} of {list(whole.shape)}"
            for (path, x), whole in zip(jax.tree_util.tree_leaves_with_path(shards), jax.tree.leaves(like), strict=True)
            if x.shape != (part := shard_shape(whole.shape, parts))
        ),
        ValueError,
        "gather_params: these shards are not parts of the arrays; make them with shard_params",
    )

    def one(x: jax.Array, whole: Any) -> jax.Array:
        split = split_of(whole.shape, parts)
        if split is None:
            return x
        return lax.slice_in_dim(gather(x, _spec(whole.shape, names, parts)), 0, split.size, axis=split.dim)

    return jax.tree.map(one, shards, like)


def zero1(
    tx: optax.GradientTransformation,
    axis_name: AxisName = "data",
    *,
    reduce: Reduce = "mean",
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """ZeRO stage 1 inside `shard_map`: parameters and gradients whole, optimizer state split.

    Rajbhandari et al. 2020, section 5.1.

    Updates enter as each device's own gradient of its local mean, whole, and leave averaged, whole and equal on all
    devices. Per array: one all-reduce of the gradient, `tx` on this device's part, one all-gather of the update. See
    `zero2` for all the rest.
    """
    names = axis_names(axis_name)

    def to_part(grad: jax.Array, parts: int) -> jax.Array:
        return _part(all_sum(grad, names), names, parts)

    return _on_parts("zero1", tx, names, reduce, extra_args, to_part)


def zero2(
    tx: optax.GradientTransformation,
    axis_name: AxisName = "data",
    *,
    reduce: Reduce = "mean",
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """ZeRO stage 2 inside `shard_map`: parameters whole, gradients and optimizer state split.

    Rajbhandari et al. 2020, section 5.2.

    Updates enter as each device's own gradient of its local mean, whole, and leave averaged, whole and equal on all
    devices. Per array: one reduce-scatter of the gradient, `tx` on this device's part, one all-gather of the update;
    scalars are all-reduced. Both `init` and `update` belong inside `shard_map` over the axis (or tuple of axes), with
    or without `check_vma`; the state is that of `tx` on the parts, its specs are `state_specs(tx, params, axis_name,
    axis_size)`.

    Arguments:
      reduce: "mean" over the axis, or "sum" for a loss that is already this device's share of the global mean.
      extra_args: the extra arguments that `tx.update` requires, for the check of `init`; see `check_elementwise`.

    Raises:
      ValueError: the axis is not bound; `tx` is not elementwise (from init); a gradient that is already summed, as
        `jax.grad` with respect to a replicated parameter gives under `check_vma=True`; a gradient whose shape is not
        its parameter's.
    """
    names = axis_names(axis_name)

    def to_part(grad: jax.Array, parts: int) -> jax.Array:
        return scatter_sum(_padded(grad, parts), _spec(grad.shape, names, parts), names)

    return _on_parts("zero2", tx, names, reduce, extra_args, to_part)


def fsdp(
    tx: optax.GradientTransformation,
    axis_name: AxisName = "data",
    *,
    reduce: Reduce = "mean",
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """ZeRO stage 3 inside `shard_map`: parameters, gradients and optimizer state split.

    Rajbhandari et al. 2020, section 5.3.

    `init` and `update` take and return this device's parts (`shard_params`, specs from `param_specs` and
    `state_specs`); the loss gathers them with `gather_params`. `update` needs `params`. Gradients of the local mean
    may enter as

      - parts, from `jax.grad` with respect to the parts: `gather_params` has then summed them over the axis;
      - whole arrays, from `jax.grad` with respect to the gathered parameters: one reduce-scatter per array.

    Which of both is told from the shapes, per array. Either way they are averaged here (or not, `reduce="sum"`: for a
    loss that is already a share of the global mean). Scalars are whole and all-reduced, unless their type says that
    they are summed. No other collectives. Arguments and errors as for `zero2`; a gradient of any other shape is a
    ValueError.
    """
    names = axis_names(axis_name)
    scale = _scale("fsdp", reduce)
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        parts = axis_parts(names, "fsdp")
        # The whole shapes are not known here: they lie between those of the parts and this.
        largest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(d * parts for d in x.shape), x.dtype), params)
        require_elementwise(tx, params, axis_name=names, extra_args=extra_args, views=largest)
        return tx.init(params)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError(
                "fsdp: update needs this device's parts of the parameters; call tx.update(grads, state, params)"
            )
        parts = axis_parts(names, "fsdp")
        checked = is_checked(names)
        _check_shapes("fsdp", updates, params, lambda g, p: g == p or shard_shape(g, parts) == p)
        whole = jax.tree.map(lambda g, p: g if g.shape != p.shape else None, updates, params)
        _check_not_summed("fsdp", whole, names)

        def to_part(grad: jax.Array, param: jax.Array) -> jax.Array:
            if grad.shape != param.shape:
                return scatter_sum(_padded(grad, parts), _spec(grad.shape, names, parts), names)
            if grad.shape:
                return grad
            # Where types are known, an axis over which a scalar's gradient does not vary has been summed over.
            return all_sum(grad, [name for name in names if not checked or name in varying_axes(grad)])

        shards = jax.tree.map(lambda g, p: scale(to_part(g, p), parts), updates, params)
        return tx.update(shards, state, params, **extra)

    return OnParts(init_fn, update_fn)


def _on_parts(
    who: str,
    tx: optax.GradientTransformation,
    names: tuple[str, ...],
    reduce: Reduce,
    extra_args: Mapping[str, Any] | None,
    to_part: Callable[[jax.Array, int], jax.Array],
) -> optax.GradientTransformationExtraArgs:
    """The transform that runs `tx` on this device's parts of gradients and parameters, and gathers the updates."""
    scale = _scale(who, reduce)
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        parts = axis_parts(names, who)
        views = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shard_shape(x.shape, parts), x.dtype), params)
        require_elementwise(tx, params, axis_name=names, extra_args=extra_args, views=views)
        return tx.init(jax.tree.map(lambda x: _part(x, names, parts), params))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        parts = axis_parts(names, who)
        if params is not None:
            _check_shapes(who, updates, params, lambda g, p: g == p)
        _check_not_summed(who, updates, names)
        grads = jax.tree.map(lambda g: scale(to_part(g, parts), parts), updates)
        own = None if params is None else jax.tree.map(lambda x: _part(x, names, parts), params)
        steps, state = tx.update(grads, state, own, **extra)
        return jax.tree.map(lambda step, g: _whole(step, g.shape, names, parts), steps, updates), state

    return OnParts(init_fn, update_fn)


def _scale(who: str, reduce: Reduce) -> Callable[[jax.Array, int], jax.Array]:
    if reduce not in ("mean", "sum"):
        raise ValueError(f'{who}: reduce must be "mean" or "sum", got {reduce!r}')
    return (lambda total, parts: total / parts) if reduce == "mean" else (lambda total, parts: total)


def axis_parts(names: tuple[str, ...], who: str) -> int:
    """The number of devices along the axes."""
    try:
        return math.prod(lax.axis_size(name) for name in names)
    except NameError as error:
        raise ValueError(
            f"{who}: {error} Call init and update inside jax.shard_map over the axis, with the optimizer state's specs "
            "from js.optim.state_specs(tx, params, axis_name, axis_size)"
        ) from error


def _spec(shape: tuple[int, ...], names: tuple[str, ...], parts: int) -> PartitionSpec:
    split = split_of(shape, parts)
    entry = names[0] if len(names) == 1 else names
    return PartitionSpec() if split is None else PartitionSpec(*[None] * split.dim, entry)


def _padded(x: jax.Array, parts: int) -> jax.Array:
    split = split_of(x.shape, parts)
    if split is None or split.local * parts == split.size:
        return x
    config = [(0, split.local * parts - split.size if dim == split.dim else 0, 0) for dim in range(x.ndim)]
    return lax.pad(x, x.dtype.type(0), config)


def _part(x: jax.Array, names: tuple[str, ...], parts: int) -> jax.Array:
    split = split_of(x.shape, parts)
    if split is None:
        return x
    return lax.dynamic_slice_in_dim(_padded(x, parts), lax.axis_index(names) * split.local, split.local, split.dim)


def _whole(x: jax.Array, shape: tuple[int, ...], names: tuple[str, ...], parts: int) -> jax.Array:
    """All parts together, of a type that does not vary over the axes, so that parameters stay replicated."""
    split = split_of(shape, parts)
    if split is None:
        return x
    for name in reversed(names):
        x = lax.all_gather(x, name, axis=split.dim, tiled=True, to="invarying")
    return lax.slice_in_dim(x, 0, split.size, axis=split.dim)


def is_checked(names: tuple[str, ...]) -> bool:
    """Whether types say over which axes a value varies; under check_vma=False not even the index of the axis does."""
    return all(name in varying_axes(lax.axis_index(name)) for name in names)


def _check_not_summed(who: str, grads: PyTree, names: tuple[str, ...]) -> None:
    if not is_checked(names):
        return
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    found = [(path_str(path), sorted(set(names) - varying_axes(g))) for path, g in leaves]
    raise_all(
        (f"{path}: does not vary over {', '.join(map(repr, missing))}" for path, missing in found if missing),
        ValueError,
        f"{who}: these gradients are already summed over the axis: with check_vma=True jax.grad with respect to a "
        "replicated parameter sums over the devices, and another sum would make them too large. Take the gradient with "
        f'respect to jax.lax.pcast(params, {names[0] if len(names) == 1 else names!r}, to="varying")',
    )


def _check_shapes(who: str, grads: PyTree, params: PyTree, fits: Callable[[Any, Any], bool]) -> None:
    def problem(path: Any, g: Any, p: Any) -> str | None:
        return (
            None if fits(g.shape, p.shape) else f"{path_str(path)}: gradient {list(g.shape)}, parameter {list(p.shape)}"
        )

    raise_all(
        jax.tree.leaves(map_with_path(problem, grads, params)),
        ValueError,
        f"{who}: these gradients do not fit their parameters; pass the gradients of the same tree, whole"
        + (", or this device's parts as gather_params gives them" if who == "fsdp" else ""),
    )
