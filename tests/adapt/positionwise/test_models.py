"""Ready-made models and unmodified models of Flax, as users write them."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxshard as js
from tests.adapt.positionwise.cases import findings

ROWS, LENGTH, VOCAB, WIDTH = 2, 16, 20, 16
DIMS = {"tokens": 1, "targets": 1, "positions": 1, "segment_ids": 1, "weights": 1}
IDS = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
BATCH = {"tokens": IDS, "targets": IDS}
PACKED = BATCH | {"positions": IDS, "segment_ids": IDS, "weights": jax.ShapeDtypeStruct(IDS.shape, jnp.float32)}
KEY = jax.random.key(0)
gpt = partial(js.models.gpt, vocab=VOCAB, width=WIDTH, depth=2, heads=4, seq=LENGTH)
llama = partial(js.models.llama, vocab=VOCAB, width=WIDTH, depth=2, heads=4, kv_heads=2, hidden=32, seq=LENGTH)


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (partial(gpt, dropout=0.3), BATCH),
        (llama, PACKED),
        pytest.param(gpt, PACKED, marks=pytest.mark.slow),
        pytest.param(partial(gpt, tied=True), BATCH, marks=pytest.mark.slow),
        pytest.param(llama, BATCH, marks=pytest.mark.slow),
    ],
    ids=["gpt_dropout", "llama_packed", "gpt_packed", "gpt_tied", "llama"],
)
def test_ready_made_models_pass(make, batch):
    model = make()
    assert not findings(model.loss, jax.eval_shape(model.init, KEY), batch, dims=DIMS)


def attend(q, k, v):
    """Linen hands over what a function takes: this one gets no mask."""
    return js.attention(q, k, v, causal=True)


class LinenBlock(nn.Module):
    """One block as people write them."""

    attention_fn: object
    beside: object = None

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4, attention_fn=self.attention_fn)(nn.LayerNorm()(x))
        if self.beside is not None:
            x = x + self.beside()(x)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.RMSNorm()(x))))


class LinenModel(nn.Module):
    """A language model with a table of positions."""

    positions: object = js.positions
    attention_fn: object = attend
    beside: object = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        table = self.param("table", nn.initializers.normal(), (64, WIDTH))
        count = tokens.shape[1]
        x = x + (table[:count] if self.positions is None else table[self.positions(count)])
        blocks = nn.scan(nn.remat(lambda block, x, _: (block(x), None)), length=2, variable_axes={"params": 0},
                         split_rngs={"params": True})  # fmt: skip
        x, _ = blocks(LinenBlock(self.attention_fn, self.beside), x, None)
        return nn.Dense(VOCAB)(x)


def of_linen(module):
    variables = jax.eval_shape(module.init, KEY, jnp.zeros(IDS.shape, jnp.int32))

    def loss(variables, batch, key):
        logits = module.apply(variables, batch["tokens"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return js.Mean(nats.sum(), nats.size)

    return [str(finding) for finding in findings(loss, variables, BATCH, dims=DIMS)]


def test_linen_with_js_attention_passes():
    assert not of_linen(LinenModel())


def line_of(text):
    """The line of this file that holds a text."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line and '"' not in line)


BESIDE = "self.beside()(x)"


@pytest.mark.parametrize(
    ("changes", "what", "line"),
    [
        ({"positions": None}, "slice .* takes as much of an array as there are positions", "(table[:count]"),
        ({"attention_fn": nn.dot_product_attention}, "flax/linen/attention.py.*dot_general", "x + nn.MultiHeadDot"),
        ({"beside": partial(nn.Conv, WIDTH, (3,))}, "flax/linen/linear.py.* convolves along the positions", BESIDE),
    ],
    ids=["table", "attention", "conv"],
)  # fmt: skip
def test_linen_without_is_refused_by_name_and_line(changes, what, line):
    found = of_linen(LinenModel(**changes))
    assert re.search(what, found[0]), found
    assert found[0].startswith(f"positionwise/test_models.py:{line_of(line)}"), found


def test_constants_of_the_host_that_are_the_same_are_no_matter():
    table = np.ones((64, VOCAB), np.float32)

    def loss(params, batch, key):
        return js.Mean(jnp.asarray(table)[batch["tokens"]].sum(), batch["tokens"].size)

    assert not findings(loss, jnp.zeros(3), BATCH, dims=DIMS)


def test_routed_experts_pass_and_room_for_some_tokens_does_not():
    sizes = {"vocab": VOCAB, "width": WIDTH, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 8, "seq": LENGTH}
    make = partial(js.models.moe, **sizes, experts=4, k=2, shared=1, z=1e-3, bias_rate=1e-3)
    model = make()
    shapes = jax.eval_shape(model.init, KEY)
    assert not findings(model.loss, shapes, PACKED, dims=DIMS)
    with pytest.raises(ValueError, match="capacity counts the tokens of full rows"):
        findings(make(capacity=1.0).loss, shapes, BATCH, dims=DIMS)
