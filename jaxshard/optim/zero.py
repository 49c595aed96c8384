"""ZeRO for a user's own `shard_map` loop: `zero1`, `zero2` and `fsdp` as ordinary optax transforms.

    stage    parameters   reduced gradients   optimizer state   collectives per array and step
    zero1    replicated   replicated          split             all-reduce of gradient, all-gather of update
    zero2    replicated   split               split             reduce-scatter of gradient, all-gather of update
    fsdp     split        split               split             all-gather of parameter, reduce-scatter of gradient

`parts.py` says how arrays are split. The wrapped transform sees only this device's parts, so it must be elementwise,
which `init` proves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax

from jaxshard.core.collectives import all_sum, scatter_sum
from jaxshard.core.compat import varying_axes
from jaxshard.core.transform import as_transform
from jaxshard.core.tree import map_with_path, path_str, raise_all
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.parts import Parts, shard_shape, types_are_checked
from jaxshard.optim.proof.elementwise import require_elementwise

Reduce = Literal["mean", "sum"]
"""The combination of the devices' gradients."""


class OnParts(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types, so this is Any
    """An optax transform that splits arrays over devices and proves in `init` that the transform inside is elementwise.

    `js.optim.tensor` recognises this class, and does not repeat the proof.
    """


def zero1(
    tx: optax.GradientTransformation,
    axis_name: AxisName = "data",
    *,
    reduce: Reduce = "mean",
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Split the optimizer state over an axis, inside `shard_map`; parameters are replicated.

    ZeRO stage 1 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    section 5.1). Pass `update` each device's own gradient, of the mean loss over its rows, for the full parameters. The
    gradients are averaged over the axis by an all-reduce, and the returned updates are equal on all devices.

    Per array: one all-reduce of the gradient, `tx` on this device's part, one all-gather of the update. Each of n
    devices sends 3 (n - 1) / n times the array's bytes, 1.5 times as much as with `zero2`, whose updates are the same.

    Args:
      tx: An elementwise transform.
      axis_name: The mesh axis, or a tuple of axes, over which the batch and the state are split.
      reduce: See `zero2`.
      extra_args: See `zero2`.

    Returns:
      A transform whose `init` and `update` must be called inside `shard_map`. State and errors are as for `zero2`.

    Example:
        tx = js.optim.zero1(optax.adamw(3e-4), "data")
        states = js.optim.state_specs(tx, params, "data", mesh.shape["data"])
    """

    def to_part(grad: jax.Array, parts: Parts) -> jax.Array:
        return parts.take(all_sum(grad, parts.axes))

    return _on_parts("zero1", tx, axis_name, reduce, extra_args, to_part)


def zero2(
    tx: optax.GradientTransformation,
    axis_name: AxisName = "data",
    *,
    reduce: Reduce = "mean",
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Split reduced gradients and optimizer state over an axis, inside `shard_map`; parameters are replicated.

    ZeRO stage 2 (Rajbhandari et al. 2020, section 5.2). Pass `update` each device's own gradient, of the mean loss over
    its rows, for the full parameters. The gradients are averaged over the axis by a reduce-scatter, and the returned
    updates are equal on all devices.

    Per array: one reduce-scatter of the gradient, `tx` on this device's part, one all-gather of the update; scalars are
    all-reduced. Each of n devices sends 2 (n - 1) / n times the (padded) array's bytes, as much as an all-reduce.

    Args:
      tx: An elementwise transform. To clip by the norm of all parameters, put
        `js.optim.clip_by_global_norm(max_norm, axis_name)` inside, which sums the norm over the devices' parts.
      axis_name: The mesh axis, or a tuple of axes, over which the batch and the state are split.
      reduce: "mean" averages the gradients over the axis. "sum" adds them, for a loss that is already this device's
        share of the global mean.
      extra_args: The extra arguments that `tx.update` requires, for the check of `init`; see `check_elementwise`.

    Returns:
      A transform whose `init` and `update` must be called inside `shard_map` over the axis, with or without
      `check_vma`. `init` takes replicated parameters; the state is the state of `tx` for this device's parts: for a
      parameter [4096, 1024] on 8 devices a moment of Adam is [512, 1024]. The specs (`PartitionSpec`) of the state are
      `state_specs(tx, params, axis_name, axis_size)`.

    Raises (from init and update):
      ValueError: The axis is not bound; `tx` is not elementwise (from init); a gradient that is already summed over the
        devices, as by `jax.grad` with respect to a replicated parameter under `check_vma=True`; a gradient that differs
        in shape from its parameter.

    Example:
        tx = js.optim.zero2(optax.adamw(3e-4), "data")
        states = js.optim.state_specs(tx, params, "data", mesh.shape["data"])

        def step(params, opt_state, rows):
            params = jax.lax.pcast(params, "data", to="varying")    # so that jax.grad does not sum over devices
            grads = jax.grad(local_mean_loss)(params, rows)
            return tx.update(grads, opt_state, params)

        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), states, P("data")), out_specs=(P(), states))
    """

    def to_part(grad: jax.Array, parts: Parts) -> jax.Array:
        return scatter_sum(parts.pad(grad), parts.spec(grad.shape), parts.axes)

    return _on_parts("zero2", tx, axis_name, reduce, extra_args, to_part)


def fsdp(
    tx: optax.GradientTransformation,
    axis_name: AxisName = "data",
    *,
    reduce: Reduce = "mean",
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Split parameters, gradients and optimizer state over an axis, inside `shard_map`.

    ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3). `init` and `update` take and return this device's parts of
    parameters and state: make the parts with `shard_params`, their specs with `param_specs` and `state_specs`,
    and gather the parameters in the loss with `gather_params`. `update` needs `params`. Its gradients, of the mean loss
    over the device's rows, may be

      - parts, from `jax.grad` with respect to the parts: `gather_params` has then summed them over the axis;
      - full arrays, from `jax.grad` with respect to the gathered parameters: `update` sums them, by one reduce-scatter
        per array.

    `update` distinguishes the two by the shape of each array, and divides both by the number of devices (except with
    `reduce="sum"`). Scalars are replicated, and their gradients all-reduced, unless their type shows that they are
    already summed. There are no other collectives: together with `gather_params` each of n devices sends 2 (n - 1) / n
    times an array's bytes per step, as for `zero2`, and (n - 1) / n times more whenever the parameters are gathered
    again, such as under `jax.checkpoint`.

    Args:
      tx: An elementwise transform; see `zero2`.
      axis_name: The mesh axis, or a tuple of axes, over which the batch, the parameters and the state are split.
      reduce: See `zero2`.
      extra_args: See `zero2`.

    Raises (from init and update):
      ValueError: As for `zero2`; also if `update` is called without `params`, and for a gradient that has neither the
        shape of a full parameter nor of its part.

    Example:
        tx = js.optim.fsdp(optax.adamw(3e-4), "data")
        shapes = jax.eval_shape(lambda: params)

        def step(shards, opt_state, rows):
            grads = jax.grad(lambda s: local_mean_loss(js.optim.gather_params(s, shapes, "data"), rows))(shards)
            updates, opt_state = tx.update(grads, opt_state, shards)
            return optax.apply_updates(shards, updates), opt_state

        specs, states = js.optim.param_specs(shapes, "data", 8), js.optim.state_specs(tx, shapes, "data", 8)
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs, states, P("data")), out_specs=(specs, states))
    """
    scale = _make_scale("fsdp", reduce)
    tx = as_transform(tx)

    def init_fn(params: PyTree) -> Any:
        parts = Parts.bound(axis_name, "fsdp")
        # The full shape is unknown because of padding: it is between that of a part and a part times the devices. So
        # prove the transform for both.
        largest = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(tuple(d * parts.devices for d in x.shape), x.dtype), params
        )
        require_elementwise(tx, params, axis_name=axis_name, extra_args=extra_args, views=largest)
        return tx.init(params)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError(
                "fsdp: update needs this device's parts of the parameters; call tx.update(grads, state, params)"
            )
        parts = Parts.bound(axis_name, "fsdp")
        checked = types_are_checked(parts.axes)
        _check_shapes("fsdp", updates, params, lambda g, p: g == p or shard_shape(g, parts.devices) == p)
        whole = jax.tree.map(lambda g, p: g if g.shape != p.shape else None, updates, params)
        _check_not_summed("fsdp", whole, parts.axes)

        def to_part(grad: jax.Array, param: jax.Array) -> jax.Array:
            if grad.shape != param.shape:
                return scatter_sum(parts.pad(grad), parts.spec(grad.shape), parts.axes)
            if grad.shape:
                return grad
            # With checked types, a scalar's gradient has been summed over the axes over which it does not vary.
            return all_sum(grad, [axis for axis in parts.axes if not checked or axis in varying_axes(grad)])

        shards = jax.tree.map(lambda g, p: scale(to_part(g, p), parts.devices), updates, params)
        return tx.update(shards, state, params, **extra)

    return OnParts(init_fn, update_fn)


def _on_parts(
    who: str,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    reduce: Reduce,
    extra_args: Mapping[str, Any] | None,
    to_part: Callable[[jax.Array, Parts], jax.Array],
) -> optax.GradientTransformationExtraArgs:
    """Make the transform that runs `tx` on this device's parts of all arrays, and all-gathers the updates.

    Args:
      who: the name of the public function, for error messages.
      tx: an elementwise transform.
      axis_name: the mesh axis, or axes, over which arrays are split.
      reduce: "mean" or "sum", over the devices' gradients.
      extra_args: the extra arguments that `tx.update` requires.
      to_part: `to_part(gradient, parts)` sums a full gradient over the devices and returns this device's part of the
        sum.
    """
    scale = _make_scale(who, reduce)
    tx = as_transform(tx)

    def init_fn(params: PyTree) -> Any:
        parts = Parts.bound(axis_name, who)
        views = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shard_shape(x.shape, parts.devices), x.dtype), params)
        require_elementwise(tx, params, axis_name=axis_name, extra_args=extra_args, views=views)
        return tx.init(jax.tree.map(parts.take, params))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> Any:
        parts = Parts.bound(axis_name, who)
        if params is not None:
            _check_shapes(who, updates, params, lambda g, p: g == p)
        _check_not_summed(who, updates, parts.axes)
        grads = jax.tree.map(lambda g: scale(to_part(g, parts), parts.devices), updates)
        own = None if params is None else jax.tree.map(parts.take, params)
        steps, state = tx.update(grads, state, own, **extra)
        return jax.tree.map(lambda step, g: parts.gather_replicated(step, g.shape), steps, updates), state

    return OnParts(init_fn, update_fn)


def _make_scale(who: str, reduce: Reduce) -> Callable[[jax.Array, int], jax.Array]:
    if reduce not in ("mean", "sum"):
        raise ValueError(f'{who}: reduce must be "mean" or "sum", got {reduce!r}')
    return (lambda total, count: total / count) if reduce == "mean" else (lambda total, count: total)


def _check_not_summed(who: str, grads: PyTree, axes: tuple[str, ...]) -> None:
    if not types_are_checked(axes):
        return
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    found = [(path_str(path), sorted(set(axes) - varying_axes(g))) for path, g in leaves]
    raise_all(
        (f"{path}: does not vary over {', '.join(map(repr, missing))}" for path, missing in found if missing),
        ValueError,
        f"{who}: these gradients are already summed over the axis: with check_vma=True jax.grad with respect to a "
        "replicated parameter sums over the devices, and another sum would make them too large. Take the gradient with "
        f'respect to jax.lax.pcast(params, {axes[0] if len(axes) == 1 else axes!r}, to="varying")',
    )


def _check_shapes(who: str, grads: PyTree, params: PyTree, fits: Callable[[Any, Any], bool]) -> None:
    def problem(path: Any, g: Any, p: Any) -> str | None:
        if fits(g.shape, p.shape):
            return None
        return f"{path_str(path)}: gradient {list(g.shape)}, parameter {list(p.shape)}"

    raise_all(
        jax.tree.leaves(map_with_path(problem, grads, params)),
        ValueError,
        f"{who}: these gradients do not fit their parameters; pass the gradients of the same tree, whole"
        + (", or this device's parts as gather_params gives them" if who == "fsdp" else ""),
    )
