"""Ring attention: each device passes keys and values on to the next device, so that no device gathers all of them.

In iteration t, device i attends with its queries to the keys of device i - t, and sends these keys to device i + 1.
Every iteration yields an output and the sum of exp(logits), stored as exp(largest) * total for numerical stability.
The outputs are averaged by their shares of the sum:

    out = sum of share_t out_t        share_t = exp(largest_t - largest) total_t / total

The backward pass sends keys and values around the ring once more, together with their gradients in f32, which return
to the device of these keys after n sends. With causality all iterations have the same work, since every device has two
chunks of the sequence (`zigzag.py`): all queries see the first chunk of an earlier device's keys, and the second chunk
of queries sees both chunks of a later device's keys.

These functions run inside `shard_map`. Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Zhu 2024,
"ring-flash-attention". Shape suffixes are explained in `formula.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard.core.unsuited import Unsuited
from jaxshard.layers.attention.blockwise import NAME, Starts, partial_attention, partial_gradients
from jaxshard.layers.attention.formula import Extras, Form
from jaxshard.layers.attention.zigzag import Axes, chunk_starts


class Turn(NamedTuple):
    """One iteration of ring attention on a device, in which its queries attend to one device's keys.

    Attributes:
      queries: the index of the device to which the queries belong (this device), traced.
      keys: the index of the device to which the keys belong, traced.
      devices: the number of devices.
      own: True in the first iteration, in which the keys are this device's own; static.
    """

    queries: jax.Array
    keys: jax.Array
    devices: int
    own: bool


class Parts(NamedTuple):
    """The functions that compute one iteration of ring attention on a platform, forward and backward.

    `turn` is the iteration, a `Turn`.

    Attributes:
      forward: (q, k, v, extras, form, turn) -> (output, largest [B, T, H], total [B, T, H]), for one device's keys. The
        sum of a query's exp(logits) is exp(largest) * total.
      backward: (q, k, v, extras, form, out, largest, total, d_out, turn) -> contributions of this iteration to the
        gradients of q, k and v. Here out, largest and total are the combined results of all iterations.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def blocks(block: int) -> Parts:
    """Make the forward and backward function of one iteration of ring attention, computed in blocks, for any platform.

    `block` is the largest block size, in positions.
    """

    def starts(form: Form, q: jax.Array, k: jax.Array, turn: Turn) -> Starts:
        if not form.causal:
            return Starts(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
        n = turn.devices
        return Starts(chunk_starts(turn.queries, n, q.shape[1]), chunk_starts(turn.keys, n, k.shape[1]))

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, form: Form, turn: Turn
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return partial_attention(q, k, v, extras, form, starts=starts(form, q, k, turn), block=block)

    def backward(
        q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, form: Form, *rest: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        *results, turn = rest
        return partial_gradients(q, k, v, extras, form, *results, starts=starts(form, q, k, turn), block=block)

    return Parts(forward, backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def ring_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    segments: jax.Array | None,
    key_segments: jax.Array | None,
    form: Form,
    parts: Parts,
    axes: Axes,
) -> jax.Array:
    """Compute attention of this device's queries to the keys of all devices along `axes`, inside `shard_map`.

    Collectives: n - 1 permutes of k, v and segments, forward and backward; in the backward pass also n permutes of the
    gradients of k and v.

    Args:
      q_BTHD: this device's queries.
      k_BSKD: this device's keys, which are sent around the ring.
      v_BSKE: this device's values, which are sent with the keys.
      segments: int[B, T], the segment ids of the queries, or None.
      key_segments: int[B, S], the segment ids of the keys, or None.
      form: static arguments, such as `causal`.
      parts: the functions that compute one iteration.
      axes: the mesh axes over which the sequence is split.
    """
    return _forward(q_BTHD, k_BSKD, v_BSKE, segments, key_segments, form, parts, axes)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, key_segments: Any, form: Form, parts: Parts, axes: Axes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def take_turn(carry: Any, sums: tuple[()], passing: Any, turn: Turn) -> tuple[Any, tuple[()]]:
        k, v, ids = passing
        more, its_largest, its_total = parts.forward(q, k, v, Extras(segments, key_segments=ids), form, turn)
        more = more.astype(jnp.float32)
        if turn.own:
            return (more, its_largest, its_total), sums
        out, largest, total = carry
        # Rescale both sums to their common maximum; the outputs are then averaged by their shares of the total.
        new = jnp.maximum(largest, its_largest)
        total, its_total = total * jnp.exp(largest - new), its_total * jnp.exp(its_largest - new)
        share = (its_total / (total + its_total))[..., None]
        return (out * (1 - share) + more * share, new, total + its_total), sums

    (out, largest, total), _ = _go_around(take_turn, None, (), (k, v, key_segments), axes)
    return out.astype(v.dtype), largest, total


def _go_around(
    take_turn: Callable[..., tuple[Any, Any]], carry: Any, sums: Any, passing: Any, axes: Axes
) -> tuple[Any, Any]:
    """Run n iterations of `carry, sums = take_turn(carry, sums, passing, turn)` on a ring of n devices.

    Between iterations `passing` (keys and values) and `sums` (their gradients) are sent to the next device. Both sends
    overlap with computation: `passing` is sent during the iteration that reads it; `sums` is sent while the device
    computes the values that it adds to `sums` on arrival.

    Args:
      take_turn: computes one iteration.
      carry: arrays that stay on the device, such as the output so far.
      sums: sums that are sent around with `passing`.
      passing: the arrays that every device receives once.
      axes: the mesh axes of the ring.

    Returns:
      The last `carry` and `sums`.
    """
    n, i = lax.axis_size(axes), lax.axis_index(axes)

    def turn_and_move(state: Any, t: Any) -> tuple[Any, None]:
        carry, sums, passing = state
        sent = _send_on(passing, axes)
        return (*take_turn(carry, _send_on(sums, axes), passing, Turn(i, (i - t) % n, n, False)), sent), None

    carry, sums = take_turn(carry, sums, passing, Turn(i, i, n, True))
    if n == 1:
        return carry, sums
    passing = _send_on(passing, axes)
    if n > 2:
        (carry, sums, passing), _ = lax.scan(turn_and_move, (carry, sums, passing), jnp.arange(1, n - 1))
    return take_turn(carry, _send_on(sums, axes), passing, Turn(i, (i + 1) % n, n, False))


def _send_on(tree: Any, axes: Axes) -> Any:
    n = lax.axis_size(axes)
    return jax.tree.map(lambda x: lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)]), tree)


def _ring_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, key_segments: Any, form: Form, parts: Parts, axes: Axes
) -> tuple[jax.Array, Any]:
    # A custom_vjp call, as in `blockwise`: policies of `jax.checkpoint` would apply inside the loop.
    found = _closed_forward(q, k, v, segments, key_segments, form, parts, axes)
    out, largest, total = (checkpoint_name(x, NAME) for x in found)
    return out, (q, k, v, segments, key_segments, out, largest, total)


_closed_forward = jax.custom_vjp(_forward, nondiff_argnums=(5, 6, 7))


def _no_second_derivative(*args: Any) -> Any:
    raise Unsuited("attention in a ring has no second derivatives; use js.context(how='gather')")


_closed_forward.defvjp(_no_second_derivative, _no_second_derivative)


def _ring_backward(form: Form, parts: Parts, axes: Axes, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, segments, key_segments, *results = kept

    def take_turn(dq: jax.Array, sums: Any, passing: Any, turn: Turn) -> tuple[jax.Array, Any]:
        k, v, ids = passing
        given = q, k, v, Extras(segments, key_segments=ids), form, *results, d_out, turn
        dq, *sums = (x + more.astype(jnp.float32) for x, more in zip((dq, *sums), parts.backward(*given)))
        return dq, tuple(sums)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    dq, sums = _go_around(take_turn, zeros[0], zeros[1:], (k, v, key_segments), axes)
    dk, dv = _send_on(sums, axes)  # the last send, to the device of these keys
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


ring_attention.defvjp(_ring_forward, _ring_backward)
