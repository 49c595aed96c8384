"""`js.scanned`: a Linen model with `nn.scan` inside, taken apart, is still that model."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxshard as js
from tests.toys import CLASSES, Toy, assert_equal_runs, classes, cross_entropy, one_device, sharded
from tests.toys import tree_error as error_of

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WIDTH, BLOCKS = 16, 3
SPLIT = {"params": True, "dropout": True}


class Block(nn.Module):
    """With a mask for all blocks, a number for each, and dropout."""

    train: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, mask, gain):
        names = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        h = jnp.tanh(nn.Dense(2 * WIDTH, kernel_init=names)(nn.LayerNorm()(x)))
        h = nn.Dropout(self.rate, deterministic=not self.train)(h)
        return x + gain.astype(x.dtype) * nn.Dense(WIDTH)(h) * mask, None


class Decoder(nn.Module):
    """The scan is not at the top."""

    rate: float = 0.0
    split: Any = None
    options: Any = None
    unit: Any = Block

    @nn.compact
    def __call__(self, x, mask, train):
        scan = nn.scan(
            self.unit,
            variable_axes={"params": 0},
            split_rngs=self.split or SPLIT,
            in_axes=(nn.broadcast, 0),
            metadata_params={nn.PARTITION_NAME: "layers"},
            **({"length": BLOCKS} | (self.options or {})),
        )
        x, _ = scan(train, self.rate)(x, mask, jnp.linspace(0.5, 1.5, BLOCKS))
        return nn.LayerNorm()(x)


class Net(nn.Module):
    """A tied embedding, dropout before the blocks, and what it dropped added again after them."""

    rate: float = 0.0
    split: Any = None
    options: Any = None
    unit: Any = Block

    @nn.compact
    def __call__(self, labels, weights, train=False):
        table = nn.Embed(CLASSES, WIDTH)
        first = nn.Dropout(self.rate, deterministic=not train)(table(labels))
        x = Decoder(self.rate, self.split, self.options, self.unit)(first, weights[:, None] > 0, train)
        return table.attend(x + first)


def loss(model, batch, train):
    logits = model(batch["y"], batch["weights"], train)
    hits = (logits.argmax(-1) == batch["y"]).sum()
    return js.Loss(cross_entropy(logits, batch), metrics={"hits": js.Sum(hits)})


def model_of(**options):
    return js.scanned(Net(**options), loss, classes())


def unpacked(output):
    return output.value.value


def test_equals_the_module_itself():
    """Loss within 1e-6 and gradients within 1e-5; parameters and what comes back of them bit for bit."""
    model, adapter = model_of(), js.linen(Net(), loss, classes())
    params, theirs, boxed = jax.jit(
        lambda key: (model.init(key), adapter.init(key), Net().init(key, classes()["y"], classes()["weights"]))
    )(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, model.to_variables(params)["params"], theirs)
    jax.tree.map(np.testing.assert_array_equal, model.from_variables(boxed), params)
    assert jax.tree.map(jnp.shape, params["blocks"]["Dense_0"]) == {"kernel": (3, 16, 32), "bias": (3, 32)}
    assert {name: set(part) for name, part in params.items() if name != "blocks"} == {
        "Embed_0": {"embedding"},
        "Decoder_0": {"LayerNorm_0"},
    }

    found = jax.jit(jax.value_and_grad(lambda p: unpacked(model.loss(p, classes(), None))))(params)
    expected = jax.jit(jax.value_and_grad(lambda p: unpacked(adapter.run(p, classes(), None))))(theirs)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    assert error_of(model.to_variables(found[1])["params"], expected[1]) < 1e-5
    assert set(jax.eval_shape(model.evaluate, params, classes())) == {"loss", "hits"}


FSDP = js.fsdp(min_size=0)
CELLS = {
    "auto": (FSDP, {"data": 8}, js.auto()),
    "explicit": (FSDP, {"data": 8}, js.explicit(remat="nothing", microbatches=2)),
    "pipelined": (js.compose(FSDP, js.pipeline(chunks=1)), {"data": 4, "pipe": 2}, js.pipelined(microbatches=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_sharded(cell):
    """Losses within 1e-6 and gradients within 1e-5 of one device; a device has other shapes than the example batch."""
    strategy, axes, engine = CELLS[cell]
    model = js.scanned(Net(), partial(loss, train=False), jax.tree.map(lambda x: x[:2], classes()))
    toy = Toy(model.init, model.loss, classes(), rate=0.01)
    trace, _ = sharded(toy, strategy, js.make_mesh(**axes), engine, steps=2)
    assert_equal_runs(trace, one_device(toy, steps=2))


@pytest.mark.slow
def test_dropout_is_drawn_for_every_block_and_only_once_before_them():
    """Blocks that only drop: each takes another half, from its own key; the head adds what the embedding kept."""

    class Drop(nn.Module):
        train: bool
        rate: float

        @nn.compact
        def __call__(self, x, mask, gain):
            one = self.param("one", nn.initializers.ones, ())
            return nn.Dropout(0.5, deterministic=not self.train)(x) * one, None

    model = model_of(rate=0.5, unit=Drop)
    params = jax.tree.map(lambda x: jnp.ones(x.shape), jax.eval_shape(model.init, jax.random.key(0)))
    rest = {name: part for name, part in params.items() if name != "blocks"}
    x = jax.jit(model.embed)(rest, classes(), jax.random.key(1))
    assert [len(part) for part in (x.carry, x.layered, x.drawn)] == [1, 1, 1], "activations, gains and what was dropped"
    np.testing.assert_array_equal(x.drawn[0], x.carry[0])
    block = jax.tree.map(lambda p: p[0], params["blocks"])
    run = jax.jit(model.block)
    one, two, again = (run(block, x, jax.random.key(i)).carry[0] for i in (2, 3, 2))
    assert (one != two).any() and (one == again).all()
    assert 0.1 < float((one != 0).mean() / (x.carry[0] != 0).mean()) < 0.9
    assert int(run(block, x, jax.random.key(2)).count) == 1
    loss_of = jax.jit(lambda i: unpacked(model.loss(params, classes(), jax.random.key(i))))
    assert float(loss_of(4)) != float(loss_of(5))


def test_names_of_dimensions():
    """The name of the scanned dimension is that of stacked blocks."""
    model = model_of()
    params = jax.eval_shape(model.init, jax.random.key(0))
    names = model.dim_names(params)
    assert names["blocks"]["Dense_0"]["kernel"] == ("blocks", "embed", "mlp")
    assert names["blocks"]["Dense_1"]["kernel"] == ("blocks", None, None)
    assert names["Embed_0"]["embedding"] == (None, None)


# Bad input.


def scan_in(call, **options):
    """A model around one scan over dense layers."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = x + nn.Dense(13)(x)
            self.sow("intermediates", "size", y.sum())
            return y, y.sum()

    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2} | options

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return call(lambda: nn.scan(Layer, **options)(), x)

    return Model()


def two(make, x):
    return make()(make()(x, None)[0], None)[0]


def outputs(make, x):
    x, sizes = make()(x, None)
    return x + sizes.sum()


def no_scan(make, x):
    return nn.Dense(13)(x)


def once(make, x):
    return make()(x, None)[0]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (scan_in(two), r"runs one over ScanLayer_1.*; one over ScanLayer_0"),
        (scan_in(no_scan), "runs none; blocks in a Python loop are for js.stack"),
        (scan_in(once, reverse=True), "ScanLayer_0/Dense_0/kernel, backwards"),
        (scan_in(once, variable_axes={"params": 1}), "runs none"),
        (scan_in(outputs), "what the blocks return beside the carry"),
    ],
)
def test_models_that_cannot_be_taken_apart(module, message):
    def loss(model, batch):
        return cross_entropy(model(batch["x"])[:, :CLASSES], batch)

    with pytest.raises(ValueError, match=message):
        js.scanned(module, loss, classes())


def test_stacked_parameters_outside_of_the_scan():
    def decayed(model, batch):
        value = cross_entropy(model(batch["x"])[:, :CLASSES], batch)
        weights = jax.tree.leaves(model.params)
        return value + js.Mean(sum(jnp.square(w).sum() for w in weights), 1.0)

    with pytest.raises(ValueError, match=r"\n  - ScanLayer_0/Dense_0/\w+: used outside of the scan"):
        js.scanned(scan_in(once), decayed, classes())


def test_a_random_key_that_blocks_share():
    with pytest.raises(ValueError, match="blocks share one random key: pass split_rngs"):
        model_of(rate=0.5, split={"params": False, "dropout": False})


def test_state_is_refused():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(scan_in(once)(x))

    with pytest.raises(ValueError, match=r"has no state.*\n  - batch_stats/BatchNorm_0/mean"):
        js.scanned(Norm(), lambda model, batch: cross_entropy(model(batch["x"]), batch), classes())
