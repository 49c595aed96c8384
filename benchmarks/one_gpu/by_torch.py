"""The same Llama in torch, compiled, with its fused attention: bf16 by autocast, and fp8 by torchao where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from one_gpu.shape import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    NORM_EPSILON,
    ROPE_BASE,
    WEIGHT_DECAY,
    Effort,
    Shape,
    speed,
    time_steps,
)
from torch import nn
from torch.nn import functional


def llama(shape: Shape) -> nn.Module:
    C, H = shape.width, shape.heads
    rates = ROPE_BASE ** (-torch.arange(0, C // H, 2) / (C // H))
    angles = torch.arange(shape.seq)[:, None] * rates

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm, self.mlp_norm = nn.RMSNorm(C, eps=NORM_EPSILON), nn.RMSNorm(C, eps=NORM_EPSILON)
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
            self.embed, self.norm = nn.Embedding(shape.vocab, C), nn.RMSNorm(C, eps=NORM_EPSILON)
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


def in_eight_bits(model: nn.Module) -> None:
    """Let the linear layers of the blocks compute in fp8, scaled by tensor; the head stays in bf16."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "head")


def measure_torch(shape: Shape, effort: Effort, quant: str | None) -> Iterator[dict[str, Any]]:
    """Yield the figures of speed and memory."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = llama(shape).to(device)
    shape.check_parameters(sum(x.numel() for x in model.parameters()))
    if quant is not None:
        in_eight_bits(model)
    compiled = torch.compile(model) if on_gpu else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=on_gpu
    )
    tokens = torch.from_numpy(shape.tokens()).long().to(device)

    def take(count: int) -> float:
        for _ in range(count):
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    timed = time_steps(take, effort)
    yield speed(shape, timed, torch.cuda.get_device_name() if on_gpu else "cpu")
    yield {"peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}
