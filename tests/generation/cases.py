"""Models, layouts and the comparison with full forward passes that the tests of generation share."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import jaxshard as js
from jaxshard.generation.generate import _programs, _Same
from jaxshard.generation.programs import Draw
from jaxshard.generation.sampling import Sampling

SIZES = {"vocab": 32, "width": 16, "depth": 2, "heads": 4, "seq": 48}
LLAMA = SIZES | {"kv_heads": 4, "hidden": 32}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [7]]
"""Of different lengths, and more than two devices divide."""


def whole():
    return js.fsdp("data", min_size=0)


LAYOUTS = {
    "one device": (whole, {"data": 1}),
    "fsdp": (whole, {"data": 8}),
    "zero2": (lambda: js.zero2("data"), {"data": 8}),
    "tensor": (lambda: js.compose(whole(), js.tensor()), {"data": 2, "tensor": 4}),
    "sequence": (lambda: js.compose(whole(), js.tensor([("sequence", "split"), *js.RULES])), {"data": 2, "tensor": 4}),
    "context": (
        lambda: js.compose(js.fsdp(("data", "context"), min_size=0), js.context("context")),
        {"data": 2, "context": 4},
    ),
    "pipeline": (lambda: js.compose(whole(), js.pipeline("pipe", chunks=1)), {"data": 4, "pipe": 2}),
    "experts": (
        lambda: js.compose(js.fsdp(("data", "expert"), min_size=0), js.expert("expert"), js.tensor()),
        {"data": 2, "expert": 2, "tensor": 2},
    ),
}


@cache
def layout_of(model, name):
    strategy, axes = LAYOUTS[name]
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return js.layout(strategy(), js.make_mesh(devices, **axes), model.init)


@cache
def params_of(model):
    """Parameters far from their first values, so that every one matters and no two tokens are equally likely."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: rng.normal(0.1, 0.3, x.shape).astype(np.float32), shapes)


def likeliest(model, rows, length, plain=None):
    """Continue rows greedily by a full forward pass for every token, without a cache."""
    plain = plain or (lambda params, tokens: js.models.logits(model, params, tokens))
    forward, size = jax.jit(plain), max(map(len, rows)) + length
    found = []
    for row in rows:
        tokens = list(row)
        for _ in range(length):
            padded = np.zeros((1, size), np.int32)
            padded[0, : len(tokens)] = tokens  # what stands behind a token is not seen
            tokens.append(int(forward(params_of(model), jnp.asarray(padded))[0, len(tokens) - 1].argmax()))
        found.append(tokens)
    return found


def programs_of(model, layout, rows, size, *, prompt=3, how=None):
    """Return (the programs, their weights, the state after a prompt of each row, how tokens are drawn)."""
    programs = _programs(_Same(model), _Same(layout), _Same(None))
    how = (how or Sampling()).arrays(programs.model.vocab)
    tokens, lengths = np.ones((rows, 16), np.int32), np.full(rows, prompt, np.int32)
    given = Draw(jax.random.key(0), np.arange(rows, dtype=np.uint32), lengths, np.zeros((0, 1), np.int32), how)
    weights = programs.weights(params_of(model))
    state, _ = programs.prefill(weights, tokens, given, size=size)
    return programs, weights, state, given
