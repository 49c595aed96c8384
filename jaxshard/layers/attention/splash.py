"""Attention on TPUs by JAX's splash attention: a Pallas kernel that stores no logits and skips blocks of unseen keys.

The kernel takes one row of the batch, [heads, positions, head size], with a multiple of 128 positions. Other lengths
are padded with keys that no query sees, and with queries whose outputs are dropped.

Shape suffixes are explained in `formula.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.layers.attention.blockwise import NAME
from jaxshard.layers.attention.formula import Extras, Form

_LANES = 128


def why_not_splash(q_BTHD: jax.Array, extras: Extras, form: Form) -> str:
    """Return why the TPU kernel can't compute a call of attention; "" if it can."""
    if extras.windows is not None:
        return "traced windows, such as a window for each row"
    if extras.mask is not None:
        return "a mask whose values are not known when the program is made; causal=, window= and segment_ids= are"
    if extras.bias is not None:
        return "a bias"
    if extras.keep is not None:
        return "dropout"
    if form.precision is not None:
        return f"precision={form.precision}"
    if not jnp.issubdtype(q_BTHD.dtype, jnp.floating) or q_BTHD.dtype.itemsize > 4:
        return f"the dtype {q_BTHD.dtype}"
    return ""


def splash(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form, *, interpret: bool = False
) -> jax.Array:
    """Compute attention by JAX's splash attention kernel for TPUs.

    `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    T, D, S, E = *q_BTHD.shape[1::2], k_BSKD.shape[1], v_BSKE.shape[-1]
    block, key_block = _block_size(T), _block_size(S)

    def prepare(x_BTHD: jax.Array, block: int) -> jax.Array:
        x_BHTD = _pad(_pad(x_BTHD, 1, block), 3, _LANES).swapaxes(1, 2)
        return x_BHTD

    # The kernel does not divide the logits by sqrt(D).
    scaled_BTHD = (q_BTHD.astype(jnp.float32) / D**0.5).astype(q_BTHD.dtype)
    q_BHTD, k_BKSD, v_BKSE = prepare(scaled_BTHD, block), prepare(k_BSKD, key_block), prepare(v_BSKE, key_block)
    segments = _segments(T, S, q_BHTD.shape, k_BKSD.shape[2], extras, form)
    kernel = kernels.make_splash_mha(
        mask=_mask((q_BHTD.shape[2], k_BKSD.shape[2]), q_BHTD.shape[1], form),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_block_sizes(block, key_block),
        attn_logits_soft_cap=form.soft_cap,
        residual_checkpoint_name=NAME,
        interpret=interpret,
    )
    if segments is None:
        out_BHTE = jax.vmap(kernel)(q_BHTD, k_BKSD, v_BKSE)
    else:
        out_BHTE = jax.vmap(kernel)(q_BHTD, k_BKSD, v_BKSE, kernels.SegmentIds(*segments))
    out: jax.Array = out_BHTE.swapaxes(1, 2)[:, :T, :, :E]
    return out


def _block_size(length: int) -> int:
    """Return the block size for a sequence: 512 or 256 if this pads it by at most an eighth of its length, else 128."""
    for block in (512, 256):
        if -length % block <= length // 8:
            return block
    return _LANES


def _pad(x: jax.Array, dim: int, multiple: int) -> jax.Array:
    missing = -x.shape[dim] % multiple
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)]) if missing else x


def _segments(
    T: int, S: int, padded: tuple[int, ...], padded_keys: int, extras: Extras, form: Form
) -> tuple[jax.Array, ...] | None:
    """Return the segment ids of the padded queries and of the padded keys; padding gets a segment id of its own.

    So no query sees padding. None if there are no segments and the kernel's causal mask hides the padding anyway.

    Args:
      T: the number of queries.
      S: the number of keys.
      padded: the shape [B, heads, padded queries, width].
      padded_keys: the number of padded keys.
      extras: has the segment ids of the call, if any.
      form: static arguments; causality is read.
    """
    B, _, padded_queries, _ = padded
    keys = extras.of_keys()
    if extras.segments is not None and keys is not None:
        unused = jnp.maximum(extras.segments.max(), keys.max()).astype(jnp.int32) + 1
        return tuple(
            jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])), constant_values=unused)
            for ids, length in ((extras.segments, padded_queries), (keys, padded_keys))
        )
    if padded_keys == S or form.causal:  # the padding comes after every query, so the causal mask hides it
        return None
    ids_T, ids_S = (jnp.arange(n) >= real for n, real in ((padded_queries, T), (padded_keys, S)))
    return tuple(jnp.broadcast_to(ids.astype(jnp.int32), (B, ids.size)) for ids in (ids_T, ids_S))


def _mask(shape: tuple[int, int], heads: int, form: Form) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if form.window is not None:
        near = form.window - 1
        mask: Any = masks.LocalMask(shape, (near, 0 if form.causal else near), 0)
    else:
        mask = masks.CausalMask(shape) if form.causal else masks.FullMask(shape)
    return masks.MultiHeadMask([mask] * heads)


def _block_sizes(block: int, key_block: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

    return BlockSizes(
        block_q=block,
        block_kv=key_block,
        block_kv_compute=key_block,
        block_q_dkv=block,
        block_kv_dkv=key_block,
        block_kv_dkv_compute=key_block,
        block_q_dq=block,
        block_kv_dq=key_block,
    )
