"""What attention takes of a device's memory: `js.attention` beside all logits, compiled, not run.

    python benchmarks/attention.py cpu          # one block, 1k to 16k positions, on this machine
    python benchmarks/attention.py v5e          # the same for one TPU v5e, to 64k; needs libtpu, no TPU
    python benchmarks/attention.py flax         # an unmodified transformer, Linen and NNX, before and after
    python benchmarks/attention.py tokamax      # our kernel (JAX's own) beside tokamax's; needs libtpu and tokamax

Temporaries are those of a training step (forward and backward pass, SGD) on each device, as the compiler assigned them.
A TPU's are those in HBM, and arrays that fit lie in VMEM instead. The last column of v5e has them all: compiled with
arrays kept out of VMEM.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.layers.attention.formula import Extras, Form
from jaxshard.layers.attention.splash import splash

WIDTH, HEADS = 1024, 8
POSITIONS = (1024, 2048, 4096, 8192, 16384)
NONE_IN_VMEM = {"xla_vf_vmem_memory_space_assignment": False}
"""The option of the compiler for v5e that keeps arrays in HBM, where they are counted."""
SGD = optax.sgd(0.1)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Attention with all logits, as `jax.nn` computes it."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


def step_of(model: Any, mesh: Any, positions: int, options: dict[str, Any] | None = None) -> Any:
    """Compile a step on one row of bf16 activations per device."""
    engine = js.explicit(compute_dtype=jnp.bfloat16, options=options)
    layout = js.layout(js.fsdp(), mesh, model.init, SGD)
    batch = {"x": jax.ShapeDtypeStruct((mesh.size, positions, WIDTH), jnp.bfloat16)}
    return js.make_step(model.loss, SGD, layout, engine=engine).compile(batch)


def report(compiled: Any) -> str:
    """Describe temporaries, and whether the TPU's kernel is in the program."""
    kernel = "splash" if "splash_mha_fwd" in compiled.as_text() else ""
    return f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:,.0f} MB {kernel}".strip()


# One block.


class Attention(nn.Module):
    """Norm, projections and attention, added to x."""

    attend: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(dtype=x.dtype)(x)
        q, k, v = (nn.DenseGeneral((HEADS, WIDTH // HEADS), name=name)(h) for name in ("query", "key", "value"))
        return x + nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(self.attend(q, k, v, causal=True))


def mean_square(model: Any, batch: Any) -> Any:
    """Any loss."""
    y = model(batch["x"]).astype(jnp.float32)
    return js.Mean((y**2).sum(), y.size)


Column = tuple[str, Any, dict[str, Any], int]
"""Title, attention, options of the compiler, and the longest row that is compiled."""


def one_block(mesh: Any, positions: Sequence[int], columns: Sequence[Column]) -> None:
    """Print the table of one block."""
    titles = [title for title, *_ in columns]
    print(f"| positions | {' | '.join(titles)} |\n|---:|{'---:|' * len(columns)}")
    for T in positions:
        cells = []
        for _, attend, options, longest in columns:
            model = js.linen(Attention(attend), mean_square, {"x": jnp.ones((8, 8, WIDTH), jnp.bfloat16)})
            cells.append(report(step_of(model, mesh, T, options)) if longest >= T else "")
        print(f"| {T:,} | {' | '.join(cells)} |", flush=True)


# Unmodified transformers.


class Transformer(nn.Module):
    """Four blocks of Linen as people write them, with a causal mask."""

    attention_fn: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        for _ in range(4):
            h = nn.LayerNorm(dtype=x.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=x.dtype, attention_fn=self.attention_fn)(h, mask=mask)
            h = nn.gelu(nn.Dense(4 * WIDTH, dtype=x.dtype)(nn.LayerNorm(dtype=x.dtype)(x)))
            x = x + nn.Dense(WIDTH, dtype=x.dtype)(h)
        return x


class NNXTransformer(nnx.Module):
    """The same in NNX, which says `is_causal=True`."""

    def __init__(self, attention_fn: Any, rngs: nnx.Rngs) -> None:
        half = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, **half) for _ in range(8)])
        self.attentions = nnx.List(
            [nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=attention_fn, **half) for _ in range(4)]
        )
        self.ups = nnx.List([nnx.Linear(WIDTH, 4 * WIDTH, **half) for _ in range(4)])
        self.downs = nnx.List([nnx.Linear(4 * WIDTH, WIDTH, **half) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, (attention, up, down) in enumerate(zip(self.attentions, self.ups, self.downs, strict=True)):
            x = x + attention(self.norms[2 * i](x), is_causal=True)
            x = x + down(nnx.gelu(up(self.norms[2 * i + 1](x))))
        return x


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Linen hands over what a function takes: this one gets no mask."""
    return js.attention(q, k, v, causal=True)


def transformers(positions: int = 4096) -> None:
    """Print the table of whole models."""
    batch = {"x": np.ones((8, 8, WIDTH), jnp.bfloat16)}
    mesh = topology_mesh("v5e:2x4", data=8)
    print("| model | attention_fn | temporaries |\n|---|---|---:|")
    linen = (("Flax's own", nn.dot_product_attention), ("js.attention", js.attention), ("lambda, causal=True", causal))
    for name, attention_fn in linen:
        model = js.linen(Transformer(partial(attention_fn)), mean_square, batch)
        print(f"| Linen | {name} | {report(step_of(model, mesh, positions))} |", flush=True)
    for name, attention_fn in (("Flax's own", nnx.dot_product_attention), ("js.attention", js.attention)):
        model = js.nnx(partial(NNXTransformer, attention_fn), mean_square)
        print(f"| NNX | {name} | {report(step_of(model, mesh, positions))} |", flush=True)


# Kernels.


def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The kernel that `js.attention` takes on TPUs."""
    return splash(q, k, v, Extras(), Form(causal=True))


def tokamax(q: jax.Array, k: jax.Array, v: jax.Array, *, steps: int | None) -> jax.Array:
    """Tokamax's kernel with our blocks; `tokamax.dot_product_attention` itself does not compile without a TPU."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernels
    from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask import CausalMask

    names = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute"
    config = kernels.SplashConfig(**dict.fromkeys(names.split(), 512), dq_reduction_steps=steps)
    kernel = kernels.make_splash_mha(mask=CausalMask((q.shape[1],) * 2), config=config, q_seq_shards=1)
    q = (q.astype(jnp.float32) / q.shape[-1] ** 0.5).astype(q.dtype)
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def kernels_beside(topology: str) -> None:
    """Print temporaries of forward and backward pass: one row, 32 heads of 128 on 8 heads of keys and values."""
    mesh = topology_mesh(topology, data=-1)
    split = NamedSharding(mesh, PartitionSpec("data"))
    sides = {
        "JAX's": ours,
        "tokamax's": partial(tokamax, steps=None),
        "tokamax's, dq_reduction_steps=3": partial(tokamax, steps=3),
    }
    print(f"| positions, {topology} | {' | '.join(sides)} |\n|---:|{'---:|' * len(sides)}")
    for T in POSITIONS[2:]:
        arrays = [jax.ShapeDtypeStruct((mesh.size, T, n, 128), jnp.bfloat16, sharding=split) for n in (32, 8, 8)]
        cells = []
        for attend in sides.values():
            rows = jax.shard_map(attend, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False)

            def loss(*qkv: jax.Array, rows: Any = rows) -> jax.Array:
                return (rows(*qkv).astype(jnp.float32) ** 2).sum()

            cells.append(report(jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile(NONE_IN_VMEM)))
        print(f"| {T:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    match sys.argv[1:]:
        case ["cpu"]:
            columns = [("all logits", plain, {}, 16384), ("js.attention", js.attention, {}, 16384)]
            one_block(js.make_mesh(jax.devices()[:1], data=1), POSITIONS, columns)
        case ["v5e"]:
            columns = [
                ("all logits", plain, {}, 4096),
                ("js.attention", js.attention, {}, 65536),
                ("all logits, none in VMEM", plain, NONE_IN_VMEM, 4096),
                ("js.attention, none in VMEM", js.attention, NONE_IN_VMEM, 65536),
            ]
            one_block(topology_mesh("v5e:2x4", data=8), (*POSITIONS, 32768, 65536), columns)
        case ["flax"]:
            transformers()
        case ["tokamax"]:
            for topology in ("v5e:2x2", "v5p:2x2x1"):
                kernels_beside(topology)
        case _:
            raise SystemExit(__doc__)
