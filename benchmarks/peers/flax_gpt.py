"""The GPT as a Flax Linen module, without a word about devices."""

import jax
import optax
from flax import linen as nn


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        qkv = nn.Dense(3 * width, name="qkv")(nn.LayerNorm(name="ln_1")(x))
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jax.numpy.split(qkv, 3, axis=-1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(width, name="attn_out")(attended.reshape(x.shape))
        hidden = nn.gelu(nn.Dense(4 * width, name="mlp_in")(nn.LayerNorm(name="ln_2")(x)))
        return x + nn.Dense(width, name="mlp_out")(hidden)


class GPT(nn.Module):
    vocab: int
    width: int
    blocks: int
    heads: int
    seq: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width, name="wte")(tokens)
        x = x + self.param("wpe", nn.initializers.normal(0.02), (self.seq, self.width))[: tokens.shape[1]]
        for number in range(self.blocks):
            x = Block(self.heads, name=f"block_{number}")(x)
        return nn.Dense(self.vocab, use_bias=False, name="lm_head")(nn.LayerNorm(name="ln_f")(x))


def make_gpt(shape):
    return GPT(shape.vocab, shape.width, shape.blocks, shape.heads, shape.seq)


def mean_loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
