"""Calls of attention of every kind, and the formula's value and gradients to compare with."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.layers.attention.formula import Extras, Form, formula

NOTHING, PLAIN = Extras(), Form()


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def arrays(queries, *, keys=None, rows=2, heads=4, kv_heads=2, width=8, value_width=None):
    """(q, k, v) with values from -3 to 3 or so."""
    keys = queries if keys is None else keys
    return (
        normal(0, rows, queries, heads, width),
        normal(1, rows, keys, kv_heads, width),
        normal(2, rows, keys, kv_heads, value_width or width),
    )


def documents(rows, positions):
    """Segment ids [rows, positions] of documents of uneven lengths."""
    rng = np.random.default_rng(3)
    return jnp.asarray(np.sort(rng.integers(-1, 4, (rows, positions)), axis=1), jnp.int32)


def value_and_grads(attend, q, k, v, extras, form):
    """A loss of the output and its gradients by q, k, v and, if there is one, the bias."""
    weights = normal(9, *q.shape[:-1], v.shape[-1]) / q.shape[1]

    @partial(jax.value_and_grad, argnums=(0, 1, 2) if extras.bias is None else (0, 1, 2, 3))
    def loss(q, k, v, bias):
        return (attend(q, k, v, extras._replace(bias=bias), form) * weights).sum()

    return jax.jit(loss)(q, k, v, extras.bias)


def assert_equal(attend, q, k, v, extras=NOTHING, form=PLAIN):
    """Losses agree to 1e-6, gradients to 1e-5 of their largest element.

    Of one position the gradients of query and key are exactly 0 in the formula and rounding errors in kernels: an array
    far smaller than the largest gradient is compared with a tenth of that one.
    """
    expected, gradients = value_and_grads(formula, q, k, v, extras, form)
    value, found = value_and_grads(attend, q, k, v, extras, form)
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
    largest = max(float(np.abs(one).max()) for one in gradients)
    for one, other in zip(found, gradients, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(float(np.abs(other).max()), largest / 10))
