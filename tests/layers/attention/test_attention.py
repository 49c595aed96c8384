"""`js.attention`: its arguments, the kernel that it chooses, and how layouts split it."""

import warnings
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.hlo.found import summary
from jaxshard.layers.attention import attention as module
from jaxshard.layers.attention.formula import Extras, Form, formula
from tests.engines.programs import tpu
from tests.layers.cases import arrays, documents, normal
from tests.toys import Toy, assert_equal_runs, one_device, sharded

pytestmark = pytest.mark.fast_cases(2)

SGD = optax.sgd(0.1)


@pytest.fixture
def blocks_from_16(monkeypatch):
    """Sequences above 16 are computed as long ones are."""
    monkeypatch.setattr(module, "_SHORT", 16)
    monkeypatch.setattr(module, "blockwise", lambda *args, block: blockwise(*args, block=16))


blockwise = module.blockwise


# Arguments


def test_what_does_not_fit_is_refused():
    q, k, v = arrays(8)
    attend = partial(js.attention, q, k, v)
    with pytest.raises(TypeError, match="causal=True or causal=False"):
        attend()
    with pytest.raises(ValueError, match=r"window must be at least 1 .* got 0"):
        attend(causal=True, window=0)
    with pytest.raises(TypeError, match=r"window must be an int, got 2\.5"):
        attend(causal=True, window=2.5)
    with pytest.raises(ValueError, match="soft_cap must be positive, got 0"):
        attend(causal=True, soft_cap=0)
    with pytest.raises(ValueError, match=r"segment_ids must be integers of the shape \[2, 8\].* got int32\[2, 7\]"):
        attend(causal=True, segment_ids=jnp.zeros((2, 7), jnp.int32))
    with pytest.raises(ValueError, match=r"segment_ids must be integers .* got float32"):
        attend(causal=True, segment_ids=jnp.zeros((2, 8)))
    with pytest.raises(ValueError, match=r"the bias \[3, 8, 8\] does not broadcast to .* = \[2, 4, 8, 8\]"):
        attend(causal=True, bias=jnp.zeros((3, 8, 8)))
    with pytest.raises(ValueError, match=r"the mask \[2, 1, 1, 8, 8\] does not broadcast"):
        attend(causal=True, mask=jnp.zeros((2, 1, 1, 8, 8), bool))
    with pytest.raises(ValueError, match="4 heads of the query are not divisible by the 3"):
        js.attention(q, normal(0, 2, 8, 3, 8), normal(0, 2, 8, 3, 8), causal=True)
    with pytest.raises(ValueError, match=r"heads of the same width, got query \[2, 8, 4, 8\], key \[2, 8, 2, 6\]"):
        js.attention(q, k[..., :6], v, causal=True)
    with pytest.raises(ValueError, match="the same positions and heads"):
        js.attention(q, k, v[:, :5], causal=False)
    with pytest.raises(ValueError, match="8 queries and 5 keys"):
        js.attention(q, k[:, :5], v[:, :5], causal=True)
    with pytest.raises(ValueError, match="of the same batch"):
        js.attention(q[0], k, v, causal=True)


@pytest.mark.parametrize("name", ["module", "qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_what_needs_all_weights_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*needs all weights at once"):
        js.attention(*arrays(8), causal=True, **{name: jnp.einsum})


@pytest.mark.slow
def test_any_number_of_batch_dimensions(blocks_from_16):
    q, k, v = arrays(20, rows=6)
    ids, mask = documents(6, 20), normal(4, 6, 1, 20, 20) > 0
    expected = js.attention(q, k, v, causal=True, segment_ids=ids, mask=mask)
    one = js.attention(q[0], k[0], v[0], causal=True, segment_ids=ids[0], mask=mask[0])
    np.testing.assert_allclose(one, expected[0], rtol=1e-5, atol=1e-6)
    apart = [x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v)]
    many = js.attention(*apart, causal=True, segment_ids=ids.reshape(2, 3, 20), mask=mask.reshape(2, 3, 1, 20, 20))
    np.testing.assert_allclose(many.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_one_position():
    q, k, v = arrays(1)
    attend = jax.jit(partial(js.attention, causal=True))
    np.testing.assert_allclose(attend(q, k, v), np.repeat(v, 2, axis=2), rtol=1e-6)


# The kernel


def trace(q, k, v, **options):
    """Call it without computing anything."""
    return jax.eval_shape(partial(js.attention, **options), q, k, v)


@pytest.fixture
def on_a_tpu(monkeypatch):
    """A stand-in: programs are made as for a TPU, and count how often the kernel is asked."""
    asked = []

    def count(q, k, v, extras, form):
        asked.append(form)
        return formula(q, k, v, extras, form)

    monkeypatch.setattr(module, "devices_in_force", lambda: [SimpleNamespace(platform="tpu")])
    monkeypatch.setattr(module, "splash", count)
    module._warn_once.cache_clear()
    return asked


def test_a_tpu_takes_the_kernel_but_for_short_rows(on_a_tpu):
    trace(*arrays(127), causal=True)
    assert on_a_tpu == []
    trace(*arrays(128), causal=True, window=5)
    assert on_a_tpu == [Form(causal=True, window=5)]


@pytest.mark.slow
def test_what_the_kernel_refuses_falls_back_and_says_so_once(on_a_tpu):
    q, k, v = arrays(300, rows=1)
    bias = normal(3, 1, 4, 1, 300)
    with pytest.warns(UserWarning, match=r"query \[1, 300, 4, 8\] .* in blocks, not by the kernel for tpu.* a bias"):
        found = js.attention(q, k, v, causal=True, bias=bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        js.attention(q, k, v, causal=True, bias=bias)
    assert on_a_tpu == []
    np.testing.assert_allclose(found, formula(q, k, v, Extras(bias=bias), Form(True)), rtol=1e-4, atol=1e-5)


def test_a_constant_causal_mask_is_known_to_the_kernel(on_a_tpu):
    q, k, v = arrays(300, rows=1)
    causal = np.tri(300, dtype=bool)
    trace(q, k, v, causal=False, mask=causal[None, None])
    trace(q, k, v, causal=False, mask=jnp.asarray(causal, jnp.float32))
    trace(q, k, v, causal=False, mask=np.ones((300, 300), bool))
    assert on_a_tpu == [Form(causal=True), Form(causal=True), Form()]
    with pytest.warns(UserWarning, match="a mask whose values are not known"):
        jax.eval_shape(lambda mask: js.attention(q, k, v, causal=False, mask=mask), causal)


def test_a_gpu_takes_cudnn_for_half_precision_and_rocm_blocks(monkeypatch):
    asked = []
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0", client=SimpleNamespace(platform_version="cuda"))
    monkeypatch.setattr(module, "devices_in_force", lambda: [gpu])
    monkeypatch.setattr(module, "cudnn", lambda *args: asked.append(args) or formula(*args))
    module._warn_once.cache_clear()
    half = [x.astype(jnp.bfloat16) for x in arrays(300, rows=1)]
    trace(*half, causal=True)
    assert len(asked) == 1
    with pytest.warns(UserWarning, match="kernel for gpu, which does not take the dtype float32"):
        trace(*arrays(300, rows=1), causal=True)
    gpu.client.platform_version = "rocm 7"
    trace(*half, causal=True)
    assert len(asked) == 1


def test_flops_are_those_of_the_formula_on_every_platform(on_a_tpu):
    from jaxshard.cost.flops import model_flops

    q, k, v = arrays(512)
    assert model_flops(lambda: js.attention(q, k, v, causal=True)) == 2 * 2 * (2 * 4 * 512 * 512 * 8)
    assert on_a_tpu == []


# Layouts


def attention_model(heads=8, kv_heads=8, width=4, embed=16):
    """(init_fn, loss_fn) of one layer of attention, whose kernels the built-in rules know."""

    def init_fn(key):
        shapes = {
            "q_proj": (embed, heads, width),
            "k_proj": (embed, kv_heads, width),
            "v_proj": (embed, kv_heads, width),
        }
        shapes["o_proj"] = (heads, width, embed)
        keys = jax.random.split(key, len(shapes))
        return {name: {"kernel": jax.random.normal(k, shapes[name]) / 3} for name, k in zip(shapes, keys)}

    def loss_fn(params, batch, key):
        q, k, v = (jnp.einsum("btc,chd->bthd", batch["x"], params[f"{name}_proj"]["kernel"]) for name in "qkv")
        x = js.attention(q, k, v, causal=True, window=9, segment_ids=batch["ids"], soft_cap=5.0)
        y = jnp.einsum("bthd,hdc->btc", x, params["o_proj"]["kernel"])
        return js.Mean((y**2).sum(), y.size)

    return init_fn, loss_fn


BATCH = {"x": normal(6, 8, 20, 16), "ids": documents(8, 20)}

LAYOUTS = {
    "auto": ({"data": 8}, js.fsdp(min_size=0), js.auto(), {}),
    "explicit": ({"data": 8}, js.fsdp(min_size=0), js.explicit(), {}),
    "auto-tensor": ({"data": 2, "tensor": 4}, js.compose(js.ddp("data"), js.tensor()), js.auto(), {}),
    "explicit-tensor": ({"data": 2, "tensor": 4}, js.compose(js.ddp("data"), js.tensor()), js.explicit(), {}),
    "few-kv-heads": ({"data": 2, "tensor": 4}, js.compose(js.ddp("data"), js.tensor()), js.explicit(), {"kv_heads": 2}),
    "uneven-kv-heads": ({"data": 2, "tensor": 4}, js.compose(js.ddp("data"), js.tensor()), js.auto(),
                        {"heads": 12, "kv_heads": 6}),
    "tensor-alone": ({"tensor": 8}, js.tensor(), js.explicit(), {"width": 8}),
}  # fmt: skip


FAST = ("explicit-tensor",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in LAYOUTS])
def test_a_layout_splits_it_and_one_device_is_equalled(name, blocks_from_16):
    axes, strategy, engine, sizes = LAYOUTS[name]
    toy = Toy(*attention_model(**sizes), BATCH)
    trace, _ = sharded(toy, strategy, js.make_mesh(**axes), engine, steps=1)
    assert_equal_runs(trace, one_device(toy, steps=1))


@pytest.mark.parametrize(
    "engine", [js.auto(), pytest.param(js.explicit(), marks=pytest.mark.slow)], ids=["auto", "explicit"]
)
def test_its_own_collectives_are_none(engine, blocks_from_16):
    """Over tensor the output's partial sums; over data the gradients; nothing is gathered or permuted."""
    mesh, (init_fn, loss_fn) = js.make_mesh(data=2, tensor=4), attention_model()
    layout = js.layout(js.compose(js.ddp("data"), js.tensor()), mesh, init_fn, SGD)
    step = js.make_step(loss_fn, SGD, layout, engine=engine)
    assert js.audit(step, BATCH).ok
    rows = summary(js.collectives(step.compile(BATCH), mesh))
    assert {row.kind for row in rows} == {"all-reduce"}
    (over_tensor,) = (row.bytes for row in rows if row.axes == ("tensor",))
    output = 4 * 20 * 16 * 4  # of this device's 4 rows
    assert output <= over_tensor <= output + 64  # and some scalars


WHOLE_KERNELS = [(f"{name}_proj/kernel", "whole") for name in "qkvo"] + list(js.RULES)


@pytest.mark.filterwarnings("ignore:the mesh axis 'tensor' splits nothing")
def test_heads_that_the_axis_does_not_divide_are_refused():
    init_fn, loss_fn = attention_model(heads=6, kv_heads=6)
    layout = js.layout(
        js.compose(js.ddp("data"), js.tensor(WHOLE_KERNELS)), js.make_mesh(data=2, tensor=4), init_fn, SGD
    )
    step = js.make_step(loss_fn, SGD, layout)
    with pytest.raises(ValueError, match=r"attention \(heads\) has 6 elements, .* 4 devices .*\('heads', 'whole'\)"):
        step.lower(BATCH)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mesh axis 'tensor' splits nothing")
def test_heads_that_a_rule_keeps_whole_equal_one_device(blocks_from_16):
    init_fn, loss_fn = attention_model(heads=6, kv_heads=6)
    whole = js.tensor([("heads", "whole"), *WHOLE_KERNELS])
    js.parity(init_fn, loss_fn, SGD, js.compose(js.ddp("data"), whole), js.make_mesh(data=2, tensor=4), BATCH).check()


def test_what_is_saved_by_name_is_not_computed_again(blocks_from_16):
    q, k, v = arrays(40)

    def loops(names):
        """Loops over pairs of blocks in a gradient."""
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        attend = jax.checkpoint(lambda q: js.attention(q, k, v, causal=True) ** 2, policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda q: attend(q).sum()))(q)).count("= scan[")

    assert loops([]) == 3  # forward, forward again, backward
    assert loops(["attention_out"]) == 2


# The TPU compiler


@pytest.mark.slow
@tpu
@pytest.mark.parametrize("name", ["auto", "explicit", "auto-tensor", "explicit-tensor", "few-kv-heads"])
def test_a_program_for_tpus_has_the_kernel_and_no_logits(name):
    axes, strategy, engine, sizes = LAYOUTS[name]
    init_fn, loss_fn = attention_model(**sizes)
    mesh = topology_mesh("v5e:2x4", **axes)
    batch = {"x": jax.ShapeDtypeStruct((8, 640, 16), jnp.float32), "ids": jax.ShapeDtypeStruct((8, 640), jnp.int32)}
    step = js.make_step(loss_fn, SGD, js.layout(strategy, mesh, init_fn, SGD), engine=engine)
    text = step.compile(batch).as_text()
    assert "splash_mha_fwd" in text and "splash_mha_dkv" in text
    assert "640,640" not in text
