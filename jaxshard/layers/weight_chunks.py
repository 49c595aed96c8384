"""Gather weights in chunks: an engine offers a layer to gather a weight chunk by chunk along a dimension.

Each device stores an equal shard of a dimension, and a chunk has the same fraction of every shard: all devices then
send the same bytes, and the gradient of a chunk is reduce-scattered to the shards. For 12 columns on 2 devices, in 3
chunks of 2 columns of each shard:

    device 0     0 1 | 2 3 | 4 5         chunk 0     0 1  6 7
    device 1     6 7 | 8 9 | 10 11       chunk 1     2 3  8 9
                                         chunk 2     4 5 10 11

If the width does not divide a shard, the last chunk begins earlier, and `Chunks.numbers` marks repeated columns.

An engine registers the weights that it passes to a loss (`offer_chunks`), and a layer looks a weight up by identity
(`cut_weight`). A weight that is not registered, such as one that the user computed, is sliced as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxshard.core.mesh import axis_names, axis_size
from jaxshard.core.placement import Placement

_LANES = 128
"""Chunks wider than this have a multiple of this width: the width of a TPU's tiles."""


@dataclass(frozen=True)
class Chunks:
    """The chunks into which one weight is split along a dimension, to be gathered one at a time.

    The dimension is stored in equal shards. Every chunk takes `width` elements from each shard.

    Attributes:
      dim: the dimension.
      size: its size, without padding.
      parts: the number of shards in which the weight or its gradient is stored.
      part: the size of a shard along the dimension.
      width: the number of elements that a chunk takes from each shard.
      gather: gathers a chunk: from this device's elements to the chunk of the weight, [..., parts * width, ...].
      reduce: reduces the gradient with respect to a chunk over devices, to this device's elements of the stored
        gradient.
    """

    dim: int
    size: int
    parts: int
    part: int
    width: int
    gather: Callable[[jax.Array], jax.Array]
    reduce: Callable[[jax.Array], jax.Array]

    @property
    def count(self) -> int:
        """The number of chunks."""
        return -(-self.part // self.width)

    def take(self, stored: jax.Array, index: jax.Array) -> jax.Array:
        """Return chunk `index` of the weight, gathered from its stored array by the engine's collectives."""
        shape, dim = stored.shape, self.dim
        parts = stored.reshape(*shape[:dim], -1, self.part, *shape[dim + 1 :])
        chunk = lax.dynamic_slice_in_dim(parts, self._start(index), self.width, dim + 1)
        return self.gather(chunk.reshape(*shape[:dim], -1, *shape[dim + 1 :]))

    def numbers(self, index: jax.Array) -> jax.Array:
        """Return where the elements of chunk `index` are along the dimension of the full weight, int32[parts * width].

        The position is -1 for padding, and for elements that an earlier chunk has.
        """
        inside = self._start(index) + jnp.arange(self.width, dtype=jnp.int32)
        numbers = jnp.arange(self.parts, dtype=jnp.int32)[:, None] * self.part + inside
        return jnp.where((inside >= index * self.width) & (numbers < self.size), numbers, -1).reshape(-1)

    def zeros(self, sink: jax.ShapeDtypeStruct) -> jax.Array:
        """Return zeros for summing the gradients of all chunks; the chunked dimension is split in two, [shards, part].

        `sink` has the shape and dtype of the stored gradient.
        """
        parts = -(-sink.shape[self.dim] // self.part)
        return jnp.zeros((*sink.shape[: self.dim], parts, self.part, *sink.shape[self.dim + 1 :]), sink.dtype)

    def add(self, total: jax.Array, cotangent: jax.Array, index: jax.Array) -> jax.Array:
        """Reduce the gradient of chunk `index` over devices, and add it to the weight's gradient; return the new sum.

        Collectives: the engine's, such as a reduce-scatter.

        Args:
          total: the sum so far, made by `zeros`.
          cotangent: this device's gradient with respect to the gathered chunk.
          index: the index of the chunk.
        """
        shape, start = total.shape, self._start(index)
        new = self.reduce(cotangent.astype(total.dtype)).astype(total.dtype)
        new = new.reshape(*shape[: self.dim + 1], self.width, *shape[self.dim + 2 :])
        old = lax.dynamic_slice_in_dim(total, start, self.width, self.dim + 1)
        return lax.dynamic_update_slice_in_dim(total, old + new, start, self.dim + 1)

    def finish(self, total: jax.Array, sink: jax.ShapeDtypeStruct) -> jax.Array:
        """Return `total`, the accumulated gradient of all chunks, in the shape of the stored gradient.

        `sink` has this shape.
        """
        whole = total.reshape(*sink.shape[: self.dim], -1, *sink.shape[self.dim + 1 :])
        return lax.slice_in_dim(whole, 0, sink.shape[self.dim], axis=self.dim)

    def _start(self, index: jax.Array) -> jax.Array:
        return jnp.minimum(index * self.width, self.part - self.width)


class Offered(NamedTuple):
    """A gathered weight that an engine passed to a loss, and its stored shards, to gather it in chunks instead.

    Attributes:
      weight: the gathered weight.
      stored: the stored parameter.
      sink: an array like the stored gradient, whose gradient in the loss becomes the gradient of the parameter; None if
        the parameter is frozen.
      param: the parameter's placement.
      grad: its gradient's placement; None if it is frozen.
      make_move: `make_move(param, grad)` returns an object with `gather` and `reduce`.
      mesh: the layout's mesh.
    """

    weight: jax.Array
    stored: jax.Array
    sink: jax.Array | None
    param: Placement
    grad: Placement | None
    make_move: Callable[[Placement, Placement | None], Any]
    mesh: Mesh

    def cut(self, dim: int, count: int, parts: int) -> Chunks | None:
        """Return how to gather the weight in chunks along a dimension; None if its shards do not allow it.

        Args:
          dim: the dimension.
          count: the number of chunks; the result may have fewer.
          parts: the number of devices that split the dimension in computation.
        """
        grad = self.grad or self.param
        used, held, made = (axis_names(spec[dim]) for spec in (self.param.use, self.param.store, grad.store))
        finest = max(held, made, key=len)
        nested = all(finest[: len(axes)] == axes for axes in (used, held, made))
        views = self.param.view, grad.view
        padded = views[0].padded[dim]
        alike = padded == views[1].padded[dim] and not any(view.extra_dims for view in views)
        if not nested or not alike or axis_size(self.mesh, used) != parts:
            return None
        splits = axis_size(self.mesh, finest)
        part = padded // splits
        width = _width(part, count)
        if views[0].logical[dim] <= part * (splits - 1):  # the last shard has only padding
            return None
        wide = splits * width
        move = self.make_move(self.param.resize(dim, wide), self.grad and self.grad.resize(dim, wide))
        return Chunks(dim, views[0].logical[dim], splits, part, width, move.gather, move.reduce)


_current: ContextVar[Mapping[int, Offered]] = ContextVar("chunks", default=MappingProxyType({}))


@contextmanager
def offer_chunks(offered: Iterable[Offered]) -> Iterator[None]:
    """Make a context in which layers can gather these weights in chunks, by `cut_weight`."""
    token = _current.set({id(one.weight): one for one in offered})
    try:
        yield
    finally:
        _current.reset(token)


def parts_in_use(weight: jax.Array, dim: int) -> int | None:
    """Return the number of devices that split a dimension of a weight in computation, such as those of a tensor axis.

    None if `weight` is not a gathered parameter of the current engine.
    """
    offered = _current.get().get(id(weight))
    return None if offered is None else axis_size(offered.mesh, offered.param.use[dim])


def cut_weight(weight: jax.Array, dim: int, count: int, parts: int) -> tuple[Chunks, jax.Array, jax.Array | None]:
    """Split a weight into chunks along a dimension, to be gathered one at a time where the engine allows it.

    Otherwise, such as for a weight that the loss computed, the chunks are slices of the given array.

    Args:
      weight: the weight that the loss received.
      dim: the dimension.
      count: the number of chunks; the result may have fewer.
      parts: the number of devices that split the dimension in computation.

    Returns:
      (the chunks, the array to take them from, an array whose gradient becomes the weight's gradient). The third array
      is None if the weight is frozen; its values are not used.
    """
    offered = _current.get().get(id(weight))
    chunks = None if offered is None else offered.cut(dim, count, parts)
    if offered is not None and chunks is not None:
        return chunks, offered.stored, offered.sink
    part = weight.shape[dim] // parts
    plain = Chunks(dim, weight.shape[dim], parts, part, _width(part, count), lambda x: x, lambda x: x)
    return plain, lax.stop_gradient(weight), weight


def _width(part: int, count: int) -> int:
    width = -(-part // count)
    return min(part, width + -width % _LANES) if width > _LANES else width
