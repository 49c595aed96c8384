"""Promise the collectives between the replicas of `js.local`: gradients in warm-up, then parameters every few steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.checks.collectives.expected import Expected, common_axes, gather_stages
from jaxshard.core.layout import Layout, put_back, select
from jaxshard.core.tree import path_str
from jaxshard.core.types import PyTree
from jaxshard.optim.local import Local


def rows_of_replica(layout: Layout, local: Local, batch: PyTree) -> PyTree:
    """Return the shapes of one replica's share of a global batch: [rows / replicas, ...] for each array of rows."""
    count, mask = local.replicas(layout.mesh), layout.rows_mask(batch)

    def part(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), jnp.result_type(x))

    return put_back(mask, jax.tree.map(part, select(mask, batch)), batch)


def synchronisations(layout: Layout, local: Local, inside: Iterable[Expected]) -> Iterator[Expected]:
    """Yield the collectives that `js.local` adds: sums over the replica axis, and gathers of the new parameters.

    Args:
      layout: the layout on the mesh of all replicas.
      local: the `js.local` of the layout's strategy.
      inside: the promised collectives inside one replica; metrics among them are summed over replicas too.
    """
    trained = select(layout.trainable, layout.shapes.params)
    flags = (1 + 2 * len(jax.tree.leaves(trained)),)
    yield _over(local, flags, jnp.int32, 0, "flags of bad steps")
    for one in inside:
        if one.what.startswith("metric ") and one.shape is not None:
            yield replace(one, axes=local.axis, least=0)
    yield from _reductions_in_warm_up(layout, local, trained)
    often, leaves = f"every {local.every} steps", jax.tree_util.tree_leaves_with_path(trained)
    used, stored = jax.tree.leaves(layout.opt_params), jax.tree.leaves(select(layout.trainable, layout.params))
    for (path, x), opt, own in zip(leaves, used, stored, strict=True):
        name, dtype = path_str(path), _sum_dtype(x.dtype)
        mean = _over(local, opt.shard_shape(layout.mesh), dtype, 1, f"mean of {name} over replicas, {often}")
        back = Expected("all-gather", (), (), x.dtype, 1, 1, f"shared {name}, {often}")
        for one in (mean, *gather_stages(layout.mesh, opt, common_axes(opt, own), back)):
            yield replace(one, every=local.every)


def _reductions_in_warm_up(layout: Layout, local: Local, trained: PyTree) -> Iterator[Expected]:
    """Yield the all-reduces of gradients over replicas in the warm-up steps; each device sends its shards."""
    if not local.warmup:
        return
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    for (path, x), grad in zip(leaves, jax.tree.leaves(layout.grads), strict=True):
        what = f"gradient of {path_str(path)} over replicas, in the first {local.warmup} steps"
        yield replace(_over(local, grad.shard_shape(layout.mesh), _sum_dtype(x.dtype), 1, what), until=local.warmup)


def _sum_dtype(dtype: Any) -> Any:
    """Return the dtype in which arrays are summed over replicas: f32 for 16-bit dtypes, else the dtype itself."""
    return dtype if dtype.itemsize > 2 else jnp.float32


def _over(local: Local, shape: tuple[int, ...], dtype: Any, least: int, what: str) -> Expected:
    return Expected("all-reduce", local.axis, shape, dtype, least, 1, what)
