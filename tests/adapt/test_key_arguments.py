"""Modules that take a random key, or `nnx.Rngs`, as an argument of their call, as Flax's examples do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from jaxshard.core.keys import neighbour
from tests.toys import Toy, assert_equal_runs, one_device, sharded

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X = np.random.default_rng(0).normal(size=(16, 13)).astype(np.float32)
FSDP = js.fsdp(min_size=0)


class Coder(nn.Module):
    """A variational auto-encoder: it draws from a key that it is called with, and from a stream of its own."""

    @nn.compact
    def __call__(self, x, z_rng, train=True):
        x = nn.Dropout(0.2, deterministic=not train)(x)
        mean, spread = nn.Dense(5)(x), nn.Dense(5)(x)
        return nn.Dense(13)(mean + jnp.exp(0.1 * spread) * jax.random.normal(z_rng, mean.shape)), mean


def coder_loss(model, batch, key, train):
    x, mean = model(batch, key, train)
    return js.Mean(jnp.square(x - batch).sum() + jnp.square(mean).sum(), batch.size)


@pytest.mark.slow
def test_a_linen_module_called_with_a_key_equals_one_device():
    """As `assert_equal_runs`, against a loop that calls `Coder().apply` itself."""
    model = js.linen(Coder(), coder_loss, X)

    def by_hand(params, batch, key):
        # Flax takes the stream "params" for every name that has none.
        def apply(*args):
            return Coder().apply({"params": params}, *args, rngs={"params": key})

        return coder_loss(apply, batch, neighbour(key), train=True)

    trace, _ = sharded(Toy(model.init, model.loss, X, 0.01), FSDP, js.make_mesh(data=8), js.auto())
    assert_equal_runs(trace, one_device(Toy(model.init, by_hand, X, 0.01)))


def test_keys_of_rows_are_the_same_under_every_engine():
    """As `assert_equal_runs`; the loss makes a key for each row of the key that it receives."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, keys):
            return nn.Dense(3)(x + jax.vmap(lambda key: jax.random.normal(key, (13,)))(keys))

    def loss(model, batch, key):
        y = model(batch, js.row_keys(key, len(batch)))
        return js.Mean(jnp.square(y).sum(), y.size)

    toy = Toy(*js.linen(Noisy(), loss, X), X)
    trace, _ = sharded(toy, FSDP, js.make_mesh(data=8), js.explicit(microbatches=2))
    assert_equal_runs(trace, one_device(toy))


class Block(nnx.Module):
    """Its dropout has no stream: it draws from the Rngs of the call."""

    def __init__(self, width, rngs):
        self.dense, self.drop = nnx.Linear(width, 8, rngs=rngs), nnx.Dropout(0.3)

    def __call__(self, x, rngs=None):
        return self.drop(jnp.tanh(self.dense(x)), rngs=rngs)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = Block(13, rngs), Block(8, rngs)

    def __call__(self, x, rngs=None):
        return self.second(self.first(x, rngs), rngs=rngs)


def net_loss(model, batch, rngs: nnx.Rngs | None = None):
    y = model(batch, rngs)
    return js.Mean(jnp.square(y - 1).sum(), y.size)


@pytest.mark.slow
@pytest.mark.parametrize("units", [[], [Block]], ids=["whole", "units"])
def test_an_nnx_module_called_with_rngs_equals_one_device(units):
    """As `assert_equal_runs`, against a loop that merges the module itself."""
    model = js.nnx(Net, net_loss)
    graph, form = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def by_hand(params, batch, key):
        state = jax.tree.map(lambda x: x, form)
        nnx.replace_by_pure_dict(state, params)
        return net_loss(nnx.merge(graph, state, copy=True), batch, nnx.Rngs(neighbour(neighbour(key))))

    trace, _ = sharded(Toy(model.init, model.loss, X), FSDP, js.make_mesh(data=8), js.auto(units=units))
    assert_equal_runs(trace, one_device(Toy(model.init, by_hand, X)))


@pytest.mark.slow
def test_an_nnx_module_is_evaluated_without_rngs():
    model, tx = js.nnx(Net, net_loss), optax.sgd(0.1)
    layout = js.layout(FSDP, js.make_mesh(data=8), model.init, tx)
    found = js.evaluate(js.make_eval_step(model.evaluate, layout), js.init(model.init, tx, layout, 0), [X])
    module = Net(nnx.Rngs(jax.random.key(0)))
    module.eval()
    assert found["loss"] == pytest.approx(float(net_loss(module, X).value), rel=1e-6)


def test_the_key_of_the_loss_is_no_other_key():
    """Neither that of a stream (the step's key folded with its number) nor a share that a loss might split off it."""
    key = jax.random.key(3)
    others = [key, neighbour(neighbour(key)), *jax.random.split(key, 4), *jax.random.split(neighbour(key), 4)]
    words = {tuple(np.asarray(jax.random.key_data(one)).tolist()) for one in (neighbour(key), *others)}
    assert len(words) == 1 + len(others)


def test_evaluation_has_no_key():
    def loss(model, batch, key):
        return coder_loss(model, batch, key, key is not None)

    model = js.linen(Coder(), loss, X)
    with pytest.raises(TypeError) as caught:
        jax.eval_shape(model.evaluate, jax.eval_shape(model.init, jax.random.key(0)), X)
    assert any(
        "the loss received key=None; there draw from a key of your own" in note for note in caught.value.__notes__
    )


@pytest.mark.parametrize("who", ["js.stack", "js.scanned"])
def test_a_model_of_blocks_hands_out_no_key(who):
    def loss(model, batch, key=None):
        return js.Mean(model.blocks(batch).sum(), 1)

    with pytest.raises(TypeError, match=rf"{who}: .*key=None.*nothing is passed for 'key'; the modules draw"):
        js.stack(nn.Dense(13), 2, loss, X) if who == "js.stack" else js.scanned(Coder(), loss, X)
