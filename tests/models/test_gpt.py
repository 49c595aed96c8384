"""The GPT against its published sizes, a plain reference and itself."""

import math
from functools import cache, partial
from operator import itemgetter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.models.decoder import logits
from jaxshard.models.gpt import gpt
from jaxshard.models.recipe import Recipe

pytestmark = pytest.mark.fast_cases(3)

SMALL = {"vocab": 65, "width": 32, "depth": 2, "heads": 4, "seq": 12}
KEY = jax.random.key(0)


def batch_of(rows=4, positions=12, vocab=65, seed=0):
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, positions + 1), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens)}


@cache
def compiled(fn, *static):
    """`fn` bound to its first arguments and compiled: operation by operation these tests would take minutes."""
    return jax.jit(partial(fn, *static))


@cache
def small(**changes):
    return gpt(**SMALL | changes)


@cache
def noisy(model):
    """Parameters far from their initial values, biases included, so that every one of them matters."""
    rng = np.random.default_rng(9)
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, KEY))
    leaves = [
        jnp.asarray(rng.normal("scale" in jax.tree_util.keystr(path), 0.2, leaf.shape), jnp.float32)
        for path, leaf in shapes
    ]
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(model.init, KEY)), leaves)


# Sizes.


def test_the_learning_rate_warms_up_and_decays():
    tx = Recipe(batch=8, steps=100, learning_rate=1e-2, warmup=10, weight_decay=0.0).optimizer()
    params = jnp.zeros(())

    @jax.jit
    def updates():
        return jax.lax.scan(lambda state, grad: tx.update(grad, state, params)[::-1], tx.init(params), jnp.ones(100))[1]

    sizes = (-updates()).tolist()
    assert sizes[0] == pytest.approx(1e-2 / 11, rel=1e-3)
    assert max(sizes) == pytest.approx(1e-2, rel=1e-3) and sizes.index(max(sizes)) == 10
    assert sizes[-1] == pytest.approx(1e-2 / 20, rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "width 32 is not divisible by heads 5"),
        ({"depth": 0}, r"at least 1, got \{'depth': 0\}"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        gpt(**SMALL | change)


# The function.


def reference_logits(params, tokens, heads):
    """GPT-2 in loops of NumPy, f64."""
    params = jax.tree.map(partial(np.asarray, dtype=np.float64), params)

    def norm(x, p):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    rows = []
    for row in np.asarray(tokens):
        x = params["embed"]["wte"]["embedding"][row] + params["embed"]["wpe"][: len(row)]
        width = x.shape[-1]
        for layer in range(params["blocks"]["qkv"]["kernel"].shape[0]):
            p = jax.tree.map(itemgetter(layer), params["blocks"])
            qkv = dense(norm(x, p["ln_1"]), p["qkv"]).reshape(len(row), heads, 3, width // heads)
            out = np.zeros((len(row), heads, width // heads))
            for head in range(heads):
                for t in range(len(row)):
                    scores = qkv[: t + 1, head, 1] @ qkv[t, head, 0] / np.sqrt(width // heads)
                    shares = np.exp(scores - scores.max())
                    out[t, head] = shares @ qkv[: t + 1, head, 2] / shares.sum()
            x = x + dense(out.reshape(len(row), width), p["attn_out"])
            x = x + dense(gelu(dense(norm(x, p["ln_2"]), p["mlp_in"])), p["mlp_out"])
        x = norm(x, params["head"]["ln_f"])
        tied = "lm_head" not in params["head"]
        rows.append(x @ (params["embed"]["wte"]["embedding"].T if tied else params["head"]["lm_head"]["kernel"]))
    return np.stack(rows)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logits_and_loss_equal_a_plain_reference(tied):
    """f32 against f64: 2e-5 of the largest logit, loss 1e-6 relative."""
    model = small(tied=tied)
    params = noisy(model)
    batch = batch_of()
    expected = reference_logits(params, batch["tokens"][:, :-1], heads=4)
    got = compiled(logits, model)(params, batch["tokens"][:, :-1])
    assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()

    shares = np.exp(expected - expected.max(-1, keepdims=True))
    picked = np.take_along_axis(shares / shares.sum(-1, keepdims=True), np.asarray(batch["tokens"])[:, 1:, None], -1)
    loss = compiled(model.evaluate)(params, batch)
    assert float(loss["loss"].value) == pytest.approx(-np.log(picked).mean(), rel=1e-6)
    hits = expected.argmax(-1) == np.asarray(batch["tokens"])[:, 1:]
    assert float(loss["accuracy"].value) == pytest.approx(hits.mean())


def test_no_position_sees_a_later_one():
    model = small(tied=True)
    params, tokens = noisy(model), np.asarray(batch_of()["tokens"][:, :12])
    for position in (1, 5, 11):
        changed = np.where(np.arange(12) < position, tokens, 0)
        before, after = (np.asarray(compiled(logits, model)(params, t)) for t in (tokens, changed))
        np.testing.assert_array_equal(before[:, :position], after[:, :position])
        assert (before[:, position:] != after[:, position:]).any()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"inputs": jnp.zeros((2, 3), int)}, r"must be a dict with \"tokens\".*got \['inputs'\]"),
        ([1, 2], "must be a dict.*got list"),
        ({"tokens": jnp.zeros((2, 14), int)}, r"14 columns, but must have 2 to 13 .*build the model with seq=13"),
        ({"tokens": jnp.zeros((2, 1), int)}, "1 columns, but must have 2 to 13"),
        ({"tokens": jnp.zeros((2, 3))}, r"must be integers \[rows, positions \+ 1\], got float32\(2, 3\)"),
        ({"tokens": jnp.zeros(3, int)}, r"must be integers .* got int32\(3,\)"),
        ({"tokens": jnp.zeros((2, 4), int), "weights": jnp.zeros((2, 4))}, r"shape \(2, 3\) or \(2,\), got \(2, 4\)"),
    ],
)
def test_wrong_batches(batch, message):
    model = small()
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: model.loss(model.init(KEY), batch, KEY))


# Dropout.


@pytest.mark.slow  # `test_ready_made_models_pass` proves it of the program
def test_dropout_is_the_same_for_a_row_wherever_it_is():
    """Rows 2 and 3 computed apart, with their number in the batch, weigh in exactly as in the whole batch (1e-6)."""
    model, batch = small(dropout=0.4), batch_of()
    params = noisy(model)
    apart = jax.jit(partial(model.run, row=2))(params, {"tokens": batch["tokens"][2:]}, jax.random.key(3))
    loss_of, last = compiled(model.loss), batch | {"weights": jnp.array([0.0, 0.0, 1.0, 1.0])}
    whole = loss_of(params, last, jax.random.key(3))
    assert float(apart.value) == pytest.approx(float(whole.value), rel=1e-6)
    assert float(loss_of(params, last, jax.random.key(4)).value) != float(whole.value)


@pytest.mark.slow
def test_nothing_is_dropped_in_evaluation():
    model, batch = small(dropout=0.4), batch_of()
    params = noisy(model)
    evaluated, plain = (compiled(m.evaluate)(params, batch)["loss"].value for m in (model, small()))
    assert float(evaluated) == pytest.approx(float(plain), rel=1e-6)


@pytest.mark.slow
def test_dropout_drops_its_share_and_keeps_the_mean():
    """0.25 of 64 x 12 x 32 entries within 5 sigma; the others a third larger."""
    params = noisy(small())
    batch = batch_of(rows=64)
    plain = compiled(small().embed)(params, batch, KEY)
    dropped = compiled(small(dropout=0.25).embed)(params, batch, KEY)
    assert float((dropped == 0).mean()) == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / plain.size))
    np.testing.assert_allclose(dropped[dropped != 0], plain[dropped != 0] / 0.75, rtol=1e-6)
    assert len({tuple(row) for row in np.asarray(dropped[:, 0] == 0)}) == 64


def test_the_initial_parameters_are_traced_once_for_all_blocks_and_callers(monkeypatch):
    """Flax is slow to trace; a layout and `js.init` trace the parameters one after the other."""
    traced, init = [], nn.Module.init

    def counted(module, *args, **kwargs):
        traced.append(type(module).__name__)
        return init(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "init", counted)
    model = gpt(**SMALL)
    shapes = [jax.eval_shape(model.init, KEY) for _ in range(2)]
    assert shapes[0] == shapes[1]
    assert traced == ["Embedding", "Block", "Output"]
