"""Context parallelism: attention over a sequence that is split over mesh axes.

    how       communication                                            computed on each device
    gather    all-gather k and v                                       its own queries x all keys, all heads
    ulysses   all-to-all q, k, v from sequence to heads, output back   all queries x all keys, some of the heads
    usp       ulysses over the second axis, gather over the first
    ring      pass k, v to the next device, n - 1 times (`ring`)       its own queries x one device's keys at a time

All functions run inside `shard_map`, on a device's shard [B, T, heads, D]. Positions are in zigzag order (`zigzag.py`),
which balances causal work.

The collectives of the forward pass are listed below, for n devices; each of `k, v`, [B, T, K, D], has a collective of
its own. The backward pass has the transposes: a reduce-scatter for an all-gather, an all-to-all for an all-to-all. With
"gather" it also repeats the all-gathers, since gathered keys and values are not saved.

    gather    all-gather of k, v for each group of heads (see `_MOST_GATHERED`), and of segment_ids
    ulysses   all-to-all of q, k, v and the output (and an all-gather of segment_ids)
    ring      n - 1 permutes of k, v (and segment_ids); the backward pass also n permutes of their gradients, in f32

Sources: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2 (gather); Jacobs et al. 2023, "DeepSpeed
Ulysses"; Fang and Zhao 2024, "USP"; Liu et al. 2023, "Ring Attention".

Shape suffixes are explained in `formula.py`.
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
"""The most bytes of gathered keys and values at a time. Larger arrays are gathered in several groups of heads."""

_Attend = Callable[[jax.Array, jax.Array, jax.Array, Extras, Form], jax.Array]
"""(q, k, v, extras, form) -> output."""


class Kernels(NamedTuple):
    """The functions that compute attention on one platform, for each way in which the sequence may be split.

    Attributes:
      whole: (q, k, v, extras, form) -> output, for queries and keys in the order of the sequence, or in any order if
        there is neither causality nor a window.
      chunks: (q, k, v, extras, form, starts=Starts(...)) -> output, for all keys, and for queries that are some chunks
        of the sequence, which begin at the positions `starts.queries`.
      parts: the functions for ring attention, which compute with one device's keys at a time.
    """

    whole: _Attend
    chunks: Callable[..., jax.Array]
    parts: Parts


def why_not_in_context(length: int, extras: Extras, form: Form, how: str, n: int) -> str:
    """Return why attention can't be computed on a sequence split over n devices; "" if it can.

    Args:
      length: the number of positions of each device.
      extras: the optional arrays of the call, such as a bias.
      form: the static arguments of the call, such as `causal`.
      how: the form of context parallelism, such as "ring".
      n: the number of devices.
    """
    if extras.bias is not None or extras.mask is not None:
        given = "bias" if extras.mask is None else "mask"
        return (
            f"a {given} has entries for the full sequence, of which each device has a part; use causal=, window= and "
            "segment_ids=, or js.auto()"
        )
    if extras.keep is not None:
        return "dropout would need random bits for the full sequence; use js.auto(), or a rate of 0"
    if how == "ring" and (form.window is not None or extras.windows is not None):
        return (
            f"a window of {form.window or 'its own'} in a ring, which would send keys that no query sees; use "
            'js.context(how="gather") or how="ulysses"'
        )
    if is_ordered(form) and length % 2:
        return (
            f"each of {n} devices has {length} positions, which must be two equal chunks; use sequences of a multiple "
            f"of {2 * n}"
        )
    return ""


def chunk_length(length: int, form: Form, how: str, sizes: dict[str, int]) -> int | None:
    """Return the number of positions in each chunk of queries that a device computes under context parallelism.

    Return None if the device's kernel needs no chunks, because it gets the full sequence or order does not matter.

    Args:
      length: the number of positions of each device.
      form: the call's static arguments; causality and the window are read.
      how: the form of context parallelism.
      sizes: {axis: size} of the axes over which the sequence is split.
    """
    if not is_ordered(form):
        return length if how == "ring" else None
    if how == "ulysses":
        return None
    # A device has two chunks in zigzag order; "usp" joins the positions of all devices along the second axis.
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
      q_BTHD: this device's queries, in zigzag order over the devices of `axes`.
      k_BSKD: this device's keys, in the same order.
      v_BSKE: this device's values, in the same order.
      extras: may have this device's segments; all other extras are refused.
      form: causal and window refer to positions in the full sequence.
      kernels: the kernels of the platform.
      axes: the mesh axes over which the sequence is split; exactly two for "usp".
      how: the form of context parallelism; see the top of this file.

    Returns:
      This device's part of the output, [B, T, H, E]. The output and the residuals have the name "attention_out".

    Raises:
      ValueError: too few heads for "ulysses" or "usp", or a reason of `why_not_in_context`.
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
    """Return True if attention depends on the order of positions: it is causal or has a window."""
    return form.causal or form.window is not None


# gather: all-gather keys and values


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

    # Save the kernel's output and sums for the backward pass, but gather the keys and values again.
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
    """All-gather the sequence, dimension 1 of `x`; for causal or windowed attention also undo its zigzag order.

    The array is gathered axis by axis, the last axis first. It is gathered as a matrix whose first dimension is the
    sequence, because for other shapes the TPU compiler all-reduces the gradients instead of reduce-scattering them.
    """
    B, S, *rest = x.shape
    rows = x.swapaxes(0, 1).reshape(S, -1)
    for axis in reversed(axes):
        rows = lax.all_gather(rows, axis, axis=0, tiled=True)
    rows = from_zigzag(rows, lax.axis_size(axes), 0) if is_ordered(form) else rows
    return rows.reshape(-1, B, *rest).swapaxes(0, 1)


def _group_count(kv_heads: int, size: int) -> int:
    """Return the number of equal groups into which to split the heads, of at most `_MOST_GATHERED` bytes each.

    Groups are gathered one at a time. The result is the smallest number of groups within this limit; if even a single
    head exceeds the limit, each head is a group.

    Args:
      kv_heads: the number of heads of keys and values.
      size: the number of bytes of all gathered heads.
    """
    counts = (count for count in range(1, kv_heads + 1) if kv_heads % count == 0)
    return next((count for count in counts if size <= _MOST_GATHERED * count), kv_heads)


# ulysses: exchange sequence for heads


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
    # Repeat heads of keys and values as often as it takes for n to divide them.
    repeats = next(r for r in range(1, H // K + 1) if H // K % r == 0 and K * r % n == 0)
    if repeats > 1:
        k_BSKD, v_BSKE = (jnp.repeat(x, repeats, axis=2) for x in (k_BSKD, v_BSKE))

    def heads_to_sequence(x: jax.Array) -> jax.Array:
        all_positions: jax.Array = lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
        return from_zigzag(all_positions, n, 1) if is_ordered(form) else all_positions

    if extras.segments is not None:
        extras = extras._replace(segments=_gather(extras.segments, axes, form))
    q, k, v = map(heads_to_sequence, (q_BTHD, k_BSKD, v_BSKE))
    out = attend(q, k, v, extras, form)
    if is_ordered(form):
        out = to_zigzag(out, n, 1)
    back: jax.Array = lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)
    return back
