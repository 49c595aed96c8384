"""The Llama against its published size, a plain reference, Flax's own parts and itself on meshes."""

import math
from functools import cache, partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.models import SIZES
from jaxshard.models.decoder import logits
from jaxshard.models.llama import gated, llama
from jaxshard.models.rope import RopeScaling, YarnScaling, rotary_gain, rotary_rates

SMALL = {"vocab": 64, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 12, "rope_base": 100}
KEY = jax.random.key(0)


def batch_of(rows=4, positions=12, vocab=64, seed=0):
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, positions + 1), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens)}


@cache
def small(**changes):
    return llama(**SMALL | changes)


@cache
def noisy(model):
    """Parameters far from their initial values, so that every one of them matters."""
    rng = np.random.default_rng(9)
    shapes = jax.eval_shape(model.init, KEY)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(rng.normal("scale" in jax.tree_util.keystr(path), 0.2, x.shape), jnp.float32),
        shapes,
    )


# Sizes.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5, "kv_heads": 5}, "width 32 over heads 5 must give heads of an even size; pass a multiple of 10"),
        ({"heads": 32, "kv_heads": 2}, "width 32 over heads 32 must give heads of an even size"),
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3; pass a divisor of 4"),
        ({"hidden": 0}, r"llama: sizes must be at least 1, got \{'hidden': 0\}"),
        ({"rope_base": 1}, "rope_base must be above 1, got 1"),
        ({"head_dim": 9}, "head_dim must be even, got 9"),
        ({"head_dim": 0}, r"sizes must be at least 1, got \{'head_dim': 0\}"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon must not be negative, got -1e-05"),
        ({"rope_scaling": 0.5}, "rope_scaling: factor must be at least 1"),
        ({"rope_scaling": RopeScaling(low=4)}, "rope_scaling: factor must be at least 1, 0 < low < high"),
        ({"rope_scaling": YarnScaling(8, attention=0.0)}, "rope_scaling: attention must be above 0"),
        ({"rope_scaling": "8"}, "rope_scaling must be a factor such as 8, a js.models.RopeScaling or .*, got '8'"),
        ({"qk_norm": "all"}, """qk_norm must be False, True or "joint", got 'all'"""),
        ({"depth": 2.5}, r"llama: sizes must be whole numbers, got \{'depth': 2.5\}"),
    ],
)
def test_wrong_sizes(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        llama(**SMALL | change)


def test_errors_name_the_model():
    with pytest.raises(ValueError, match=r'llama: the batch must be a dict with "tokens"'):
        jax.eval_shape(lambda: small().loss(small().init(KEY), {"x": jnp.zeros((2, 3))}, KEY))


# The function.


def reference_logits(params, tokens, heads, kv_heads, base, epsilon=1e-5, scaled=lambda rates: rates):
    """Llama 3 in loops of NumPy, f64; a pair of dimensions is turned as a complex number."""
    params = jax.tree.map(partial(np.asarray, dtype=np.float64), params)

    def norm(x, p):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p["scale"]

    def turn(x, position):
        half = len(x) // 2
        turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * scaled(base ** (-np.arange(half) / half)))
        return np.concatenate([turned.real, turned.imag])

    rows = []
    for row in np.asarray(tokens):
        x = params["embed"]["embed_tokens"]["embedding"][row]
        for layer in range(params["blocks"]["q_proj"]["kernel"].shape[0]):
            p = jax.tree.map(itemgetter(layer), params["blocks"])
            h = norm(x, p["attn_norm"])
            q, k, v = (np.einsum("tc,chd->htd", h, p[f"{name}_proj"]["kernel"]) for name in "qkv")
            out = np.zeros((len(row), *q.shape[::2]))
            for head in range(heads):
                shared = head // (heads // kv_heads)
                keys = np.stack([turn(k[shared, t], t) for t in range(len(row))])
                for t in range(len(row)):
                    scores = keys[: t + 1] @ turn(q[head, t], t) / np.sqrt(q.shape[-1])
                    shares = np.exp(scores - scores.max())
                    out[t, head] = shares @ v[shared, : t + 1] / shares.sum()
            x = x + np.einsum("thd,hdc->tc", out, p["o_proj"]["kernel"])
            h = norm(x, p["mlp_norm"])
            gate, up = h @ p["gate_proj"]["kernel"], h @ p["up_proj"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down_proj"]["kernel"]
        x = norm(x, params["head"]["norm"])
        tied = "lm_head" not in params["head"]
        table = params["embed"]["embed_tokens"]["embedding"].T if tied else params["head"]["lm_head"]["kernel"]
        rows.append(x @ table)
    return np.stack(rows)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 2), (False, 1), (False, 4)])
def test_logits_and_loss_equal_a_plain_reference(tied, kv_heads):
    """f32 against f64: 2e-5 of the largest logit, loss 1e-6 relative."""
    model = small(tied=tied, kv_heads=kv_heads)
    params, batch = noisy(model), batch_of(rows=2, positions=9)
    expected = reference_logits(params, batch["tokens"][:, :-1], 4, kv_heads, SMALL["rope_base"])
    got = jax.jit(partial(logits, model))(params, batch["tokens"][:, :-1])
    assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()

    shares = np.exp(expected - expected.max(-1, keepdims=True))
    picked = np.take_along_axis(shares / shares.sum(-1, keepdims=True), np.asarray(batch["tokens"])[:, 1:, None], -1)
    loss = jax.jit(model.evaluate)(params, batch)
    assert float(loss["loss"].value) == pytest.approx(-np.log(picked).mean(), rel=1e-6)


def test_head_width_epsilon_and_scaling_equal_a_plain_reference():
    """f32 against f64: 2e-5 of the largest logit; each of the three matters."""
    scaling = RopeScaling(factor=4, low=1, high=3, original=16)
    model = small(head_dim=12, norm_epsilon=0.1, rope_scaling=scaling)
    params, tokens = noisy(model), batch_of(rows=2, positions=12)["tokens"][:, :-1]
    assert params["blocks"]["q_proj"]["kernel"].shape == (2, 32, 4, 12)
    assert params["blocks"]["o_proj"]["kernel"].shape == (2, 4, 12, 32)
    expected = reference_logits(params, tokens, 4, 2, SMALL["rope_base"], 0.1, partial(scaled_rates, scaling))
    got = jax.jit(partial(logits, model))(params, tokens)
    assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()
    for other in (small(head_dim=12, norm_epsilon=0.1), small(head_dim=12, rope_scaling=scaling)):
        assert np.abs(jax.jit(partial(logits, other))(params, tokens) - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(("dims", "base", "original"), [(128, 1e4, 4096), (64, 5e5, 8192), (12, 100, 16)])
def test_yarn_has_the_ramp_and_gain_of_its_authors(dims, base, original):
    """The formula of Peng et al. in loops, f64: slow pairs are slower by the factor, fast ones stay."""
    scaling, plain = YarnScaling(factor=16, low=1, high=32, original=original), rotary_rates(dims, base)
    first, last = (dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1))
    first, last = max(math.floor(first), 0), min(math.ceil(last), dims - 1)
    for pair, (rate, got) in enumerate(zip(plain, rotary_rates(dims, base, scaling), strict=True)):
        slow = min(max((pair - first) / (last - first), 0), 1)
        assert got == pytest.approx(rate * (slow / 16 + 1 - slow), rel=1e-12)
    assert rotary_rates(dims, base, scaling)[-1] == pytest.approx(plain[-1] / 16) or last > dims // 2 - 1
    assert rotary_gain(scaling) == pytest.approx(1.2772588722239782)  # 0.1 ln 16 + 1
    assert rotary_gain(scaling._replace(attention=1.5)) == 1.5 and rotary_gain(RopeScaling()) == 1


def scaled_rates(scaling, rates):
    """Meta's loop over the rates, as its reference code has it."""
    longest, shortest = scaling.original / scaling.low, scaling.original / scaling.high
    new = []
    for rate in rates:
        wavelength = 2 * math.pi / rate
        if wavelength < shortest:
            new.append(rate)
        elif wavelength > longest:
            new.append(rate / scaling.factor)
        else:
            smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
            new.append((1 - smooth) * rate / scaling.factor + smooth * rate)
    return np.array(new)


# Meshes.


def test_a_tensor_axis_splits_every_large_array():
    layout = js.layout(
        js.compose(js.fsdp(min_size=0), js.tensor()),
        js.make_mesh(data=2, tensor=4), SIZES["llama3-8b"].model().init, optax.sgd(0.1),
    )  # fmt: skip
    entries = {p.leaf.path: p.placement for p in layout.placed() if p.role == "param"}
    split = {path: [str(entry) for entry in place.use] for path, place in entries.items()}
    assert split == {
        "embed/embed_tokens/embedding": ["tensor", "None"],
        "blocks/attn_norm/scale": ["None", "None"],
        "blocks/q_proj/kernel": ["None", "None", "tensor", "None"],
        "blocks/k_proj/kernel": ["None", "None", "tensor", "None"],
        "blocks/v_proj/kernel": ["None", "None", "tensor", "None"],
        "blocks/o_proj/kernel": ["None", "tensor", "None", "None"],
        "blocks/mlp_norm/scale": ["None", "None"],
        "blocks/gate_proj/kernel": ["None", "None", "tensor"],
        "blocks/up_proj/kernel": ["None", "None", "tensor"],
        "blocks/down_proj/kernel": ["None", "tensor", "None"],
        "head/norm/scale": ["None"],
        "head/lm_head/kernel": ["None", "tensor"],
    }
    assert all("data" in str(place.store) for place in entries.values())


@pytest.mark.slow
def test_norms_over_all_heads_and_after_the_layers_on_a_mesh():
    """As in OLMo 2, with heads split over an axis, and token by token with a cache; tests/hf has its logits."""
    model, tx = small(qk_norm="joint", norm_after=True, kv_heads=4), optax.adamw(1e-3)
    strategy, mesh = js.compose(js.fsdp(min_size=0), js.tensor()), js.make_mesh(data=2, tensor=4)
    found = js.parity(model.init, model.loss, tx, strategy, mesh, batch_of(), engine=js.explicit())
    assert found.ok, str(found)
    layout = js.layout(strategy, mesh, model.init, tx)
    run = js.init(model.init, tx, layout, 0)
    (row,) = js.generate(model, run, layout, [[1, 2, 3]], length=6)
    wanted = logits(model, js.logical(run, layout).params, jnp.asarray([row]))[0].argmax(-1)
    assert row[3:] == wanted[2:-1].tolist()


def test_the_product_of_a_gated_mlp_and_its_gradients_are_computed_once():
    """Behind a barrier each, so that no compiler computes them again in every matrix product that reads them."""
    gate, up = (jax.random.normal(key, (4, 8)) for key in jax.random.split(KEY))
    wanted = jax.value_and_grad(lambda gate, up: (jax.nn.silu(gate) * up).sum(), (0, 1))
    once = jax.value_and_grad(lambda gate, up: gated(jax.nn.silu, gate, up).sum(), (0, 1))
    text = jax.jit(once).lower(gate, up).as_text()
    assert text.count("stablehlo.optimization_barrier") == 2
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), once(gate, up), wanted(gate, up))
