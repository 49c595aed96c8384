"""`js.attention`: check the arguments, choose a kernel, and run it on each device's shard.

    check arguments -> choose the kernel by platform and shape -> split rows and heads over devices -> kernel

Shape suffixes such as `_BTHD` are explained in `formula.py`.
"""

from __future__ import annotations

import functools
import math
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxshard.core.cache import cache_in_force
from jaxshard.core.constrain import devices_in_force
from jaxshard.core.counting import is_counting
from jaxshard.core.marks import is_marking, leave_mark
from jaxshard.layers.attention.blockwise import NAME, blockwise
from jaxshard.layers.attention.cached import attend_cached, check_cached
from jaxshard.layers.attention.context import Kernels
from jaxshard.layers.attention.cudnn import cudnn, is_rocm, why_not_cudnn
from jaxshard.layers.attention.formula import Extras, Form, formula
from jaxshard.layers.attention.ring import blocks as turns_in_blocks
from jaxshard.layers.attention.splash import splash, why_not_splash
from jaxshard.layers.attention.splash_chunks import splash_chunks, why_not_chunks
from jaxshard.layers.attention.splash_ring import splash_turns
from jaxshard.layers.attention.split import Split

SCOPE = "js.attention"
"""The `jax.named_scope` of attention, by which `js.audit` recognises the collectives of context parallelism."""
_SHORT = 256
"""Up to this many queries and keys, computing all logits at once is faster than blocks, and needs little memory."""
_SHORT_ON_TPU = 127
"""The same limit on TPUs, where the smallest block of the kernel has 128 positions."""


def attention(
    query: Float[Array, "*batch queries heads dim"],
    key: Float[Array, "*batch keys kv_heads dim"],
    value: Float[Array, "*batch keys kv_heads value_dim"],
    *,
    causal: bool | None = None,
    window: int | Int[Array, "*batch"] | None = None,
    segment_ids: Int[Array, "*batch queries"] | None = None,
    bias: Float[Array, ...] | None = None,
    soft_cap: float | None = None,
    mask: Bool[Array, ...] | None = None,
    is_causal: bool | None = None,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool | None = None,
    dtype: Any = None,
    precision: Any = None,
    force_fp32_for_softmax: bool = False,
    module: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Float[Array, "*batch queries heads value_dim"]:
    """Compute softmax(query key^T / sqrt(dim)) value, without an array of all logits.

    TPUs use a Pallas kernel (JAX's splash attention), NVIDIA GPUs cuDNN, all others a blockwise online softmax. All are
    exact, with memory linear in the sequence, forward and backward. Short sequences use the plain formula. If a kernel
    does not support a call, the blockwise form computes it, with a warning once. The platform is that of the layout's
    mesh inside jaxshard's steps, else that of the default device.

    The current layout determines the sharding: rows are split over the batch axes, heads over the axis to which
    `js.tensor` maps "heads". Under `js.auto` attention runs in a `shard_map` over all axes, under `js.explicit` and in
    pipeline stages on the device's own rows. If the axis has more devices than there are heads of keys and values,
    keys and values are replicated; their gradients are then all-reduced. Without `js.context` there is no other
    collective.

    While `js.generate` runs, keys and values of earlier positions come from its KV cache.

    If `js.context` splits the sequence, every query still sees the keys of all devices: `causal` and `window` refer to
    positions in the full sequence. `layers/attention/context.py` lists the collectives. Bias, mask and dropout are then
    refused under `js.explicit`; under `js.auto` they make each device compute with all keys.

    Flax's attention layers accept this function as `attention_fn=`, and pass the arguments from `mask` on:

        nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=js.attention)
        nnx.MultiHeadAttention(8, 512, rngs=rngs, decode=False, attention_fn=js.attention)

    The output and the residuals of the backward pass have the name "attention_out" for `jax.checkpoint_policies`: with
    a policy that saves this name the backward pass does not run the kernel's forward pass again.

    Args:
      query: may have any number of batch dimensions.
      key: `kv_heads` divides `heads`; consecutive heads of the query share a head of keys and values.
      value: `value_dim` may differ from `dim`.
      causal: query t sees keys 0 to t. Required; only in calls by Flax, which never pass it, None means False.
      window: query t sees keys less than `window` positions from t, including key t. An integer array has a window for
        each row; it may be traced, and needs `causal`. The kernels for TPUs and GPUs do not support such an array.
      segment_ids: each position sees only its own segment, such as one of several documents in a row.
      bias: added to the logits (after `soft_cap`); its shape broadcasts to [*batch, heads, queries, keys].
      soft_cap: logits x become soft_cap * tanh(x / soft_cap).
      mask: False (or 0) hides a key, in addition to all other arguments; its shape broadcasts like that of `bias`. The
        kernels for TPUs and GPUs support only a constant causal mask: prefer `causal`, `window` and `segment_ids`.
      is_causal: NNX's name for `causal`.
      dropout_rng: random key of dropout. The bits, bool[queries, keys], equal those of Flax.
      dropout_rate: the fraction of the attention weights to drop, the same weights in all rows and heads.
      broadcast_dropout: must be True if attention weights are dropped.
      deterministic: True disables dropout.
      dtype: query, key and value are cast to this dtype; by default to their common dtype.
      precision: the precision of the matrix products.
      force_fp32_for_softmax: ignored; the softmax is always in f32.
      module: must be None, since there are no attention weights to sow.
      qk_attn_weights_einsum: must be None.
      attn_weights_value_einsum: must be None.

    Returns:
      The output, in the dtype of the computation. For a query that sees no key at all the output is the mean of all
      values.

    Raises:
      TypeError: `causal` is missing.
      ValueError: shapes that do not match, a window below 1, a soft_cap that is not positive; heads that the mesh axis
        does not divide; an unsupported argument, by name.

    Source: Dao 2023, "FlashAttention-2"; Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory".

    Example:
          x = js.attention(q, k, v, causal=True, window=1024)    # q: [2, 8192, 32, 128], k and v: [2, 8192, 8, 128]
    """
    del force_fp32_for_softmax
    refused = {
        "module (sow_weights)": module,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, given in refused.items():
        if given is not None:
            raise ValueError(f"attention: {name} needs all weights at once; use Flax's own attention_fn for that")
    if causal is None and is_causal is None and deterministic is None:
        raise TypeError("attention: say causal=True or causal=False")
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    arrays = tuple(jnp.asarray(x).astype(dtype) for x in (query, key, value))
    batch, T, H, S = _check_shapes(*arrays)
    windows, window = (window, None) if isinstance(window, jax.Array | np.ndarray) else (None, window)
    form = Form(bool(causal or is_causal), window, soft_cap, 0.0, precision)
    _check_form(form, T, S)
    if mask is not None:
        constant = max(T, S) > _SHORT and not isinstance(mask, jax.core.Tracer)
        mask = _fit("mask", (np.asarray(mask) if constant else jnp.asarray(mask)) != 0, (*batch, H, T, S))
    extras = Extras(
        None if segment_ids is None else _fit_segments(segment_ids, batch, T, S),
        None if bias is None else _fit("bias", jnp.asarray(bias), (*batch, H, T, S)),
        mask,
        windows=None if windows is None else _fit_windows(windows, batch, form),
    )
    if dropout_rate > 0 and not deterministic:
        form = form._replace(dropout=dropout_rate)
        extras = extras._replace(keep=_draw(dropout_rng, dropout_rate, broadcast_dropout, (T, S)))
    if is_marking():
        out = jax.ShapeDtypeStruct((*batch, T, H, arrays[2].shape[-1]), dtype)
        beside = [(-1 if name == "segments" else None, x) for name, x in extras._asdict().items() if x is not None]
        dims, given = (-3, -3, -3, *(dim for dim, _ in beside)), (*arrays, *(x for _, x in beside))
        return leave_mark("js.attention", given, dims, [out], [-3], form)[0]
    rows = math.prod(batch)
    q_BTHD, k_BSKD, v_BSKE = (x.reshape(rows, *x.shape[-3:]) for x in arrays)
    extras, form = _without_known_mask(extras, form)
    attend = partial(_dispatch, extras=extras, form=form)
    if (cache := cache_in_force()) is None:
        out_BTHE = attend(q_BTHD, k_BSKD, v_BSKE)
    else:
        check_cached(cache, extras, form, T, S)
        out_BTHE = attend_cached(cache, q_BTHD, k_BSKD, v_BSKE, form, attend, extras.windows)
    return out_BTHE.reshape(*batch, T, H, v_BSKE.shape[-1])


# Arguments


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[tuple[int, ...], int, int, int]:
    """Check that query, key and value fit together; return (batch dimensions, queries, heads, keys).

    Raises:
      ValueError: they do not; names their shapes.
    """
    shapes = f"query {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim >= 3 or not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"attention: query must be [*batch, queries, heads, dim], key and value [*batch, keys, kv_heads, dim] of "
            f"the same batch, got {shapes}"
        )
    if k.shape[-3:-1] != v.shape[-3:-1]:
        raise ValueError(f"attention: key and value must have the same positions and heads, got {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention: query and key must have heads of the same width, got {shapes}")
    if min(*q.shape, *k.shape, *v.shape) < 1:
        raise ValueError(f"attention: there must be at least one of everything, got {shapes}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"attention: the {q.shape[-2]} heads of the query are not divisible by the {k.shape[-2]} of key and value: "
            f"{shapes}"
        )
    return q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-3]


def _check_form(form: Form, T: int, S: int) -> None:
    if form.window is not None and (isinstance(form.window, bool) or not isinstance(form.window, int | np.integer)):
        raise TypeError(f"attention: window must be an int, got {form.window!r}")
    if form.window is not None and form.window < 1:
        raise ValueError(f"attention: window must be at least 1 (a position sees itself), got {form.window}")
    if form.soft_cap is not None and not form.soft_cap > 0:
        raise ValueError(f"attention: soft_cap must be positive, got {form.soft_cap}")
    if T != S and (form.causal or form.window is not None):
        raise ValueError(
            f"attention: causal and window compare positions of the same sequence, but there are {T} queries and {S} "
            "keys; pass causal=False and a mask with the keys that each query sees"
        )


def _fit_segments(segment_ids: Any, batch: tuple[int, ...], T: int, S: int) -> jax.Array:
    ids = jnp.asarray(segment_ids)
    if ids.shape != (*batch, T) or T != S or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"attention: segment_ids must be integers of the shape {[*batch, T]}, one for each position, which query "
            f"and key share ({T} queries, {S} keys), got {ids.dtype}{list(ids.shape)}"
        )
    return ids.reshape(math.prod(batch), T)


def _fit_windows(windows: Any, batch: tuple[int, ...], form: Form) -> jax.Array:
    windows = jnp.asarray(windows)
    fits = windows.ndim <= len(batch) and all(size in (1, full) for size, full in zip(windows.shape[::-1], batch[::-1]))
    if not form.causal or not fits or not jnp.issubdtype(windows.dtype, jnp.integer):
        raise ValueError(
            f"attention: a window of each row must be integers of the shape {list(batch)}, with causal=True, got "
            f"{windows.dtype}{list(windows.shape)}, causal={form.causal}"
        )
    return jnp.broadcast_to(windows, batch).reshape(math.prod(batch))


def _fit(what: str, x: Any, shape: tuple[int, ...]) -> Any:
    """Reshape a bias or mask to four dimensions, [1 or B, 1 or H, 1 or T, 1 or S].

    Args:
      what: "bias" or "mask", for error messages.
      x: the array.
      shape: the shape [*batch, heads, queries, keys] to which it must broadcast.
    """
    given = x.shape
    sizes = (1,) * (len(shape) - x.ndim) + given
    if len(sizes) != len(shape) or any(size not in (1, full) for size, full in zip(sizes, shape)):
        raise ValueError(
            f"attention: the {what} {list(given)} does not broadcast to [*batch, heads, queries, keys] = {list(shape)}"
        )
    batch = sizes[:-3]
    if math.prod(batch) not in (1, math.prod(shape[:-3])):
        batch = shape[:-3]
        x = (
            np.broadcast_to(x, (*batch, *sizes[-3:]))
            if isinstance(x, np.ndarray)
            else jnp.broadcast_to(x, (*batch, *sizes[-3:]))
        )
    return x.reshape(math.prod(batch), *sizes[-3:])


def _draw(key: jax.Array | None, rate: float, broadcast: bool, shape: tuple[int, int]) -> jax.Array:
    if key is None:
        raise ValueError("attention: dropout needs a dropout_rng; or pass deterministic=True")
    if not broadcast:
        raise ValueError(
            "attention: broadcast_dropout=False would draw bits for every row and head; leave it True, or use Flax's "
            "own attention_fn"
        )
    return jax.random.bernoulli(key, 1 - rate, (1, 1, *shape))[0, 0]


def _without_known_mask(extras: Extras, form: Form) -> tuple[Extras, Form]:
    """Remove a mask that is a constant and hides nothing, and replace a constant causal mask by `causal=True`.

    The kernels for TPUs and GPUs support `causal`, but no mask arrays.
    """
    seen = extras.mask
    if not isinstance(seen, np.ndarray):
        return extras, form
    if seen.all():
        return extras._replace(mask=None), form
    if seen.shape[-1] == seen.shape[-2] and (seen == np.tri(seen.shape[-1], dtype=bool)).all():
        return extras._replace(mask=None), form._replace(causal=True)
    return extras._replace(mask=jnp.asarray(seen)), form


# The kernel


def _dispatch(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form) -> jax.Array:
    """Choose the kernel of the platform and run it on each device's shard.

    If that kernel does not support the call, use the blockwise form, with a warning. Short sequences use the plain
    formula.
    """
    device = devices_in_force()[0]
    platform = device.platform
    split = Split.in_force(q_BTHD, k_BSKD, extras, form)
    short = max(q_BTHD.shape[1], k_BSKD.shape[1]) <= (_SHORT_ON_TPU if platform == "tpu" else _SHORT)
    if (short and not split.context) or is_counting():
        named: jax.Array = checkpoint_name(formula(q_BTHD, k_BSKD, v_BSKE, extras, form), NAME)
        return named
    block = 128 if platform == "cpu" else 512
    blocks = Kernels(partial(blockwise, block=block), partial(blockwise, block=block), turns_in_blocks(block))
    kernels, reason = blocks, ""
    if platform == "tpu":
        kernels = Kernels(splash, splash_chunks, splash_turns())
        reason = why_not_splash(q_BTHD, extras, form) or split.why_not(why_not_chunks, form)
    elif platform == "gpu" and not is_rocm(device):
        kernels = Kernels(cudnn, blocks.chunks, blocks.parts)
        reason = why_not_cudnn(device, q_BTHD, v_BSKE, extras, form) or split.why_not(_why_not_on_gpus, form)
    reason = reason or (split.uneven_rows if kernels is not blocks else "")
    if reason:
        _warn_once(
            f"attention: query {list(q_BTHD.shape)} with key {list(k_BSKD.shape)} is computed in blocks, not by the "
            f"kernel for {platform}, which does not take {reason}"
        )
        kernels = blocks
    if split.whole:
        _warn_once(f"attention: every device of {split.whole_over} computes with all keys, because {split.whole}")
    with jax.named_scope(SCOPE):
        return split.run(kernels, q_BTHD, k_BSKD, v_BSKE, extras, form)


def _why_not_on_gpus(chunk: int) -> str:
    return f'chunks of {chunk} positions of a sequence (use js.context(how="ulysses") for it)'


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # over attention to its caller
