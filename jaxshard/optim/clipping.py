"""Clipping by the global norm, also where every device holds a part of the arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.core.collectives import all_sum
from jaxshard.core.mesh import axis_names
from jaxshard.core.tree import path_str
from jaxshard.core.types import AxisName, PyTree


def clip_by_global_norm(
    max_norm: float | jax.Array, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Updates scaled so that their global norm is at most `max_norm`, like `optax.clip_by_global_norm`.

    With `axis_name` it runs inside `shard_map` on this device's shards, as inside `js.optim.zero2` and
    `js.optim.fsdp`, and uses the norm of the whole arrays: one all-reduce of one f32 number. Arrays count as split
    over the axis (or tuple of axes), scalars as whole on every device, so they are counted once; inside
    `js.optim.tensor` the parameters that are whole there are counted once, too (one more all-reduce of one number).
    Where updates arrive whole, leave `axis_name` out.
    """

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        del params
        norm = global_norm(updates, axis_name, split_axes=extra_args.get("split_axes"))

        def clip(u: jax.Array) -> jax.Array:
            return jnp.where(norm < max_norm, u, (u / norm.astype(u.dtype) * max_norm).astype(u.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


SplitAxes = Callable[[str, tuple[str, ...]], tuple[str, ...]]
"""`split_axes(path, axes) -> axes`: which axes split an array, given those that split every array; of `tensor`."""


def global_norm(tree: PyTree, axis_name: AxisName | None = None, *, split_axes: SplitAxes | None = None) -> jax.Array:
    """The Euclidean norm of all numbers of a tree: a scalar, accumulated in at least f32.

    With `axis_name` the arrays are this device's shards over the axis (or tuple of axes) and scalars are whole: one
    all-reduce of one number makes the result the same on every device. `split_axes` tells for single arrays which axes
    split them, given the path and those of `axis_name`: one all-reduce per set of axes.
    """
    names = axis_names(axis_name)
    groups: dict[tuple[str, ...], list[jax.Array]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        axes = names if x.ndim else ()
        groups.setdefault(axes if split_axes is None else split_axes(path_str(path), axes), []).append(x)
    squares = (all_sum(_sum_of_squares(leaves), axes) for axes, leaves in groups.items())
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _sum_of_squares(leaves: list[jax.Array]) -> jax.Array:
    def one(x: jax.Array) -> jax.Array:
        size = jnp.abs(x)
        return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))

    return sum(map(one, leaves), start=jnp.zeros((), jnp.float32))
