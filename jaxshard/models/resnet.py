"""Residual networks with batch normalisation, as a Flax module. `models/classifier.py` describes the batch.

Shape suffixes: B rows, H and W the sides of a feature map, C its channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxshard.adapt.linen import Linen
from jaxshard.core.constrain import constrain
from jaxshard.core.loss import Loss, Mean
from jaxshard.core.row_axes import row_axes
from jaxshard.core.types import PyTree
from jaxshard.models.classifier import ImageShape, check_images, classifier_loss, image_shape
from jaxshard.models.parts import check_sizes
from jaxshard.models.recipe import MomentumRecipe, Size

Kind = Literal["basic", "bottleneck"]


class ResNet(Linen):
    """A `js.linen` classifier of images with batch statistics; made by `js.models.resnet`.

    Attributes:
      images: the images that it takes.
      classes: how many classes there are.
    """

    images: ImageShape
    classes: int

    def logits(self, model: PyTree, images: jax.Array) -> jax.Array:
        """Compute the logits [B, classes] of images [B, H, W, C] with the running statistics, in f32.

        Args:
          model: a `js.Model` of parameters and batch statistics, such as `js.make_apply` hands to a function.
          images: uint8, or floats from 0 to 1.
        """
        logits: jax.Array = self.apply(model, self.images.normalize(images), train=False)
        return logits.astype(jnp.float32)


def resnet(
    *,
    image: int,
    classes: int,
    depths: Sequence[int],
    kind: Kind = "bottleneck",
    width: int = 64,
    channels: int = 3,
    small: bool = False,
    mean: Sequence[float] | float | None = None,
    stddev: Sequence[float] | float | None = None,
) -> ResNet:
    """Build a residual network: `model.init(key)`, `model.loss(model, batch, key)`, `model.logits(model, images)`.

    `init` makes a `js.Model`: the parameters, and as state the running mean and variance of every batch normalisation,
    which decay by 0.9. Convolutions have no bias. The last normalisation of a block begins with a scale of zero. Blocks
    that halve the side do so in their 3 x 3 convolution (the first of a basic block). Everything is computed in the
    dtype of the parameters; statistics and loss are in f32.

    In training the statistics are those of the whole global batch, as on one device: under `js.auto` the loss sees all
    rows, under `js.explicit` means are averaged over the axes of the rows, one all-reduce for each normalisation
    forward and one backward. (In Goyal et al. each device takes those of its own 32 images.) Micro-batches are refused,
    since then no statistics can be those of the batch, and so are pipelines. Evaluation takes the running ones.

    Args:
      image: height and width of the images, in pixels.
      classes: the number of classes.
      depths: the number of blocks in each stage; the width doubles and the side halves from one to the next.
      kind: "basic" blocks of two 3 x 3 convolutions, or "bottleneck" ones of 1 x 1, 3 x 3 and 1 x 1, the last
        four times as wide.
      width: the channels of the first stage.
      channels: 3 for colours, 1 for grey images.
      small: begin with a 3 x 3 convolution in the place of one of 7 x 7 with stride 2 and a maximum over 3 x 3, for
        images of 32 pixels.
      mean: what is taken away from each channel, from 0 to 1; None for ImageNet's.
      stddev: by what each channel is then divided; None for ImageNet's.

    Returns:
      The model, for `js.auto` and `js.explicit`.

    Raises:
      ValueError: a size below 1, or a kind that there is not.
      TypeError: a size that is no whole number.

    Source: He et al. 2016, "Deep Residual Learning for Image Recognition", section 3.3 and table 1; Goyal et al. 2017,
      "Accurate, Large Minibatch SGD", section 5.1, for the stride and the scale of zero.

    Example:
        model = js.models.resnet(image=32, classes=10, depths=(1, 1), kind="basic", width=16, small=True)
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
    """
    check_sizes("resnet", {"image": image, "classes": classes, "width": width, "channels": channels})
    check_sizes("resnet", {f"depths[{number}]": depth for number, depth in enumerate(depths)} or {"depths": 0})
    if kind not in get_args(Kind):
        raise ValueError(f"resnet: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    images = image_shape("resnet", image, channels, mean, stddev)

    def loss(called: Any, batch: PyTree, train: bool) -> Mean | Loss:
        x_BHWC = images.normalize(check_images("resnet", batch))
        logits = called(x_BHWC, train=train).astype(jnp.float32)
        return classifier_loss("resnet", classes, logits, batch, accuracy=not train)

    example = {
        "images": jax.ShapeDtypeStruct((1, image, image, channels), jnp.float32),
        "labels": jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    made = ResNet(Network(classes, tuple(depths), kind, width, small), loss, example)
    # The dataclass is frozen so that it is a key of JAX's caches by identity.
    object.__setattr__(made, "images", images)
    object.__setattr__(made, "classes", classes)
    return made


def _imagenet(depths: tuple[int, ...], kind: Kind) -> Size:
    # Goyal et al. 2017, section 5.1: 90 epochs of 1,281,167 images in batches of 8192, a rate of 0.1 for 256 images,
    # warm-up over 5 epochs, a tenth after 30, 60 and 80.
    recipe = MomentumRecipe(batch=8192, steps=14_075, learning_rate=3.2, warmup=782)
    return Size({"image": 224, "classes": 1000, "depths": depths, "kind": kind}, recipe, resnet, "everything")


SIZES = {
    # On the rendered digits of `js.data.digits`; docs/guides/images.md has its accuracy.
    "resnet-tiny": Size(
        {"image": 32, "classes": 10, "depths": (1, 1, 1), "kind": "basic", "width": 16, "small": True},
        MomentumRecipe(batch=64, steps=600, learning_rate=0.1, warmup=20, weight_decay=5e-4),
        resnet,
        "everything",
    ),
    "resnet18": _imagenet((2, 2, 2, 2), "basic"),
    "resnet50": _imagenet((3, 4, 6, 3), "bottleneck"),
    "resnet101": _imagenet((3, 4, 23, 3), "bottleneck"),
}
"""Ready-made sizes of this family; `js.models.SIZES` has those of all families."""

_HE = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class Network(nn.Module):
    """Images[B, H, W, C] to logits[B, classes]."""

    classes: int
    depths: tuple[int, ...]
    kind: Kind
    width: int
    small: bool

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool) -> jax.Array:
        side, stride = (3, 1) if self.small else (7, 2)
        x_BHWC = Conv(self.width, side, stride, (None, None), name="conv_0")(x_BHWC)
        x_BHWC = nn.relu(Norm(name="norm_0")(x_BHWC, train))
        if not self.small:
            x_BHWC = nn.max_pool(x_BHWC, (3, 3), (2, 2), ((1, 1), (1, 1)))
        block = Basic if self.kind == "basic" else Bottleneck
        for stage, depth in enumerate(self.depths):
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                x_BHWC = block(self.width * 2**stage, stride, name=f"stage_{stage}_block_{number}")(x_BHWC, train)
        x_BC = constrain(x_BHWC.mean((1, 2)), ("batch", None))
        init = nn.with_partitioning(nn.initializers.normal(0.01), ("embed", "embed"))
        logits: jax.Array = nn.Dense(self.classes, kernel_init=init, name="classes")(x_BC)
        return logits


class Conv(nn.Module):
    """A convolution without bias; `names` are those of its inputs and outputs, by which `js.tensor` splits.

    Padding is that of the same side on both edges, as in the published networks.
    """

    features: int
    side: int
    stride: int
    names: tuple[str | None, str | None]

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        init = nn.with_partitioning(_HE, ("spatial", "spatial", *(name or "embed" for name in self.names)))
        pad = (self.side // 2, self.side // 2)
        conv = nn.Conv(
            self.features,
            (self.side,) * 2,
            (self.stride,) * 2,
            (pad, pad),
            use_bias=False,
            kernel_init=init,
            name="conv",
        )
        return constrain(conv(x_BHWC), ("batch", None, None, self.names[1]))


class Norm(nn.Module):
    """Batch normalisation by the statistics of the global batch in training, by the running ones in evaluation.

    Args:
      channels: the name of the channels, by which `js.tensor` splits; None for whole ones.
      zero: begin with a scale of 0, so that a block begins as the identity.
    """

    channels: str | None = None
    zero: bool = False

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool) -> jax.Array:
        axes = row_axes() if train and not self.is_initializing() else ()
        scale_init = nn.initializers.zeros if self.zero else nn.initializers.ones
        norm = nn.BatchNorm(
            use_running_average=not train, momentum=0.9, epsilon=1e-5, axis_name=axes or None,  # type: ignore[arg-type]
            scale_init=scale_init, name="norm",
        )  # fmt: skip
        return constrain(norm(x_BHWC), ("batch", None, None, self.channels))


class Basic(nn.Module):
    """Two 3 x 3 convolutions, added to x[B, H, W, C]. A tensor axis splits what lies between them."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool) -> jax.Array:
        y_BHWC = Conv(self.features, 3, self.stride, (None, "mlp"), name="conv_1")(x_BHWC)
        y_BHWC = nn.relu(Norm("mlp", name="norm_1")(y_BHWC, train))
        y_BHWC = Conv(self.features, 3, 1, ("mlp", None), name="conv_2")(y_BHWC)
        y_BHWC = Norm(zero=True, name="norm_2")(y_BHWC, train)
        return nn.relu(_shortcut(x_BHWC, y_BHWC, self.stride, train) + y_BHWC)


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 and a 1 x 1 convolution, added to x[B, H, W, C]. A tensor axis splits what the second reads."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool) -> jax.Array:
        y_BHWC = Conv(self.features, 1, 1, (None, "mlp"), name="conv_1")(x_BHWC)
        y_BHWC = nn.relu(Norm("mlp", name="norm_1")(y_BHWC, train))
        y_BHWC = Conv(self.features, 3, self.stride, ("mlp", None), name="conv_2")(y_BHWC)
        y_BHWC = nn.relu(Norm(name="norm_2")(y_BHWC, train))
        y_BHWC = Conv(4 * self.features, 1, 1, (None, None), name="conv_3")(y_BHWC)
        y_BHWC = Norm(zero=True, name="norm_3")(y_BHWC, train)
        return nn.relu(_shortcut(x_BHWC, y_BHWC, self.stride, train) + y_BHWC)


def _shortcut(x_BHWC: jax.Array, y_BHWC: jax.Array, stride: int, train: bool) -> jax.Array:
    """The block's input, projected where its shape is another one. Its modules belong to the block that calls this."""
    if x_BHWC.shape == y_BHWC.shape:
        return x_BHWC
    x_BHWC = Conv(y_BHWC.shape[-1], 1, stride, (None, None), name="conv_short")(x_BHWC)
    shortcut: jax.Array = Norm(name="norm_short")(x_BHWC, train)
    return shortcut
