"""Attention where the sequence is split over mesh axes: which keys and values come to which queries, and how.

    gather    k, v of all devices to every device                      a device's queries x all keys, all heads
    ulysses   q, k, v: heads against sequence, and the output back     all queries x all keys, some heads
    usp       heads against sequence over the second axis, k and v gathered over the first
    ring      k, v one device further, n - 1 times (`ring`)            queries x keys of one device at a time

All functions run inside `shard_map`, on a device's own part [B, T, heads, D]: the rows, heads and positions it has.
Positions are in zigzag order (`zigzag`), in which causal work is even.

Collectives, forward; `k, v` stand for one each, [B, T, K, D], and n for the devices. The backward pass has their
transposes: a reduce-scatter for a gather, an all-to-all for an all-to-all. In a gather it has the forward ones too,
since what was gathered is not kept.

    gather    all-gather of k, v (and of segment_ids), in as many parts as there are groups of heads
    ulysses   all-to-all of q, k, v and the output (and an all-gather of segment_ids)
    ring      n - 1 permutes of k, v (and segment_ids); backward also n of their gradients, in f32

Sources: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2 (gather); Jacobs et al. 2023, "DeepSpeed
Ulysses"; Fang and Zhao 2024, "USP"; Liu et al. 2023, "Ring Attention".

Shape suffixes as in `formula`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.layers.attention.blockwise import NAME, Starts
from jaxshard.layers.attention.formula import Extras, Form
from jaxshard.layers.attention.ring import Parts, ring_attention
from jaxshard.layers.attention.zigzag import Axes, chunk_starts, from_zigzag, to_zigzag

_MOST_GATHERED = 2**28
"""Bytes of gathered keys and values at a time: heads are computed in groups, as few as that takes."""

_Attend = Callable[[jax.Array, jax.Array, jax.Array, Extras, Form], jax.Array]


class Kernels(NamedTuple):
    """The functions that compute attention on a platform.

    Attributes:
      whole: for queries and keys in the order of the sequence, or where the order does not matter.
      chunks: for queries that are chunks of the sequence, which begin at `starts.queries`, and for all keys:
        chunks(q, k, v, extras, form, starts=Starts(...)).
      parts: for the turns of a ring.
    """

    whole: _Attend
    chunks: Callable[..., jax.Array]
    parts: Parts


def why_not_in_context(length: int, extras: Extras, form: Form, how: str, n: int) -> str:
    """Return why attention can't be computed on n devices' parts of a sequence, `length` each; "" where it can."""
    if extras.bias is not None or extras.mask is not None:
        given = "bias" if extras.mask is None else "mask"
        return (
            f"a {given} belongs to queries and keys of the whole sequence, of which each device has its own part; use "
            "causal=, window= and segment_ids=, or js.auto()"
        )
    if extras.keep is not None:
        return "dropout would need bits for the queries and keys of the whole sequence; use js.auto(), or a rate of 0"
    if how == "ring" and (form.window is not None or extras.windows is not None):
        return (
            f"a window of {form.window or 'its own'} in a ring, which would pass on keys that nobody sees; use "
            'js.context(how="gather") or how="ulysses"'
        )
    if is_ordered(form) and length % 2:
        return (
            f"each of {n} devices has {length} positions, which must be two equal chunks; use sequences of a multiple "
            f"of {2 * n}"
        )
    return ""


def chunk_length(length: int, form: Form, how: str, sizes: dict[str, int]) -> int | None:
    """Return how long the chunks are for which `Kernels.chunks` or `parts` is called; None where neither is.

    Args:
      length: of each device's part.
      form: as for every kernel.
      how: which collectives.
      sizes: of the axes over which the sequence is split.
    """
    if not is_ordered(form):
        return length if how == "ring" else None
    if how == "ulysses":
        return None
    return length // 2 * (list(sizes.values())[-1] if how == "usp" else 1)


def attend_in_context(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    extras: Extras,
    form: Form,
    *,
    kernels: Kernels,
    axes: Axes,
    how: str = "gather",
) -> jax.Array:
    """Compute attention of this device's queries to the keys of all devices along `axes`.

    Args:
      q_BTHD: this device's queries, in zigzag order of `axes`.
      k_BSKD: its keys.
      v_BSKE: its values.
      extras: its segments; nothing else is possible.
      form: as for every kernel; causal and window mean the positions in the sequence.
      kernels: those of the platform.
      axes: the mesh axes over which the sequence is split; exactly two for "usp".
      how: which collectives; see the top of this file.

    Returns:
      This device's part of the output, [B, T, H, E]. It and what its backward pass needs have the name "attention_out".

    Raises:
      ValueError: too few heads for "ulysses" and "usp", and what `why_not_in_context` names.
    """
    if reason := why_not_in_context(q_BTHD.shape[1], extras, form, how, lax.axis_size(axes)):
        raise ValueError(f"attention: {reason}")
    if how == "ring":
        out: jax.Array = ring_attention(
            q_BTHD, k_BSKD, v_BSKE, extras.segments, extras.segments, form, kernels.parts, axes
        )
        return out
    outer, inner = {"gather": (axes, ()), "ulysses": ((), axes), "usp": (axes[:1], axes[1:])}[how]
    attend = partial(_with_gathered_keys, kernels=kernels, axes=outer) if outer else kernels.whole
    if inner:
        return _with_exchanged_heads(q_BTHD, k_BSKD, v_BSKE, extras, form, attend=attend, axes=inner)
    return attend(q_BTHD, k_BSKD, v_BSKE, extras, form)


def is_ordered(form: Form) -> bool:
    """Return whether the order of the positions matters."""
    return form.causal or form.window is not None


# Keys and values gathered


def _with_gathered_keys(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form, *, kernels: Kernels, axes: Axes
) -> jax.Array:
    (B, T, H, D), (S, K, E) = q_BTHD.shape, v_BSKE.shape[1:]
    n = lax.axis_size(axes)
    if extras.segments is not None:
        extras = extras._replace(key_segments=_gather(extras.segments, axes, form))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (_gather(x, axes, form) for x in (k, v))
        if not is_ordered(form):
            return kernels.whole(q, k, v, extras, form)
        mine = chunk_starts(lax.axis_index(axes), n, T)
        return kernels.chunks(q, k, v, extras, form, starts=Starts(mine, jnp.zeros(1, jnp.int32)))

    # What is gathered is not kept for the backward pass, the kernel's own output and sums are.
    attend = jax.checkpoint(attend, policy=jax.checkpoint_policies.save_only_these_names(NAME))
    groups = _group_count(K, n * B * S * K * (D + E) * k_BSKD.dtype.itemsize)
    out: jax.Array
    if groups == 1:
        out = attend(q_BTHD, k_BSKD, v_BSKE)
        return out
    by_group = (jnp.moveaxis(x.reshape(B, T, groups, -1, x.shape[-1]), 2, 0) for x in (q_BTHD, k_BSKD, v_BSKE))
    out = lax.map(lambda args: attend(*args), tuple(by_group))
    return jnp.moveaxis(out, 0, 2).reshape(B, T, H, E)


def _gather(x: jax.Array, axes: Axes, form: Form) -> jax.Array:
    """Gather dimension 1 from all devices, in the order of the sequence if the order matters.

    Axis by axis, the last one first, and as matrices with the sequence in rows: the TPU compiler sums the gradients of
    other shapes whole instead of scattering the sums.
    """
    B, S, *rest = x.shape
    rows = x.swapaxes(0, 1).reshape(S, -1)
    for axis in reversed(axes):
        rows = lax.all_gather(rows, axis, axis=0, tiled=True)
    rows = from_zigzag(rows, lax.axis_size(axes), 0) if is_ordered(form) else rows
    return rows.reshape(-1, B, *rest).swapaxes(0, 1)


def _group_count(kv_heads: int, size: int) -> int:
    """Return the least number of equal groups of heads of which each takes at most `_MOST_GATHERED` bytes."""
    counts = (count for count in range(1, kv_heads + 1) if kv_heads % count == 0)
    return next((count for count in counts if size <= _MOST_GATHERED * count), kv_heads)


# Heads against sequence


def _with_exchanged_heads(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form, *, attend: _Attend, axes: Axes
) -> jax.Array:
    n = lax.axis_size(axes)
    H, K = q_BTHD.shape[2], k_BSKD.shape[2]
    if H % n:
        few = f"{H} heads of queries" + (" on each device" if H != K else "")
        raise ValueError(
            f"attention: {few} are not divisible by the {n} devices of {axes}, between which how='ulysses' exchanges "
            f"them; use js.context(how='gather'), or an axis of {math.gcd(H, n)}"
        )
    repeats = next(r for r in range(1, H // K + 1) if H // K % r == 0 and K * r % n == 0)
    if repeats > 1:
        k_BSKD, v_BSKE = (jnp.repeat(x, repeats, axis=2) for x in (k_BSKD, v_BSKE))

    def heads_to_sequence(x: jax.Array) -> jax.Array:
        whole: jax.Array = lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
        return from_zigzag(whole, n, 1) if is_ordered(form) else whole

    if extras.segments is not None:
        extras = extras._replace(segments=_gather(extras.segments, axes, form))
    q, k, v = map(heads_to_sequence, (q_BTHD, k_BSKD, v_BSKE))
    out = attend(q, k, v, extras, form)
    if is_ordered(form):
        out = to_zigzag(out, n, 1)
    back: jax.Array = lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)
    return back
