"""What FSDP over two devices costs: CPU-seconds per step over those of the same model on one device.

    python benchmarks/fsdp_overhead.py [--rounds 15] [--steps 3] [--batch 8] [--json FILE]

Two devices do the arithmetic of one (the global batch is the same, each takes half of its rows) and, besides, gather
every weight and reduce every gradient. On simulated devices no network hides or adds anything: the CPU time that is
more than one device's is what sharding costs. Beside jaxshard's engines stands torch FSDP2 (`fully_shard`), two gloo
ranks on the loopback interface over its own single process, where torch is installed (extra `bench`).

What makes it fair, besides what `interleaved.py` says:
- The same transformer on both sides: pre-LN blocks, causal attention, GELU, f32, AdamW. Every variant runs the same
  steps on the same global batch, and the benchmark fails unless the losses within a library agree.
- One compute thread per device: XLA and torch are told not to split an operation over threads. Given two threads for
  its one device, torch's reference lets one spin while it waits for the other, which counts as CPU time and flatters
  FSDP.
- Each side is asked for what suits it: torch gets AdamW's `foreach` form, which calls an operation once for all
  parameters and so spares its distributed tensors most of their dispatch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import socket
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from interleaved import Step, Variant, check_losses, free_cores, measure, report, work

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


class Shape(NamedTuple):
    """The model and its global batch."""

    width: int
    blocks: int
    heads: int
    seq: int
    batch: int
    vocab: int = 256


def global_tokens(shape: Shape) -> np.ndarray:
    return np.random.default_rng(0).integers(0, shape.vocab, (shape.batch, shape.seq + 1), dtype=np.int32)


def variants_of(shape: Shape) -> list[Variant]:
    jax_one, torch_one = "jax one device", "torch one process"
    variants = [
        Variant(jax_one, partial(jax_one_device, shape)),
        Variant("jaxshard fsdp auto", partial(jax_fsdp, shape, "auto"), 2, 1, jax_one, 1.20),
        Variant("jaxshard fsdp explicit", partial(jax_fsdp, shape, "explicit"), 2, 1, jax_one, 1.35),
    ]
    if importlib.util.find_spec("torch") is not None:
        variants += [
            Variant(torch_one, partial(torch_one_process, shape)),
            Variant("torch fsdp2 gloo", partial(torch_fsdp2, shape), 2, 2, torch_one),
        ]
    return variants


# The JAX side. Imports stand inside functions: a worker is pinned to its cores before any library counts them.


def jax_model_and_optimizer(shape: Shape) -> tuple[Any, Any]:
    import optax

    from jaxshard.models.gpt import gpt

    model = gpt(vocab=shape.vocab, width=shape.width, depth=shape.blocks, heads=shape.heads, seq=shape.seq, tied=False)
    return model, optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def jax_one_device(shape: Shape, rank: int, meeting: str) -> Step:
    """Plain `jax.jit` of the step: of jaxshard only the model's functions."""
    import jax
    import optax

    model, tx = jax_model_and_optimizer(shape)

    def update(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(lambda p: model.loss(p, batch, key).value)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}  # what make_step reports too
        return optax.apply_updates(params, updates), opt_state, metrics

    compiled = jax.jit(update, donate_argnums=(0, 1))
    key = jax.random.key(0)
    params = jax.jit(model.init)(key)
    opt_state = jax.jit(tx.init)(params)
    batch = jax.device_put({"tokens": global_tokens(shape)})

    def step() -> float:
        nonlocal params, opt_state
        params, opt_state, metrics = jax.block_until_ready(compiled(params, opt_state, batch, key))
        return float(metrics["loss"])

    return step


def jax_fsdp(shape: Shape, engine: str, rank: int, meeting: str) -> Step:
    import jax

    import jaxshard as js

    js.simulate_devices(2)
    model, tx = jax_model_and_optimizer(shape)
    layout = js.layout(js.fsdp("data"), js.make_mesh(data=2), model.init, tx)
    run = js.init(model.init, tx, layout, jax.random.key(0))
    engines = {"auto": js.auto, "explicit": js.explicit}
    compiled = js.make_step(model.loss, tx, layout, engine=engines[engine]())
    tokens = global_tokens(shape)
    batch = {"tokens": jax.device_put(tokens, layout.batch_sharding(jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)))}

    def step() -> float:
        nonlocal run
        run, metrics = jax.block_until_ready(compiled(run, batch))
        return float(metrics["loss"])

    return step


# The torch side.


def torch_model(shape: Shape) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = shape.width
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.attn_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            qkv = self.qkv(self.ln_1(x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (shape.heads, -1)).transpose(1, 2) for part in qkv)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
            return x + self.mlp_out(functional.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(shape.vocab, shape.width), nn.Embedding(shape.seq, shape.width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.blocks))
            self.ln_f, self.lm_head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocab, bias=False)
            for embedding in (self.wte, self.wpe):
                nn.init.normal_(embedding.weight, std=0.02)

        def forward(self, tokens: Any) -> Any:
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    torch.manual_seed(0)
    return GPT()


def torch_step(model: Any, tokens: np.ndarray) -> Step:
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True)
    inputs, targets = torch.from_numpy(tokens[:, :-1]).long(), torch.from_numpy(tokens[:, 1:]).long()

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def torch_one_process(shape: Shape, rank: int, meeting: str) -> Step:
    import torch

    torch.set_num_threads(1)
    return torch_step(torch_model(shape), global_tokens(shape))


def torch_fsdp2(shape: Shape, rank: int, meeting: str) -> Step:
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    model = torch_model(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = shape.batch // 2
    return torch_step(model, global_tokens(shape)[rank * rows : (rank + 1) * rows])


def environment() -> dict[str, str]:
    return {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option: Callable[..., Any] = partial(parser.add_argument, type=int, metavar="N")
    option("--rounds", default=15, help="turns of every variant")
    option("--steps", default=3, help="steps per turn")
    option("--width", default=512)
    option("--blocks", default=6)
    option("--heads", default=8)
    option("--seq", default=128)
    option("--batch", default=8, help="rows of the global batch")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2 or options.steps < 1 or options.batch % 2:
        parser.error("at least 2 rounds and 1 step are needed, and a batch that two devices can share")
    shape = Shape(options.width, options.blocks, options.heads, options.seq, options.batch)
    variants = variants_of(shape)
    if options.worker:
        work(variants, options.worker)
    has_torch = any(variant.name.startswith("torch") for variant in variants)
    versions = {name: version(name) for name in ("jax", "jaxlib", *(["torch"] if has_torch else []))}
    versions = {"python": platform.python_version()} | versions
    cores = free_cores(2)
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print(f"{shape}, f32, AdamW; cores {cores or 'not pinned'}; {options.rounds} rounds of {options.steps} steps")
    if not has_torch:
        print("torch is not installed (extra `bench`; none for this Python version): its half is left out")
    turns = measure(variants, options.rounds, options.steps, cores, environment())
    check_losses(turns, variants)
    rows = report(turns, variants)
    if options.json:
        figures = {"versions": versions, "shape": shape._asdict(), "rounds": options.rounds, "steps": options.steps}
        Path(options.json).write_text(json.dumps(figures | {"variants": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
