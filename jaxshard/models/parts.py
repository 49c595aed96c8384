"""Parts that the decoder models share: dimension names of activations, the output layer and initialization.

Shape suffixes: B rows, T positions, C width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxshard.core.bounds import LARGEST_SIZE, MOST_LISTED
from jaxshard.core.constrain import constrain, is_split, split_count
from jaxshard.core.types import PyTree

STDDEV = 0.02
"""Standard deviation of the normal distribution that weights are drawn from."""

# Logical names of the dimensions of activations, for `constrain`; `js.tensor(rules)` maps them to mesh axes.
RESIDUAL = ("batch", "sequence", None)
"""Activations [B, T, C] between blocks, whose positions a rule for "sequence" splits (sequence parallelism)."""
WHOLE_ROWS = ("batch", "context", None)
"""Activations [B, T, C] with every position on every device of a tensor axis."""
HEADS = ("batch", "context", "heads", None)
"""Activations [B, T, heads, D] inside attention."""


class Output(nn.Module):
    """Apply the final norm and the output matrix: x[B, T, C] to logits [B, T, vocab].

    If `vocab` is None there is no matrix, and the result is the normalized x[B, T, C]. This is for models that use the
    embedding table as the output matrix.
    """

    vocab: int | None
    norm: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        x_BTC = enter_tensor_region(self.norm()(x_BTC))
        if self.vocab is None:
            return x_BTC
        init = nn.initializers.normal(STDDEV)
        logits_BTV: jax.Array = nn.Dense(self.vocab, use_bias=False, kernel_init=init, name="lm_head")(x_BTC)
        return logits_BTV


def apply(module: nn.Module, params: PyTree, *args: Any) -> jax.Array:
    """Call a Linen module with its parameters: `module.apply({"params": params}, *args)`."""
    return cast(jax.Array, module.apply({"params": params}, *args))


def apply_to_rows(layer: nn.Module, x: jax.Array) -> jax.Array:
    """Apply a dense layer to x[B, T, ...], with rows and positions merged to one dimension [B * T, ...].

    The merge is for XLA on CPU. The gradient of a kernel contracts rows and positions, and for two contracted
    dimensions XLA first transposes both operands, at several times the cost of the product. Positions that are split
    over a tensor axis, or by the compiler over a context axis, are not merged, since a merged dimension can't be split
    by positions.
    """
    if is_split("sequence") or split_count("context", x.shape[1]) > 1:
        y: jax.Array = layer(x)
        return y
    B, T, *inputs = x.shape
    y = layer(x.reshape(B * T, *inputs))
    return y.reshape(B, T, *y.shape[1:])


def enter_tensor_region(x_BTC: jax.Array) -> jax.Array:
    """All-gather the positions of x[B, T, C] before column-parallel layers; in the backward pass, reduce-scatter.

    This is Megatron-LM's sequence parallelism: outside of the layers each device of a tensor axis has some positions of
    a row. If the strategy does not split the dimension "sequence", there is no communication.
    """
    return constrain(x_BTC, WHOLE_ROWS, grad=RESIDUAL)


def init_parts(embedding: nn.Module, block: nn.Module, output: nn.Module, width: int) -> Callable[[jax.Array], PyTree]:
    """Build `init(key) -> {"embed": ..., "block": ..., "head": ...}` for a `js.Stacked` from its three Flax modules."""

    @jax.jit  # traced once: a layout and `js.init` call it four times, for the blocks and for the other parts
    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, 3)
        x_BTC = jnp.zeros((1, 1, width))
        return {
            "embed": embedding.init(keys[0], jnp.zeros((1, 1), jnp.int32))["params"],
            "block": block.init(keys[1], x_BTC)["params"],
            "head": output.init(keys[2], x_BTC)["params"],
        }

    return init


def residual_stddev(depth: int) -> float:
    """Return the standard deviation for initializing output projections of attention and MLP: 0.02 / sqrt(2 depth)."""
    return STDDEV / math.sqrt(2 * depth)


def largest_size(name: str) -> int:
    """Return the largest value of the argument `name` of a model: of "depth", whose blocks are listed, or of a size."""
    return MOST_LISTED if name == "depth" else LARGEST_SIZE


def check_sizes(family: str, sizes: Mapping[str, Any]) -> None:
    """Raise TypeError unless all sizes are whole numbers, and ValueError unless they are from 1 to `largest_size`."""
    if other := {
        name: size for name, size in sizes.items() if not isinstance(size, Integral) or isinstance(size, bool)
    }:
        raise TypeError(f"{family}: sizes must be whole numbers, got {other}")
    if wrong := {name: size for name, size in sizes.items() if size < 1}:
        raise ValueError(f"{family}: sizes must be at least 1, got {wrong}")
    for name, size in sizes.items():
        if size > largest_size(name):
            raise ValueError(f"{family}: {name} must be at most {largest_size(name)}, got {size}")


Window = int | Sequence[int | None] | None
"""The attention window of all blocks, or of each block; None for full attention."""
_UNLIMITED = 2**30
"""The window that stands for full attention in an array of windows."""


def check_window(family: str, window: Window, depth: int) -> int | tuple[int | None, ...] | None:
    """Check a model's `window`, and simplify it: one value if all blocks have the same window, else a tuple by block.

    Raises:
      ValueError: a list of another length than `depth`, or a window that is not from 1 to `LARGEST_SIZE`.
      TypeError: a window that is neither an integer nor None.
    """
    each = tuple(window) if isinstance(window, Sequence) else (window,)
    if any(x is not None and (not isinstance(x, Integral) or isinstance(x, bool)) for x in each):
        raise TypeError(f"{family}: a window must be a whole number or None, got {window!r}")
    if any(x is not None and not 1 <= x <= LARGEST_SIZE for x in each) or len(each) not in (1, depth):
        raise ValueError(
            f"{family}: window must be at least 1 (a position sees itself) and at most {LARGEST_SIZE}, or a list of "
            f"{depth}, one for each block, got {window!r}"
        )
    return each[0] if len(set(each)) == 1 else each


def window_of(window: int | tuple[int | None, ...] | None, number_B: jax.Array | None) -> int | jax.Array | None:
    """Return the attention window of one block, for the argument `window` of `js.attention`.

    Args:
      window: one window for all blocks, or a tuple with the window of each block; the result of `check_window`.
      number_B: the index of the block, one copy for each row. None in `init`, where the index is not known. The result
        for a tuple is then None too, since parameters do not depend on the window.
    """
    if not isinstance(window, tuple):
        return window
    if number_B is None:
        return None
    return jnp.asarray([_UNLIMITED if x is None else x for x in window], jnp.int32)[number_B]
