"""Vision transformers as `js.Stacked` models. `models/classifier.py` describes the batch.

Shape suffixes: B rows, T patches, P pixels of a patch times channels, C width, F the MLP's width, H heads, D = C / H.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.constrain import constrain
from jaxshard.core.loss import Loss, Mean
from jaxshard.core.tree import map_with_path, path_str
from jaxshard.core.types import PyTree
from jaxshard.layers.attention.attention import attention
from jaxshard.models.classifier import ImageShape, check_images, classifier_loss, image_shape
from jaxshard.models.parts import (
    HEADS,
    RESIDUAL,
    STDDEV,
    WHOLE_ROWS,
    apply,
    apply_to_rows,
    check_sizes,
    enter_tensor_region,
)
from jaxshard.models.readout import run_stacked
from jaxshard.models.recipe import Recipe, Size

_WHOLE = ("embed/patch/kernel", "head/classes/kernel")
"""Matrices that a tensor axis does not split: they are small, and what they make is whole in any case."""


class ViT(Stacked):
    """A `js.Stacked` classifier of images whose blocks are those of a transformer; made by `js.models.vit`.

    Attributes:
      images: the images that it takes.
      classes: how many classes there are.
    """

    def __init__(self, images: ImageShape, patch: int, classes: int, width: int, depth: int, heads: int, hidden: int):
        self.images, self.classes = images, classes
        patches = Patches(patch, width, (images.side // patch) ** 2)
        one_block, output = Block(heads, hidden), Head(classes)

        def embed(params: PyTree, batch: PyTree, key: jax.Array | None) -> jax.Array:
            x_BHWC = images.normalize(check_images("vit", batch))
            dtype = jax.tree.leaves(params["embed"])[0].dtype
            return constrain(apply(patches, params["embed"], x_BHWC.astype(dtype)), RESIDUAL, grad=WHOLE_ROWS)

        def block(params: PyTree, x_BTC: jax.Array, key: jax.Array | None) -> jax.Array:
            return apply(one_block, params, x_BTC)

        def head(params: PyTree, x_BTC: jax.Array, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
            return classifier_loss("vit", classes, self.readout(params, x_BTC), batch, accuracy=key is None)

        def readout(params: PyTree, x_BTC: jax.Array) -> jax.Array:
            return apply(output, params["head"], x_BTC).astype(jnp.float32)

        def init(key: jax.Array) -> PyTree:
            keys = jax.random.split(key, 3)
            x_BTC = jnp.zeros((1, 1, width))
            pixels = jnp.zeros((1, images.side, images.side, images.channels))
            return {
                "embed": patches.init(keys[0], pixels)["params"],
                "block": one_block.init(keys[1], x_BTC)["params"],
                "head": output.init(keys[2], x_BTC)["params"],
            }

        super().__init__(embed, block, head, depth, init)
        self.readout = readout

    def logits(self, params: PyTree, images: jax.Array) -> jax.Array:
        """Compute the logits [B, classes] of images [B, H, W, C], in f32.

        Args:
          params: the parameters, in model order; such as `js.make_apply` hands them to a function.
          images: uint8, or floats from 0 to 1.
        """
        return run_stacked(self, params, {"images": images})

    def separate_labels(self, batch: PyTree) -> PyTree:
        """Refuse `js.context`, which asks for this: an image has one label, not one for each position.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            "vit: js.context splits the positions of rows, but a batch of images has none; leave out the axis of the "
            "context, and split rows (data), weights (fsdp, tensor) or blocks (pipe)"
        )

    def dim_names(self, params: PyTree) -> PyTree:
        """Return the names of the blocks' first dimension, and of the first and last matrix, which stay whole."""
        return map_with_path(
            lambda path, _, names: ("embed", "embed") if path_str(path) in _WHOLE else names,
            params,
            super().dim_names(params),
        )


def vit(
    *,
    image: int,
    patch: int,
    classes: int,
    width: int,
    depth: int,
    heads: int,
    expansion: int = 4,
    channels: int = 3,
    mean: Sequence[float] | float | None = None,
    stddev: Sequence[float] | float | None = None,
) -> ViT:
    """Build a vision transformer: `model.init(key)`, `model.loss(params, batch, key)`, `model.logits(params, images)`.

    An image is cut into patches, each projected to the width C; learned positions are added. Blocks are layer norm and
    attention, layer norm and an MLP with GELU, with biases everywhere. A last layer norm, the mean over patches, and a
    matrix that begins at zero make the logits. (The mean in the place of a class token, as in appendix D.3 of the
    paper and in Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k".) Everything is computed in the dtype
    of the parameters; layer-norm statistics, softmax and loss are in f32.

    Activations that `remat` policies of engines can name: "block_in", "qkv", "attention_out", "attention_proj" and
    "mlp_hidden", as in `js.models.gpt`.

    Args:
      image: height and width of the images, in pixels, a multiple of `patch`.
      patch: height and width of a patch.
      classes: the number of classes.
      width: the width C of the residual stream, a multiple of `heads`.
      depth: the number of blocks.
      heads: the number of attention heads.
      expansion: the MLP's width over `width`.
      channels: 3 for colours, 1 for grey images.
      mean: what is taken away from each channel, from 0 to 1; None for ImageNet's.
      stddev: by what each channel is then divided; None for ImageNet's.

    Returns:
      The model, a `js.Stacked` that every engine can run, pipelines included.

    Raises:
      ValueError: a size below 1, an image that `patch` does not divide, or a width that `heads` does not divide.
      TypeError: a size that is no whole number.

    Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", section 3.1.

    Example:
        model = js.models.vit(image=32, patch=8, classes=10, width=64, depth=2, heads=4)
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
    """
    check_sizes(
        "vit",
        {"image": image, "patch": patch, "classes": classes, "width": width, "depth": depth, "heads": heads}
        | {"expansion": expansion, "channels": channels},
    )
    if image % patch:
        raise ValueError(
            f"vit: patches of {patch} pixels do not divide an image of {image}; pass a multiple of {patch}"
        )
    if width % heads:
        raise ValueError(f"vit: width {width} is not divisible by heads {heads}; pass a multiple of {heads}")
    images = image_shape("vit", image, channels, mean, stddev)
    return ViT(images, patch, classes, width, depth, heads, expansion * width)


def _sized(width: int, depth: int, heads: int, patch: int, recipe: Recipe, remat: str) -> Size:
    shape = {"image": 224, "patch": patch, "classes": 1000, "width": width, "depth": depth, "heads": heads}
    return Size(shape, recipe, vit, remat)


# Table 3 of Dosovitskiy et al. 2021, from scratch on ImageNet's 1,281,167 images: 300 epochs in batches of 4096, a
# warm-up of 10,000 steps, gradients clipped to a norm of 1. Theirs has dropout of 0.1, and the decay ends at 0.
_IMAGENET = Recipe(
    batch=4096, steps=93_835, learning_rate=3e-3, warmup=10_000, b2=0.999, weight_decay=0.3, clip=1.0
)  # fmt: skip

SIZES = {
    # On the rendered digits of `js.data.digits`; docs/guides/images.md has its accuracy.
    "vit-1m": Size(
        {"image": 32, "patch": 8, "classes": 10, "width": 128, "depth": 5, "heads": 4},
        Recipe(batch=64, steps=1000, learning_rate=1e-3, warmup=50, b2=0.99, weight_decay=0.05, clip=1.0),
        vit,
        "everything",
    ),
    # Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k", section 3: 90 epochs in batches of 1024 (theirs
    # with RandAugment and Mixup, and sine-cosine positions); a decay of 1e-4 apart from the rate is 0.1 times the rate.
    "vit-s16": _sized(
        384, 12, 6, 16,
        Recipe(batch=1024, steps=112_602, learning_rate=1e-3, warmup=10_000, b2=0.999, weight_decay=0.1, clip=1.0),
        "everything",
    ),
    # Table 1 of Dosovitskiy et al. 2021.
    "vit-b16": _sized(768, 12, 12, 16, _IMAGENET, "everything"),
    "vit-l16": _sized(1024, 24, 16, 16, _IMAGENET, "nothing"),
    "vit-h14": _sized(1280, 32, 16, 14, _IMAGENET, "nothing"),
}  # fmt: skip
"""Ready-made sizes of this family; `js.models.SIZES` has those of all families."""


class Patches(nn.Module):
    """The patches of images[B, H, W, C] projected to the width, and their positions: x[B, T, C]."""

    patch: int
    width: int
    count: int

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        B, side, _, channels = x_BHWC.shape
        n, p = side // self.patch, self.patch
        x_BTP = x_BHWC.reshape(B, n, p, n, p, channels).swapaxes(2, 3).reshape(B, n * n, p * p * channels)
        x_BTC = constrain(apply_to_rows(nn.Dense(self.width, name="patch"), x_BTP), WHOLE_ROWS)
        positions_TC: jax.Array = self.param("wpe", nn.initializers.normal(STDDEV), (self.count, self.width))
        return x_BTC + positions_TC


class Block(nn.Module):
    """Attention between all patches, then an MLP, each on a normalized copy of x[B, T, C] and added to it."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        B, T, C = x_BTC.shape
        init, D = nn.initializers.xavier_uniform(), C // self.heads

        def dense(name: str, x: jax.Array, features: int) -> jax.Array:
            return apply_to_rows(nn.Dense(features, kernel_init=init, name=name), x)

        h_BTC = enter_tensor_region(nn.LayerNorm(epsilon=1e-6, name="ln_1")(x_BTC))
        qkv_BTX = checkpoint_name(dense("qkv", h_BTC, 3 * C), "qkv")
        # By head, with (q, k, v) within each, so that a tensor axis splits whole heads.
        qkv_BTHX = constrain(qkv_BTX.reshape(B, T, self.heads, 3, D), (*HEADS, None))
        q_BTHD, k_BTHD, v_BTHD = (constrain(qkv_BTHX[:, :, :, i], HEADS) for i in range(3))
        h_BTC = constrain(attention(q_BTHD, k_BTHD, v_BTHD, causal=False), HEADS).reshape(B, T, C)
        x_BTC = x_BTC + checkpoint_name(constrain(dense("attn_out", h_BTC, C), RESIDUAL), "attention_proj")

        h_BTC = enter_tensor_region(nn.LayerNorm(epsilon=1e-6, name="ln_2")(x_BTC))
        h_BTF = checkpoint_name(dense("mlp_in", h_BTC, self.hidden), "mlp_hidden")
        h_BTF = constrain(nn.gelu(h_BTF, approximate=False), ("batch", "context", "mlp"))
        return x_BTC + constrain(dense("mlp_out", h_BTF, C), RESIDUAL)


class Head(nn.Module):
    """The last norm, the mean over patches, and the logits: x[B, T, C] to [B, classes]."""

    classes: int

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        x_BC = enter_tensor_region(nn.LayerNorm(epsilon=1e-6, name="ln_f")(x_BTC)).mean(1)
        logits: jax.Array = nn.Dense(self.classes, kernel_init=nn.initializers.zeros, name="classes")(x_BC)
        return logits
