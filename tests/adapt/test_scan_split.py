"""A traced loss is cut at its scan: the example of the module's docstring, piece by piece."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.adapt.scan_split import ScanCarry, find_scan, split_at_scan
from jaxshard.core.jaxpr import Program

KEY = jax.random.key(0)
PARAMS = {
    "embed": jnp.linspace(-1, 1, 13 * 8).reshape(13, 8),
    "layers": jnp.linspace(1, -1, 3 * 8 * 8).reshape(3, 8, 8),
    "head": jnp.linspace(-1, 1, 8 * 7).reshape(8, 7),
}
REST = {name: PARAMS[name] for name in ("embed", "head")}
BATCH = {"x": jnp.linspace(0, 1, 16 * 13).reshape(16, 13), "mask": jnp.arange(16) % 3}


def loss(params, batch, key, rate=0.0):
    h = batch["x"] @ params["embed"]
    gains = 1 / jnp.arange(1, 4)
    keys = jax.random.split(jax.random.fold_in(key, 1), 3)
    noise = jax.random.normal(jax.random.fold_in(key, 2), (16, 7))
    mask = batch["mask"]

    def block(h, layer):
        w, key, gain = layer
        kept = jax.random.bernoulli(key, 1 - rate, h.shape)
        return gain * jnp.tanh(h @ w) * kept * mask[:, None], None

    h, _ = lax.scan(block, h, (params["layers"], keys, gains))
    return jnp.mean(h @ params["head"] + noise)


def test_the_inputs_of_the_scan_are_told_apart():
    split = split_at_scan(Program.trace(loss, PARAMS, BATCH, KEY))
    assert [(one.kind, one.which) for one in split.inputs] == [
        ("shared", 0), ("carry", 0), ("weight", ("layers",)), ("key", 0), ("layered", 0),
    ]  # fmt: skip
    shapes = [[var.aval.shape for var in group] for group in split.moving]
    assert shapes == [[(16, 8)], [(16,)], [(3,)], [(16, 7)]], "carry, shared, layered, drawn"


def test_the_pieces_one_after_the_other_are_the_loss():
    """The head has another key, and yet the noise that the embedding drew."""
    split = split_at_scan(Program.trace(loss, PARAMS, BATCH, KEY))
    made = split.run_embed(REST, BATCH, KEY)
    carry = made.carry
    for i in range(3):
        x = ScanCarry(carry, made.shared, made.layered, made.drawn, jnp.asarray(i), None)
        carry = split.run_block({("layers",): PARAMS["layers"][i]}, x, jax.random.key(i))
    x = ScanCarry(carry, made.shared, made.layered, made.drawn, jnp.asarray(3), None)
    found = split.run_head(REST, x, BATCH, jax.random.key(9))
    assert float(found) == pytest.approx(float(loss(PARAMS, BATCH, KEY)), rel=1e-6)


def test_a_scan_over_what_was_made_of_parameters_is_none_over_blocks():
    def changed(params, batch, key):
        return loss(params | {"layers": 2 * params["layers"]}, batch, key)

    with pytest.raises(ValueError, match="but this runs none"):
        find_scan(Program.trace(changed, PARAMS, BATCH, KEY))
