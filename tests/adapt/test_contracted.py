"""DenseGeneral and Einsum kernels under js.tensor: heads are split, whatever they are called and annotated with."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js
from jaxshard.core.tree import CONTRACTED, LAYERS
from tests.toys import quick_compile

WIDTH, HEADS, SIZE = 16, 4, 8  # heads of 8, so that WIDTH is no product of the other two
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 6, WIDTH)).astype(np.float32)}

# What Flax's attention does with `kernel_init=nn.with_logical_partitioning(init, ("embed", "kv"))`: two names for the
# three dimensions of each kernel.
FLAT = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "kv"))
# Axes of a mesh, as nanodo and other programs annotate for data parallelism.
AXES = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None, None))


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class LinenBlock(nn.Module):
    """Attention in four styles: annotated flat, annotated with axes, named by nobody, and as einsums."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(HEADS, qkv_features=HEADS * SIZE, kernel_init=FLAT, name="flat")(x)
        made = [nn.DenseGeneral((HEADS, SIZE), kernel_init=AXES, name=name)(x) for name in ("query", "key", "value")]
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=AXES, name="attn_out_proj")(attend(*made))
        made = [nn.DenseGeneral((HEADS, SIZE), name=name)(x) for name in ("ask", "offer", "tell")]
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), name="join")(attend(*made))
        made = nn.Einsum((3, HEADS, WIDTH, SIZE), "btd,sndh->sbtnh", use_bias=False, name="three")(x)
        return x + nn.Einsum((HEADS, SIZE, WIDTH), use_bias=False, name="one")(attend(*made), "btnh,nhd->btd")


class NnxBlock(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        flat = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "kv"))
        self.flat = nnx.MultiHeadAttention(
            HEADS, WIDTH, qkv_features=HEADS * SIZE, kernel_init=flat, decode=False, rngs=rngs
        )
        self.asks = nnx.Dict({n: nnx.LinearGeneral(WIDTH, (HEADS, SIZE), rngs=rngs) for n in ("ask", "offer", "tell")})
        self.join = nnx.LinearGeneral((HEADS, SIZE), WIDTH, axis=(-2, -1), rngs=rngs)
        self.three = nnx.Einsum("btd,sndh->sbtnh", (3, HEADS, WIDTH, SIZE), rngs=rngs)
        self.one = nnx.Einsum("btnh,nhd->btd", (HEADS, SIZE, WIDTH), rngs=rngs)

    def __call__(self, x):
        x = x + self.flat(x)
        x = x + self.join(attend(*(ask(x) for ask in self.asks.values())))
        return x + self.one(attend(*self.three(x)))


def loss(model, batch):
    errors = (model(batch["x"]) - 1) ** 2
    return js.Mean(errors.sum(), errors.size)


MODELS = {
    "linen": lambda: js.linen(LinenBlock(), loss, BATCH),
    "nnx": lambda: js.nnx(NnxBlock, loss),
}
TO_HEADS = {"query", "key", "value", "ask", "offer", "tell"}


def split_dims(model, strategy=None, parts=4):
    strategy = strategy or js.compose(js.fsdp("data"), js.tensor())
    made = js.layout(strategy, js.make_mesh(data=8 // parts, tensor=parts), model.init, optax.sgd(0.1))
    return {
        p.leaf.path: p.placement.use.index("tensor") if "tensor" in p.placement.use else None
        for p in made.placed()
        if p.role == "param"
    }


@pytest.mark.parametrize("kind", MODELS)
def test_heads_are_split(kind):
    for path, dim in split_dims(MODELS[kind]()).items():
        *_, layer, leaf = path.split("/")
        if leaf == "kernel":
            assert dim == {"three": 1, "one": 0}.get(layer, 1 if layer in TO_HEADS else 0), path
        else:  # one bias for each head, or for the whole output
            assert dim == (0 if layer in TO_HEADS else None), path


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit(), js.auto()], ids=["explicit", "auto"])
@pytest.mark.parametrize("kind", MODELS)
def test_equal_to_one_device(kind, engine):
    """Loss to 1e-6 and gradients to 1e-5 relative, in f32."""
    model, mesh = MODELS[kind](), js.make_mesh(data=2, tensor=4)
    strategy = js.compose(js.fsdp("data", min_size=0), js.tensor())
    with quick_compile():
        js.parity(model.init, model.loss, optax.sgd(0.1), strategy, mesh, BATCH, engine=engine).check()


@pytest.mark.slow  # `test_heads_are_split` is fast
def test_layers_say_what_they_sum_over_wherever_they_are():
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=6)
            return stack(name="layers")(x, None)[0]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.DenseGeneral((HEADS, SIZE), use_bias=False, name="make")(x)
            return x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="join")(h), None

    model = js.linen(Scanned(), loss, BATCH)
    names = model.dim_names(model.init(jax.random.key(0)))["layers"]
    assert names["make"]["kernel"] == (LAYERS, CONTRACTED, None, None)
    assert names["join"]["kernel"] == (LAYERS, CONTRACTED, CONTRACTED, None)
    assert split_dims(model) == {"layers/make/kernel": 2, "layers/join/kernel": 1}
    parts = js.stack(LinenBlock(), 2, lambda model, batch: loss(lambda x: model.blocks(x), batch), BATCH)
    dims = split_dims(parts)
    assert dims["blocks/ask/kernel"] == 2 and dims["blocks/join/kernel"] == 1 and dims["blocks/three/kernel"] == 2


KERNELS = {"out": (4, 4), "query": (3,), "up": (3,), "Conv_0": (4, 4, 4)}
"""The windows of convolutions with names of other layers: their heads, stacks and flat products would fit."""


class LinenConvolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name, window in KERNELS.items():
            image = x.reshape(-1, *(4,) * len(window), WIDTH)
            x = nn.Conv(64 if name == "Conv_0" else WIDTH, window, name=name)(image)[..., :WIDTH]
        return nn.ConvTranspose(8, (2,), transpose_kernel=True, name="down")(x.reshape(-1, 4, WIDTH))


class NnxConvolutions(nnx.Module):
    def __init__(self, rngs):
        for name, window in KERNELS.items():
            setattr(self, name, nnx.Conv(WIDTH, 64 if name == "Conv_0" else WIDTH, window, rngs=rngs))
        self.down = nnx.ConvTranspose(WIDTH, 8, (2,), transpose_kernel=True, rngs=rngs)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_convolution_is_split_along_channels_whatever_it_is_called(kind):
    batch = {"x": np.zeros((64, WIDTH), np.float32)}
    model = js.linen(LinenConvolutions(), loss, batch) if kind == "linen" else js.nnx(NnxConvolutions, loss)
    dims = {path: dim for path, dim in split_dims(model).items() if path.endswith("kernel")}
    channels = {f"{name}/kernel": len(window) + 1 for name, window in KERNELS.items()}
    assert dims == channels | {"down/kernel": 2}  # [window, outputs, inputs], with more inputs than outputs


def test_stacked_convolutions_are_split_along_channels():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(WIDTH, (4, 4), name="out")(x.reshape(-1, 4, 4, WIDTH)).reshape(-1, WIDTH)
            return nn.Conv(WIDTH, (4,), name="query")(x.reshape(-1, 4, WIDTH)).reshape(-1, WIDTH)

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes, split = {"params": 0}, {"params": True}
            run = nn.scan(lambda block, x, _: (block(x), None), variable_axes=axes, split_rngs=split, length=4)
            return run(Block(name="layers"), x, None)[0]

    batch = {"x": np.zeros((64, WIDTH), np.float32)}
    stacked = js.stack(Block(), 4, lambda model, batch: loss(lambda x: model.blocks(x), batch), batch)
    for model, where in ((js.linen(Scanned(), loss, batch), "layers"), (stacked, "blocks")):
        dims = {path: dim for path, dim in split_dims(model).items() if path.endswith("kernel")}
        assert dims == {f"{where}/out/kernel": 4, f"{where}/query/kernel": 3}


def test_an_annotation_with_the_axis_of_the_strategy_splits():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("tensor", "data"))
            return nn.Dense(WIDTH, kernel_init=init, use_bias=False)(x)  # the rules would split dim 1

    assert split_dims(js.linen(Net(), loss, BATCH)) == {"Dense_0/kernel": 0}


def test_large_arrays_that_an_annotation_keeps_whole_are_reported():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "kv"))
                x = nn.Dense(128, kernel_init=init)(x)
            x = nn.Dense(1030)(x)
            return nn.Dense(8)(nn.Dense(16, name="up")(x))

    model = js.linen(Net(), loss, {"x": np.zeros((8, 128), np.float32)})
    with pytest.warns(UserWarning) as caught:
        split_dims(model)
    annotated, indivisible = sorted((str(one.message) for one in caught), key=lambda text: "divide" in text)
    assert "annotations split nothing of Dense_*/kernel [128, 128] ('embed', 'kv') (3 of them): replicated" in annotated
    assert "('*/Dense_*/kernel', 'whole')" in annotated
    assert (
        "does not divide the dimension to split of Dense_3/kernel [128, 1030] ('embed', 'features'): replicated"
        in indivisible
    )
    assert "make its size a multiple of 4, or say ('*/Dense_3/kernel', 'whole')" in indivisible
    # Said on purpose: no warning, which would be an error in tests.
    rules = [("Dense_3/kernel", "whole"), ("Dense_*/kernel", "whole"), *js.RULES]
    split_dims(model, js.compose(js.fsdp("data"), js.tensor(rules)))
