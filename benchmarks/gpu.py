"""Training speed on one GPU: ours with cuDNN's attention beside torch, compiled, with its fused attention.

    pip install -e ".[cuda12]" torch
    python benchmarks/gpu.py [--models 125m 350m 1.5b] [--rounds 6] [--steps 10] [--json FILE]
    python benchmarks/gpu.py --smoke          # tiny sizes, on whatever is there: that the command runs

Llama-shaped models, f32 parameters and AdamW moments, products in bf16, the same random tokens. Both sides are
processes of their own that take turns on the GPU, a few steps at a time (`interleaved.py`); a figure is the median over
the turns, the ratio that of the rounds' own ratios. Printed are tokens per second and the model FLOPs utilization (MFU)
of the chip's dense bf16 peak, without recomputation, by two counts of FLOPs per token:

- 6N: six for each parameter but the embedding table, which multiplies nothing,
- PaLM's: with the products of attention, 12 L C T more (causal or not; Chowdhery et al. 2022, appendix B).

It also prints the estimates of `js.plan.predict` for memory and time, the bytes that the compiler allocates, the peak
that the device reports, and the time of a call of the step while the GPU is idle (later calls may wait: a stream takes
about a thousand kernels in advance, fewer than a step has). Each
model is printed, and written to the file, as soon as it is measured.

Without torch its half is left out. Whether our program calls cuDNN's attention is read from its text and printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from interleaved import Step, Turns, Variant, measure, work

OURS, TORCH = "jaxshard", "torch"
LEARNING_RATE, WEIGHT_DECAY, EPSILON, BETAS = 3e-4, 0.1, 1e-8, (0.9, 0.95)
NOTES = "JAXSHARD_BENCHMARK_NOTES"
"""The variable that names the file in which our process says where it ran."""
AT_ONCE = 5
"""Steps that are dispatched before one is waited for."""


class Shape(NamedTuple):
    """A Llama and its batch: `rows` rows of `seq` tokens.

    `remat` is the engine's. "dots" keeps the results of products and recomputes what is cheap, as torch.compile does.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    rows: int
    seq: int = 2048
    vocab: int = 32_000
    remat: str = "dots"

    @property
    def parameters(self) -> int:
        """All parameters: embedding, blocks, last norm, output."""
        C = self.width
        return 2 * self.vocab * C + self.depth * (4 * C * C + 3 * C * self.hidden + 2 * C) + C

    @property
    def flops_per_token(self) -> dict[str, float]:
        """By the two counts."""
        six = 6 * (self.parameters - self.vocab * self.width)
        return {"6N": six, "PaLM": six + 12 * self.depth * self.width * self.seq}


MODELS = {
    "125m": Shape(768, 12, 12, 2048, rows=16),
    "350m": Shape(1024, 24, 16, 2816, rows=8),
    "1.5b": Shape(2048, 28, 16, 5504, rows=2),
}
SMOKE = {"tiny": Shape(64, 2, 4, 128, rows=2, seq=32, vocab=256)}


def tokens_of(shape: Shape) -> np.ndarray:
    return np.random.default_rng(0).integers(0, shape.vocab, (shape.rows, shape.seq + 1), dtype=np.int32)


def ours(shape: Shape, rank: int, meeting: str) -> Step:
    import jax
    import jax.numpy as jnp
    import optax

    import jaxshard as js

    model = js.models.llama(
        vocab=shape.vocab, width=shape.width, depth=shape.depth, heads=shape.heads, kv_heads=shape.heads,
        hidden=shape.hidden, seq=shape.seq, rope_base=10_000,
    )  # fmt: skip
    tx = optax.adamw(LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPSILON, weight_decay=WEIGHT_DECAY)
    layout = js.layout(js.ddp(), js.make_mesh(jax.devices()[:1], data=1), model.init, tx)
    engine = js.explicit(compute_dtype=jnp.bfloat16, remat=shape.remat)
    step = js.make_step(model.loss, tx, layout, engine=engine)
    run = js.init(model.init, tx, layout, key=0)
    parameters = sum(x.size for x in jax.tree.leaves(run.params))
    assert parameters == shape.parameters, f"{parameters:,} parameters, {shape.parameters:,} expected"
    batch = {"tokens": jnp.asarray(tokens_of(shape))}
    predicted = js.plan.predict(layout, model.loss, batch, engine, tx=tx, estimate=True)
    compiled = step.compile(batch)
    about = {
        "device": jax.devices()[0].device_kind,
        "attention": "cuDNN's" if "cudnn$fmha" in compiled.as_text() else "XLA's products, or another kernel",
        "estimated_bytes": predicted.live_bytes,
        "estimated_seconds": None if predicted.time is None else [predicted.time.low, predicted.time.high],
        "compiled_bytes": compiled.memory_analysis().peak_memory_in_bytes,
    }
    calls: list[float] = []

    def steps() -> float:
        nonlocal run
        start = time.perf_counter()
        run, metrics = step(run, batch)
        calls.append(time.perf_counter() - start)
        for _ in range(AT_ONCE - 1):
            run, metrics = step(run, batch)
        loss = float(metrics["loss"])
        memory = jax.devices()[0].memory_stats() or {}
        seen = {"peak_bytes": memory.get("peak_bytes_in_use"), "call_seconds": statistics.median(calls)}
        Path(os.environ[NOTES]).write_text(json.dumps(about | seen))
        return loss

    return steps


def torch_model(shape: Shape) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    C, H = shape.width, shape.heads
    rates = 10_000.0 ** (-torch.arange(0, C // H, 2) / (C // H))
    angles = torch.arange(shape.seq)[:, None] * rates

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm, self.mlp_norm = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
            self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
            self.gate, self.up = nn.Linear(C, shape.hidden, bias=False), nn.Linear(C, shape.hidden, bias=False)
            self.down = nn.Linear(shape.hidden, C, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            B, T, _ = x.shape
            q, k, v = self.qkv(self.attn_norm(x)).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
            h = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(shape.vocab, C), nn.RMSNorm(C, eps=1e-5)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.depth))
            self.head = nn.Linear(C, shape.vocab, bias=False)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens[:, :-1])
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = self.head(self.norm(x)).float()
            return functional.cross_entropy(logits.view(-1, shape.vocab), tokens[:, 1:].reshape(-1))

    return Llama()


def torchs(shape: Shape, rank: int, meeting: str) -> Step:
    import torch

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = torch_model(shape).to(device)
    parameters = sum(x.numel() for x in model.parameters())
    assert parameters == shape.parameters, f"{parameters:,} parameters, {shape.parameters:,} expected"
    compiled = torch.compile(model) if on_gpu else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=on_gpu
    )
    tokens = torch.from_numpy(tokens_of(shape)).long().to(device)

    def steps() -> float:
        for _ in range(AT_ONCE):
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return steps


def variants_of(models: dict[str, Shape]) -> dict[str, list[Variant]]:
    """What is compared, by model: torch only where it is installed."""
    both = {
        name: [Variant(f"{name} {OURS}", partial(ours, shape)), Variant(f"{name} {TORCH}", partial(torchs, shape))]
        for name, shape in models.items()
    }
    return both if importlib.util.find_spec("torch") else {name: pair[:1] for name, pair in both.items()}


def figures(shape: Shape, turns: Turns, peak: float | None) -> dict[str, dict[str, Any]]:
    """Tokens per second and MFU of every side, and our share of torch's speed, round by round."""
    found: dict[str, dict[str, Any]] = {}
    for name, of_one in turns.items():
        seconds = statistics.median(turn.wall for turn in of_one) / AT_ONCE
        speed = shape.rows * shape.seq / seconds
        found[name] = {"seconds_per_step": seconds, "tokens_per_second": speed, "loss": of_one[-1].loss}
        if peak is not None:
            found[name] |= {f"mfu {count}": speed * flops / peak for count, flops in shape.flops_per_token.items()}
    names = list(turns)
    if len(names) == 2:
        ratios = [theirs.wall / mine.wall for mine, theirs in zip(*turns.values(), strict=True)]
        found[names[0]]["of_torch"] = statistics.median(ratios)
    return found


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| | s/step | tokens/s | of torch's | MFU (6N) | MFU (PaLM) | loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        share = f"{row['of_torch']:.2f}" if "of_torch" in row else ""
        used = [f"{row[f'mfu {count}']:.1%}" if f"mfu {count}" in row else "" for count in ("6N", "PaLM")]
        cells = [name, f"{row['seconds_per_step']:.4f}", f"{row['tokens_per_second']:,.0f}", share, *used]
        lines.append("| " + " | ".join([*cells, f"{row['loss']:.3f}"]) + " |")
    return "\n".join(lines)


def beforehand(about: dict[str, Any]) -> str:
    """Print the estimated and the measured memory, and the time of one call of the step."""
    sizes = {"estimated": "estimated_bytes", "by the compiler": "compiled_bytes", "seen": "peak_bytes"}
    memory = [f"{name} {about[key] / 1e9:.3g} GB" for name, key in sizes.items() if about[key] is not None]
    seconds = about["estimated_seconds"]
    time_ = [] if seconds is None else [f"step estimated {seconds[0]:.4f} to {seconds[1]:.4f} s"]
    call = f"a call takes {1e6 * about['call_seconds']:.0f} us"
    return "; ".join(["memory: " + ", ".join(memory), *time_, call])


def versions() -> dict[str, str]:
    names = ["jax", "jaxlib", *(["torch"] if importlib.util.find_spec("torch") else [])]
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def compare(name: str, shape: Shape, variants: Sequence[Variant], rounds: int, steps: int) -> dict[str, Any]:
    """Let the sides of one model take turns, and print what they reached."""
    import jaxshard as js

    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes.json")
        # Both sides share the memory: none may reserve what it does not need.
        environment = {
            NOTES: str(notes), "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.92"
        }  # fmt: skip
        turns = measure(variants, rounds, steps, [], environment)
        about = json.loads(notes.read_text())
    chip = js.plan.chip(about["device"])
    found = figures(shape, turns, None if chip is None else chip.peak_flops)
    print(f"\n{name}: {shape.parameters:,} parameters, {shape.rows} rows of {shape.seq} tokens, on {about['device']}")
    print(f"attention of {OURS}: {about['attention']}")
    print(beforehand(about))
    print(table(found), flush=True)
    return about | {"shape": shape._asdict(), "sides": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", type=int, help="rows per step, for all models")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help=f"times {AT_ONCE} steps in a turn")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = SMOKE if options.smoke else {name: MODELS[name] for name in options.models}
    if options.rows:
        models = {name: shape._replace(rows=options.rows) for name, shape in models.items()}
    variants = variants_of(models)
    if options.worker:
        work([one for pair in variants.values() for one in pair], options.worker)
    rounds, steps = (2, 1) if options.smoke else (options.rounds, options.steps)
    print(", ".join(f"{name} {number}" for name, number in versions().items()), flush=True)
    if not importlib.util.find_spec("torch"):
        print("torch is not installed: its half is left out (pip install torch)", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name, shape in models.items():
        results[name] = compare(name, shape, variants[name], rounds, steps)
        if options.json:
            Path(options.json).write_text(json.dumps({"versions": versions(), "models": results}, indent=1))


if __name__ == "__main__":
    main()
