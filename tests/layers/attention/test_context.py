"""Attention over a sequence that is split over devices, inside a `shard_map` of its own, against the formula."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core.compat import KEEP_REPEATED_GATHERS
from jaxshard.layers.attention import attention, ring
from jaxshard.layers.attention.blockwise import blockwise
from jaxshard.layers.attention.context import Kernels, attend_in_context, why_not_in_context
from jaxshard.layers.attention.formula import Extras, Form
from jaxshard.layers.attention.splash import splash
from jaxshard.layers.attention.splash_chunks import splash_chunks
from jaxshard.layers.attention.splash_ring import splash_turns
from jaxshard.layers.attention.visited import visited_blocks
from jaxshard.layers.attention.zigzag import from_zigzag, to_zigzag
from tests.layers.cases import arrays, assert_equal, documents, normal
from tests.toys import Toy, assert_equal_runs, one_device, sharded

pytestmark = pytest.mark.fast_cases(1)

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


def cells(*axes, fast):
    """All combinations, of which all but some are slow."""
    return [pytest.param(*cell, marks=[] if cell in fast else pytest.mark.slow) for cell in itertools.product(*axes)]


@pytest.mark.parametrize(("how", "case"), cells(AXES, CASES, fast=[("ring", "documents"), ("ring", "window")]))
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
@pytest.mark.parametrize(
    ("how", "case"), [(how, case) for how in AXES for case in CASES if how != "ring" or CASES[case][2].window is None]
)
def test_the_tpu_kernel_is_the_formula(how, case):
    sizes, extras, form = CASES[case]
    if extras.segments is not None:
        extras = Extras(segments=documents(1, 512))
    if form.window is not None:
        form = form._replace(window=form.window * 8)
    devices = {"c": 2} if how != "usp" else {"c": 2, "d": 1}
    sizes = {**sizes, "heads": sizes["heads"] // 4, "kv_heads": max(1, sizes["kv_heads"] // 4), "rows": 1}
    assert_equal(split_over(devices, how, INTERPRETED), *arrays(512, **sizes), extras, form)


# Collectives and work

K, HEADS = 2 * 144 * 2 * 8 * 4, 2 * 144 * 8 * 8 * 4  # bytes of k or v, and of q or the output, of all 8 devices
IDS = 2 * 144 * 4
COLLECTIVES = {
    # k, v and segments; k and v again in the backward pass, and their gradients
    "gather": {
        ("all-gather", "f32"): (4, 4 * K), ("all-gather", "s32"): (1, IDS), ("reduce-scatter", "f32"): (2, 2 * K),
    },
    # q, k, v, out and the gradients of all four; 2 heads of keys are repeated to 8
    "ulysses": {("all-to-all", "f32"): (8, 8 * HEADS // 8), ("all-gather", "s32"): (1, IDS)},
    # q, out and their gradients have 8 heads, k and v and theirs 2, repeated to 4; gathered are those of a device
    "usp": {
        ("all-to-all", "f32"): (8, 4 * HEADS // 8 + 4 * 2 * K // 8), ("all-gather", "f32"): (4, 4 * K // 2),
        ("all-gather", "s32"): (2, IDS // 2 + IDS), ("reduce-scatter", "f32"): (2, 2 * K // 2),
    },
    # 7 times k, v and segments, forward and backward, and 8 times the gradients of k and v; the first move is the same
    # both ways, and is made once where nothing lies between
    "ring": {
        ("collective-permute", "f32"): (2 * 7 + 2 * 6 + 2 * 8, 42 * K // 8),
        ("collective-permute", "s32"): (7 + 6, 13 * IDS // 8),
    },
}  # fmt: skip


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how != "gather")) for how in AXES])
def test_its_collectives_are_these(how):
    mesh, names = js.make_mesh(**AXES[how]), tuple(AXES[how])

    def loss(q, k, v, ids):
        extras = Extras(segments=ids)
        out = attend_in_context(q, k, v, extras, Form(causal=True), kernels=BLOCKS, axes=names, how=how)
        return (out**2).sum()

    split = P(None, names)
    grads = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=(split,) * 4, out_specs=split, check_vma=False)
    given = *arrays(144, heads=8, kv_heads=2), documents(2, 144)
    compiled = jax.jit(grads).lower(*given).compile(KEEP_REPEATED_GATHERS)
    found = {}
    for one in js.plan.arrays_only(js.collectives(compiled, mesh)):
        count, size = found.get((one.kind, one.dtype), (0, 0))
        found[one.kind, one.dtype] = count + one.count, size + one.bytes
    assert found == COLLECTIVES[how]


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_causal_work_is_even(devices):
    causal = Form(causal=True)
    whole_pairs = 2 * devices - 1  # of chunks; the two on the diagonal are half seen
    # Chunks of 8 blocks of 1024 queries and 4 of 2048 keys.
    assert visited_blocks(causal, 16_384 * devices, devices) == [whole_pairs * 32 + 2 * 20] * devices
    # Chunks of 4 blocks of 128.
    for in_turns in (False, True):
        found = visited_blocks(causal, 1024 * devices, devices, block=128, ring=in_turns)
        assert found == [whole_pairs * 16 + 2 * 10] * devices
    uneven = visited_blocks(causal, 1000 * devices, devices, block=128)
    assert max(uneven) <= 1.02 * min(uneven)


# What is refused


def test_what_does_not_work_is_refused_by_name():
    q, k, v = arrays(48, heads=6, kv_heads=2)
    with pytest.raises(ValueError, match=r"6 heads .* not divisible by the 4 devices .* an axis of 2"):
        split_over({"c": 4}, "ulysses")(q, k, v, Extras(), Form())
    with pytest.raises(ValueError, match=r"a window of 5 in a ring.* how=\"ulysses\""):
        split_over({"c": 4}, "ring")(q, k, v, Extras(), Form(window=5))
    for name in ("bias", "mask", "keep"):
        assert why_not_in_context(4, Extras(**{name: jnp.ones((1, 1, 4, 4))}), Form(), "gather", 2)
    assert "use sequences of a multiple of 8" in why_not_in_context(3, Extras(), Form(causal=True), "gather", 4)


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


ENGINES = {"auto": js.auto(), "explicit": js.explicit()}


@pytest.mark.parametrize(
    ("how", "tensor", "engine"),
    cells(AXES, [False, True], ENGINES, fast=[("gather", True, "explicit")]),
)
def test_a_layout_splits_positions_and_one_device_is_equalled(how, tensor, engine):
    axes = {"data": 2, "tensor": 2, "c": 2} if tensor else {"data": 2, "c": 4}
    if how == "usp":
        axes = {"tensor": 2, "c": 2, "d": 2} if tensor else {"data": 2, "c": 2, "d": 2}
    split = js.context(("c", "d") if how == "usp" else "c", dims={"x": 1, "segment_ids": 1}, how=how)
    parts = [js.ddp("data")] if "data" in axes else []
    strategy = js.compose(*parts, split, *([js.tensor()] if tensor else []))
    toy = Toy(*model(how, causal=True, **({} if how == "ring" else {"window": 30})), BATCH)
    trace, _ = sharded(toy, strategy, js.make_mesh(**axes), ENGINES[engine], steps=1)
    assert_equal_runs(trace, one_device(toy, steps=1))


def test_what_is_saved_by_name_is_not_computed_again():
    """Loops of blocks and gathers in a gradient; the backward pass gathers keys and values again in any case."""
    (q, k, v), mesh = arrays(32, heads=2), js.make_mesh(c=8)

    def count(names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def loss(q, k, v):
            attend = partial(attend_in_context, kernels=BLOCKS, axes=("c",))
            return jax.checkpoint(lambda q: attend(q, k, v, Extras(), Form(True)) ** 2, policy=policy)(q).sum()

        split = P(None, "c")
        grads = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(split,) * 3, out_specs=split, check_vma=False)
        text = str(jax.make_jaxpr(grads)(q, k, v))
        return text.count("= while["), text.count("= all_gather[")

    assert count([]) == (3, 6)  # forward, forward again, backward
    assert count(["attention_out"]) == (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["mask", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_under_auto_every_call_stays_right(given, causal, monkeypatch):
    """What can't be exchanged is computed with all keys, by every device; a warning says so."""
    monkeypatch.setattr(attention, "_SHORT", 16)
    attention._warn_once.cache_clear()
    beside = {"bias": normal(3, 4, 1, 48, 48), "mask": normal(3, 1, 1, 48, 48) > 0}
    init_fn, loss_fn = model(causal=causal, **{given: beside[given]})
    strategy = js.compose(js.ddp("data"), js.context("c", dims={"x": 1, "segment_ids": 1}))
    with pytest.warns(UserWarning, match=f"every device of .* with all keys, because a {given} is given"):
        js.parity(init_fn, loss_fn, SGD, strategy, js.make_mesh(data=2, c=4), BATCH, engine=js.auto()).check()
