"""Losses by what they do to positions: `x` is [rows, positions, width], `w` [width, width], all of a batch `b`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxshard as js
from jaxshard.adapt.positionwise.prove import find_mixing

ROWS, LENGTH, WIDTH, PARTS = 2, 16, 8, 4
DIMS = {"x": 1, "tokens": 1, "positions": 1}
TABLE = np.linspace(-1, 1, 64 * WIDTH, dtype=np.float32).reshape(64, WIDTH)


def shapes(length=LENGTH):
    """The batch of all cases."""
    return {
        "x": jax.ShapeDtypeStruct((ROWS, length, WIDTH), jnp.float32),
        "tokens": jax.ShapeDtypeStruct((ROWS, length), jnp.int32),
        "positions": jax.ShapeDtypeStruct((ROWS, length), jnp.int32),
        "row": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
    }


W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def findings(loss_fn, model=W, batch=None, *, dims=DIMS, parts=PARTS, **settings):
    """What the proof finds in `loss_fn(model, batch, key)`."""
    batch = shapes() if batch is None else batch
    paths = jax.tree_util.tree_leaves_with_path(batch)
    of_batch = [dims.get(path[-1].key) for path, _ in paths]
    places = [None] * len(jax.tree.leaves(model)) + of_batch + [None]
    return find_mixing(loss_fn, (model, batch, KEY), places, parts, **settings)


def mean_of(layer):
    """A loss that adds up what a layer makes of `x`."""

    def loss(w, b, key):
        y = layer(b["x"], w, b, key)
        return js.Mean((y**2).sum(), y.size)

    return loss


def _merged(x, w, b, key):
    y = x.reshape(-1, x.shape[-1]) @ w
    return jnp.tanh(y).reshape(x.shape)


def _heads(x, w, b, key):
    return (x @ w).reshape(*x.shape[:2], 2, WIDTH // 2).swapaxes(1, 2)


def _router(x, w, b, key):
    top, which = lax.top_k(x @ w, 2)
    weights = jax.nn.one_hot(which, WIDTH) * jax.nn.softmax(top)[..., None]
    return weights.sum(-2) * jnp.sort(x, axis=-1)[..., ::-1] * jnp.argsort(x, -1)


def _scan(x, w, b, key):
    def body(carry, layer):
        return jnp.tanh(carry @ layer), carry.sum(-1)

    y, ys = lax.scan(body, x, jnp.stack([w, w * 2]))
    return y + ys.sum(0)[..., None]


def _keys(x, w, b, key):
    def keep(key, number):
        return jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, (x.shape[-1],))

    keys = js.row_keys(key, x.shape[0])
    return x * jax.vmap(jax.vmap(keep, (None, 0)))(keys, b["positions"])


def _while(x, w, b, key):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


@jax.custom_vjp
def _product(x, w):
    return x @ w


_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, d: (d @ r[1].T, jnp.einsum("btc,btd->cd", r[0], d)))


@jax.custom_vjp
def _own_rule_again(x, w):
    return x @ w


# Both of its rules call the function itself, whose rule is then never asked for.
_own_rule_again.defvjp(
    lambda x, w: (_own_rule_again(x, w), (x, w)),
    lambda r, d: (_own_rule_again(d, r[1].T), jnp.einsum("btc,btd->cd", r[0], d)),
)

GOOD = {
    "dense": lambda x, w, b, key: jax.nn.gelu(x @ w),
    "merged": _merged,
    "heads": _heads,
    "norm": lambda x, w, b, key: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3),
    "table": lambda x, w, b, key: x + jnp.asarray(TABLE)[b["tokens"]] + jnp.take(w, b["tokens"], axis=0),
    "positions": lambda x, w, b, key: x * jnp.cos(b["positions"][..., None] / 9.0),
    "label": lambda x, w, b, key: jnp.take_along_axis(x @ w, b["tokens"][..., None], -1),
    "router": _router,
    "scan": _scan,
    "remat": lambda x, w, b, key: jax.checkpoint(lambda x: jnp.sin(x @ w))(x),
    "cond": lambda x, w, b, key: lax.cond(w.sum() > 0, lambda: x * 2, lambda: jnp.zeros_like(x)),
    "while": _while,
    "split": lambda x, w, b, key: jnp.concatenate(jnp.split(x, 2, axis=-1)[::-1], -1),
    "stack": lambda x, w, b, key: jnp.stack([x, x @ w], 1)[:, 1] + sum(jnp.unstack(jnp.tile(x, (1, 1, 2)))[:1])[:, :8],
    "mask": lambda x, w, b, key: jnp.where((b["tokens"] > 2)[..., None], x, 0),
    "slot": lambda x, w, b, key: x.at[:, :, 0].set(1.0) + lax.dynamic_slice_in_dim(x, 1, 1, 2),
    "keys": _keys,
    "own_vjp": lambda x, w, b, key: _product(x, w),
    "own_vjp_again": lambda x, w, b, key: _own_rule_again(x, w),
    "noise": lambda x, w, b, key: x + jax.random.normal(key, (x.shape[0], 1, x.shape[2])),
}
"""Layers that treat positions one by one."""


def _recurrent(x, w, b, key):
    _, ys = lax.scan(lambda h, x: ((h + x) @ w, h), jnp.zeros((x.shape[0], WIDTH)), x.swapaxes(0, 1))
    return ys.swapaxes(0, 1)


def _attention(x, w, b, key):
    return jax.nn.softmax(jnp.einsum("btc,bsc->bts", x @ w, x)) @ x


def _in_loop(x, w, b, key):
    return lax.fori_loop(0, 2, lambda _, x: x + jnp.roll(x, 1, 1), x)


def _by_count(x, w, b, key):
    return x * 2 if x.shape[1] > LENGTH // 2 else jnp.sin(x)


@jax.custom_vjp
def _mixing_backward(x, w):
    return x @ w


_mixing_backward.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, d: ((d - d.mean(1, keepdims=True)) @ r[1].T, r[1]))

MIXING = {
    "attention": (_attention, "dot_general .* multiplies positions with other positions: attend by js.attention"),
    "conv": (
        lambda x, w, b, key: lax.conv_general_dilated(
            x, w[None].repeat(3, 0), (1,), "SAME", None, None, ("NWC", "WIO", "NWC")
        ),
        "conv_general_dilated .* convolves along the positions",
    ),
    "recurrent": (_recurrent, "scan .* goes over the positions one after the other"),
    "pooled": (lambda x, w, b, key: jax.nn.relu(x.mean(1) @ w), "reduce_sum .* is a sum over the positions"),
    "largest": (lambda x, w, b, key: x - x.max(1, keepdims=True), "reduce_max .* is a maximum over the positions"),
    "cumsum": (lambda x, w, b, key: jnp.cumsum(x, 1), "cumsum .* goes over the positions in their order"),
    "sort": (lambda x, w, b, key: jnp.sort(x, 1), "sort .* goes over the positions in their order: route by js.moe"),
    "roll": (lambda x, w, b, key: jnp.roll(x, 1, 1), "slice .* takes some of the positions: have the shifted array"),
    "reverse": (lambda x, w, b, key: x[:, ::-1], "rev .* reverses the positions"),
    "first": (lambda x, w, b, key: x + x[:, :1], "slice .* takes some of the positions"),
    "pick": (
        lambda x, w, b, key: x[:, w[0, 0].astype(int)],
        "dynamic_slice .* takes some of the positions|gather .* takes positions by their index",
    ),
    "arange": (
        lambda x, w, b, key: x + jnp.arange(x.shape[1])[:, None],
        "iota .* counts from 0 on each device: .*js.positions",
    ),
    "learned": (
        lambda x, w, b, key: x + jnp.asarray(TABLE)[: x.shape[1]],
        "as many entries as there are|as much of an array",
    ),
    "alibi": (
        lambda x, w, b, key: b["positions"][:, :, None] - b["positions"][:, None],
        "combines positions with other",
    ),
    "dropout": (
        lambda x, w, b, key: x * jax.random.bernoulli(key, 0.5, x.shape),
        "random_bits .* draws random numbers for the positions",
    ),
    "scale": (lambda x, w, b, key: x / x.shape[1], "a number that depends on how many"),
    "in_loop": (_in_loop, "slice .* takes some of the positions"),
    "by_count": (_by_count, "what runs depends on how many there are"),
    "blocks": (lambda x, w, b, key: x.reshape(ROWS, -1, 2, WIDTH).sum(2), "reshape .* cuts the positions into several"),
    "backward": (lambda x, w, b, key: _mixing_backward(x, w), "in the backward pass of a jax.custom_vjp"),
    "branch": (
        lambda x, w, b, key: lax.cond(x.sum() > 0, lambda: x, lambda: -x),
        "reduce_sum .* is a sum over the positions",
    ),
    "callback": (
        lambda x, w, b, key: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        "pure_callback .* is not known to treat positions one by one",
    ),
}
"""Layers that do not, and what the proof says of them."""
