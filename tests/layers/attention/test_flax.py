"""`attention_fn=js.attention` in layers of Flax that know nothing of it: equal to Flax's own attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from jaxshard.layers.attention import attention as module
from tests.layers.cases import normal

X = normal(0, 2, 40, 16)
PADDING = jnp.arange(40) < jnp.asarray([40, 29])[:, None]  # a row of 29 tokens
MASK = nn.combine_masks(nn.make_causal_mask(PADDING), nn.make_attention_mask(PADDING, PADDING))
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@pytest.fixture(autouse=True)
def blocks_from_16(monkeypatch):
    blockwise = module.blockwise
    monkeypatch.setattr(module, "_SHORT", 16)
    monkeypatch.setattr(module, "blockwise", lambda *args, block: blockwise(*args, block=16))


def assert_same(make, call):
    """The layer that `make(attention_fn)` makes gives the same output and gradients with either attention."""
    found = []
    for attention_fn in (js.attention, None):
        given = {} if attention_fn is None else {"attention_fn": attention_fn}
        layer, params = make(**given)
        found.append(jax.value_and_grad(lambda params, layer=layer: (call(layer, params) ** 2).mean())(params))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_linen(mask, dropout):
    """Dropout draws the bits that Flax draws."""

    def make(**given):
        layer = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=dropout, deterministic=False, **given)
        return layer, layer.init(KEYS, X)["params"]

    assert_same(make, lambda layer, params: layer.apply({"params": params}, X, mask=mask, rngs=KEYS))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_nnx(causal):
    def make(**given):
        layer = nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), decode=False, **given)
        return nnx.split(layer)

    def call(graph, params):
        return nnx.merge(graph, params)(X, is_causal=causal, mask=MASK if causal else None)

    assert_same(make, call)


@pytest.mark.slow
def test_decoding_in_linen_equals_the_whole_row():
    layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=js.attention)
    params = layer.init(KEYS, X)["params"]
    whole = layer.apply({"params": params}, X, mask=nn.make_causal_mask(X[..., 0]))
    decoder = layer.clone(decode=True)
    cache = decoder.init(KEYS, X)["cache"]
    for t in range(3):
        one, changed = decoder.apply({"params": params, "cache": cache}, X[:, t : t + 1], mutable="cache")
        cache = changed["cache"]
        np.testing.assert_allclose(one[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)


def test_weights_can_t_be_sown():
    layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=js.attention)
    params = jax.eval_shape(layer.init, KEYS, X)
    with pytest.raises(ValueError, match="sow_weights"):
        jax.eval_shape(partial(layer.apply, sow_weights=True), params, X)
