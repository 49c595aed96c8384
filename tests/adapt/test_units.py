"""`units=`: modules in a Python loop gather their own weights, forward and again backward, one at a time."""

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
from tests.engines.programs import Program, traffic
from tests.toys import CLASSES, FEATURES, Toy, assert_equal_runs, classes, cross_entropy, one_device, sharded

TX = optax.sgd(0.01)
WIDTH = 16


def mesh():
    return js.make_mesh(data=8)


class Up(nn.Module):
    """A unit inside a unit."""

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(4 * WIDTH)(x))


class Block(nn.Module):
    """16 -> 64 -> 16 with a residual; batch statistics and dropout where asked for."""

    noisy: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.LayerNorm()(x) if not self.noisy else nn.BatchNorm(use_running_average=not train)(x)
        h = nn.Dropout(0.3, deterministic=not (self.noisy and train))(Up()(h))
        return x + nn.Dense(WIDTH)(h)


class Net(nn.Module):
    noisy: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        for _ in range(2):
            x = Block(self.noisy)(x, train=True)
        return nn.Dense(CLASSES)(x)


class NnxUp(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class NnxBlock(nnx.Module):
    def __init__(self, noisy, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if noisy else nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = NnxUp(rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.3 if noisy else 0.0, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.drop(self.up(self.norm(x))))


class NnxNet(nnx.Module):
    def __init__(self, rngs, noisy=False):
        self.first, self.last = nnx.Linear(FEATURES, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(noisy, rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss_of(model, batch):
    return cross_entropy(model(batch["x"]), batch)


def toy_of(library: str, loss=loss_of, **options) -> Toy:
    pair = {
        "linen": lambda: js.linen(Net(**options), loss, classes()),
        "nnx": lambda: js.nnx(partial(NnxNet, **options), loss),
    }[library]()
    return Toy(*pair, classes(), rate=0.01)


LIBRARIES = ["linen", "nnx"]
UNITS = {"linen": [Block], "nnx": [NnxBlock]}
INNER = {"linen": Up, "nnx": NnxUp}


@cache
def reference(library: str, noisy: bool):
    return one_device(toy_of(library, noisy=noisy))


ENGINES = {
    "explicit": partial(js.explicit, remat="nothing"),
    "explicit in micro-batches": partial(js.explicit, microbatches=2, scatter="end"),
    "auto": partial(js.auto, remat="dots"),
    "auto, noisy": js.auto,
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_units_equal_one_device(library, engine):
    """Losses within 1e-6, gradients and batch statistics within 1e-5: keys and state pass through a unit."""
    noisy = engine == "auto, noisy"
    trace, _ = sharded(toy_of(library, noisy=noisy), js.fsdp(min_size=0), mesh(), ENGINES[engine](units=UNITS[library]))
    assert_equal_runs(trace, reference(library, noisy))
    assert bool(jax.tree.leaves(trace.state)) == noisy


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_units_split_over_tensor_equal_one_device(library):
    """Losses within 1e-6, gradients within 1e-5: each device of the tensor axis gathers its own part of a unit."""
    strategy = js.compose(js.fsdp(min_size=0), js.tensor())
    engine = js.explicit(units=UNITS[library])
    trace, layout = sharded(toy_of(library), strategy, js.make_mesh(data=4, tensor=2), engine)
    assert_equal_runs(trace, reference(library, False))
    split = [p for p in layout.placed() if p.role == "param" and "tensor" in str(p.placement.use)]
    assert len(split) >= 4


def bytes_moved(toy, engine):
    layout = js.layout(js.fsdp(min_size=0), mesh(), toy.init_fn, TX)
    return traffic(Program(layout, js.make_step(toy.loss_fn, TX, layout, engine=engine).compile(toy.batch)))


# A block has 32 + 17 x 64 + 65 x 16 = 2,160 elements, 17,280 bytes of two; the others (13 + 1) x 16 and 16 x 7 + 7,
# padded to 8: 1,376 bytes. Backward needs all of a block but its last bias, 128 bytes of two.
ONCE = 18_656
TWICE = 35_808


@pytest.mark.parametrize("library", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_units_are_gathered_forward_and_backward_and_scattered_once(library):
    toy, units = toy_of(library), UNITS[library]
    scattered = {("reduce-scatter", "data"): ONCE}
    assert bytes_moved(toy, js.explicit(remat="nothing", units=units)) == {("all-gather", "data"): TWICE, **scattered}
    if library == "linen":  # the control, and the engine in which the compiler gathers
        assert bytes_moved(toy, js.explicit(remat="nothing")) == {("all-gather", "data"): ONCE, **scattered}
        assert bytes_moved(toy, js.auto(remat="nothing", units=units))["all-gather", "data"] == TWICE


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_unit_inside_a_unit(library):
    """Alone it gathers its own 1,088 elements, 8,704 bytes of two, twice; inside another unit it is refused."""
    toy, inner = toy_of(library), INNER[library]
    alone = bytes_moved(toy, js.explicit(remat="nothing", units=[inner]))
    assert alone["all-gather", "data"] == ONCE + 8_704
    with pytest.raises(ValueError, match="only inside another unit"):
        bytes_moved(toy, js.explicit(units=[*UNITS[library], inner]))


@pytest.mark.slow
def test_a_shared_block_and_a_method():
    """One Linen block called twice, once through another method: its gradients add up."""

    class Half(nn.Module):
        def setup(self):
            self.dense = nn.Dense(WIDTH)

        def __call__(self, x):
            return x + jnp.tanh(self.dense(x))

        def other(self, x, *, scale):
            return scale * self(x)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            half = Half()
            return nn.Dense(CLASSES)(half.other(half(nn.Dense(WIDTH)(x)), scale=0.5))

    toy = Toy(*js.linen(Twice(), loss_of, classes()), classes(), rate=0.01)
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh(), js.explicit(units=[Half]), steps=2)
    assert_equal_runs(trace, one_device(toy, steps=2))


# Parameters that something else than their unit reads.


def squares(tree):
    return sum(jnp.square(x).sum() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))


def read_in_every_way(module, batch):
    """Terms of a loss that read the parameters as a tree, one by one, in a transform, and changed."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    kernel = module.blocks[0].down.kernel
    noisy = nnx.merge(graph, jax.tree.map(lambda x: 1.1 * x, params), rest)
    terms = [
        squares(params) + squares(module.blocks) + optax.tree.norm(nnx.to_pure_dict(params)),
        jnp.square(kernel[...]).sum() + jnp.abs(kernel).sum() + jnp.linalg.norm(kernel[...]),
        nnx.remat(lambda module: squares(nnx.state(module, nnx.Param)))(module),
        jax.lax.cond(squares(params) > 0, squares, lambda _: 0.0, params),
        jax.lax.scan(lambda total, _: (total + squares(params), None), 0.0, length=2)[0],
    ]
    outputs = module(batch["x"]) + noisy(batch["x"]) + jax.lax.stop_gradient(nnx.clone(module)(batch["x"]))
    return cross_entropy(outputs, batch) + js.Mean(0.01 * sum(terms), 1.0)


def penalty(module, batch):
    return cross_entropy(module(batch["x"]), batch) + js.Mean(0.01 * squares(nnx.state(module, nnx.Param)), 1.0)


def read_in_linen(model, batch):
    return cross_entropy(model(batch["x"]), batch) + js.Mean(0.01 * squares(model.params), 1.0)


@pytest.mark.parametrize(
    ("library", "loss", "engine"),
    [
        ("nnx", penalty, js.explicit),
        pytest.param("nnx", read_in_every_way, js.explicit, marks=pytest.mark.slow),
        pytest.param("nnx", read_in_every_way, js.auto, marks=pytest.mark.slow),
        pytest.param("linen", read_in_linen, js.explicit, marks=pytest.mark.slow),
        pytest.param("linen", read_in_linen, js.auto, marks=pytest.mark.slow),
    ],
)
def test_parameters_read_outside_of_their_unit_are_the_full_weights(library, loss, engine):
    """Losses within 1e-6, gradients within 1e-5 of one device: a term that reads weights trains them, too."""
    toy = toy_of(library, loss)
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh(), engine(units=UNITS[library]), steps=2)
    assert_equal_runs(trace, one_device(toy, steps=2))


def run_blocks(module, x):
    for block in module.blocks:
        x = block(x)
    return x


def split_alone(module, batch):
    graph, *states = nnx.split(module, nnx.Param, ...)
    return cross_entropy(nnx.merge(graph, *states)(batch["x"]), batch)


def checkpointed(module, batch):
    run = nnx.remat(run_blocks, policy=jax.checkpoint_policies.everything_saveable)
    return cross_entropy(module.last(run(module, module.first(batch["x"]))), batch)


def looped(module, batch):
    turn = lambda _, carry: (carry[0], run_blocks(*carry))  # noqa: E731
    return cross_entropy(module.last(nnx.fori_loop(0, 3, turn, (module, module.first(batch["x"])))[1]), batch)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [split_alone, checkpointed, looped])
def test_units_inside_of_transforms_are_gathered_as_often(loss):
    """What nothing reads is not gathered; a loop or a transform of the user's does not keep weights for backward."""
    moved = bytes_moved(toy_of("nnx", loss), js.explicit(remat="nothing", units=[NnxBlock]))
    # Two saved activations less in backward where the user's own policy saves all of them: 640 bytes of weights.
    assert moved == {("all-gather", "data"): TWICE - 640 * (loss is not split_alone), ("reduce-scatter", "data"): ONCE}


@pytest.mark.slow
def test_a_frozen_low_rank_base_in_units_is_read_outside_of_them():
    """Losses within 1e-6, gradients of the factors within 1e-5 of the run without units."""
    pair = js.nnx(NnxNet, read_in_every_way)
    tuned = js.lora(pair.init, pair.loss, rank=2, match=["up/dense/kernel", "down/kernel"])
    toy = Toy(tuned.init, tuned.loss, classes(), rate=0.01)
    both = [
        sharded(toy, js.fsdp(min_size=0), mesh(), js.explicit(units=units), steps=2)[0] for units in ([], [NnxBlock])
    ]
    assert_equal_runs(*both[::-1])


class OwnParameters(nn.Module):
    """A layer that makes parameters in `setup`."""

    def setup(self):
        self.scale, self.dense = self.param("scale", nn.initializers.ones, (WIDTH,)), nn.Dense(WIDTH)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x * self.scale))


class Tokens(nn.Module):
    vocab: int
    wrap: str = ""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, WIDTH, name="embed")
        layer = getattr(nn, self.wrap)(OwnParameters) if self.wrap else OwnParameters
        return embed.attend(layer(name="layer")(embed(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "wrap", "engine"),
    [
        (24, "", js.explicit),
        (25, "", js.explicit),
        (25, "", js.auto),
        (25, "remat", js.explicit),
        (25, "jit", js.explicit),
    ],
)
def test_linen_units_that_make_parameters_in_setup(vocab, wrap, engine):
    """Losses within 1e-6, gradients within 1e-5 of one device, also where `nn.remat` or `nn.jit` wraps the class."""
    tokens = np.random.default_rng(0).integers(0, vocab, (16, 3)).astype(np.int32)

    def loss(model, batch):
        nats = js.cross_entropy(model(batch), batch)
        return js.Mean(nats.sum(), nats.size)

    toy = Toy(*js.linen(Tokens(vocab, wrap), loss, tokens), tokens, rate=0.01)
    engine = engine(units=[OwnParameters, nn.Embed])
    trace, _ = sharded(toy, js.fsdp(min_size=0), mesh(), engine, steps=2)
    assert_equal_runs(trace, one_device(toy, steps=2))


# Bad input.


class Unused(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


class NnxUnused(nnx.Module): ...


def step(library, units, loss=loss_of):
    toy = toy_of(library, loss)
    layout = js.layout(js.ddp(), mesh(), toy.init_fn, TX)
    return js.make_step(toy.loss_fn, TX, layout, engine=js.explicit(units=units))


def test_units_that_cannot_be():
    with pytest.raises(TypeError, match=r"units must be a list of classes of modules such as \[Block\], got the class"):
        js.explicit(units=Block)
    with pytest.raises(TypeError, match="units must be a list of classes"):
        js.auto(units=["Block"])
    with pytest.raises(ValueError, match=r"(?s)units: every one.*Unused: never runs.*Dropout: has no parameters"):
        step("linen", [Unused, nn.Dropout])
    with pytest.raises(ValueError, match=r"(?s)units: every one.*NnxUnused: the module has none.*Dropout: has no par"):
        step("nnx", [NnxUnused, nnx.Dropout])
    with pytest.raises(TypeError, match=r"(?s)made of flax.linen Modules, which these classes are not.*NnxBlock"):
        step("linen", [NnxBlock])
    with pytest.raises(TypeError, match=r"(?s)made of flax.nnx Modules, which these classes are not.*- Block"):
        step("nnx", [Block])


def test_a_loss_without_units_to_look_into():
    toy = toy_of("nnx")
    layout = js.layout(js.ddp(), mesh(), toy.init_fn, TX)

    def my_loss(model, batch, key):
        return js.Mean(jnp.square(model["first"]["kernel"]).sum(), 1.0)

    step = js.make_step(my_loss, TX, layout, engine=js.explicit(units=[NnxBlock]))
    with pytest.raises(TypeError, match=r"units: .*my_loss has no modules for units; make it with js.linen or js.nnx"):
        step.lower(classes())


def test_an_nnx_unit_that_never_runs():
    def loss(module, batch):
        return cross_entropy(module.last(module.first(batch["x"])), batch)

    with pytest.raises(ValueError, match=r"(?s)units: these never ran in the loss.*NnxBlock"):
        step("nnx", [NnxBlock], loss).compile(classes())


def test_stacked_modules_are_no_units():
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Carried, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return nn.Dense(CLASSES)(scan()(nn.Dense(WIDTH)(x))[0])

    class Carried(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(x), None

    init_fn, loss_fn = js.linen(Scanned(), loss_of, classes())
    layout = js.layout(js.ddp(), mesh(), init_fn, TX)
    with pytest.raises(ValueError, match=r"(?s)Carried at .*: its parameters are stacked.*js.Stacked"):
        js.make_step(loss_fn, TX, layout, engine=js.explicit(units=[Carried]))


def test_stacked_nnx_modules_are_no_units():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: NnxUp(rngs)))(rngs)

        def __call__(self, x):
            return nnx.scan(lambda up, x: up(x)[:, :WIDTH], in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)

    init_fn, loss_fn = js.nnx(Scanned, lambda module, x: js.Mean(module(x).sum(), x.size))
    layout = js.layout(js.ddp(), mesh(), init_fn, TX)
    with pytest.raises(ValueError, match=r"(?s)NnxUp at layers: its parameters are stacked \(nnx.scan.*js.Stacked"):
        js.make_step(loss_fn, TX, layout, engine=js.explicit(units=[NnxUp])).lower(np.ones((8, WIDTH), np.float32))


def test_stacked_models_need_no_units():
    stacked = js.models.gpt(vocab=8, width=8, depth=2, heads=2, seq=8)
    layout = js.layout(js.ddp(), mesh(), stacked.init, TX)
    with pytest.raises(TypeError, match="has no modules for units; it gathers block by block without"):
        js.make_step(stacked.loss, TX, layout, engine=js.explicit(units=[Block]))
