"""What a model is and what a loss returns: `Model`, `Mean`, `Sum`, `Max`, `Loss`.

These values say how a number is combined over rows that were computed apart (on other devices, in other micro-batches),
so that every engine combines it the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.core.types import PyTree


class Model(NamedTuple):
    """Parameters with the model's own mutable state (batch statistics, caches)."""

    params: PyTree
    state: PyTree


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, init=False)
class Mean:
    """A weighted mean that is still open: total and weight, summed over rows and divided once.

    `total` and `weight` are scalars: the sum of the weighted values and the sum of the weights of the rows at hand.
    Both are sums over the rows at hand, which may be a share of the batch: a weight that counts anything else (a
    fixed batch size, say) is added up over shards as well. Means add (`ce + 0.01 * aux`, each divided by its own
    weight) and scale by numbers. The weight must not depend on the parameters: no gradient passes through it.

    >>> float((Mean(6.0, 3.0) + 0.5 * Mean(4.0, 1.0)).value)
    4.0
    """

    totals: tuple[jax.Array, ...]
    weights: tuple[jax.Array, ...]

    def __init__(self, total: Any, weight: Any):
        for name, number in (("total", total), ("weight", weight)):
            if jnp.shape(number) != ():
                raise ValueError(
                    f"Mean: {name} must be a scalar, got shape {jnp.shape(number)}; sum over the rows first"
                )
        object.__setattr__(self, "totals", (jnp.asarray(total, _float(total)),))
        object.__setattr__(self, "weights", (jnp.asarray(weight, _float(weight)),))

    @property
    def value(self) -> jax.Array:
        """The sum over terms of total / weight; a term without weight is 0, and its gradient too."""
        return weighted_sum(self, self.weights)

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        return _mean(self.totals + other.totals, self.weights + other.weights)

    def __mul__(self, scale: Any) -> Mean:
        if isinstance(scale, Mean) or jnp.shape(scale) != ():
            return NotImplemented
        return _mean(tuple(scale * total for total in self.totals), self.weights)

    __rmul__ = __mul__

    def tree_flatten(self):
        return (self.totals, self.weights), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return _mean(*children)


def _mean(totals, weights) -> Mean:
    mean = object.__new__(Mean)
    object.__setattr__(mean, "totals", totals)
    object.__setattr__(mean, "weights", weights)
    return mean


def _float(number: Any):
    dtype = jnp.result_type(number)
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def weighted_sum(mean: Mean, weights: tuple[jax.Array, ...]) -> jax.Array:
    """The sum of the mean's totals, each over the given weight: a share of the global mean if those are global.

    Written with a safe divisor so that a weight of zero gives zero and a zero gradient instead of NaN.
    """

    def share(total: jax.Array, weight: jax.Array) -> jax.Array:
        weight = jax.lax.stop_gradient(weight)
        return jnp.where(weight == 0, 0, total) / jnp.where(weight == 0, 1, weight)

    return sum((share(t, w) for t, w in zip(mean.totals, weights, strict=True)), start=jnp.zeros((), jnp.float32))


class Sum(NamedTuple):
    """A metric that adds over rows."""

    value: jax.Array


class Max(NamedTuple):
    """A metric of which the largest over rows counts."""

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """What a loss function returns when it has more to say than a number.

    `value` is a scalar or a `Mean`; `state` the model's new mutable state (None: it has none); `metrics` maps names to
    `Mean`, `Sum` or `Max`, which are combined over all rows of the global batch.
    """

    value: Any
    state: PyTree = None
    metrics: dict[str, Mean | Sum | Max] = field(default_factory=dict)


def as_loss(output: Any) -> Loss:
    """The loss function's output as a `Loss`; a TypeError that says what was received when it is none."""
    loss = output if isinstance(output, Loss) else Loss(output)
    value = loss.value
    if not isinstance(value, Mean):
        if not hasattr(value, "shape") and not isinstance(value, (int, float)):
            fix = "; return js.Loss(value, state=..., metrics=...)" if isinstance(value, tuple) else ""
            raise TypeError(f"loss_fn must return a scalar, js.Mean or js.Loss, got {type(value).__name__}{fix}")
        if jnp.shape(value) != ():
            raise TypeError(
                f"loss_fn must return a scalar, js.Mean or js.Loss, got an array of shape {jnp.shape(value)}; "
                "return js.Mean(values.sum(), values.size)"
            )
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise TypeError(f"loss_fn must return a real floating scalar, got dtype {jnp.result_type(value)}")
    if not isinstance(loss.metrics, dict):
        raise TypeError(f"metrics must be a dict of js.Mean, js.Sum or js.Max, got {type(loss.metrics).__name__}")
    for name, metric in loss.metrics.items():
        if name in ("loss", "grad_norm", "bad"):
            raise TypeError(f"metric {name!r} is what a step reports by itself; give yours another name")
        if not isinstance(metric, (Mean, Sum, Max)):
            raise TypeError(f"metric {name!r} must be a js.Mean, js.Sum or js.Max, got {type(metric).__name__}")
    return loss


def lowest(dtype: Any) -> Any:
    """What no value is below: the maximum of no rows."""
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def combine(a: Mean | Sum | Max, b: Mean | Sum | Max) -> Mean | Sum | Max:
    """One metric of two sets of rows."""
    if isinstance(a, Max):
        return Max(jnp.maximum(a.value, b.value))
    return jax.tree.map(jnp.add, a, b)
