"""Adam with moments that are stored in 8 bits between steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, UInt8

from jaxshard.core.types import PyTree
from jaxshard.optim.blocks import largest_per_block, scales_shape, spread
from jaxshard.optim.dynamic_map import decode_magnitude, decode_signed, encode_magnitude, encode_signed
from jaxshard.optim.master import is_low

SMALL = 4096
"""The most elements of an array whose moments stay in f32: norms and biases, which are small and sensitive."""


class Adam8bitState(NamedTuple):
    """The state of `js.optim.scale_by_adam8bit`.

    Each tree has the structure of the parameters, so that the path of an array ends with the path of its parameter.

    Attributes:
      steps: int32[], the number of updates.
      mu: The first moment: uint8 codes of the parameter's shape, or f32 for small parameters.
      mu_scales: f32, one scale per block of `mu`; `optax.MaskedNode` for small parameters.
      nu: The second moment: codes of its square root, or the moment itself in f32 for small parameters.
      nu_scales: f32, one scale per block of `nu`; `optax.MaskedNode` for small parameters.

    Example:
        state = js.optim.scale_by_adam8bit().init(params)
        state.mu            # uint8 where parameters have more than 4,096 elements
    """

    steps: jax.Array
    mu: PyTree
    mu_scales: PyTree
    nu: PyTree
    nu_scales: PyTree


def adam8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Make AdamW with its moments in 8 bits: 2.1 bytes of state per parameter instead of 8.

    It is `optax.adamw` with `js.optim.scale_by_adam8bit` in place of `optax.scale_by_adam`. See
    `js.optim.scale_by_adam8bit` for the rounding.

    Args:
      learning_rate: A number or a schedule.
      b1: The decay of the first moment.
      b2: The decay of the second moment.
      eps: Added to the root of the second moment.
      weight_decay: The factor of the weight decay, decoupled from the gradient as in AdamW; 0 is Adam.
      mask: The parameters that decay, as in `optax.add_decayed_weights`.

    Example:
        tx = js.optim.adam8bit(3e-4, weight_decay=0.1)
        layout = js.layout(js.fsdp(), mesh, init_fn, tx)
    """
    # `optax.inject_hyperparams` makes it an array, whose value is not known here.
    decays = isinstance(weight_decay, jax.Array) or bool(weight_decay)
    decay = [optax.add_decayed_weights(weight_decay, mask)] if decays else []
    return optax.with_extra_args_support(
        optax.chain(scale_by_adam8bit(b1, b2, eps), *decay, optax.scale_by_learning_rate(learning_rate))
    )


def scale_by_adam8bit(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformationExtraArgs:
    """Scale gradients like Adam, with moments kept in 8 bits between steps.

    Arrays of more than 4,096 elements are divided into blocks of 128 to 256 neighbouring elements (`optim/blocks.py`),
    each with an f32 scale, the largest magnitude in the block. The ratio of an element to its scale is stored as a code
    of 8 bits (`optim/dynamic_map.py`): with a sign for the first moment, without a sign for the square root of the
    second moment. So the state takes at most 2 + 8 / 128 bytes per parameter. An update uses the new moments before
    they are rounded.

    Why the square root of the second moment: its codes reach down to 1e-7 of a block's largest gradient instead of
    3e-4, and only 0 is rounded to 0. If the second moment itself were encoded, in a block with an outlier the second
    moments of other elements would be rounded to 0, and the update would divide by 0. (Evenly spaced int8 codes are
    rounded to 0 even sooner.)

    Blocks are blocks of the logical array, and a maximum does not depend on order, so the state is the same on every
    mesh. In `js.make_step` codes are sharded like their parameter's optimizer state, and scales with them: if no device
    boundary cuts a block, no collective is added. The transform is not elementwise, so arrays that are padded or stored
    in pipeline order are converted to their logical view (see `Step.update_view`). If `js.stack` stacked the blocks of
    your model, wrap the transform in `js.optim.per_block`.

    Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", sections 2 and 3 (there with blocks of 2,048
    and codes of the second moment itself).

    Args:
      b1: The decay of the first moment.
      b2: The decay of the second moment.
      eps: Added to the root of the second moment.

    Returns:
      A transform with an `Adam8bitState`. Its updates are f32; for bf16 and f16 parameters they have the dtype of the
      gradient, as in optax (f32 if `update` is called without `params`).

    Example:
        tx = optax.chain(optax.clip_by_global_norm(1.0), js.optim.scale_by_adam8bit(), optax.scale(-3e-4))
    """

    def init_fn(params: PyTree) -> Adam8bitState:
        def codes(x: Any) -> jax.Array:
            return jnp.zeros(x.shape, jnp.float32 if _is_small(x) else jnp.uint8)

        def scales(x: Any) -> Any:
            return optax.MaskedNode() if _is_small(x) else jnp.zeros(scales_shape(x.shape), jnp.float32)

        mu, nu = jax.tree.map(codes, params), jax.tree.map(codes, params)
        return Adam8bitState(
            jnp.zeros((), jnp.int32), mu, jax.tree.map(scales, params), nu, jax.tree.map(scales, params)
        )

    def update_fn(
        updates: PyTree, state: Adam8bitState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Adam8bitState]:
        del extra_args
        count = optax.safe_increment(state.steps)
        first, second = 1 - b1**count, 1 - b2**count

        def update(grad: Any, mu: Any, mu_scales: Any, nu: Any, nu_scales: Any) -> tuple[Any, ...]:
            grad = grad.astype(jnp.float32)
            small = _is_small(grad)
            old_mean = mu if small else dequantise_signed(mu, mu_scales)
            old_square = nu if small else jnp.square(dequantise_magnitude(nu, nu_scales))
            mean = b1 * old_mean + (1 - b1) * grad
            square = b2 * old_square + (1 - b2) * jnp.square(grad)
            step = (mean / first) / (jnp.sqrt(square / second) + eps)
            if small:
                return step, mean, mu_scales, square, nu_scales
            return step, *quantise_signed(mean), *quantise_magnitude(jnp.sqrt(square))

        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(updates)
        trees = (state.mu, state.mu_scales, state.nu, state.nu_scales)
        rows = zip(leaves, *(tree.flatten_up_to(part) for part in trees), strict=True)
        columns = zip(*(update(*row) for row in rows), strict=True) if leaves else [[]] * 5
        made, *parts = (tree.unflatten(column) for column in columns)
        if params is not None:
            made = jax.tree.map(lambda step, g, p: step.astype(g.dtype) if is_low(p) else step, made, updates, params)
        return made, Adam8bitState(count, *parts)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def quantise_signed(x: Float32[Array, "*shape"]) -> tuple[UInt8[Array, "*shape"], Float32[Array, "*blocks"]]:
    """Encode an array in 8 bits: return (codes of the elements, one f32 scale per block of elements).

    An element's error is at most 0.0071 times the scale of its block, which is the largest magnitude in the block.
    """
    share, scales = _share(x)
    return encode_signed(share), scales


def dequantise_signed(codes: UInt8[Array, "*shape"], scales: Float32[Array, "*blocks"]) -> Float32[Array, "*shape"]:
    """Decode the codes and scales that `quantise_signed` returned: the original array up to rounding."""
    return decode_signed(codes) * spread(scales, codes.shape)


def quantise_magnitude(x: Float32[Array, "*shape"]) -> tuple[UInt8[Array, "*shape"], Float32[Array, "*blocks"]]:
    """Encode an array without negative numbers in 8 bits: return (codes of the elements, one f32 scale per block).

    An element's error is at most 0.0036 times the scale of its block, which is the largest number in the block.
    """
    share, scales = _share(x)
    return encode_magnitude(share, 8), scales


def dequantise_magnitude(codes: UInt8[Array, "*shape"], scales: Float32[Array, "*blocks"]) -> Float32[Array, "*shape"]:
    """Decode the codes and scales that `quantise_magnitude` returned: the original array up to rounding."""
    return decode_magnitude(codes, 8) * spread(scales, codes.shape)


def _share(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (each element divided by the largest magnitude in its block, the largest magnitude of each block)."""
    scales = largest_per_block(x)
    whole = spread(scales, x.shape)
    return jnp.where(whole > 0, x / whole, 0.0), scales


def _is_small(x: Any) -> bool:
    return bool(x.size <= SMALL)
