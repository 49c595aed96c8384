"""Two classifiers of images as their users write them, for the steps of `plan_cases.py`: a ViT and a ResNet.

A batch is {"images": uint8[B, H, W, 3], "labels": int[B]}; each model has `init` and `loss`. Shape suffixes: B rows,
T patches, C width, H heads, D = C / H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import jaxshard as js
from jaxshard.core.tree import map_with_path, path_str

SIDE, CLASSES = 224, 1000
LARGE = {"width": 1024, "depth": 24, "heads": 16}
"""ViT-L of Dosovitskiy et al. 2021, table 1; with patches of 16 pixels."""

RESIDUAL = ("batch", "sequence", None)
WHOLE_ROWS = ("batch", "context", None)
HEADS = ("batch", "context", "heads", None)


def mean_loss(logits: jax.Array, batch: Any) -> js.Mean:
    """The mean of nats per image."""
    logits = js.constrain(logits.astype(jnp.float32), ("batch", None))
    nats = js.cross_entropy(logits, batch["labels"])
    return js.Mean(nats.sum(), nats.size)


def normalize(images: jax.Array) -> jax.Array:
    """Images from 0 to 255 as floats with ImageNet's mean and standard deviation taken out."""
    return (images.astype(jnp.float32) / 255 - jnp.array([0.485, 0.456, 0.406])) / jnp.array([0.229, 0.224, 0.225])


# The vision transformer, whose activations have the names of `js.models.gpt`.


class Patches(nn.Module):
    width: int
    patch: int = 16

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        n, p = SIDE // self.patch, self.patch
        x_BTP = x_BHWC.reshape(-1, n, p, n, p, 3).swapaxes(2, 3).reshape(-1, n * n, p * p * 3)
        x_BTC = js.constrain(nn.Dense(self.width, name="patch")(x_BTP), WHOLE_ROWS)
        return x_BTC + self.param("wpe", nn.initializers.normal(0.02), (n * n, self.width))


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        B, T, C = x_BTC.shape
        h_BTC = js.constrain(nn.LayerNorm(name="ln_1")(x_BTC), WHOLE_ROWS, grad=RESIDUAL)
        qkv = checkpoint_name(nn.Dense(3 * C, name="qkv")(h_BTC), "qkv").reshape(B, T, self.heads, 3, C // self.heads)
        q_BTHD, k_BTHD, v_BTHD = (js.constrain(qkv[:, :, :, i], HEADS) for i in range(3))
        h_BTC = js.constrain(js.attention(q_BTHD, k_BTHD, v_BTHD, causal=False), HEADS).reshape(B, T, C)
        h_BTC = js.constrain(nn.Dense(C, name="attn_out")(h_BTC), RESIDUAL)
        x_BTC = x_BTC + checkpoint_name(h_BTC, "attention_proj")
        h_BTC = js.constrain(nn.LayerNorm(name="ln_2")(x_BTC), WHOLE_ROWS, grad=RESIDUAL)
        h_BTF = checkpoint_name(nn.Dense(4 * C, name="mlp_in")(h_BTC), "mlp_hidden")
        h_BTF = js.constrain(nn.gelu(h_BTF, approximate=False), ("batch", "context", "mlp"))
        return x_BTC + js.constrain(nn.Dense(C, name="mlp_out")(h_BTF), RESIDUAL)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES, name="classes")(nn.LayerNorm(name="ln_f")(x_BTC).mean(1))


class ViT(js.Stacked):
    """A `js.Stacked` vision transformer whose first and last matrix a tensor axis does not split."""

    def dim_names(self, params: Any) -> Any:
        whole = ("embed/patch/kernel", "head/classes/kernel")
        return map_with_path(
            lambda path, _, names: ("embed", "embed") if path_str(path) in whole else names,
            params,
            super().dim_names(params),
        )


def vit(width: int, depth: int, heads: int) -> ViT:
    """Build a vision transformer with patches of 16 pixels."""
    patches, one_block, output = Patches(width), Block(heads), Head()

    def init(key: jax.Array) -> Any:
        keys, x_BTC = jax.random.split(key, 3), jnp.zeros((1, 1, width))
        return {
            "embed": patches.init(keys[0], jnp.zeros((1, SIDE, SIDE, 3)))["params"],
            "block": one_block.init(keys[1], x_BTC)["params"],
            "head": output.init(keys[2], x_BTC)["params"],
        }

    def embed(params: Any, batch: Any, key: Any) -> jax.Array:
        dtype = jax.tree.leaves(params["embed"])[0].dtype
        x_BTC = patches.apply({"params": params["embed"]}, normalize(batch["images"]).astype(dtype))
        return js.constrain(x_BTC, RESIDUAL, grad=WHOLE_ROWS)

    def block(params: Any, x_BTC: jax.Array, key: Any) -> jax.Array:
        return one_block.apply({"params": params}, x_BTC)

    def head(params: Any, x_BTC: jax.Array, batch: Any, key: Any) -> js.Mean:
        return mean_loss(output.apply({"params": params["head"]}, x_BTC), batch)

    return ViT(embed, block, head, depth, init)


# The residual network.


class Bottleneck(nn.Module):
    features: int
    stride: int
    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x)))
        y = nn.relu(self.norm()(nn.Conv(self.features, (3, 3), self.stride, use_bias=False)(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(nn.Conv(4 * self.features, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = self.norm()(nn.Conv(4 * self.features, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def norm(**options: Any) -> nn.BatchNorm:
            return nn.BatchNorm(not train, momentum=0.9, axis_name=js.row_axes() or None, **options)

        x = nn.relu(norm()(nn.Conv(64, (7, 7), 2, use_bias=False)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, depth in enumerate((3, 4, 6, 3)):
            for number in range(depth):
                x = Bottleneck(64 * 2**stage, 2 if stage > 0 and number == 0 else 1, norm)(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def resnet50() -> Any:
    """A `js.linen` residual network with batch statistics (He et al. 2016, table 1)."""
    example = {
        "images": jax.ShapeDtypeStruct((1, SIDE, SIDE, 3), jnp.uint8),
        "labels": jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    return js.linen(
        ResNet50(),
        lambda model, batch, train: mean_loss(model(normalize(batch["images"]), train=train), batch),
        example,
    )


def batch_of(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch."""
    images = jax.ShapeDtypeStruct((rows, SIDE, SIDE, 3), jnp.uint8)
    return {"images": images, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}
