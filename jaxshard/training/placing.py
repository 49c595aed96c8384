"""Copy the arrays of a model that the user passes, in NumPy or JAX, to the shardings in which a layout stores them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.layout import Layout, join_model, split_model
from jaxshard.core.low_rank import cast_base, is_low_rank, matrix_shapes
from jaxshard.core.placement import Placement
from jaxshard.core.settings import no_mesh
from jaxshard.core.tree import check_same_tree, path_str, raise_all, same_structure
from jaxshard.core.types import PyTree


def place_model(model: PyTree, layout: Layout, what: str, *, with_state: bool = True) -> tuple[PyTree, PyTree]:
    """Copy a model, NumPy or JAX arrays in a tree like the result of `init_fn`, to the shardings of a layout.

    Args:
      model: parameters or a `js.Model`, in model order.
      layout: the layout.
      what: the name of the model, for messages.
      with_state: False if `model` is passed without the model state that the layout has.

    Returns:
      (parameters, model state or ()), each array copied directly to its shards.

    Raises:
      ValueError: an array with another shape or dtype than the layout has; the message names each.
    """
    model = as_arrays(what, model)
    expected = join_model(layout.shapes.params, layout.shapes.state if with_state else ())
    _check_given(expected, model, what, "give what init_fn returns")
    params, state = split_model(model)
    params = jax.tree.map(lambda x, p: put_stored(x, p, layout), params, layout.params)
    return params, jax.tree.map(lambda x, p: put_stored(x, p, layout), state, layout.state if with_state else ())


def place_base(model: PyTree, layout: Layout, what: str) -> tuple[PyTree, PyTree]:
    """Copy a model without low-rank factors to the shardings of the frozen base weights of a layout with factors.

    Matrices are cast to bf16 or int8 if the layout stores base weights so; only one matrix at a time is on the devices
    in its original dtype. The compiler chooses the collectives (for int8 a maximum over the inputs).

    Args:
      model: parameters or a `js.Model` of the model without factors, in model order.
      layout: the layout of the model with factors.
      what: the name of the model, for messages.

    Returns:
      (parameters with None for factors, model state), each array on its shards.

    Raises:
      ValueError: an array has another shape or dtype (a cast array may have any floating dtype); the message names
        each.
    """
    model = as_arrays(what, model)
    expected = join_model(matrix_shapes(layout.shapes.params), layout.shapes.state)
    given = split_model(model)[0]

    def as_given(node: Any, x: Any) -> Any:
        shape, dtype = matrix_shapes(node), jnp.result_type(x)
        casts = is_low_rank(node) and node.cast is not None and jnp.issubdtype(dtype, jnp.floating)
        return jax.ShapeDtypeStruct(shape.shape, dtype) if casts else shape

    if same_structure(split_model(expected)[0], given):
        shapes = jax.tree.map(as_given, layout.shapes.params, given, is_leaf=is_low_rank)
        expected = join_model(shapes, layout.shapes.state)
    _check_given(expected, model, what, "give what the init_fn without factors returns")

    def place(node: Any, x: Any, placements: Any) -> Any:
        if not is_low_rank(node):
            return put_stored(x, placements, layout)
        whole = put_stored(x, placements.base, layout)
        if node.cast is None:
            return replace(placements, base=whole, a=None, b=None)
        scale = placements.scale if node.cast == "int8" else None
        shardings = placements.base.sharding(layout.mesh), scale and scale.sharding(layout.mesh)

        @partial(jax.jit, out_shardings=shardings)
        def cast(stored: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            base, made = cast_base(placements.base.view.invert(stored), node.stack, node.inputs, node.cast)
            return placements.base.view.apply(base), scale and scale.view.apply(made)

        base, made = cast(whole)
        return replace(placements, base=base, a=None, b=None, scale=made)

    params = jax.tree.map(place, layout.shapes.params, given, layout.params, is_leaf=is_low_rank)
    state = jax.tree.map(lambda x, p: put_stored(x, p, layout), split_model(model)[1], layout.state)
    return params, state


def _check_given(expected: PyTree, model: PyTree, what: str, fix: str) -> None:
    check_same_tree(expected, model, f"{what} does not fit the layout", fix)
    _check_dtypes(expected, model, what)


def _check_dtypes(expected: PyTree, given: PyTree, what: str) -> None:
    """Raise ValueError, with all arrays whose dtypes differ.

    JAX would cast these arrays silently, such as float64 to f32.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(expected), strict=True)
    raise_all(
        (
            f"{path_str(path)}: {x.dtype}, expected {want.dtype}"
            for (path, x), want in pairs
            if _dtype_of(x, want) != want.dtype
        ),
        ValueError,
        f"{what} has other dtypes than the layout; cast it yourself",
    )


def _dtype_of(x: Any, want: Any) -> Any:
    return getattr(x, "dtype", want.dtype)  # Python numbers have none: they take the parameter's


def put_stored(x: Any, placement: Placement, layout: Layout) -> jax.Array:
    """Copy an array to its stored sharding: each device receives only its shard.

    Args:
      x: a logical array, in JAX or NumPy. It is never donated, and shares no buffer with the result.
      placement: the placement of the array, which may pad it.
      layout: the layout, which has the mesh.
    """
    sharding, view = placement.sharding(layout.mesh), placement.view
    if isinstance(x, jax.Array):
        if x.committed and x.sharding.device_set != sharding.device_set:
            # A step donates its run, but the caller's array must stay valid: device_put alone may share a buffer,
            # may_alias=False or not (JAX 0.10 and 0.12).
            with no_mesh():
                placed: jax.Array = jax.device_put(view.apply(jnp.copy(x)), sharding)
        else:
            placed = jax.jit(view.apply, out_shardings=sharding)(x)
        return placed
    stored = np.zeros(view.padded, jnp.result_type(x))
    stored[tuple(slice(size) for size in view.logical)] = x
    stored = stored.reshape(view.stored)
    return jax.make_array_from_callback(stored.shape, sharding, lambda index: stored[index])
