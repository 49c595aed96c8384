"""The head in chunks equals plain logits with `js.cross_entropy`, on every engine, and never has all logits."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.layers import head_loss as layer
from tests.toys import assert_equal_runs, gpt_toy, one_device, sharded

pytestmark = pytest.mark.fast_cases(2)

ROWS, SEQ, WIDTH = 4, 6, 16
CAPPED = {"z_loss": 0.01, "soft_cap": 3.0}


def made(vocab, tied=False, dtype=np.float32, labels=None):
    """(x, kernel, labels, weights): a third of the weights 0, also those of labels of -1 and one too many."""
    rng = np.random.default_rng(vocab)
    x = rng.normal(size=(ROWS, SEQ, WIDTH)).astype(dtype)
    kernel = rng.normal(size=(vocab, WIDTH) if tied else (WIDTH, vocab)).astype(dtype)
    labels = rng.integers(-1, vocab + 2, (ROWS, SEQ), dtype=np.int32)
    counts = (rng.random((ROWS, SEQ)) > 1 / 3) & (labels >= 0) & (labels < vocab)
    return jnp.asarray(x), jnp.asarray(kernel), labels, counts.astype(np.float32)


def plain(x, kernel, labels, weights, *, tied=False, z_loss=0.0, soft_cap=None):
    """The loss, and the share of labels with the largest logit, of all logits at once."""
    logits = (x @ (kernel.T if tied else kernel)).astype(jnp.float32)
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    nats = js.cross_entropy(logits, labels, where=weights != 0) + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return (nats * weights).sum() / weights.sum(), ((logits.argmax(-1) == labels) * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    ("vocab", "tied", "chunks", "options"),
    [
        (97, False, 7, {}),
        (97, True, 3, CAPPED),
        (1000, True, 7, {}),
        (1000, False, 3, CAPPED),
        (97, False, 97, CAPPED),
        (1000, False, 1, CAPPED),
        (1000, True, 1, {}),
    ],
)
def test_equals_plain_logits_for_any_number_of_chunks(vocab, tied, chunks, options):
    """Chunks that do not divide, wider and narrower than a tile, and as many as columns."""
    x, kernel, labels, weights = made(vocab, tied)

    def whole(x, kernel):
        return plain(x, kernel, labels, weights, tied=tied, **options)

    def cut(x, kernel):
        loss = js.head_loss(x, kernel, labels, weights, tied=tied, chunks=chunks, accuracy=True, **options)
        return loss.value.value, loss.metrics["accuracy"].value

    (value, accuracy), grads = jax.jit(jax.value_and_grad(whole, (0, 1), has_aux=True))(x, kernel)
    (loss, share), found = jax.jit(jax.value_and_grad(cut, (0, 1), has_aux=True))(x, kernel)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    assert share == accuracy
    for ours, theirs in zip(found, grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_first_of_equal_logits_counts():
    """Columns 2, 9 and 5 are the same: as `jnp.argmax`, whichever chunk has them."""
    kernel = jnp.zeros((WIDTH, 12)).at[:, jnp.array([2, 9, 5])].set(1.0)

    @jax.jit
    def share_of(label):
        found = js.head_loss(jnp.ones((3, WIDTH)), kernel, jnp.full(3, label), chunks=4, accuracy=True)
        return found.metrics["accuracy"].value

    assert [share_of(label) for label in (2, 5, 9)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("chunks", "options"),
    [(3, {"tied": True, "z_loss": 1e-2, "soft_cap": 5.0}), pytest.param(1, {}, marks=pytest.mark.slow)],
)
def test_labels_of_weight_zero_are_ignored_and_other_bad_labels_are_nan(chunks, options):
    """Whatever label and input are; the gradient is that of the labels that count, to the bit, and 0 if none does."""
    x, kernel, labels, weights = made(97, options.get("tied", False))
    spoilt = jnp.where(weights[..., None] == 0, jnp.array([jnp.nan, jnp.inf] * (WIDTH // 2)), x)

    def run(x, kernel, labels, weights):
        loss = js.head_loss(x, kernel, labels, weights, chunks=chunks, accuracy=True, **options)
        return loss.value.value, loss.metrics["accuracy"].value

    run = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))
    clean, expected = run(x, kernel, np.maximum(labels, 0) % 97, weights)
    bad, found = run(spoilt, kernel, labels, weights)
    jax.tree.map(np.testing.assert_array_equal, (bad, found), (clean, expected))
    assert not np.any(found[0][weights == 0])
    (loss, _), _ = run(x, kernel, np.where(weights == 0, labels, -100), weights)
    assert np.isnan(loss)
    (loss, _), _ = run(x, kernel, np.where(weights == 0, labels, 97), weights * 0.5)
    assert np.isnan(loss)
    (loss, _), grads = run(x, kernel, labels, np.zeros_like(weights))
    assert loss == 0 and not any(np.any(grad) for grad in grads)


def test_bf16_logits_are_f32_and_gradients_are_added_up_in_f32():
    """Closer to the f32 run of the same bf16 numbers than bf16 logits are, and chunks cost no digits."""
    x, kernel, labels, weights = made(1000, dtype=jnp.bfloat16)
    wide = jnp.float32

    @jax.jit
    @jax.value_and_grad
    def expected(x):
        return plain(x, kernel.astype(wide), labels, weights)[0]

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1))
    def found(x, kernel):
        return js.head_loss(x, kernel, labels, weights, chunks=7).value

    (exact, gradient), (loss, (dx, _)) = expected(x.astype(wide)), found(x, kernel)
    assert abs(loss - exact) < 1e-5 * exact and dx.dtype == jnp.bfloat16
    assert np.abs(dx.astype(wide) - gradient).max() < 2**-7 * np.abs(gradient).max()


def logits_shapes(text, vocab):
    """Shapes in a program with a dimension of all the vocabulary, but for those of the matrix itself."""
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\w\d+\[([\d,]+)\]", text)}
    return {shape for shape in shapes if vocab in shape and not set(shape) <= {vocab, WIDTH, 1}}


def test_no_array_of_all_logits_is_in_the_program():
    x, kernel, labels, weights = made(997)

    def run(x, kernel, chunks):
        return js.head_loss(x, kernel, labels, weights, chunks=chunks).value

    for chunks, expected in ((1, True), (4, False)):
        step = jax.jit(jax.value_and_grad(partial(run, chunks=chunks), (0, 1)))
        assert bool(logits_shapes(step.lower(x, kernel).compile().as_text(), 997)) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": jnp.zeros((ROWS, SEQ))}, r"integer labels \[...\], got .*float32\[4, 6\]"),
        ({"labels": jnp.zeros((ROWS,), int)}, r"got float32\[4, 6, 16\] and int32\[4\]"),
        ({"tied": True}, r"needs a kernel \[V, C\] with C = 16, got \[16, 97\].*pass tied=False"),
        ({"weights": jnp.ones(5)}, r"weights \[5\] do not broadcast to the labels \[4, 6\]"),
        ({"chunks": 0}, "chunks must be a whole number from 1 on, got 0"),
        ({"soft_cap": 0.0}, "soft_cap be positive, got 0.0 and 0.0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shapes(changes, message):
    x, kernel, labels, _ = made(97)
    with pytest.raises(ValueError, match=message):
        js.head_loss(x, kernel, **({"labels": labels} | changes))


# Engines


MESHES = {
    "fsdp": ({"data": 8}, js.fsdp(min_size=0)),
    "two axes": ({"x": 2, "y": 4}, js.fsdp(("x", "y"), min_size=0)),
    "tensor": ({"data": 4, "tensor": 2}, js.compose(js.fsdp(min_size=0), js.tensor())),
    "pipe": ({"data": 2, "tensor": 2, "pipe": 2}, js.compose(js.fsdp(min_size=0), js.tensor(), js.pipeline(chunks=1))),
}
CELLS = [
    ("fsdp", js.explicit(), {"vocab": 203, "tied": True}),
    ("fsdp", js.auto(), {"vocab": 208, "tied": True}),
    ("tensor", js.explicit(remat="nothing"), {"vocab": 200}),
    ("tensor", js.auto(), {"vocab": 200, "tied": True}),
    ("two axes", js.explicit(microbatches=2, scatter="end"), {"vocab": 203, "tied": True}),
    ("pipe", js.pipelined(microbatches=2), {"vocab": 200}),
]


@pytest.fixture
def chunked(monkeypatch):
    """Small models are cut too: at width 32 into chunks of 64 columns."""
    monkeypatch.setattr(layer, "_ONE_CHUNK", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "engine", "sizes"), CELLS)
def test_every_engine_equals_plain_logits_on_one_device(where, engine, sizes, monkeypatch):
    toy = gpt_toy(**sizes)
    reference = one_device(toy, steps=2)
    monkeypatch.setattr(layer, "_ONE_CHUNK", 0)
    jax.clear_caches()
    axes, strategy = MESHES[where]
    trace, _ = sharded(toy, strategy, js.make_mesh(**axes), engine, steps=2)
    assert_equal_runs(trace, reference)


def step_of(model, strategy, mesh, engine):
    tx = optax.adam(1e-3)
    return js.make_step(model.loss, tx, js.layout(strategy, mesh, model.init, tx), engine=engine)


def shape_of(found, size):
    return [(one.kind, one.count) for one in found if size in [int(np.prod(shape)) for shape in one.shapes]]


@pytest.mark.parametrize(
    ("width", "vocab", "columns"),
    [pytest.param(64, 512, 128, marks=pytest.mark.slow), pytest.param(32, 208, 56, marks=pytest.mark.slow)],
    ids=["its width is split", "its vocabulary is split"],
)
@pytest.mark.parametrize("engine", [js.explicit(remat="nothing"), pytest.param(js.auto(), marks=pytest.mark.slow)])
def test_each_chunk_is_gathered_twice_and_reduced_once(engine, width, vocab, columns, chunked):
    """Four chunks over 8 devices, in the program and in the promise: of 128 columns, or of 7 of each device's 26."""
    model = js.models.gpt(vocab=vocab, width=width, depth=2, heads=4, seq=16, tied=False)
    step = step_of(model, js.fsdp(min_size=0), js.make_mesh(data=8), engine)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
    found = js.collectives(step.compile(batch), step.layout.mesh)
    moved = shape_of(found, width * columns)
    assert sum(count for kind, count in moved if kind == "all-gather") == 8
    assert sum(count for kind, count in moved if kind != "all-gather") == 4
    comparison = js.audit(step, batch)
    # Under auto the compiler may gather what the embedding looked up, whatever the head does.
    surprises = [one for one in comparison.surprises if "gpt.py" not in one.place]
    assert not surprises and not comparison.missing, str(comparison)


def test_a_head_of_the_users_gathers_its_kernel_in_chunks_too():
    """In a plain function: the kernel is the array that the loss received."""

    def init(key):
        return {"embed": jnp.ones((8, 32)), "head": 0.1 * jax.random.normal(key, (32, 128))}

    def loss(params, batch, key):
        return js.head_loss(batch["x"] @ params["embed"], params["head"], batch["y"], chunks=4)

    batch = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32), "y": jax.ShapeDtypeStruct((16,), jnp.int32)}
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init, optax.sgd(0.1))
    step = js.make_step(loss, optax.sgd(0.1), layout, engine=js.explicit())
    found = js.collectives(step.compile(batch), layout.mesh)
    moved = shape_of(found, 32 * 32)
    assert sum(count for _, count in moved) == 12 and not shape_of(found, 32 * 128), moved


MASKED = {
    "explicit": ({"data": 8}, js.fsdp(min_size=0), js.explicit(microbatches=2)),
    "auto": (
        {"data": 4, "tensor": 2},
        js.compose(js.fsdp(min_size=0), js.tensor([("head", (None, "vocab")), *js.RULES])),
        js.auto(),
    ),
    "pipelined": (
        {"data": 4, "pipe": 2},
        js.compose(js.fsdp(min_size=0), js.pipeline(chunks=1)),
        js.pipelined(microbatches=2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
def test_ignored_labels_train_and_the_guard_reports_other_bad_ones(name):
    """Labels of -100 of weight 0 train as any other label of weight 0 does, to 1e-6; with weight 1 a step is bad."""

    def init(key):
        return {"embed": jnp.eye(8, 32), "block": jnp.eye(32), "head": jnp.eye(32, 128)}

    def head(params, x, batch, key):
        return js.head_loss(x, params["head"], batch["y"], batch["weights"], chunks=4)

    model = js.Stacked(lambda p, b, k: b["x"] @ p["embed"], lambda w, x, k: x + jnp.tanh(x @ w), head, 2, init)
    axes, strategy, engine = MASKED[name]
    tx, rng = optax.sgd(0.5), np.random.default_rng(3)
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, tx)
    step = js.make_step(model.loss, tx, layout, engine=engine)
    weights = np.float32(rng.random(16) > 0.4)
    batch = {"x": np.float32(rng.normal(size=(16, 8))), "y": rng.integers(0, 128, 16), "weights": weights}
    masked = batch | {"y": np.where(weights == 0, -100, batch["y"])}
    expected = float(jax.jit(lambda key: model.loss(model.init(key), batch, key).value)(jax.random.key(0)))
    runs = [step(js.init(model.init, tx, layout, 0), one) for one in (batch, masked)]
    assert [float(metrics["loss"]) for _, metrics in runs] == pytest.approx([expected] * 2, rel=1e-6)
    (clean, _), (run, metrics) = runs
    jax.tree.map(np.testing.assert_array_equal, clean.params, run.params)
    assert not metrics["bad"]
    _, metrics = step(run, masked | {"weights": np.ones(16, np.float32)})
    with pytest.raises(js.BadStep, match=r"step 2 is bad: loss nan, all gradients are finite.*labels outside of the"):
        js.check_finite(metrics, step=2)
