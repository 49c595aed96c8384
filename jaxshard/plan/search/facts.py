"""Measure the facts of a model that decide between layouts: bytes of weights, FLOPs, activations that blocks keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from jaxshard.adapt.objective import OfBlocks, OfModule, resolve
from jaxshard.compiler.planned import PlannedDevice
from jaxshard.core.layout import Layout, join_model
from jaxshard.core.loss import Loss, Mean
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.strategy import Strategy, ddp, expert, tensor
from jaxshard.core.tree import BLOCKS
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.cost.flops import train_flops
from jaxshard.plan.search.policies import PLAIN, Policy, policies_of, tree_bytes

_MOST = 64
"""The largest size that is tried for the axes tensor and expert."""
_POSITIONS = 256
"""The fewest positions of a row that a device of a context axis may have."""


@dataclass(frozen=True)
class Facts:
    """The properties of a model and its batch that decide which layouts are possible and fast.

    Attributes:
      rows: the rows of the global batch.
      depth: the number of blocks; None if the model does not say.
      flops: the FLOPs of a step on all devices together, without recomputation.
      weights: global bytes of the parameters, by (True if in blocks, True if an expert axis splits them).
      opt_ratio: bytes of the optimizer's state for each byte of parameters.
      itemsize: bytes of an element of a weight during use.
      policies: the remat policies of a block, with the bytes kept for one row; () for a loss
        function that jaxshard can't look into.
      block_input: bytes of a block's input for one row; 0 without blocks.
      tensor_share: the share of all weights that each device has under a tensor axis, by the size of this axis.
      expert_sizes, context_sizes, pipe_sizes: sizes above 1 that an axis may have.
      engine: "explicit", or "auto" for a loss that returns a scalar, without a weight.
    """

    rows: int
    depth: int | None
    flops: float
    weights: Mapping[tuple[bool, bool], int]
    opt_ratio: float
    itemsize: int
    policies: tuple[Policy, ...] = ()
    block_input: int = 0
    tensor_share: Mapping[int, float] = field(default_factory=dict)
    expert_sizes: tuple[int, ...] = ()
    context_sizes: tuple[int, ...] = ()
    pipe_sizes: tuple[int, ...] = ()
    engine: str = "explicit"


def facts_of(
    init_fn: InitFn, loss_fn: LossFn, tx: optax.GradientTransformation, batch: PyTree, devices: int,
    precision: str | None,
) -> Facts:  # fmt: skip
    """Measure the `Facts` of a model from a few layouts on small planned meshes and traces of loss and block."""
    unsplit = make_layout(ddp(), _mesh(data=1), init_fn, tx)
    rows, sizes = _rows(unsplit, batch), _bytes(unsplit, "param")
    total, most = sum(sizes.values()), min(devices, _MOST)
    by_tensor, by_expert = (
        _splits(axis, strategy, init_fn, tx, total, most)
        for axis, strategy in (("tensor", tensor()), ("expert", expert()))
    )
    expert_part = next(iter(by_expert.values()), sizes)
    objective = resolve(loss_fn)
    depth = objective.model.num_blocks if isinstance(objective, OfBlocks) else None
    policies: tuple[Policy, ...] = PLAIN if isinstance(objective, OfModule) else ()
    block_input = positions = 0
    if isinstance(objective, OfBlocks):
        dtype = jnp.bfloat16 if precision == "bf16" else None
        policies, block_input, positions = _policies(objective, unsplit, batch, rows, dtype)
    weights: dict[tuple[bool, bool], int] = {}
    for path, size in sizes.items():
        key = depth is not None and path.startswith(f"{BLOCKS}/"), expert_part[path] < size
        weights[key] = weights.get(key, 0) + size
    model = join_model(unsplit.shapes.params, unsplit.shapes.state)
    answer = jax.eval_shape(loss_fn, model, batch, unsplit.shapes.key)
    return Facts(
        rows=rows,
        depth=depth,
        flops=train_flops(loss_fn, model, batch, unsplit.shapes.key),
        weights=weights,
        opt_ratio=sum(_bytes(unsplit, "opt").values()) / total,
        itemsize=2 if precision == "bf16" else 4,
        policies=policies,
        block_input=block_input,
        tensor_share={size: sum(split.values()) / total for size, split in by_tensor.items()},
        expert_sizes=tuple(by_expert),
        context_sizes=_context_sizes(positions, devices, batch),
        pipe_sizes=tuple(n for n in range(2, min(depth or 1, most) + 1) if depth and depth % n == 0),
        engine="explicit" if isinstance(answer, Mean | Loss) else "auto",
    )


def _mesh(**axes: int) -> Mesh:
    """Make a mesh of stand-ins for devices, to make layouts that are only measured."""
    devices = np.empty(tuple(axes.values()), dtype=object)
    devices.flat[:] = [PlannedDevice(number, "cpu", "planned", 0, 0) for number in range(devices.size)]
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _splits(
    axis: str, strategy: Strategy, init_fn: InitFn, tx: optax.GradientTransformation, total: int, most: int
) -> dict[int, dict[str, int]]:
    """Return {axis size: {path of parameter: bytes per device}} for sizes 2, 4, 8 ... while doubling saves 20 %."""
    found: dict[int, dict[str, int]] = {}
    size, before = 2, total
    while size <= most:
        try:
            now = _bytes(make_layout(strategy, _mesh(data=1, **{axis: size}), init_fn, tx), "param")
        except ValueError:  # the strategy refuses it
            break
        if sum(now.values()) > 0.8 * before:
            break
        found[size], before, size = now, sum(now.values()), 2 * size
    return found


def _bytes(layout: Layout, role: str) -> dict[str, int]:
    return {
        one.leaf.path: one.placement.bytes_per_device(layout.mesh, one.leaf.dtype)
        for one in layout.placed()
        if one.role == role
    }


def _rows(layout: Layout, batch: PyTree) -> int:
    """Return the number of rows of a global batch; raise ValueError if no array has rows."""
    mask = jax.tree.leaves(layout.rows_mask(batch))
    counts = [x.shape[0] for x, has_rows in zip(jax.tree.leaves(batch), mask, strict=True) if has_rows]
    if not counts:
        raise ValueError("js.plan.search: the batch has no array with rows; give a tree of arrays [rows, ...]")
    return int(counts[0])


def _policies(
    objective: OfBlocks, layout: Layout, batch: PyTree, rows: int, dtype: Any
) -> tuple[tuple[Policy, ...], int, int]:
    """Return (remat policies of a block, bytes of its input for one row, sequence length or 0 if unknown)."""
    model, params = objective.model, layout.shapes.params
    weights = _cast(params[BLOCKS], dtype, first_dim=1)
    rest = _cast({name: part for name, part in params.items() if name != BLOCKS}, dtype)

    def cut(x: Any) -> Any:
        has_rows = x.ndim > 0 and x.shape[0] == rows
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) if has_rows else x

    x = jax.eval_shape(model.embed, rest, jax.tree.map(cut, batch), layout.shapes.key)
    stream = max(jax.tree.leaves(x), key=lambda x: x.size)
    found = policies_of(lambda weights, x: model.named_block(weights, x, None), weights, x)
    return found, tree_bytes(x), stream.shape[1] if stream.ndim == 3 else 0


def _cast(tree: PyTree, dtype: Any, first_dim: int = 0) -> PyTree:
    """Drop the first `first_dim` dimensions of all shapes in a tree; floats get the dtype `dtype` unless it is None."""

    def cast(x: Any) -> jax.ShapeDtypeStruct:
        is_cast = dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape[first_dim:], dtype if is_cast else x.dtype)

    return jax.tree.map(cast, tree)


def _context_sizes(positions: int, devices: int, batch: PyTree) -> tuple[int, ...]:
    """Return the possible sizes of a context axis; () unless all arrays of the batch have `positions` positions."""
    shapes = {x.shape[1] for x in jax.tree.leaves(batch) if getattr(x, "ndim", 0) >= 2}
    if not positions or shapes != {positions}:
        return ()
    powers = [2**k for k in range(1, 7)]
    return tuple(size for size in powers if size <= devices and positions % (2 * size) == 0
                 and positions // size >= _POSITIONS)  # fmt: skip
