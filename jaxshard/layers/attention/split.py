"""Split attention over devices by the current layout: rows, heads and positions.

Inside jaxshard's steps some mesh axes are manual already: under `js.explicit` the axes over which the batch and the
sequence are split. A `shard_map` here makes all other axes manual, because the compiler can't split a kernel.

Shape suffixes are explained in `formula.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxshard.core.constrain import activations_in_force
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import spec_entry
from jaxshard.core.strategy_parts import Context
from jaxshard.layers.attention.context import Kernels, attend_in_context, chunk_length, is_ordered, why_not_in_context
from jaxshard.layers.attention.formula import Extras, Form
from jaxshard.layers.attention.zigzag import exchange_from_zigzag, exchange_to_zigzag

_NONE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """The sharding of one call of attention over the devices of the mesh, by the current layout.

    Attributes:
      mesh: the mesh around the call; None without a layout.
      manual: the mesh axes that are manual already around the call.
      rows: the axes over which the `shard_map` of `run` splits rows of the batch.
      heads: the axes over which this `shard_map` splits heads of queries.
      kv_heads: the axes over which this `shard_map` splits heads of keys and values: the axes of `heads`, or none.
      context: the layout's context parallelism, if the call uses it; else None.
      queries: the axes over which queries are split, but not keys. Only for a call that can't use the layout's context
        parallelism.
      length: the number of queries of the call, or of this device if the axes of the sequence are manual already.
      uneven_rows: a message if the devices do not divide the rows, so that no `shard_map` is possible; "" if they do.
      whole: why the call can't use the layout's context parallelism, so that keys are replicated; "" if it can.
      whole_over: the axes over which keys are replicated for this reason.
    """

    mesh: Mesh | None = None
    manual: frozenset[str] = frozenset()
    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    context: Context | None = None
    queries: tuple[str, ...] = ()
    length: int = 0
    uneven_rows: str = ""
    whole: str = ""
    whole_over: tuple[str, ...] = ()

    @classmethod
    def in_force(cls, q_BTHD: jax.Array, k_BSKD: jax.Array, extras: Extras, form: Form) -> Split:
        """Return how the current layout splits a call of attention.

        Raises:
          ValueError: heads that the axis does not divide; an argument that context parallelism does not support.
        """
        activations = activations_in_force()
        if activations is None:
            return cls()
        mesh, manual = activations.mesh()
        (B, T, H, _), (S, K) = q_BTHD.shape, k_BSKD.shape[1:3]
        automatic = set(mesh.axis_names) - manual
        context, queries, whole = activations.layout.context, _NONE, ""
        whole_over = _NONE
        if context is not None:
            n, how = axis_size(mesh, context.axis), context.how
            inside = set(context.axis) <= manual
            whole = "" if inside else _why_whole(T, S, n, extras, form)
            if n == 1 or whole:
                if n > 1:
                    whole_over = context.axis
                    queries = context.axis if T % n == 0 and not is_ordered(form) else _NONE
                context = None
            elif reason := why_not_in_context(T if inside else T // n, extras, form, how, n):
                raise ValueError(f"attention: {reason}")
        if not automatic or mesh.size == 1:
            return cls(mesh, manual, context=context, length=T)
        batch = tuple(axis for axis in activations.layout.batch_axes if axis in automatic)
        if B % axis_size(mesh, batch):
            uneven = f"{B} rows over the {axis_size(mesh, batch)} devices of {batch}"
            if context is not None and set(context.axis) <= manual:
                raise ValueError(f"attention: {uneven}, in a context over {context.axis}; use rows that they divide")
            return cls(mesh, manual, uneven_rows=uneven)
        heads = tuple(axis for axis in activations.axes("heads", H, "attention") if axis in automatic)
        kv_heads = heads if K % axis_size(mesh, heads) == 0 else ()
        return cls(mesh, manual, batch, heads, kv_heads, context, queries, T, "", whole, whole_over)

    def why_not(self, why_not_chunks: Callable[[int], str], form: Form) -> str:
        """Return why a kernel can't compute the chunks of the sequence that a device has; "" if it can.

        Without context parallelism there are no chunks, and the result is "".

        Args:
          why_not_chunks: returns why the kernel can't compute chunks of a given length, or "".
          form: static arguments of attention, such as `causal`.
        """
        if self.context is None or self.mesh is None:
            return ""
        sizes = {axis: self.mesh.shape[axis] for axis in self.context.axis}
        inside = set(self.context.axis) <= self.manual
        length = self.length if inside else self.length // axis_size(self.mesh, self.context.axis)
        chunk = chunk_length(length, form, self.context.how, sizes)
        return "" if chunk is None else why_not_chunks(chunk)

    def run(
        self, kernels: Kernels, q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form
    ) -> jax.Array:
        """Compute attention on each device by one of these kernels, in a `shard_map` over all axes not yet manual."""
        mesh = self.mesh
        automatic = set() if mesh is None or self.uneven_rows else set(mesh.axis_names) - self.manual
        if mesh is None or not automatic or mesh.size == 1:
            return self._attend(kernels, q_BTHD, k_BSKD, v_BSKE, extras, form)
        context = self.context
        exchanged = context is not None and not set(context.axis) <= self.manual
        positions = context.axis if context is not None and exchanged else ()
        rows, heads, kv_heads = map(spec_entry, (self.rows, self.heads, self.kv_heads))
        queries, keys = spec_entry(positions or self.queries), spec_entry(positions)

        def spec(x: Any) -> Any:
            if x is None:
                return None
            entries = zip(x.shape, (rows, heads, queries, None))
            return PartitionSpec(*(entry if size > 1 else None for size, entry in entries))

        beside: dict[str, Any] = {name: spec(getattr(extras, name)) for name in ("bias", "mask")}
        for name, entry in (("segments", queries), ("key_segments", keys)):
            beside[name] = None if getattr(extras, name) is None else PartitionSpec(rows, entry)
        beside["windows"] = None if extras.windows is None else PartitionSpec(rows)
        beside["keep"] = None if extras.keep is None else PartitionSpec(queries, None)
        query_spec, key_spec = PartitionSpec(rows, queries, heads, None), PartitionSpec(rows, keys, kv_heads, None)
        H, K = q_BTHD.shape[2], k_BSKD.shape[2]

        def on_device(q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> jax.Array:
            if self.heads != self.kv_heads:
                own = H // axis_size(mesh, self.heads)
                k, v = (heads_for(x, own, H // K, self.heads) for x in (k, v))
            if not positions or not is_ordered(form):
                return self._attend(kernels, q, k, v, extras, form)
            q, k, v = (exchange_to_zigzag(x, positions, 1) for x in (q, k, v))
            if extras.segments is not None:
                extras = extras._replace(segments=exchange_to_zigzag(extras.segments, positions, 1))
            return exchange_from_zigzag(self._attend(kernels, q, k, v, extras, form), positions, 1)

        if self.queries and extras.segments is not None:
            beside["key_segments"] = PartitionSpec(rows, None)
            extras = extras._replace(key_segments=extras.segments)
        out: jax.Array = jax.shard_map(
            on_device,
            mesh=None if self.manual else mesh,  # nested: the mesh of the shard_map around it
            in_specs=(query_spec, key_spec, key_spec, Extras(**beside)),
            out_specs=query_spec,
            axis_names=automatic,
            check_vma=False,
        )(q_BTHD, k_BSKD, v_BSKE, extras)
        return out

    def _attend(
        self, kernels: Kernels, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, form: Form
    ) -> jax.Array:
        if self.context is None:
            return kernels.whole(q, k, v, extras, form)
        axes, how = self.context.axis, self.context.how
        return attend_in_context(q, k, v, extras, form, kernels=kernels, axes=axes, how=how)


def _why_whole(T: int, S: int, n: int, extras: Extras, form: Form) -> str:
    """Return why the call can't use context parallelism over n devices; "" if it can.

    Args:
      T: the number of queries in the full sequence.
      S: the number of keys in the full sequence.
      n: the number of devices.
      extras: the optional arrays of the call, such as a bias.
      form: the static arguments of the call, such as `causal`.
    """
    if extras.bias is not None or extras.mask is not None:
        return f"a {'bias' if extras.mask is None else 'mask'} is given"
    if extras.keep is not None:
        return "weights are dropped"
    parts = 2 * n if is_ordered(form) else n
    if T % parts or S % parts:
        return f"{parts} parts do not divide {T} queries and {S} keys"
    return ""


def heads_for(x_BSKD: jax.Array, own: int, shared_by: int, axes: tuple[str, ...]) -> jax.Array:
    """Select the heads of keys or values that this device's query heads use, inside `shard_map`.

    Args:
      x_BSKD: keys or values with all heads.
      own: the number of query heads on this device.
      shared_by: the number of query heads that share a head of keys and values.
      axes: the mesh axes over which query heads are split.
    """
    first = jax.lax.axis_index(axes) * own
    if shared_by % own == 0:
        return jax.lax.dynamic_slice_in_dim(x_BSKD, first // shared_by, 1, 2)
    return jnp.take(x_BSKD, (first + jnp.arange(own)) // shared_by, axis=2)
