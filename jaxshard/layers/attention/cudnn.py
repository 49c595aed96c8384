"""Attention on NVIDIA GPUs by cuDNN, through `jax.nn.dot_product_attention`.

Shape suffixes are explained in `formula.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxshard.core.compat import has_cudnn
from jaxshard.layers.attention.blockwise import NAME
from jaxshard.layers.attention.formula import Extras, Form

_MOST_WIDTH = 128
_OLDEST = 8.0


def is_rocm(gpu: Any) -> bool:
    """Return True for an AMD GPU, for which there is no cuDNN."""
    return "rocm" in gpu.client.platform_version


def why_not_cudnn(gpu: Any, q_BTHD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form) -> str:
    """Return why cuDNN's fused kernel can't compute a call of attention; "" if it can.

    It may not store all logits: calls for which cuDNN would store them are refused.
    """
    D, E = q_BTHD.shape[-1], v_BSKE.shape[-1]
    if float(gpu.compute_capability) < _OLDEST:
        return f"compute capability {gpu.compute_capability}; it takes {_OLDEST} and up"
    if q_BTHD.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the dtype {q_BTHD.dtype}; it takes bfloat16 and float16"
    if D != E or D % 8 or D > _MOST_WIDTH:
        return f"heads of {D} and values of {E}; it takes equal multiples of 8 up to {_MOST_WIDTH}"
    if extras.windows is not None:
        return "traced windows, such as a window for each row"
    if extras.segments is not None:
        return "segment_ids"
    if extras.mask is not None or extras.bias is not None:
        return "a mask or a bias, which it would hold for every head"
    if extras.keep is not None:
        return "dropout"
    if form.soft_cap is not None:
        return "a soft_cap"
    if form.window is not None and not form.causal:
        return "a window without causal=True"
    if form.precision is not None:
        return f"precision={form.precision}"
    if _is_elsewhere(gpu) and not has_cudnn():
        return (
            "a program for a GPU that is not here while cuDNN is not installed (pip install nvidia-cudnn-cu12); "
            "predicted memory and time are those of blocks, which store no logits either"
        )
    return ""


def _is_elsewhere(gpu: Any) -> bool:
    """Return True if the GPU is not in this machine: the program is only compiled or planned for it."""
    client = gpu.client
    compiles = getattr(client, "runtime_type", "") == "compile_only_runtime"
    return compiles or getattr(client, "platform", "") == "planned"


def cudnn(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, extras: Extras, form: Form) -> jax.Array:
    """Compute attention on a GPU by cuDNN's fused kernel, through `jax.nn.dot_product_attention`.

    Call it only if `why_not_cudnn` returns "": `extras` (bias, mask and the like) must be empty.
    """
    del extras
    window = None if form.window is None else (form.window - 1, 0)
    out = jax.nn.dot_product_attention(
        q_BTHD, k_BSKD, v_BSKE, is_causal=form.causal, local_window_size=window, implementation="cudnn"
    )
    named: jax.Array = checkpoint_name(out, NAME)
    return named
