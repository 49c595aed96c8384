"""Strategies: pure functions that place each array.

A strategy maps (role, leaf, placement, mesh) to a new placement. It is called once for every array in every role that
the array has, so ZeRO-1, ZeRO-2 and FSDP are one function, `shard`, given different roles. Strategies compose because
functions compose: each receives the placement that the strategy before it returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxshard.core.context import context as context
from jaxshard.core.context import rows_without_context
from jaxshard.core.mesh import axis_names, make_mesh
from jaxshard.core.offload import offload as offload
from jaxshard.core.rules import DEFAULT, Rule, Rules
from jaxshard.core.several_axes import axes_in_a_tuple
from jaxshard.core.strategy_parts import MIN_SIZE, RANK, Batch, Composed, Expert, Pipeline, Shard, Tensor, WithoutRows
from jaxshard.core.strategy_parts import Strategy as Strategy
from jaxshard.core.types import ROLES, AxisName, Role


def shard(axis: AxisName, roles: Role | Iterable[Role], *, min_size: int = MIN_SIZE) -> Strategy:
    """Split every array of the given roles over a mesh axis, along a free dimension that is chosen by its size.

    A dimension is free if no other axis splits it. The axis splits the first free dimension whose size it divides and
    whose shards have at least 8 elements (`MIN_PART`), or else the largest dimension whose size it divides. For stacked
    blocks of 2**20 elements or more (`LARGE`) it prefers a dimension whose shards have a multiple of 8. If it divides
    no dimension, the stored array is padded along the dimension where that costs least. Scalars and small arrays are
    replicated. The dimension of stacked blocks is never split. The engine issues the collectives that follow:
    all-gathers of arrays that are stored sharded but used replicated, and reduce-scatters of gradients.

    Args:
      axis: a mesh axis, or a tuple of axes that split one dimension together.
      roles: one or several of "param", "grad", "opt" and "state".
      min_size: arrays with fewer elements are replicated.

    Returns:
      A strategy. Applied, it raises ValueError if the mesh has no such axis or the axis already splits the array.

    Raises:
      ValueError: an unknown role, or a negative `min_size`.

    Example:
      js.fsdp() written out:

        js.compose(js.batch("data"), js.shard("data", ["param", "grad", "opt"]))

      On 8 devices f32[1024, 50257] is stored as [1024 / 8, 50257] on each, and f32[50257, 300] as [50264 / 8, 300]:
      neither of its dimensions divides by 8, so the first is padded by 7 rows.
    """
    chosen: tuple[Any, ...] = (roles,) if isinstance(roles, str) else tuple(roles)
    unknown = [role for role in chosen if role not in ROLES or role == "batch"]
    if unknown:
        raise ValueError(f"shard: unknown roles {unknown}; use some of 'param', 'grad', 'opt', 'state'")
    if min_size < 0:
        raise ValueError(f"shard: min_size must be at least 0 elements, got {min_size}")
    return Shard(axis, chosen, min_size)


def batch(*axes: AxisName) -> Strategy:
    """Split the rows (dimension 0) of every batch array over mesh axes; scalars are replicated.

    Args:
      *axes: mesh axes, the first one major: consecutive rows are on neighbours along the last axis.

    Returns:
      A strategy. Applied, it raises ValueError if the mesh has no such axis or the axes do not divide the rows.

    Example:
        js.batch("replica", "data")     # on replica=2, data=4: [rows / 8, ...] on each device
    """
    return Batch(tuple(name for axis in axes for name in axis_names(axis)))


def without_rows(*patterns: str) -> Strategy:
    """Name the arrays of a batch that have no rows: lookup tables, the nodes and edges of graphs.

    Every device and every micro-batch has all of these arrays, as it has scalars. All other arrays must have the same
    number of rows.

    Args:
      *patterns: the ends of the arrays' paths in the batch; "*" matches anything.

    Raises:
      TypeError: a pattern that is no string.

    Example:
        js.compose(js.fsdp("data"), js.without_rows("table", "graph/*"))    # {"x": ..., "table": ..., "graph": {...}}
    """
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise TypeError(f"without_rows: patterns are strings such as 'table', got {wrong[0]!r}")
    return WithoutRows(patterns)


def tensor(rules: Iterable[Rule] = DEFAULT, axis: AxisName = "tensor") -> Strategy:
    """Tensor parallelism: split parameters, gradients and optimizer state by the names of their dimensions.

    Computation uses the sharded weights; they are never gathered over the axis. The compiler derives the collectives: a
    column-parallel layer followed by a row-parallel one costs one all-reduce of the activations in the forward pass and
    one in the backward pass. If the rules split several dimensions of an array, the first one is split.

    With the rule `("sequence", "split")` in front, activations that the model constrains by that name (`js.constrain`)
    are split between blocks as well, which is sequence parallelism.

    Args:
      rules: pairs; the first that fits decides. `("mlp", "split")` decides about all dimensions of a name: "split",
        "whole" (not split), or "split or whole" (not split if it does not divide, as with fewer key and value heads
        than devices). `("fuse/kernel", ("embed", "mlp"))` names the dimensions of parameters whose path ends with the
        pattern. The model's own annotations rank after your patterns and before `js.RULES`, which knows Flax's layers
        and common names.
      axis: a mesh axis, or a tuple of axes that split one dimension together.

    Returns:
      A strategy. Applied, it raises ValueError if the mesh has no such axis, the axis does not divide a dimension that
      is to be split, or no rule knows a name.

    Raises:
      TypeError: rules that are not pairs.

    References:
      Shoeybi et al. 2019, "Megatron-LM", section 3. Sequence parallelism: Korthikanti et al. 2022, "Reducing Activation
      Recomputation in Large Transformer Models", section 4.2.2.

    Example:
        js.compose(js.fsdp("data"), js.tensor([("fuse/kernel", ("embed", "mlp")), *js.RULES]))
    """
    if isinstance(rules, str):
        raise TypeError(
            f"tensor: rules are pairs, got {rules!r}; for the axis of this name write js.tensor(axis={rules!r})"
        )
    return Tensor(Rules(tuple(rules)), axis)


def pipeline(axis: AxisName = "pipe", *, chunks: int = 2) -> Strategy:
    """Pipeline parallelism: split the stacked blocks of a `js.Stacked` model into stages over a mesh axis.

    With p devices there are p * chunks stages of ceil(blocks / (p * chunks)) consecutive blocks each; stage k is chunk
    k // p of device k % p. If the stages do not divide the blocks, the last stages are filled up with padding blocks,
    which are stored as zeros and pass activations through unchanged. A leaf [blocks, ...] is stored as [chunks, p,
    blocks per stage, ...] and is in model order everywhere else. Parameters that are not stacked (embedding, head) are
    replicated over the axis.

    The strategy only places arrays; the engine `js.pipelined(...)` runs the stages.

    Args:
      axis: the mesh axis whose devices form the ring of stages.
      chunks: stages per device. More chunks make the bubble smaller and the traffic between stages larger.

    Returns:
      A strategy. Applied, it raises ValueError if the mesh has no such axis or there are fewer blocks than stages.

    Raises:
      ValueError: `chunks` is not a positive integer, or `axis` is not one axis.

    References:
      Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.

    Example:
        js.compose(js.fsdp("data"), js.pipeline("pipe", chunks=4))
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"pipeline: chunks must be a whole number from 1 on, got {chunks!r}")
    if len(axis_names(axis)) != 1:
        raise ValueError(f"pipeline: name one mesh axis, whose devices form the ring of stages, got {axis!r}")
    return Pipeline(axis_names(axis)[0], chunks)


@axes_in_a_tuple
def expert(
    axis: AxisName = "expert", *, rules: Iterable[Rule] = DEFAULT, exchange: Literal["equal"] | None = None
) -> Strategy:
    """Expert parallelism: each device of an axis holds some of the experts, and tokens are sent to their experts.

    Parameters with a dimension of experts, their gradients and their optimizer state are split along it. Computation
    uses the shards: they are never gathered over the axis, nor are their gradients summed over it. The model calls
    `js.moe`, whose all-to-alls are the only collectives that the strategy adds. Rows of the batch are split over the
    axis too. The axis may be an axis of its own, or an axis that splits rows anyway:

        js.compose(js.fsdp("data"), js.expert("expert"))              # on data=2, expert=4: rows over both
        js.compose(js.fsdp(("data", "expert")), js.expert("expert"))  # all other parameters split over both, too
        js.compose(js.fsdp("data"), js.expert("data"))                # on data=8: rows and experts over 8

    `js.fsdp` and `js.shard` over the same axis do not split the experts' arrays further; over other axes they split
    another of their dimensions. `js.tensor` splits the hidden dimension of every expert.

    Args:
      axis: a mesh axis, or a tuple of axes that split the experts together.
      rules: as in `js.tensor`: patterns that name dimensions. Dimensions called "expert" or "experts" are split,
        whether the model's own annotation or a pattern names them.
      exchange: None lets `js.moe` use ragged all-to-alls on chips that have them; "equal" uses all-to-alls of equal
        counts everywhere.

    Returns:
      A strategy. Applied, it raises ValueError if the mesh has no such axis, no parameter has experts, or the axis does
      not divide their number.

    Raises:
      TypeError: rules that are not pairs.
      ValueError: another `exchange`.

    References:
      Lepikhin et al. 2020, "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
      section 3.

    Example:
        mesh = js.make_mesh(data=2, expert=4)
        layout = js.layout(js.compose(js.fsdp("data"), js.expert()), mesh, model.init, tx)
    """
    if exchange not in ("equal", None):
        raise ValueError(f'expert: exchange must be "equal" or None, got {exchange!r}')
    return Expert(axis_names(axis), Rules(tuple(rules)), exchange)


def compose(*strategies: Strategy) -> Strategy:
    """Combine strategies into one that applies them all.

    The order of the arguments does not matter. `js.pipeline` is applied first, then `js.batch`. Then come placements by
    name (`js.expert` before `js.tensor`) and functions of your own. `js.shard` is last and splits dimensions that are
    still free. The axes of `js.context` never split rows.

    Raises:
      TypeError: something that is not a function of (role, leaf, placement, mesh).
      ValueError: `js.context` is given twice, or shares its axis with `js.tensor` or `js.pipeline`.

    Example:
        js.compose(js.zero2("data"), js.tensor(js.RULES), js.pipeline("pipe"))
    """
    for strategy in strategies:
        if not callable(strategy):
            raise TypeError(f"compose: expected strategies, got {type(strategy).__name__} ({strategy!r})")
        check_strategy(strategy)
    flat = [part for s in strategies for part in (s.parts if isinstance(s, Composed) else (s,))]
    return Composed(tuple(sorted(rows_without_context(flat), key=lambda part: getattr(part, "rank", RANK))))


@axes_in_a_tuple
def ddp(axis: AxisName = "data") -> Strategy:
    """Data parallelism: rows split over `axis`, everything else replicated.

    Collectives per step: one all-reduce of the gradients.

    Example:
        layout = js.layout(js.ddp(), js.make_mesh(data=-1), init_fn, tx)
    """
    return compose(batch(axis))


@axes_in_a_tuple
def zero1(axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """ZeRO stage 1: optimizer state split over `axis`, parameters and gradients replicated.

    Collectives per step: an all-reduce of the gradients and an all-gather of the updated parameters.

    Args:
      axis: a mesh axis, or a tuple of axes that split one dimension together.
      min_size: arrays with fewer elements are replicated.

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1.

    Example:
        layout = js.layout(js.zero1(), js.make_mesh(data=-1), init_fn, tx)
    """
    return compose(batch(axis), shard(axis, ["opt"], min_size=min_size))


@axes_in_a_tuple
def zero2(axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """ZeRO stage 2: optimizer state and gradients split over `axis`, parameters replicated.

    Collectives per step: a reduce-scatter of the gradients and an all-gather of the updated parameters.

    Args:
      axis: a mesh axis, or a tuple of axes that split one dimension together.
      min_size: arrays with fewer elements are replicated.

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.2.

    Example:
        layout = js.layout(js.zero2(), js.make_mesh(data=-1), init_fn, tx)
    """
    return compose(batch(axis), shard(axis, ["opt", "grad"], min_size=min_size))


@axes_in_a_tuple
def fsdp(axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """Fully sharded data parallelism (ZeRO stage 3): parameters, gradients and optimizer state split over `axis`.

    Collectives per step: an all-gather of each weight before its use in the forward pass, another in the backward pass
    where the engine dropped it in between, and a reduce-scatter of the gradients.

    Args:
      axis: a mesh axis, or a tuple of axes that split one dimension together (one per dimension of a torus). The last
        axis is gathered first and moves the fewest bytes: write an axis over slices or hosts last, ("data", "slices").
      min_size: arrays with fewer elements are replicated.

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.3.

    Example:
        layout = js.layout(js.fsdp(), js.make_mesh(data=-1), init_fn, tx)
        print(layout)    # in 20 lines: how arrays are split, their bytes per device, what is replicated and why
    """
    return compose(batch(axis), shard(axis, ["opt", "grad", "param"], min_size=min_size))


@axes_in_a_tuple
def hsdp(replica: AxisName = "replica", axis: AxisName = "data", *, min_size: int = MIN_SIZE) -> Strategy:
    """Hybrid sharding: rows split over both axes, everything else split over `axis` and copied over `replica`.

    The gathers of `js.fsdp` then stay within a group of devices (a slice, a host), and only the shards of the gradients
    are all-reduced across groups.

    Args:
      replica: the mesh axis across groups.
      axis: the mesh axis within a group.
      min_size: arrays with fewer elements are replicated.

    References:
      Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3.2.2.

    Example:
        layout = js.layout(js.hsdp("replica", "data"), js.make_mesh(replica=2, data=-1), init_fn, tx)
    """
    return compose(batch(replica, axis), shard(axis, ["opt", "grad", "param"], min_size=min_size))


def hybrid(
    devices: Sequence[jax.Device] | None = None,
    /,
    *,
    data: int = -1,
    tensor: int | None = None,
    pipe: int | None = None,
    chunks: int = 2,
    split: Callable[..., Strategy] = fsdp,
    rules: Iterable[Rule] = DEFAULT,
) -> tuple[Mesh, Strategy]:
    """Make a mesh and a strategy of data, tensor and pipeline parallelism over all devices.

    The mesh has the axes "pipe", "data" and "tensor", in this order: neighbours on the last axis are nearest to one
    another, and tensor parallelism communicates most. With `pipe` the engine is `js.pipelined(...)`.

    Args:
      devices: the devices; by default all.
      data: devices for data parallelism. One of the three sizes may be -1, for all remaining devices.
      tensor: devices for tensor parallelism; None for a mesh without it.
      pipe: devices for pipeline parallelism; None for a mesh without it.
      chunks: stages per device of the pipeline, as in `js.pipeline`.
      split: the strategy along "data": `js.ddp`, `js.zero1`, `js.zero2` or `js.fsdp`.
      rules: as in `js.tensor`.

    Returns:
      (mesh, strategy), for `js.layout`.

    Raises:
      ValueError: more than one -1, or sizes that do not multiply to the number of devices.

    Example:
        mesh, strategy = js.hybrid(data=-1, tensor=2, pipe=2)
        layout = js.layout(strategy, mesh, model.init, tx)
    """
    asked = {"pipe": pipe, "data": data, "tensor": tensor}
    mesh = make_mesh(devices, **{name: size for name, size in asked.items() if size is not None})
    parts = [split("data")]
    if tensor is not None:
        parts.append(Tensor(Rules(tuple(rules)), "tensor"))
    if pipe is not None:
        parts.append(pipeline("pipe", chunks=chunks))
    return mesh, compose(*parts)


def check_strategy(strategy: Any) -> None:
    """Raise TypeError unless `strategy` is a function that can be called as strategy(role, leaf, placement, mesh)."""
    if not callable(strategy):
        raise TypeError(f"strategy must be a strategy such as js.fsdp('data'), got {type(strategy).__name__}")
    makes = "Strategy" in str(getattr(strategy, "__annotations__", {}).get("return"))
    if makes and strategy.__module__.startswith("jaxshard."):
        name = strategy.__name__
        raise TypeError(
            f"strategy must be a strategy, not the function that makes one: write js.{name}(...), not js.{name}"
        )
    try:
        signature = inspect.signature(strategy)
    except ValueError:  # a builtin; calling it will tell
        return
    try:
        signature.bind("role", "leaf", "placement", "mesh")
    except TypeError:
        raise TypeError(
            "strategy must be a function (role, leaf, placement, mesh) -> placement, got "
            f"{getattr(strategy, '__name__', type(strategy).__name__)}{signature}"
        ) from None
