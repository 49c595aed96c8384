"""Compute the iterations of ring attention (`ring`) by the TPU kernel.

Every iteration has static shapes. With its own keys a device computes plain causal attention. With the keys of an
earlier device it computes attention of all queries to the first chunk of keys, with the keys of a later device
attention of the second chunk of queries to all keys, both without a mask. (Every device has two chunks: `zigzag.py`.)

Shape suffixes are explained in `formula.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.core.compat import splash_gradients
from jaxshard.layers.attention.formula import UNSEEN, Extras, Form
from jaxshard.layers.attention.ring import Parts, Turn
from jaxshard.layers.attention.splash_chunks import Blocks, Sees, block_sizes, heads_first, tables

_Results = tuple[jax.Array, ...]


def splash_turns(*, interpret: bool = False) -> Parts:
    """Make the forward and backward function of one iteration of ring attention, computed by the TPU kernel.

    `interpret` runs the kernel without a TPU, slowly.
    """

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, form: Form, turn: Turn
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        part = partial(_part, form=form, interpret=interpret)
        queries, keys = (q, extras.segments), (k, v, extras.of_keys())
        out, logsumexp = _by_turn(part, _put_forward, queries, keys, form, turn)
        # exp(largest) * total = exp(logsumexp) * 1.
        return out, logsumexp, jnp.ones_like(logsumexp)

    def backward(
        q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, form: Form, *rest: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, largest, total, d_out, turn = rest
        part = partial(_gradients_of_part, form=form, interpret=interpret)
        queries = q, extras.segments, out, largest + jnp.log(total), d_out
        keys = k, v, extras.of_keys()
        dq, dk, dv = _by_turn(part, _put_backward, queries, keys, form, turn)
        return dq, dk, dv

    return Parts(forward, backward)


def _by_turn(part: Any, put: Any, queries: Any, keys: Any, form: Form, turn: Turn) -> Any:
    """Compute an iteration of causal ring attention: call `part` only on queries and keys that see each other.

    With an earlier device's keys, all queries see the first half of the keys. With a later device's keys, the second
    half of the queries sees all keys.

    Args:
      part: `part(queries, keys, causal=...) -> results`.
      put: `put(results, later)` pads the results to all of the device's queries and keys; `later` is True for a later
        device's keys.
      queries: the queries, and arrays with an entry per query.
      keys: the keys, and arrays with an entry per key.
      form: static arguments of attention; causality is read.
      turn: the iteration.
    """
    if turn.own or not form.causal:
        return part(queries, keys, causal=form.causal)

    def second(x: jax.Array) -> jax.Array:
        return x[:, x.shape[1] // 2 :]

    def first(x: jax.Array) -> jax.Array:
        return x[:, : x.shape[1] // 2]

    def of_earlier_keys(queries: Any, keys: Any) -> Any:
        return put(part(queries, jax.tree.map(first, keys), causal=False), False)

    def of_later_keys(queries: Any, keys: Any) -> Any:
        return put(part(jax.tree.map(second, queries), keys, causal=False), True)

    return lax.cond(turn.keys < turn.queries, of_earlier_keys, of_later_keys, queries, keys)


def _put_forward(found: _Results, later: bool) -> _Results:
    if not later:
        return found
    out, logsumexp = found
    return (
        jnp.concatenate([jnp.zeros_like(out), out], 1),
        jnp.concatenate([jnp.full_like(logsumexp, UNSEEN), logsumexp], 1),
    )


def _put_backward(found: _Results, later: bool) -> _Results:
    dq, dk, dv = found
    if later:
        return jnp.concatenate([jnp.zeros_like(dq), dq], 1), dk, dv
    return dq, *(jnp.concatenate([x, jnp.zeros_like(x)], 1) for x in (dk, dv))


def _kernel_form(q: jax.Array, k: jax.Array, form: Form, causal: bool) -> tuple[Any, Any, Any]:
    """Return the TPU kernel's (block sizes, tables, mask function) for one iteration of ring attention.

    Every query sees every key, unless `causal`. Without `causal` the tables are empty, and the mask function is None.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    T, S = q.shape[1], k.shape[1]
    blocks, of_dq = Blocks.of(T, S), Blocks.of_dq(T, S)
    if not causal:
        return block_sizes(blocks, of_dq), (MaskInfo(None, None, None, None, None),) * 3, None
    found = tables(form, jnp.zeros(1, jnp.int32), T, S, blocks, of_dq)
    return block_sizes(blocks, of_dq), found, Sees(True, None)


def _segment_ids(ids: Any, key_ids: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    return None if ids is None else SegmentIds(ids.astype(jnp.int32), key_ids.astype(jnp.int32))


def _part(queries: Any, keys: Any, *, form: Form, interpret: bool, causal: bool) -> _Results:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    (q, ids), (k, v, key_ids) = queries, keys
    sizes, infos, mask = _kernel_form(q, k, form, causal)
    kernel: Any = kernels.SplashAttentionKernel(
        *infos,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=True,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=form.soft_cap,
        residual_checkpoint_name=None,
        mask_function=mask,
        interpret=interpret,
    )
    arrays = heads_first(q, scale=True), heads_first(k), heads_first(v)
    out, (logsumexp,) = jax.vmap(kernel)(*arrays, _segment_ids(ids, key_ids))
    return out.swapaxes(1, 2)[..., : v.shape[-1]], logsumexp.swapaxes(1, 2)


def _gradients_of_part(queries: Any, keys: Any, *, form: Form, interpret: bool, causal: bool) -> _Results:
    (q, ids, out, logsumexp, d_out), (k, v, key_ids) = queries, keys
    sizes, infos, mask = _kernel_form(q, k, form, causal)
    arrays = heads_first(q, scale=True), heads_first(k), heads_first(v)

    def pull_back(q: Any, k: Any, v: Any, segments: Any, out: Any, logsumexp: Any, d_out: Any) -> Any:
        residuals = q, k, v, segments, out, logsumexp
        options = {"mask_function": mask, "soft_cap": form.soft_cap, "interpret": interpret}
        return splash_gradients(sizes, infos[1:], residuals, d_out, **options)

    rest = heads_first(out), logsumexp.swapaxes(1, 2), heads_first(d_out)
    found = jax.vmap(pull_back)(*arrays, _segment_ids(ids, key_ids), *rest)
    dq, dk, dv = (x.swapaxes(1, 2)[..., : like.shape[-1]] for x, like in zip(found, (q, k, v)))
    return dq.astype(jnp.float32) / q.shape[-1] ** 0.5, dk.astype(jnp.float32), dv.astype(jnp.float32)
