"""Stochastic rounding of bf16 moments and parameters, so that small changes are not always rounded away."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, BFloat16, Float32, UInt32

from jaxshard.core.transform import as_transform
from jaxshard.core.tree import find_by_suffix, map_with_path
from jaxshard.core.types import PyTree
from jaxshard.optim.master import is_low
from jaxshard.optim.proof.marked import has_marks


class StochasticState(NamedTuple):
    """The state of `js.optim.stochastic_round`.

    Attributes:
      steps: int32[], the number of updates.
      inner: The state of the wrapped transform, in which arrays with the shape of a parameter are bf16.

    Example:
        state = js.optim.stochastic_round(optax.adam(1e-3)).init(params)
        state.inner[0].mu       # bf16
    """

    steps: jax.Array
    inner: Any


def stochastic_round(tx: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Keep moments in bf16, and update bf16 parameters without f32 copies, by stochastic rounding.

    bf16 has 8 bits of precision: with rounding to nearest an update below 1/256 of a parameter changes nothing, and a
    second moment that decays by 0.999 stops changing. Stochastic rounding picks one of the two neighbouring bf16
    numbers, the nearer number with higher probability, so that the mean is exact (Gupta et al. 2015, "Deep Learning
    with Limited Numerical Precision", section 3). `tx` computes in f32: it receives f32 copies of bf16 and f16
    parameters, of their gradients, and of the stored moments.

    Every f32 array of the state that has a parameter's path and shape is stored in bf16: 4 bytes per parameter for Adam
    instead of 8, for parameters of any dtype. bf16 parameters are rounded stochastically; f32 and f16 parameters are
    updated as usual.

    The random bits are a hash of the seed, the step, the array and the element's index in the array, so that they are
    the same on every mesh, and after a restart. Each device computes the bits of its own elements, without collectives.
    Since the bits depend on the index, `js.make_step` runs the transform on the logical view of arrays that are stored
    in another shape. Put this wrapper around `js.optim.per_block`, not inside, so that every block has its own bits.

    Args:
      tx: The transform to wrap.
      seed: The seed of the random bits.

    Returns:
      A transform with a `StochasticState`. The update of a bf16 or f16 parameter is f32; `optax.apply_updates` adds
      a bf16 parameter's update exactly unless the step shrinks the parameter by more than a factor of 2**16. Put
      wrappers that need updates in the gradients' dtype inside, since the f32 update would be rounded there:
      `stochastic_round(optax.apply_if_finite(tx, 3))`.

    Raises:
      ValueError: `update` is called without `params`.

    Example:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        tx = js.optim.stochastic_round(optax.adamw(3e-4))       # 2 bytes per parameter and 4 of state in total
    """
    tx = as_transform(tx)

    def init_fn(params: PyTree) -> Any:
        if has_marks(params):
            return tx.init(params)
        inner = tx.init(_widened(params))
        chosen = _belonging(inner, params)
        lowered = jax.tree.map(lambda x, low: x.astype(jnp.bfloat16) if low else x, inner, chosen)
        return StochasticState(jnp.zeros((), jnp.int32), lowered)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        if has_marks(updates):  # `stacking_changes` reads this trace: of rounding, stacking changes only the bits
            plain: tuple[PyTree, Any] = tx.update(updates, state, params, **extra_args)
            return plain
        if params is None:
            raise ValueError("stochastic_round: update needs the parameters; call tx.update(grads, state, params)")
        originals = _widened(params)
        shapes = jax.eval_shape(tx.init, originals)
        chosen = _belonging(shapes, params)
        wide = jax.tree.map(lambda x, like: x.astype(like.dtype), state.inner, shapes)
        steps, inner = tx.update(_widened(updates), wide, originals, **extra_args)
        key = _mix(_mix(_seed_word(seed)) ^ state.steps.astype(jnp.uint32))
        number = iter(range(2**31))

        def lower(x: jax.Array, low: bool) -> jax.Array:
            return round_stochastic(x, random_bits(key, next(number), x.shape)) if low else x

        def step_of(param: jax.Array, original: jax.Array, step: jax.Array) -> jax.Array:
            if param.dtype != jnp.bfloat16:
                return step
            bits = random_bits(key, next(number), param.shape)
            rounded: jax.Array = lax.optimization_barrier(round_stochastic(original + step.astype(jnp.float32), bits))
            return rounded.astype(jnp.float32) - original

        lowered = jax.tree.map(lower, inner, chosen)
        steps = jax.tree.map(step_of, params, originals, steps)
        return steps, StochasticState(optax.safe_increment(state.steps), lowered)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def round_stochastic(x: Float32[Array, "*shape"], bits: UInt32[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """Round each number at random to one of its two neighbours in bf16, so that the mean is the number itself.

    Args:
      x: the numbers. Infinities and NaN do not change; numbers that would become infinite are rounded towards zero.
      bits: random numbers, of which the lower 16 bits are used.
    """
    word = lax.bitcast_convert_type(x, jnp.uint32)
    # bf16 is the upper half of f32: adding random lower bits carries into it with the probability that is wanted.
    upper = (word + (bits & jnp.uint32(0xFFFF))) & jnp.uint32(0xFFFF0000)
    upper = jnp.where(_is_finite(upper), upper, word & jnp.uint32(0xFFFF0000))
    return jnp.where(_is_finite(word), lax.bitcast_convert_type(upper, jnp.float32), x).astype(jnp.bfloat16)


def random_bits(key: UInt32[Array, ""], number: int, shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """Return 32 random bits for each element of an array: a hash of key, array number and element index.

    The index along the last dimension is hashed separately, so that indices do not exceed 32 bits in arrays of 2**32
    elements.

    Args:
      key: the key, 32 bits.
      number: a number for the array, different for each array that uses the key.
      shape: the shape of the array.
    """
    seed = _mix(key ^ _mix(jnp.uint32(number)))
    if not shape:
        return seed
    rows = jnp.zeros((*shape[:-1], 1), jnp.uint32)
    for dim in range(len(shape) - 1):
        weight = math.prod(shape[dim + 1 : -1]) % 2**32
        rows += lax.broadcasted_iota(jnp.uint32, rows.shape, dim) * jnp.uint32(weight)
    columns = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return _mix(_mix(seed ^ rows) + columns * jnp.uint32(0x9E3779B9))


def _seed_word(seed: int | jax.Array) -> jax.Array:
    """Return the seed, an int or an int32 array, modulo 2**32; `optax.inject_hyperparams` makes arrays of ints."""
    return seed.astype(jnp.uint32) if isinstance(seed, jax.Array) else jnp.uint32(seed % 2**32)


def _mix(x: jax.Array) -> jax.Array:
    """Hash 32-bit numbers by a bijection: the last part of MurmurHash3 (Appleby 2011, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed: jax.Array = x ^ (x >> 16)
    return mixed


def _is_finite(word: jax.Array) -> jax.Array:
    """Return True for each f32 number that is finite, given its bits as an integer.

    `jnp.isfinite` is not used here: `js.make_step` would take it for the optimizer's own handling of non-finite
    gradients (`proof/non_finite.py`), and would no longer skip bad steps.
    """
    finite: jax.Array = word & jnp.uint32(0x7F800000) != jnp.uint32(0x7F800000)
    return finite


def _widened(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_low(x) else x, tree)


def _belonging(state: PyTree, params: PyTree) -> PyTree:
    """Return a tree of booleans: True for f32 state arrays with the path and shape of a parameter, like moments."""
    known = {path: (x.shape, True) for path, x in jax.tree_util.tree_leaves_with_path(params)}

    def belongs(path: Any, x: Any) -> bool:
        return x.dtype == jnp.float32 and bool(find_by_suffix(known, path, x.shape))

    return map_with_path(belongs, state)
