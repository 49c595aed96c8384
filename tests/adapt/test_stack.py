"""`js.stack`: unmodified Flax blocks, stacked, are the model with its blocks in a loop."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from tests.adapt.test_scanned import CELLS
from tests.toys import (
    CLASSES,
    FEATURES,
    Toy,
    assert_equal_runs,
    classes,
    cross_entropy,
    one_device,
    start_of,
    tree_error,
)
from tests.toys import sharded as sharded_run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WIDTH, BLOCKS = 16, 3
TX = optax.sgd(0.01)


class Block(nn.Module):
    """16 -> 32 -> 16 with a residual, a mask and dropout where asked for."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, mask=None, *, train=False):
        h = jnp.tanh(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        h = nn.Dropout(self.rate, deterministic=not train)(h)
        h = nn.Dense(WIDTH, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed")))(h)
        return x + (h if mask is None else h * mask)


class NnxBlock(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("mlp", "embed"))
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=init, rngs=rngs)

    def __call__(self, x, mask=None):
        h = self.down(self.drop(jnp.tanh(self.up(self.norm(x)))))
        return x + (h if mask is None else h * mask)


def loss(model, batch):
    x = jnp.tanh(model.embed(batch["x"]))
    return cross_entropy(model.head(model.blocks(x)), batch)


def tied(model, batch, train):
    """A mask of the batch goes to every block; the output matrix is the embedding."""
    labels = jax.nn.one_hot(batch["y"], CLASSES)
    x = model.blocks(model.embed(batch["y"]), batch["weights"][:, None] > 0, train=train)
    logits = model.embed(x, method="attend")
    return js.Loss(cross_entropy(logits, batch), metrics={"hits": js.Sum((logits * labels).sum())})


@cache
def models():
    ends = {
        "embed": lambda rngs: nnx.Linear(FEATURES, WIDTH, rngs=rngs),
        "head": lambda rngs: nnx.Linear(WIDTH, CLASSES, rngs=rngs),
    }
    return {
        "linen, tied": js.stack(Block(), BLOCKS, tied, classes(), embed=nn.Embed(CLASSES, WIDTH)),
        "nnx": js.stack(lambda rngs: NnxBlock(rngs), BLOCKS, loss, **ends),
    }


def layer(params, i):
    return jax.tree.map(lambda x: x[i], params["blocks"])


def linen_in_a_loop(params, batch):
    """What a user writes without this package: the same modules called one after the other."""
    embed = partial(nn.Embed(CLASSES, WIDTH).apply, {"params": params["embed"]})
    x = embed(batch["y"])
    for i in range(BLOCKS):
        x = Block().apply({"params": layer(params, i)}, x, batch["weights"][:, None] > 0)
    return cross_entropy(embed(x, method="attend"), batch).value


def nnx_in_a_loop(params, batch):
    def part(make, params):
        with nnx.use_eager_sharding(False):
            module = make(rngs=nnx.Rngs(0))
        graph, state, others = nnx.split(module, nnx.Param, ...)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, others)

    x = jnp.tanh(part(partial(nnx.Linear, FEATURES, WIDTH), params["embed"])(batch["x"]))
    for i in range(BLOCKS):
        x = part(NnxBlock, layer(params, i))(x)
    return cross_entropy(part(partial(nnx.Linear, WIDTH, CLASSES), params["head"])(x), batch).value


LOOPS = {"linen, tied": linen_in_a_loop, "nnx": nnx_in_a_loop}


@pytest.mark.parametrize("name", ["linen, tied", pytest.param("nnx", marks=pytest.mark.slow)])
def test_equals_the_modules_in_a_loop(name):
    """Loss within 1e-6 and gradients within 1e-5; the tied embedding gets both gradients."""
    model = models()[name]
    params = start_of(model.init)
    found = jax.jit(jax.value_and_grad(lambda p: value(model.loss(p, classes(), None))))(params)
    expected = jax.jit(jax.value_and_grad(lambda p: LOOPS[name](p, classes())))(params)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    assert tree_error(found[1], expected[1]) < 1e-5


def value(loss):
    return (loss.value if isinstance(loss, js.Loss) else loss).value


def block_keys(key, parts):
    """The keys from which `Stacked` draws its blocks, and among those of one block's parts the block's."""
    keys = jax.random.split(jax.random.split(key)[1], BLOCKS)
    return [jax.random.split(key, parts)[0] for key in keys]


def test_linen_blocks_are_drawn_as_single_ones():
    """Bit for bit; "block" is the first of the parts by name."""
    params = jax.jit(models()["linen, tied"].init)(jax.random.key(5))
    single = jax.vmap(lambda key: nn.unbox(Block().init(key, jnp.zeros((1, WIDTH)))["params"]))
    expected = jax.jit(single)(jnp.stack(block_keys(jax.random.key(5), 2)))
    jax.tree.map(np.testing.assert_array_equal, params["blocks"], expected)


@pytest.mark.slow
def test_nnx_blocks_are_drawn_as_single_ones():
    """Bit for bit."""
    params = jax.jit(models()["nnx"].init)(jax.random.key(5))
    for i, key in enumerate(block_keys(jax.random.key(5), 3)):
        with nnx.use_eager_sharding(False):
            drawn = nnx.to_pure_dict(nnx.state(NnxBlock(nnx.Rngs(key)), nnx.Param))
        jax.tree.map(np.testing.assert_array_equal, layer(params, i), drawn)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", LOOPS)
def test_sharded(name, cell):
    """Losses within 1e-6 and gradients within 1e-5 of one device; 3 blocks on 2 stages, the mask travels along."""
    strategy, axes, engine = CELLS[cell]
    model = models()[name]
    toy = Toy(model.init, model.loss, classes(), rate=0.01)
    trace, _ = sharded_run(toy, strategy, js.make_mesh(**axes), engine, steps=2)
    assert_equal_runs(trace, one_device(toy, steps=2))


def test_names_of_dimensions():
    for name, layer, rest in (("linen, tied", "Dense_1", ("embed", "embedding")), ("nnx", "down", ("head", "kernel"))):
        model = models()[name]
        names = model.dim_names(jax.eval_shape(model.init, jax.random.key(0)))
        assert names["blocks"][layer] == {"kernel": ("blocks", "mlp", "embed"), "bias": ("blocks", None)}
        assert names[rest[0]][rest[1]] == (None, None)
    mesh = js.make_mesh(data=4, tensor=2)
    layout = js.layout(js.compose(js.ddp(), js.tensor()), mesh, model.init, TX)
    assert tuple(layout.params["blocks"]["down"]["kernel"].store) == (None, "tensor", None)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_dropout(kind):
    """Zero-initialised: every block adds what its mask lets through, each another part, and nothing in evaluation."""

    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return x + nn.Dropout(0.5, deterministic=not train)(self.param("one", nn.initializers.ones, (64,)))

    class NnxNoise(nnx.Module):
        def __init__(self, rngs):
            self.one, self.drop = nnx.Param(jnp.ones(64)), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, train):
            return x + self.drop(self.one[...])

    seen = []

    def loss(model, batch, train):
        y = model.blocks(jnp.zeros((2, 64)), train)
        seen.append(y)
        return js.Mean(y.sum(), y.size)

    model = js.stack(Noise() if kind == "linen" else NnxNoise, 2, loss, {"x": jnp.zeros((2, 1))})
    params = start_of(model.init)
    x = model.embed({}, {"x": jnp.zeros((2, 1))}, jax.random.key(1))
    run = jax.jit(lambda i: model.block(layer(params, 0), x, jax.random.key(i)).x)
    one, two = run(0), run(1)
    assert set(np.unique(one)) == {0.0, 2.0} and (one != two).any()
    loss_of = jax.jit(lambda i: model.loss(params, {"x": 0}, jax.random.key(i)).value)
    assert float(loss_of(3)) != float(loss_of(4))
    assert float(model.evaluate(params, {"x": 0})["loss"].value) == 2.0


def test_evaluation_is_told_and_has_metrics():
    model = models()["linen, tied"]
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert set(jax.eval_shape(model.evaluate, params, classes())) == {"loss", "hits"}


# Bad input.


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))


def test_state_is_refused_by_name():
    parts = {"embed": nn.Dense(WIDTH), "head": nn.Dense(CLASSES)}
    model = js.stack(Norm(), 2, loss, classes(), **parts)
    with pytest.raises(ValueError, match=r"(?s)no state.*\n  - block: batch_stats/BatchNorm_0/mean"):
        jax.eval_shape(model.init, jax.random.key(0))
    model = js.stack(lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs), 2, loss)
    with pytest.raises(ValueError, match=r"(?s)no state.*\n  - block: mean"):
        jax.eval_shape(model.init, jax.random.key(0))


def with_loss(loss, **parts):
    parts = {"embed": nn.Dense(WIDTH), "head": nn.Dense(CLASSES)} | parts
    return js.stack(parts.pop("block", Block(0.5)), 2, loss, classes(), **parts)


def test_losses_that_do_not_run_the_blocks_once():
    def twice(model, batch):
        return cross_entropy(model.head(model.blocks(model.blocks(model.embed(batch["x"])))), batch)

    model = with_loss(twice)
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"must call model.blocks\(x\) once, but called it again"):
        jax.eval_shape(model.loss, params, classes(), None)
    without = with_loss(lambda model, batch: cross_entropy(model.head(model.embed(batch["x"])), batch))
    with pytest.raises(ValueError, match=r"the loss did not call model.blocks\(x\)"):
        jax.eval_shape(without.init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"must call model\.blocks"):
        jax.eval_shape(without.loss, {name: params[name] for name in params}, classes(), None)
    wrong = with_loss(lambda model, batch: model.tail(model.blocks(model.embed(batch["x"]))))
    with pytest.raises(AttributeError, match=r"no part 'tail', only model.embed, model.head, model.blocks; pass tail="):
        jax.eval_shape(wrong.init, jax.random.key(0))


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH)(x))


def test_random_numbers_from_before_the_blocks_are_refused_after_them():
    def skip(model, batch, train):
        x = model.embed(batch["x"], train)
        return cross_entropy(model.head(model.blocks(x) + x), batch)

    model = with_loss(skip, embed=Noisy())
    params = jax.eval_shape(model.init, jax.random.key(0))
    jax.eval_shape(model.loss, params, classes(), None)
    with pytest.raises(ValueError, match=r"after model\.blocks the loss uses what it drew at random before"):
        jax.eval_shape(model.loss, params, classes(), jax.random.key(0))
    model = with_loss(lambda model, batch: skip(model, batch, False), embed=Noisy())
    params = jax.eval_shape(model.init, jax.random.key(0))
    jax.eval_shape(model.loss, params, classes(), jax.random.key(0))


def test_a_block_that_changes_its_activations():
    model = with_loss(loss, block=nn.Dense(WIDTH + 1))
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"block must return what it receives; .*\n  - x: .*\[16, 16\].*\[16, 17\]"):
        jax.eval_shape(
            model.loss, params | {"head": {"kernel": jnp.zeros((16, 7)), "bias": jnp.zeros(7)}}, classes(), None
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: js.stack(Block(), 2, loss), "Linen modules are initialised on an example batch"),
        (lambda: js.stack(Block, 2, loss, classes()), r"\n  - block: the class Block"),
        (lambda: js.stack(Block(), 2, loss, classes(), head=3), r"\n  - head: a int"),
        (lambda: js.stack(Block(), 2, loss, classes(), head=nnx.Linear(1, 1, rngs=nnx.Rngs(0))), "head: a Linear"),
        (lambda: js.stack(Block(), 2, loss, classes(), head=NnxBlock), "block is Linen, head is NNX"),
        (lambda: js.stack(Block(), 2, lambda model: 0, classes()), r"loss must be a function loss\(model, batch\)"),
    ],
)
def test_wrong_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_wrong_names_and_numbers():
    with pytest.raises(ValueError, match="'blocks' and 'block' are the blocks"):
        js.stack(Block(), 2, loss, classes(), blocks=Block())
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        js.stack(Block(), 0, loss, classes())
