"""The same GPT as a torch module, without a word about devices."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attn_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(shape.vocab, shape.width), nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks))
        self.ln_f, self.lm_head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocab, bias=False)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def mean_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
