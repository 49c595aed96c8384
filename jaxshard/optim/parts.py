"""Split arrays into one shard per device inside `shard_map`, for `js.optim.zero1`, `zero2` and `fsdp`.

An array is split over the devices of a mesh axis along one dimension (`split_of`): the dimension that needs the least
padding, and the largest of several such dimensions. If the number of devices does not divide the dimension, the array
is padded with zeros at the end. Only scalars and arrays without elements are replicated. On 8 devices:

    array        padded        part
    [3, 5, 16]   [3, 5, 16]    [3, 5, 2]     16 divides
    [1001]       [1008]        [126]         the last device has 7 zeros at the end
    [1]          [16]          [2]           so that a part differs in shape from its array
    []           []            []
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxshard.core.collectives import gather
from jaxshard.core.compat import varying_axes
from jaxshard.core.mesh import axis_names
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import abstract, map_with_path, path_str, raise_all
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.proof.trace import param_at_end


class Split(NamedTuple):
    """The dimension along which an array is split over devices, and its sizes.

    Attributes:
      dim: the dimension.
      size: the size of this dimension in the full array.
      local: its size on one device, padding included.
    """

    dim: int
    size: int
    local: int


def split_of(shape: tuple[int, ...], count: int) -> Split | None:
    """Choose the dimension along which an array is split into `count` equal parts.

    It is the dimension that needs the least padding or, of several, the largest. None for scalars and arrays without
    elements, which are replicated.
    """
    if not math.prod(shape) or not shape:
        return None

    def local(size: int) -> int:
        # A part of a single element is padded to two, so that no part has the shape of its full array: `fsdp` tells
        # them apart by shape.
        return 2 if size == 1 and count > 1 else -(-size // count)

    dim = min(range(len(shape)), key=lambda d: (local(shape[d]) * count / shape[d], -shape[d]))
    return Split(dim, shape[dim], local(shape[dim]))


def shard_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape of one device's part of an array, padding included: (1001,) over 8 devices -> (126,)."""
    split = split_of(shape, count)
    return shape if split is None else (*shape[: split.dim], split.local, *shape[split.dim + 1 :])


class Parts(NamedTuple):
    """The devices over which arrays are split inside `shard_map`, one part for each device.

    Attributes:
      axes: the mesh axes.
      devices: the number of devices along these axes.
    """

    axes: tuple[str, ...]
    devices: int

    @classmethod
    def bound(cls, axis_name: AxisName, who: str) -> Parts:
        """Make the `Parts` for mesh axes of the enclosing `shard_map`; `who` is the caller's name for error messages.

        Raises:
          ValueError: there is no `shard_map` over these axes.
        """
        axes = axis_names(axis_name)
        try:
            return cls(axes, math.prod(lax.axis_size(axis) for axis in axes))
        except NameError as error:
            raise ValueError(
                f"{who}: {error} Call init and update inside jax.shard_map over the axis, with the optimizer state's "
                "specs from js.optim.state_specs(tx, params, axis_name, axis_size)"
            ) from error

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the `PartitionSpec` of a split array with this full shape."""
        split = split_of(shape, self.devices)
        entry = self.axes[0] if len(self.axes) == 1 else self.axes
        return PartitionSpec() if split is None else PartitionSpec(*[None] * split.dim, entry)

    def pad(self, x: jax.Array) -> jax.Array:
        """Pad a full array with zeros at the end, so that it can be split into equal parts."""
        split = split_of(x.shape, self.devices)
        if split is None or split.local * self.devices == split.size:
            return x
        missing = split.local * self.devices - split.size
        return lax.pad(x, x.dtype.type(0), [(0, missing if dim == split.dim else 0, 0) for dim in range(x.ndim)])

    def take(self, x: jax.Array) -> jax.Array:
        """Return this device's part of a replicated array: a slice, without collectives."""
        split = split_of(x.shape, self.devices)
        if split is None:
            return x
        return lax.dynamic_slice_in_dim(self.pad(x), lax.axis_index(self.axes) * split.local, split.local, split.dim)

    def gather_replicated(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """All-gather a full array of this shape from the devices' parts, and remove its padding.

        The result has a type of JAX that does not vary over the axes, so that `shard_map` accepts the result as
        replicated.

        Args:
          x: this device's part.
          shape: the shape of the full array.
        """
        split = split_of(shape, self.devices)
        if split is None:
            return x
        for axis in reversed(self.axes):
            x = lax.all_gather(x, axis, axis=split.dim, tiled=True, to="invarying")
        return lax.slice_in_dim(x, 0, split.size, axis=split.dim)


def types_are_checked(axes: tuple[str, ...]) -> bool:
    """Return True if JAX tracks over which mesh axes each value varies, as in a `shard_map` with `check_vma=True`.

    Without this check the type of every value says that it does not vary, which then proves nothing about the values.
    """
    return all(axis in varying_axes(lax.axis_index(axis)) for axis in axes)


def param_specs(params: PyTree, axis_name: AxisName, axis_size: int) -> PyTree:
    """Return the `PartitionSpec` of every parameter as `shard_params` splits it.

    Use these specs as `in_specs` and `out_specs` of the `shard_map` around a `js.optim.fsdp` loop.

    Args:
      params: The full parameters, which may be abstract.
      axis_name: The mesh axis, or a tuple of axes, over which the parameters are split.
      axis_size: The number of devices along the axis or axes.

    Example:
      >>> param_specs({"w": jax.ShapeDtypeStruct((3, 16), "float32")}, "data", 8)
      {'w': P(None, 'data')}
    """
    parts = Parts(axis_names(axis_name), axis_size)
    return jax.tree.map(lambda x: parts.spec(x.shape), params)


def state_specs(tx: Any, params: PyTree, axis_name: AxisName, axis_size: int) -> PyTree:
    """Return the `PartitionSpec` of every array of the optimizer state.

    Use these specs as `in_specs` and `out_specs` of the `shard_map` around a loop with `js.optim.zero1`, `zero2` or
    `fsdp`. A state array is split like a parameter if its path ends with the parameter's path, and if it has the shape
    of the parameter or of the parameter's part on one device; all other arrays are replicated.

    Args:
      tx: The result of `js.optim.zero1`, `zero2` or `fsdp`, or the transform inside.
      params: The full parameters, which may be abstract.
      axis_name: The mesh axis, or a tuple of axes, over which the state is split.
      axis_size: The number of devices along the axis or axes.

    Example:
        tx = js.optim.zero2(optax.adamw(3e-4), "data")
        states = js.optim.state_specs(tx, params, "data", mesh.shape["data"])
        init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=states)
    """
    check_transform(tx)
    axes = axis_names(axis_name)
    # Only the product of the sizes matters: the number of parts.
    sizes = dict(zip(axes, (axis_size, *[1] * (len(axes) - 1)), strict=True))
    specs = jax.tree.leaves(param_specs(params, axis_name, axis_size))
    return specs_of_state(tx, abstract(params), specs, sizes, axis_size)


def specs_of_state(
    tx: Any, params: PyTree, specs: Sequence[PartitionSpec], sizes: Mapping[str, int], count: int
) -> PyTree:
    """Return the `PartitionSpec` of every array of the state that `tx.init(params)` makes inside `shard_map`.

    A state array has the spec of a parameter if its path ends with the parameter's path, such as "0/mu/w" for "w", and
    if it has the shape of the parameter or of one of its `count` parts; otherwise it is replicated, P().

    Args:
      tx: The transform.
      params: The abstract parameters that `tx.init` receives.
      specs: The spec of each parameter, in the order of the leaves of `params`.
      sizes: The size of each mesh axis of the `shard_map`.
      count: The number of parts into which the transform splits parameters.
    """
    known = jax.tree_util.tree_leaves_with_path(params)
    _, state = jax.make_jaxpr(tx.init, axis_env=list(sizes.items()), return_shape=True)(params)

    def spec(path: Any, x: Any) -> PartitionSpec:
        index = param_at_end(path, [p for p, _ in known])
        if index is None:
            return PartitionSpec()
        shape = known[index][1].shape
        return specs[index] if x.shape in (shape, shard_shape(shape, count)) else PartitionSpec()

    return map_with_path(spec, state)


def shard_params(params: PyTree, axis_name: AxisName = "data") -> PyTree:
    """Return this device's part of every replicated parameter, inside `shard_map`. No collectives.

    On 8 devices the part of a parameter [4096, 1001] is [512, 1001], and the part of [1001] is [126], which on the last
    device ends with 7 zeros of padding.

    Example:
        specs = js.optim.param_specs(params, "data", 8)
        parts = jax.shard_map(js.optim.shard_params, mesh=mesh, in_specs=P(), out_specs=specs)(params)
    """
    parts = Parts.bound(axis_name, "shard_params")
    return jax.tree.map(parts.take, params)


def gather_params(shards: PyTree, like: PyTree, axis_name: AxisName = "data") -> PyTree:
    """All-gather full parameters from the parts of all devices, inside `shard_map`, and remove padding.

    One all-gather per array, which moves (n - 1) / n of the padded array's bytes to each of n devices. Under `jax.grad`
    the backward pass has one reduce-scatter of the same bytes: the gradient with respect to the shards is the sum over
    the devices of each device's gradient. Call this function in the loss, just before the parameters are used.

    Args:
      shards: This device's parts, as `shard_params` returns them.
      like: A tree like the parameters with their full shapes (arrays or ShapeDtypeStructs).
      axis_name: The mesh axis, or a tuple of axes, over which the parameters are split.

    Raises:
      ValueError: A shard whose shape is not that of a part of its array, or no `shard_map` over the axis.

    Example:
        def local_loss(shards, rows):
            return loss(js.optim.gather_params(shards, shapes, "data"), rows)
    """
    parts = Parts.bound(axis_name, "gather_params")
    raise_all(
        (
            f"{path_str(path)}: {list(x.shape)}, expected {list(part)} of {list(whole.shape)}"
            for (path, x), whole in zip(jax.tree_util.tree_leaves_with_path(shards), jax.tree.leaves(like), strict=True)
            if x.shape != (part := shard_shape(whole.shape, parts.devices))
        ),
        ValueError,
        "gather_params: these shards are not parts of the arrays; make them with shard_params",
    )

    def gather_one(x: jax.Array, whole: Any) -> jax.Array:
        split = split_of(whole.shape, parts.devices)
        if split is None:
            return x
        return lax.slice_in_dim(gather(x, parts.spec(whole.shape)), 0, split.size, axis=split.dim)

    return jax.tree.map(gather_one, shards, like)
