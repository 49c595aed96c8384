"""Attention over a sequence that is split over devices, inside a `shard_map` of its own, against the formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.layers import ring
from jaxshard.layers.blockwise import blockwise
from jaxshard.layers.context import Kernels, attend_in_context
from jaxshard.layers.formula import Extras, Form
from jaxshard.layers.splash import splash
from jaxshard.layers.splash_chunks import splash_chunks
from jaxshard.layers.splash_ring import splash_turns
from jaxshard.layers.zigzag import from_zigzag, to_zigzag
from tests.layers.cases import arrays, assert_equal, documents, normal

BLOCKS = Kernels(partial(blockwise, block=16), partial(blockwise, block=16), ring.blocks(16))
AXES = {"gather": {"c": 8}, "ulysses": {"c": 8}, "usp": {"c": 2, "d": 4}, "ring": {"c": 8}}


def split_over(devices, how, kernels=BLOCKS):
    """Attention of global arrays, whose sequence is split over devices."""
    names = tuple(devices)
    n = int(np.prod(list(devices.values())))
    size = {name: devices[name] for name in names}
    mesh = js.make_mesh(jax.devices()[:n], **size)

    def attend(q, k, v, extras, form):
        split = P(None, names)
        run = jax.shard_map(
            partial(attend_in_context, form=form, kernels=kernels, axes=names, how=how),
            mesh=mesh, in_specs=(split, split, split, Extras(segments=split)), out_specs=split, check_vma=False,
        )  # fmt: skip
        q, k, v = (to_zigzag(x, n, 1) for x in (q, k, v))
        ids = None if extras.segments is None else to_zigzag(extras.segments, n, 1)
        return from_zigzag(run(q, k, v, Extras(segments=ids)), n, 1)

    return attend


CASES = {
    "causal": ({"heads": 8, "kv_heads": 2}, Extras(), Form(causal=True)),
    "both ways": ({"heads": 8, "kv_heads": 8}, Extras(), Form()),
    "window": ({"heads": 8, "kv_heads": 4}, Extras(), Form(causal=True, window=21)),
    "near": ({"heads": 16, "kv_heads": 8, "value_width": 12}, Extras(), Form(window=5)),
    "documents": ({"heads": 8, "kv_heads": 1}, Extras(segments=documents(2, 144)), Form(causal=True, soft_cap=4.0)),
    "documents both ways": ({"heads": 8, "kv_heads": 2}, Extras(segments=documents(2, 144)), Form()),
}


@pytest.mark.parametrize("how", AXES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula(how, case):
    sizes, extras, form = CASES[case]
    if how == "ring" and form.window is not None:
        with pytest.raises(ValueError, match="a window of"):
            split_over(AXES[how], how)(*arrays(144, **sizes), extras, form)
        return
    assert_equal(split_over(AXES[how], how), *arrays(144, **sizes), extras, form)


INTERPRETED = Kernels(
    partial(splash, interpret=True), partial(splash_chunks, interpret=True), splash_turns(interpret=True)
)


@pytest.mark.slow
@pytest.mark.parametrize("how", AXES)
@pytest.mark.parametrize("case", CASES)
def test_the_tpu_kernel_is_the_formula(how, case):
    sizes, extras, form = CASES[case]
    if extras.segments is not None:
        extras = Extras(segments=documents(1, 512))
    if form.window is not None:
        form = form._replace(window=form.window * 8)
        if how == "ring":
            pytest.skip("refused")
    devices = {"c": 2} if how != "usp" else {"c": 2, "d": 1}
    sizes = {**sizes, "heads": sizes["heads"] // 4, "kv_heads": max(1, sizes["kv_heads"] // 4), "rows": 1}
    assert_equal(split_over(devices, how, INTERPRETED), *arrays(512, **sizes), extras, form)


# In a layout


def model(how="gather", heads=8, kv_heads=2, **form):
    """(init_fn, loss_fn) of one layer of attention."""

    def init_fn(key):
        shapes = {"q_proj": (16, heads, 4), "k_proj": (16, kv_heads, 4), "v_proj": (16, kv_heads, 4)}
        keys = jax.random.split(key, len(shapes))
        return {name: {"kernel": jax.random.normal(k, shapes[name]) / 3} for name, k in zip(shapes, keys)}

    def loss_fn(params, batch, key):
        q, k, v = (jnp.einsum("btc,chd->bthd", batch["x"], params[f"{name}_proj"]["kernel"]) for name in "qkv")
        y = js.attention(q, k, v, segment_ids=batch["segment_ids"], **form)
        return js.Mean((y**2).sum(), y.size)

    return init_fn, loss_fn


BATCH = {"x": normal(6, 4, 48, 16), "segment_ids": documents(4, 48)}
SGD = optax.sgd(0.1)


@pytest.mark.parametrize("engine", [js.auto(), js.explicit()], ids=["auto", "explicit"])
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("how", AXES)
def test_a_layout_splits_positions_and_one_device_is_equalled(how, tensor, engine):
    axes = {"data": 2, "tensor": 2, "c": 2} if tensor else {"data": 2, "c": 4}
    if how == "usp":
        axes = {"tensor": 2, "c": 2, "d": 2} if tensor else {"data": 2, "c": 2, "d": 2}
    context = js.context(("c", "d") if how == "usp" else "c", dims={"x": 1, "segment_ids": 1}, how=how)
    parts = [js.ddp("data")] if "data" in axes else []
    strategy = js.compose(*parts, context, *([js.tensor()] if tensor else []))
    init_fn, loss_fn = model(how, causal=True, **({} if how == "ring" else {"window": 30}))
    js.parity(init_fn, loss_fn, SGD, strategy, js.make_mesh(**axes), BATCH, engine=engine).check()
