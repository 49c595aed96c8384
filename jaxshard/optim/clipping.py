"""Clip by the global norm, also if arrays are sharded in a `shard_map`.

For an array that is split over devices, the squares must be summed over all devices, for a replicated array only once:

    w [1024] over data=8   q = sum(w_part**2)            this device's part, to be summed over data
    v [1024] replicated    q = sum(v**2)                 the same on all devices, counted once
    norm = sqrt(psum(q_w) + q_v)

Arrays are grouped by the mesh axes that split them, and each group's sum of squares takes one all-reduce over its axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxshard.core.collectives import all_sum
from jaxshard.core.mesh import axis_names
from jaxshard.core.tree import path_str
from jaxshard.core.types import AxisName, PyTree


def clip_by_global_norm(
    max_norm: float | jax.Array, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scale updates down so that their global norm is at most `max_norm`, like `optax.clip_by_global_norm`.

    Without `axis_name` updates are global arrays, or replicated. With `axis_name`, the transform runs inside
    `shard_map` on this device's shards, as inside `js.optim.zero1`, `zero2` and `fsdp`, and uses the norm of the full
    arrays: one all-reduce of one f32 scalar. Arrays count as split over the axis; scalars count as replicated, and are
    counted once. Inside `js.optim.tensor` replicated parameters are counted once, too (one more all-reduce of a
    scalar).

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", section 3.2.

    Args:
      max_norm: The largest norm of updates.
      axis_name: The mesh axis, or a tuple of axes, over which every array is split; None for global or replicated
        arrays.

    Example:
        js.make_step(loss_fn, optax.chain(js.optim.clip_by_global_norm(1.0), optax.adamw(3e-4)), layout)

        # in a shard_map loop of your own
        clip = js.optim.clip_by_global_norm(1.0, "data")
        tx = js.optim.zero2(optax.chain(clip, optax.adamw(3e-4)), "data")
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
"""`split_axes(path, axes) -> axes`: the mesh axes that split the array at a path, given the axes of `axis_name`.

`js.optim.tensor` passes such a function to the transform that it wraps."""


def global_norm(
    tree: PyTree, axis_name: AxisName | None = None, *, split_axes: SplitAxes | None = None
) -> Float[Array, ""]:
    """Return the Euclidean norm of all elements of a tree, accumulated in at least f32.

    Args:
      tree: Arrays. With `axis_name`, arrays are this device's shards over the axis, and scalars are replicated; one
        all-reduce of a scalar then makes the result the same on every device.
      axis_name: The mesh axis, or a tuple of axes, over which arrays are split.
      split_axes: `split_axes(path, axes)` returns the mesh axes that split the array at `path`, given the axes of
        `axis_name`. There is one all-reduce for each set of axes.

    Example:
      >>> float(global_norm({"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray(4.0)}))
      5.0
    """
    names = axis_names(axis_name)
    groups: dict[tuple[str, ...], list[jax.Array]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        axes = names if x.ndim else ()
        groups.setdefault(axes if split_axes is None else split_axes(path_str(path), axes), []).append(x)
    zero = jnp.zeros((), jnp.float32)
    squares = (all_sum(sum(map(_sum_of_squares, leaves), start=zero), axes) for axes, leaves in groups.items())
    return jnp.sqrt(sum(squares, start=zero))


def _sum_of_squares(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)  # of complex numbers
    return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))
