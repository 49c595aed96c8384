"""The values that users' functions return: `Model`, and `Mean`, `Sum`, `Max` and `Loss`.

The rows of a batch are computed on several devices, in several micro-batches. These values say how a result is combined
over the rows, so that every engine combines it the same way:

    Mean    totals and weights are added, then divided once
    Sum     values are added
    Max     the largest value counts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxshard.core.types import PyTree


class Model(NamedTuple):
    """The parameters of a model together with its own mutable state.

    `init_fn` returns it, and `loss_fn` and `eval_fn` receive it, where a model has a state. A model without a state is
    its parameters alone.

    Attributes:
      params: a tree of arrays; gradients are taken of these.
      state: a tree of arrays that the loss replaces in every step, such as batch statistics (see `Loss.state`).

    Example:
        def init_fn(key):
            variables = module.init(key, x)
            return js.Model(variables["params"], {"batch_stats": variables["batch_stats"]})
    """

    params: PyTree
    state: PyTree


_Terms = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, init=False)
class Mean:
    """A weighted mean before the division: a total and a weight, each a sum over rows.

    Totals and weights are summed over shards, micro-batches and stages and divided once, so a token-weighted loss is
    exact on every mesh. A mean of local means is wrong if devices hold different numbers of tokens.

    Means add (`ce + 0.01 * aux`: each term keeps its own weight) and scale by numbers. No gradient passes through a
    weight, so it must not depend on the parameters. Both are at least f32: in bf16 a count stops at 256.

    Args:
      total: a scalar, the sum of the weighted values of the rows that the loss received.
      weight: a scalar, the sum of the weights of these rows, which may be a part of the batch. Any other weight, such
        as a fixed batch size, would be added once per part. Engines refuse it if the jaxpr of the loss shows it;
        otherwise `js.parity` finds it.

    Attributes:
      totals: one floating scalar per term, if Means were added.
      weights: one floating scalar per term.

    Raises:
      ValueError: a total or weight that is not a scalar.

    Example:
        >>> float((Mean(6.0, 3.0) + 0.5 * Mean(4.0, 1.0)).value)
        4.0
    """

    totals: tuple[Float[Array, ""], ...]
    weights: tuple[Float[Array, ""], ...]

    def __init__(self, total: Any, weight: Any):
        for name, number in (("total", total), ("weight", weight)):
            if jnp.shape(number) != ():
                raise ValueError(
                    f"Mean: {name} must be a scalar, got shape {jnp.shape(number)}; sum over the rows first"
                )
        object.__setattr__(self, "totals", (jnp.asarray(total, _float_dtype(total)),))
        object.__setattr__(self, "weights", (jnp.asarray(weight, _float_dtype(weight)),))

    @property
    def value(self) -> Float[Array, ""]:
        """The sum over terms of total / weight; a term with weight 0 is 0, and so is its gradient."""
        return weighted_sum(self, self.weights)

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            raise TypeError(
                f"js.Mean adds to another js.Mean alone, got {type(other).__name__}; add a term that is no sum over "
                "rows, such as a penalty on the parameters, as js.Mean(penalty, 1)"
            )
        return _mean(self.totals + other.totals, self.weights + other.weights)

    def __radd__(self, other: Any) -> Mean:
        return self.__add__(other)

    def __mul__(self, scale: Any) -> Mean:
        if isinstance(scale, Mean) or jnp.shape(scale) != ():
            return NotImplemented
        return _mean(tuple(scale * total for total in self.totals), self.weights)

    __rmul__ = __mul__

    def tree_flatten(self) -> tuple[_Terms, None]:
        return (self.totals, self.weights), None

    @classmethod
    def tree_unflatten(cls, _: None, children: _Terms) -> Mean:
        return _mean(*children)


def _mean(totals: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]) -> Mean:
    """Make a `Mean` without checks and casts: JAX may put shapes, shardings or other objects in place of the arrays."""
    mean = object.__new__(Mean)
    object.__setattr__(mean, "totals", totals)
    object.__setattr__(mean, "weights", weights)
    return mean


def _float_dtype(number: Any) -> Any:
    dtype = jnp.result_type(number)
    return sum_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def weighted_sum(mean: Mean, weights: tuple[Float[Array, ""], ...]) -> Float[Array, ""]:
    """Divide each total of a mean by a given weight, and add the results.

    If each device passes the totals of its own rows and the weights of the global batch, the results of all devices add
    up to the mean of the global batch.

    Args:
      mean: totals of a part of the rows.
      weights: a scalar for each total. Zero gives zero and a zero gradient, not NaN.
    """

    def share(total: jax.Array, weight: jax.Array) -> jax.Array:
        weight = jax.lax.stop_gradient(weight)
        return jnp.where(weight == 0, 0, total) / jnp.where(weight == 0, 1, weight)

    return sum((share(t, w) for t, w in zip(mean.totals, weights, strict=True)), start=jnp.zeros((), jnp.float32))


def explain_weight(whole: str, parts: int, added: str) -> str:
    """Return the error message for a `Mean` whose weight does not add up over the parts of a batch, with the fix.

    Args:
      whole: the weight of the global batch, as text.
      parts: the number of parts of the batch.
      added: the sum of the weights of the parts, as text.
    """
    return (
        f"the weight of js.Mean is no sum over rows: that of the whole batch is {whole}, those of its {parts} parts "
        f"add up to {added}; return js.Mean(total, weight) with the sum of the weighted values and the sum of the "
        "weights of the rows at hand; where the weight of a row depends on other rows, as in batches of graphs, use "
        "js.auto(), which is right for any loss (and takes no js.pipeline)"
    )


class Sum(NamedTuple):
    """A metric that adds up over rows, such as a count.

    Within a batch it is added over devices and micro-batches in its own dtype, at least f32 or a 32-bit integer. An
    int32 above 2**31 in one batch wraps around, as in `jnp.sum`: use floats for such a sum. Over batches `js.combine`
    and `js.evaluate` add exactly.

    Attributes:
      value: an array of any shape, summed over the rows that the loss received.
    """

    value: jax.Array


class Max(NamedTuple):
    """A metric that is the maximum over rows.

    Attributes:
      value: an array of any shape, the elementwise maximum over the rows that the loss received.
    """

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """A loss together with a new model state or metrics, as `loss_fn` may return it in place of a scalar.

    The state changes once per step, however many devices and micro-batches share the rows. All of them receive the
    state from before the step, and the states that they return are combined, leaf by leaf:

    - `js.Sum(x)`: the new state is the old one plus the sum of x over all rows. `js.Max(x)`: the larger of the old one
      and the maximum of x. `js.Mean(total, weight)`: the mean.
    - an array that is proven equal on all devices and in all micro-batches, such as a counter or a teacher made of
      parameters and the old state: taken once;
    - any other floating array, such as the running averages of BatchNorm: the mean over devices and micro-batches. A
      mean of variances leaves out the variance between micro-batches;
    - any other array: an error that names its path. The same for an array that depends on the number of rows but not on
      their data, such as `n + x.shape[0]`.

    A sum of floats that is not returned as `js.Sum`, such as `n + mask.sum()`, can't be recognised and is averaged;
    `js.parity` finds it. If the loss sees the global batch (`js.auto()` without micro-batches), nothing is combined.

    Attributes:
      value: a scalar or a `Mean`. A scalar does not say how to combine it, and runs only under `js.auto`.
      state: the model's new mutable state, a tree like the old one whose leaves may be `Sum`, `Max` or `Mean`; None
        leaves the state as it is. With `update` a tree of any structure.
      metrics: `Mean`, `Sum` or `Max` by name, combined over all rows of the global batch.
      update: `update(old, combined) -> new state`, run once per step on the old state and the combined `state`, with
        arrays in place of `Sum`, `Max` and `Mean`. For other rules, such as the moving averages of a VQ-VAE's codes.
        It must read values of the loss only through `combined`.

    Example:
        def loss_fn(model, batch, key):
            logits = model_fn(model, batch["x"])
            ce = js.Mean(js.cross_entropy(logits, batch["y"]).sum(), len(logits))
            hits = (logits.argmax(-1) == batch["y"]).sum()
            return js.Loss(ce, state={"seen": js.Sum(len(logits))}, metrics={"accuracy": js.Mean(hits, len(logits))})
    """

    value: Any
    state: PyTree = None
    metrics: dict[str, Mean | Sum | Max] = field(default_factory=dict)
    update: Callable[[PyTree, PyTree], PyTree] | None = field(default=None, metadata={"static": True})


def as_loss(output: Any) -> Loss:
    """Convert the output of a user's loss function to a `Loss`.

    Raises:
      TypeError: the output is no real floating scalar, `Mean` or `Loss` of these, or a metric is no `Mean`, `Sum` or
        `Max`; the message says what was received.
    """
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
        if name in ("loss", "grad_norm", "update_norm", "bad"):
            raise TypeError(f"metric {name!r} is what a step reports by itself; give yours another name")
        if not isinstance(metric, (Mean, Sum, Max)):
            raise TypeError(f"metric {name!r} must be a js.Mean, js.Sum or js.Max, got {type(metric).__name__}")
    return loss


def lowest_value(dtype: Any) -> Any:
    """Return the smallest value of a dtype, with which a maximum over values starts."""
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def sum_dtype(dtype: Any) -> Any:
    """Return the dtype in which a sum over values of `dtype` is computed: at least f32 or a 32-bit integer."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.promote_types(dtype, jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)
    return dtype


def combine(a: Mean | Sum | Max, b: Mean | Sum | Max) -> Mean | Sum | Max:
    """Combine a metric of two sets of rows into the metric of all rows.

    Outside of `jax.jit` values are added on the host, in int64 or f64, so that many batches neither wrap around nor
    lose precision; this waits for both metrics. Inside of `jax.jit` they are added in their own dtype.

    Args:
      a: a metric of some rows.
      b: the same metric, of the same kind, of other rows.

    Example:
        >>> float(combine(Mean(6.0, 3.0), Mean(1.0, 4.0)).value)
        1.0
    """
    if isinstance(a, Max):
        return Max(_largest(a.value, b.value))
    both: Mean | Sum = jax.tree.map(_add, a, b)
    return both


def on_host(metric: Mean | Sum | Max) -> Mean | Sum | Max:
    """Wait for a metric and return it as NumPy arrays, in 64 bits if it is a `Mean` or a `Sum`.

    Arrays that this process can't read are returned unchanged.
    """
    read: Callable[[Any], Any] = np.asarray if isinstance(metric, Max) else _exact
    found: Mean | Sum | Max = jax.tree.map(lambda x: read(x) if _readable(x) else x, metric)
    return found


def _add(a: Any, b: Any) -> Any:
    if _readable(a) and _readable(b):
        return _exact(a) + _exact(b)
    return jnp.add(*(jnp.asarray(x, sum_dtype(jnp.result_type(x))) for x in (a, b)))


def _largest(a: Any, b: Any) -> Any:
    if _readable(a) and _readable(b):
        return np.maximum(np.asarray(a), np.asarray(b))
    return jnp.maximum(a, b)


def _readable(x: Any) -> bool:
    """Return whether this process can read the value: it is no tracer, and not split over processes."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _exact(x: Any) -> np.ndarray:
    """Convert a number or an array to a NumPy array in the largest dtype of its kind, such as int64 or f64."""
    x = np.asarray(x)
    kinds = ((jnp.floating, np.float64), (jnp.unsignedinteger, np.uint64), (jnp.complexfloating, np.complex128))
    wide: Any = next((wide for kind, wide in kinds if jnp.issubdtype(x.dtype, kind)), np.int64)
    exact: np.ndarray = x.astype(wide)
    return exact
