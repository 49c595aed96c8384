"""Round weights to 8 bits once a step, where they are stored, and gather their 8 bits: gather_dtype="quant".

    stored   f32[16, 64] of [64, 64]    rounded once, before the first micro-batch    int8[16, 64], f32[1, 64]
    used     f32[64, 64]                gathered for each use, forward and backward   int8[64, 64]

A scale reads a whole channel of the weight, so it is a maximum over the devices that store parts of the channel. The
product rounds the gathered weight again: in f32 with the same scale to rounding, to the same 8-bit numbers. In bf16
neither the gathered weight nor its new scale is exact: 4 to 12 % of int8 numbers move by one, a few by two, and none of
fp8. (A weight that is cast to bf16 first, as without "quant", has 15 to 21 % other int8 numbers than in f32.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.collectives import all_max, gather
from jaxshard.core.encoded_collectives import gather_bits
from jaxshard.core.layout import Layout
from jaxshard.core.placement import Placement, axes_of, split_dims
from jaxshard.core.tree import path_str
from jaxshard.core.types import PyTree
from jaxshard.core.wire import LARGEST
from jaxshard.engines.engine import QUANT
from jaxshard.engines.manual import nest_in_shard_map


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """A stored weight, rounded to 8 bits.

    Attributes:
      values: this device's shard of the 8-bit numbers.
      scale: f32, this device's shard of the scales, of size 1 in the dimensions that the product contracts.
      dtype: the dtype of the weight before rounding.
    """

    values: jax.Array
    scale: jax.Array
    dtype: Any = field(metadata={"static": True})


def rounded_weights(layout: Layout) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return {path: (8-bit dtype, contracted dimensions)} of the weights that are gathered in 8 bits.

    They are the weights that the model rounds, stored with their logical dimensions and split over devices.

    Raises:
      ValueError: the model rounds a weight to another dtype than those of `LARGEST`.
    """
    known = layout.model.rounded_weights if isinstance(layout.model, Stacked) else {}

    def is_gathered(placement: Placement) -> bool:
        same_dims = len(placement.view.stored) == len(placement.view.logical)
        return same_dims and not set(axes_of(placement.store)) <= set(axes_of(placement.use))

    placements = {path_str(path): one for path, one in jax.tree_util.tree_leaves_with_path(layout.params)}
    gathered = {path: how for path, how in known.items() if is_gathered(placements[path])}
    for path, (dtype, _) in gathered.items():
        if dtype not in LARGEST:
            raise ValueError(
                f"gather_dtype={QUANT!r}: the model rounds {path} to {dtype}, and weights are gathered in "
                f"{', '.join(LARGEST)}; round it to one of these, or leave gather_dtype out"
            )
    return gathered


def round_stored(layout: Layout, params: PyTree) -> PyTree:
    """Round the stored weights that the model rounds to 8 bits; return the tree with a `Rounded` for each of them.

    Collectives: for each weight whose contracted dimensions are split, a maximum over these mesh axes.

    Raises:
      ValueError: the model rounds no weights, or one of them to a dtype that is not gathered.
    """
    how = rounded_weights(layout)
    if not how:
        raise ValueError(
            f"gather_dtype={QUANT!r} gathers weights in the 8 bits to which the model rounds them, and this model "
            "rounds none that are stored split; build it with quant=, as js.models.make(name, quant='int8'), or leave "
            "gather_dtype out"
        )

    def round_one(path: Any, x: jax.Array, placement: Placement) -> Any:
        if (name := path_str(path)) not in how:
            return x
        dtype, contracted = how[name]
        axes = contracted_axes(placement, contracted)
        largest = jnp.abs(x).max(contracted, keepdims=True).astype(jnp.float32)
        if axes:
            spec = scale_spec(placement.store, largest.shape)
            largest = nest_in_shard_map(layout, partial(all_max, axes=axes), spec)(largest)
        scale = jnp.where(largest == 0, 1.0, largest / LARGEST[dtype])  # NaN stays NaN
        values = jnp.clip(x / scale, -LARGEST[dtype], LARGEST[dtype])
        return Rounded((jnp.round(values) if dtype == "int8" else values).astype(dtype), scale, x.dtype)

    return jax.tree_util.tree_map_with_path(round_one, params, layout.params)


def gather_rounded(layout: Layout, param: Placement, stored: Rounded, dtype: Any) -> jax.Array:
    """All-gather a rounded weight and its scales; return it in its stored shape.

    Args:
      layout: the layout.
      param: the placement of the weight, or of one block of a stack.
      stored: the rounded weight.
      dtype: the dtype of the result; None takes the parameter's.
    """
    keep = axes_of(param.use)
    spec = scale_spec(param.store, stored.scale.shape)
    is_float = jnp.issubdtype(stored.values.dtype, jnp.floating)
    move: Any = partial(gather_bits, dtype=stored.values.dtype) if is_float else gather
    values = nest_in_shard_map(layout, partial(move, spec=param.store, keep=keep), param.store)(stored.values)
    scale = nest_in_shard_map(layout, partial(gather, spec=spec, keep=keep), spec)(stored.scale)
    weight: jax.Array = (values.astype(jnp.float32) * scale).astype(dtype or stored.dtype)
    return weight


def contracted_axes(placement: Placement, contracted: tuple[int, ...]) -> list[str]:
    """List the mesh axes that split the contracted dimensions of a stored weight and not the weight in use."""
    used = axes_of(placement.use)
    return [axis for dim, axis in split_dims(placement.store) if dim in contracted and axis not in used]


def scale_spec(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Return how scales of this shape are split, from the spec of their weight: not in dimensions of size 1."""
    return PartitionSpec(*(None if size == 1 else entry for size, entry in zip(shape, spec)))
