"""Forward and backward pass of causal attention, one row for every kernel that `js.attention` knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from one_gpu.shape import Effort, time_steps

from jaxshard.layers.attention.blockwise import blockwise
from jaxshard.layers.attention.cudnn import cudnn, why_not_cudnn
from jaxshard.layers.attention.formula import Extras, Form, formula
from jaxshard.layers.attention.splash import splash

KERNELS = ("cudnn", "splash", "blocks", "all logits")
FORM, EXTRAS = Form(causal=True), Extras()


class Arrays(NamedTuple):
    """The shape of queries, keys and values."""

    rows: int
    seq: int
    heads: int
    dim: int

    @property
    def flops(self) -> float:
        """Of both passes: two products forward and five backward, each over half of the positions."""
        return 7 * self.rows * self.heads * self.seq**2 * self.dim


def kernel(name: str, x: jax.Array) -> Callable[..., jax.Array] | str:
    """Return the attention of this name, or why it does not exist on this device."""
    device = jax.devices()[0]
    if name == "splash":
        return splash if device.platform == "tpu" else f"JAX's kernel for TPUs; this is a {device.platform}"
    if name == "cudnn":
        if device.platform != "gpu":
            return f"NVIDIA's kernel for its GPUs; this is a {device.platform}"
        return why_not_cudnn(device, x, x, EXTRAS, FORM) or cudnn
    return formula if name == "all logits" else partial(blockwise, block=128 if device.platform == "cpu" else 512)


def measure_attention(shape: Arrays, effort: Effort) -> Iterator[dict[str, Any]]:
    """Yield the figures of every kernel, in the order of `KERNELS`."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (shape.rows, shape.seq, shape.heads, shape.dim), jnp.bfloat16) for key in keys)
    for name in KERNELS:
        attend = kernel(name, q)
        if isinstance(attend, str):
            yield {"not available": attend}
            continue

        def loss(q: Any, k: Any, v: Any, attend: Callable[..., jax.Array] = attend) -> jax.Array:
            return jnp.square(attend(q, k, v, EXTRAS, FORM).astype(jnp.float32)).mean()

        compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, v).compile()

        def take(count: int, compiled: Any = compiled) -> float:
            for _ in range(count):
                value, _ = compiled(q, k, v)
            return float(value)

        seconds = sorted(time_steps(take, effort).seconds)[effort.rounds // 2]
        yield {
            "seconds": seconds,
            "flops_per_second": shape.flops / seconds,
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "shape": shape._asdict(),
        }
