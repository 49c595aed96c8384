"""`js.attribution`: formulas in NumPy, completeness, one device against layouts, memory, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

TENSOR = js.compose(js.fsdp("data", min_size=0), js.tensor())
LAYOUTS = {
    "tensor": (TENSOR, {"data": 2, "tensor": 4}),
    "ddp": (js.ddp("data"), {"data": 8}),
    "fsdp": (js.fsdp("data", min_size=0), {"data": 8}),
}
RANDOM = np.random.default_rng(0)
PARAMS = {
    "up": {"kernel": RANDOM.normal(size=(6, 16)).astype(np.float32) / 2},
    "down": {"kernel": RANDOM.normal(size=(16, 4)).astype(np.float32) / 2},
}
X = RANDOM.normal(size=(16, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 16)
TX = optax.sgd(0.1)


def init_fn(key):
    return jax.tree.map(jnp.asarray, PARAMS)


def apply(params, x):
    return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


def layout_of(name):
    strategy, axes = LAYOUTS[name]
    return js.layout(strategy, js.make_mesh(**axes), init_fn, TX)


def one_device(init=init_fn):
    return js.layout(js.ddp("data"), js.make_mesh(jax.devices()[:1], data=1), init, TX)


def in_numpy(x, base, labels, steps=2000):
    """Integrated gradients by equation 3 of the paper, a plain sum, with the derivative written out."""
    up, down = (np.asarray(PARAMS[name]["kernel"], np.float64) for name in ("up", "down"))
    total = np.zeros(x.shape)
    for k in range(steps):
        at = base + (k + 0.5) / steps * (x - base)
        slope = (1 - np.tanh(at @ up) ** 2) * down[:, labels].T
        total += slope @ up.T / steps
    return (x - base) * total


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_integrated_gradients_are_those_of_the_paper_under_every_layout(name):
    layout = layout_of(name)
    found = js.attribution(apply, js.init(init_fn, TX, layout, 0), X, layout, target=LABELS, baseline=0.5)
    assert found.values.shape == X.shape and found.values.sharding.spec[0] == "data"
    np.testing.assert_allclose(found.values, in_numpy(X, 0.5, LABELS), atol=1e-5)
    outputs = np.asarray(apply(PARAMS, X))[np.arange(16), LABELS]
    np.testing.assert_allclose(found.outputs, outputs, atol=1e-5)
    # Completeness: they add up to f(x) - f(baseline).
    np.testing.assert_allclose(found.values.sum(1), found.outputs - found.baseline_outputs, atol=1e-5)
    np.testing.assert_allclose(found.gap, 0, atol=1e-5)


def test_gradient_x_input_and_its_gap():
    layout = layout_of("ddp")
    found = js.attribution(apply, PARAMS, X, layout, target=2, method="gradient_x_input")
    up, down = (np.asarray(PARAMS[name]["kernel"], np.float64) for name in ("up", "down"))
    expected = X * (((1 - np.tanh(X @ up) ** 2) * down[:, 2]) @ up.T)
    np.testing.assert_allclose(found.values, expected, atol=1e-5)
    np.testing.assert_allclose(found.gap, expected.sum(1) - np.asarray(found.outputs), atol=1e-5)
    assert np.abs(found.gap).max() > 0.1


def test_rows_that_devices_do_not_divide_are_padded_and_cut():
    layout = layout_of("ddp")
    whole = js.attribution(apply, PARAMS, X, layout, target=LABELS)
    part = js.attribution(apply, PARAMS, X[:5], layout, target=LABELS[:5])
    assert part.values.shape == (5, 6) and part.gap.shape == (5,)
    np.testing.assert_allclose(part.values, np.asarray(whole.values)[:5], atol=1e-6)


def test_trees_of_inputs_have_floats_attributed_and_integers_left_alone():
    def gated(params, inputs):
        return (apply(params, inputs["x"]) * inputs["scale"][:, None])[:, 0] + inputs["index"]

    inputs = {"x": X, "scale": np.linspace(1, 2, 16, dtype=np.float32), "index": np.arange(16, dtype=np.int32)}
    baseline = {"x": np.zeros((1, 6), np.float32), "scale": np.float32(1), "index": np.int32(0)}
    found = js.attribution(gated, PARAMS, inputs, layout_of("ddp"), baseline=baseline)
    assert found.values["index"] is None and found.values["scale"].shape == (16,)
    np.testing.assert_allclose(found.gap, 0, atol=1e-4)
    np.testing.assert_allclose(found.baseline_outputs, np.arange(16), atol=1e-5)


def test_the_state_of_a_model_is_handed_on():
    def with_state(key):
        return js.Model(init_fn(key), {"shift": jnp.full(4, 3.0)})

    def shifted(model, x):
        return apply(model.params, x) + model.state["shift"]

    layout = one_device(with_state)
    found = js.attribution(shifted, js.init(with_state, TX, layout, 0), X, layout, target=1)
    np.testing.assert_allclose(found.baseline_outputs, 3.0, atol=1e-5)


# Models.


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, "pipe"])
def test_tokens_of_a_decoder_are_attributed_by_their_embeddings(name):
    model = js.models.gpt(vocab=16, width=32, depth=2, heads=4, seq=8)
    run, embed = partial(js.models.logits_of_embedded, model), partial(js.models.embed_tokens, model)
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(1)))
    tokens = RANDOM.integers(0, 16, (8, 6)).astype(np.int32)
    pipe = js.compose(js.fsdp("data", min_size=0), js.pipeline("pipe", chunks=1)), {"data": 4, "pipe": 2}
    strategy, axes = LAYOUTS.get(name, pipe)
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, TX)
    ask = partial(js.attribution, run, params, tokens, target=last_logit, embed=embed, baseline=np.zeros_like(tokens))
    with warnings_of(name):
        found = ask(layout)
    alone = ask(one_device(model.init))
    assert found.values.shape == (8, 6, 32)
    np.testing.assert_allclose(found.values, alone.values, atol=1e-5)
    np.testing.assert_allclose(found.gap, 0, atol=1e-5)
    logits = jax.jit(partial(js.models.logits, model))(params, tokens)
    np.testing.assert_allclose(found.outputs, logits[:, -1, 3], atol=1e-5)


def last_logit(logits):
    return logits[:, -1, 3]


def warnings_of(name):
    """In a pipeline all blocks are gathered at once, which a warning says."""
    return pytest.warns(UserWarning, match="gathered at once") if name == "pipe" else pytest.MonkeyPatch.context()


# Refusals.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"inputs": np.zeros((8, 3), np.int32)}, ValueError, r"the inputs \(int32\[8, 3\]\) have no gradient.*embed="),
        ({"method": "saliency"}, ValueError, "method must be one of integrated_gradients, gradient_x_input"),
        ({"steps": 0}, ValueError, "steps must be a whole number from 1 on, got 0"),
        ({"target": None}, ValueError, r"one number for each of 16 rows.*apply returned float32\[16, 4\]"),
        ({"target": 0.5}, ValueError, "target must be a class"),
        ({"target": lambda logits: logits}, ValueError, r"target returned float32\[16, 4\]"),
        (
            {"baseline": np.zeros(5, np.float32)},
            ValueError,
            r"baseline float32\[5\] is not like its input float32\[16, 6",
        ),
        ({"baseline": {"x": 0}}, ValueError, "the baseline must be a number, or arrays like the inputs"),
        ({"params": {"up": PARAMS["up"]}}, ValueError, "the parameters does not fit the layout|parameters"),
        ({"apply": 3}, TypeError, "apply must be a function"),
        ({"embed": lambda params, x: jnp.zeros(16, jnp.int32)}, ValueError, r"embed must return floats, got int32\[16"),
    ],
)
def test_wrong_arguments_are_refused(changes, error, message):
    given = {"apply": apply, "params": PARAMS, "inputs": X, "target": 0} | changes
    with pytest.raises(error, match=message):
        js.attribution(layout=layout_of("ddp"), **given)


def test_a_class_of_outputs_with_positions_needs_a_function():
    with pytest.raises(ValueError, match=r"pass a function target\(outputs\)"):
        js.attribution(lambda params, x: apply(params, x)[:, None], PARAMS, X, layout_of("ddp"), target=1)
