"""Whatever passes the proof computes the same on parts of the positions: random programs, run whole and in parts.

The loss of the parts, combined, and its gradient are those of the whole, to 1e-4 relative (2e-3 of what is not scaled).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxshard as js
from tests.adapt.positionwise.cases import DIMS, GOOD, LENGTH, PARTS, ROWS, WIDTH, findings

# Of one shape, and with gradients that are no zeros and no noise.
LAYERS = {name: GOOD[name] for name in sorted(GOOD) if name not in ("heads", "label", "router", "keys", "while")}
QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def make_batch():
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32),
        "tokens": draw.integers(0, WIDTH, (ROWS, LENGTH)).astype(np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "row": draw.normal(size=ROWS).astype(np.float32),
    }


BATCH = make_batch()
WEIGHTS = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3
KEY = jax.random.key(0)


def compose(layers):
    """A loss of layers one after the other, each on what the one before made, scaled to stay small."""

    def loss(w, b, key):
        x = b["x"]
        for layer in layers:
            y = layer(x, w, b, key)
            x = x + y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1.0)
        return js.Mean((x**2).sum(), x.size) + 0.1 * js.Mean(jnp.sin(x).mean() + (w**2).sum(), 1)

    return loss


def parts_of(batch, order):
    """The batch cut into parts, with its positions in another order."""
    for part in np.split(order, PARTS):
        yield {name: np.take(x, part, DIMS[name]) if name in DIMS else x for name, x in batch.items()}


def check(loss, order, tolerance):
    """Compare a loss, and its gradient, of parts with that of the whole, as engines combine them."""

    @jax.jit
    def run(batch, shares):
        def value(w):
            made = loss(w, batch, KEY)
            return sum(total / share for total, share in zip(made.totals, shares)), made.weights

        return jax.value_and_grad(value, has_aux=True)(WEIGHTS)

    def combined(batches):
        ones = [1.0] * len(jax.eval_shape(loss, WEIGHTS, BATCH, KEY).weights)
        weights = np.sum([run(batch, ones)[0][1] for batch in batches], axis=0)
        found = [run(batch, list(weights)) for batch in batches]
        return sum(value for (value, _), _ in found), sum(gradient for _, gradient in found)

    (whole, gradient), (parts, added) = combined([BATCH]), combined(list(parts_of(BATCH, order)))
    np.testing.assert_allclose(parts, whole, rtol=tolerance, atol=tolerance * 1e-2)
    size = max(np.abs(gradient).max(), 1e-2)
    np.testing.assert_allclose(added / size, gradient / size, atol=tolerance)


def test_some_layers_together_are_right_on_parts():
    check(compose([LAYERS["merged"], LAYERS["table"]]), np.random.default_rng(0).permutation(LENGTH), 1e-4)


@pytest.mark.slow
def test_all_layers_together_are_right_on_parts():
    check(compose(LAYERS.values()), np.random.default_rng(0).permutation(LENGTH), 1e-4)


# Operations of all kinds, also with harmless arguments: whether they pass depends on these.
OPERATIONS = [
    lambda x, w, p, a, b: x.sum(a % 3, keepdims=True) * 0.1 + x,
    lambda x, w, p, a, b: jnp.roll(x, b % 3, a % 3) * 0.5 + x,
    lambda x, w, p, a, b: jnp.cumsum(x, a % 3) * 0.1,
    lambda x, w, p, a, b: jnp.flip(x, a % 3) @ w,
    lambda x, w, p, a, b: jnp.sort(x, a % 3),
    lambda x, w, p, a, b: x.transpose(1, 0, 2).reshape(-1, WIDTH).reshape(-1, ROWS, WIDTH).transpose(1, 0, 2),
    lambda x, w, p, a, b: x.reshape(-1, WIDTH).reshape(-1, ROWS, WIDTH).transpose(1, 0, 2) if a % 2 else x,
    lambda x, w, p, a, b: x.reshape(ROWS, -1).reshape(x.shape) * (1 + b % 2),
    lambda x, w, p, a, b: x.reshape(ROWS, WIDTH, -1).swapaxes(1, 2) if a % 3 == 2 else x.swapaxes(1, 2).swapaxes(2, 1),
    lambda x, w, p, a, b: jax.nn.softmax(x, a % 3),
    lambda x, w, p, a, b: (
        jnp.take_along_axis(x, (p % (ROWS if a % 3 == 0 else WIDTH))[..., None], [0, 2, 2][a % 3]) + x
    ),
    lambda x, w, p, a, b: x + jnp.arange(x.shape[a % 3]).reshape([-1 if i == a % 3 else 1 for i in range(3)]),
    lambda x, w, p, a, b: x / x.shape[a % 3],
    lambda x, w, p, a, b: jnp.einsum(["btc,bsc->bts", "btc,btd->bcd"][a % 2], x, x).sum() * 1e-3 + x if b % 2 else x,
    lambda x, w, p, a, b: jax.lax.scan(lambda h, y: (h, y @ w), 0, x.swapaxes(0, 1) if a % 2 else x)[1].reshape(
        x.shape
    ),
    lambda x, w, p, a, b: x.at[:, :, a % WIDTH].add(x[:, :, b % WIDTH]) if a % 2 else x.at[a % ROWS].mul(2.0),
    lambda x, w, p, a, b: jax.vmap(lambda y: y @ w + y.mean(0) * (b % 2), in_axes=a % 2, out_axes=a % 2)(x),
    lambda x, w, p, a, b: jnp.concatenate([x, -x], a % 3)[tuple(slice(n) for n in x.shape)],
    lambda x, w, p, a, b: jnp.pad(x, [(2, 0) if i == a % 3 else (0, 0) for i in range(3)])[:ROWS, :LENGTH, :WIDTH],
    lambda x, w, p, a, b: jnp.where(jnp.max(x, a % 3, keepdims=True) > 0, x, jnp.tanh(x)),
    lambda x, w, p, a, b: x * jnp.ones(x.shape[: 1 + a % 3]).reshape(x.shape[: 1 + a % 3] + (1,) * (2 - a % 3)),
]
ENDS = [
    lambda x, w: js.Mean((x**2).sum(), x.size),
    lambda x, w: js.Mean(x.mean(1).sum(), len(x)),
    lambda x, w: js.Mean((x.mean(1) @ w).sum(), x.shape[0]),
    lambda x, w: js.Mean(jnp.tanh(x.mean(1)).sum(), len(x)),
    lambda x, w: js.Mean(x.sum() / x.size + (w**2).sum(), 1.0),
    lambda x, w: js.Mean(x.sum() / x.size, x.shape[1]),
    lambda x, w: js.Mean(x.sum(), 1.0),
    lambda x, w: js.Mean((x > 0).astype(x.dtype).sum() * w.sum(), x.shape[1]),
]


@pytest.mark.slow
@settings(max_examples=200, **QUICK)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(range(len(OPERATIONS))), st.integers(0, 5), st.integers(0, 5)), max_size=3
    ),
    end=st.sampled_from(range(len(ENDS))),
    seed=st.integers(0, 99),
)
def test_whatever_passes_is_right(steps, end, seed):
    def loss(w, b, key):
        x = b["x"]
        for number, one, two in steps:
            x = OPERATIONS[number](x, w, b["tokens"], one, two)
        return ENDS[end](x, w)

    if not findings(loss):
        check(loss, np.random.default_rng(seed).permutation(LENGTH), 2e-3)
