"""Vision transformers: published sizes, a formula in NumPy, one device against many, and what is refused."""

import math
import re

import jax
import numpy as np
import optax
import pytest
from scipy.special import erf

import jaxshard as js
from jaxshard.checks.collectives.found import split_scalars
from jaxshard.models.vit import vit

pytestmark = pytest.mark.fast_cases(3)

SMALL = {"image": 8, "patch": 2, "classes": 8, "width": 16, "depth": 2, "heads": 4}
KEY = jax.random.key(0)


def batch_of(rows=16, side=8, classes=8, channels=3):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (rows, side, side, channels), dtype=np.uint8)
    return {"images": images, "labels": random.integers(0, classes, rows).astype(np.int32)}


def noisy_init(model):
    """An `init` whose parameters are far from zeros and ones, so that every one of them matters."""

    def init(key):
        return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), model.init(key))

    return init


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Table 1 of the paper rounds them; these are the published weights' own, less the class token and its position.
    [
        ("vit-s16", 22_050_664 - 2 * 384),
        ("vit-b16", 86_567_656 - 2 * 768),
        ("vit-l16", 304_326_632 - 2 * 1024),
        ("vit-h14", 632_045_800 - 2 * 1280),
    ],
)
def test_the_published_numbers_of_parameters(name, parameters):
    shapes = jax.eval_shape(js.models.make(name).init, KEY)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == parameters


def layer_norm(x, part):
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return scaled * part["scale"] + part["bias"]


def dense(x, part):
    return x @ part["kernel"] + part["bias"]


def logits_in_numpy(params, images, patch, heads):
    """The whole model row by row, head by head, in f64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    mean, stddev = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    found = []
    for image in (images / 255 - mean) / stddev:
        side = len(image)
        corners = [(i, j) for i in range(0, side, patch) for j in range(0, side, patch)]
        x = np.stack([image[i : i + patch, j : j + patch].ravel() for i, j in corners])
        x = dense(x, params["embed"]["patch"]) + params["embed"]["wpe"]
        for number in range(len(params["blocks"]["ln_1"]["scale"])):
            block = jax.tree.map(lambda w, number=number: w[number], params["blocks"])
            qkv = dense(layer_norm(x, block["ln_1"]), block["qkv"])
            seen = []
            for q, k, v in (np.split(one, 3, axis=1) for one in np.split(qkv, heads, axis=1)):
                weights = np.exp(q @ k.T / np.sqrt(q.shape[1]))
                seen.append(weights / weights.sum(1, keepdims=True) @ v)
            x = x + dense(np.concatenate(seen, axis=1), block["attn_out"])
            hidden = dense(layer_norm(x, block["ln_2"]), block["mlp_in"])
            x = x + dense(hidden * 0.5 * (1 + erf(hidden / np.sqrt(2))), block["mlp_out"])
        found.append(dense(layer_norm(x, params["head"]["ln_f"]).mean(0), params["head"]["classes"]))
    return np.stack(found)


def test_logits_loss_and_accuracy_are_those_of_a_formula_in_numpy():
    model, batch = vit(**SMALL), batch_of(rows=3)
    params = jax.jit(noisy_init(model))(KEY)
    expected = logits_in_numpy(params, batch["images"].astype(np.float64), 2, 4)
    logits = jax.jit(model.logits)
    np.testing.assert_allclose(logits(params, batch["images"]), expected, atol=1e-5)
    floats = batch["images"].astype(np.float32) / 255  # the same images
    np.testing.assert_allclose(logits(params, floats), expected, atol=1e-5)
    nats = np.log(np.exp(expected).sum(1)) - expected[np.arange(3), batch["labels"]]
    found = jax.jit(model.evaluate)(params, batch | {"weights": np.array([1, 0, 2], np.float32)})
    assert float(found["loss"].value) == pytest.approx((nats[0] + 2 * nats[2]) / 3, abs=1e-5)
    hits = expected.argmax(1) == batch["labels"]
    assert float(found["accuracy"].value) == pytest.approx((hits[0] + 2 * hits[2]) / 3)


CELLS = {
    "ddp": (js.ddp("data"), {"data": 8}, "explicit"),
    "fsdp": (js.fsdp("data", min_size=0), {"data": 8}, "explicit"),
    "fsdp-auto": (js.fsdp("data", min_size=0), {"data": 8}, "auto"),
    "tensor": (js.compose(js.fsdp("data", min_size=0), js.tensor()), {"data": 2, "tensor": 4}, "explicit"),
    "tensor-auto": (js.compose(js.fsdp("data", min_size=0), js.tensor()), {"data": 2, "tensor": 4}, "auto"),
    "pipe": (js.compose(js.fsdp("data", min_size=0), js.pipeline("pipe", chunks=1)), {"data": 4, "pipe": 2}, "pipe"),
}
ENGINES = {"explicit": js.explicit, "auto": js.auto, "pipe": lambda: js.pipelined(microbatches=2)}


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_equals_that_of_one_device(cell):
    strategy, axes, engine = CELLS[cell]
    model, tx = vit(**SMALL), optax.adam(1e-3)
    mesh = js.make_mesh(**axes)
    report = js.parity(noisy_loss_init(model), model.loss, tx, strategy, mesh, batch_of(), engine=ENGINES[engine]())
    assert report.ok, report


def noisy_loss_init(model):
    """`model.init` itself in pipelines need it, so the noise is in a model with other first parameters."""

    class Noisy(type(model)):
        def make_params(self, key):
            return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), super().make_params(key))

    model.__class__ = Noisy
    return model.init


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["ddp", "fsdp", "tensor", "pipe"])
def test_a_step_communicates_what_was_promised(cell):
    strategy, axes, engine = CELLS[cell]
    model, tx = vit(**SMALL), optax.adam(1e-3)
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, tx)
    assert js.audit(js.make_step(model.loss, tx, layout, engine=ENGINES[engine]()), batch_of()).ok


@pytest.mark.slow
def test_the_collectives_of_fsdp_as_literals():
    model, tx, mesh = vit(**SMALL), optax.adam(1e-3), js.make_mesh(data=8)
    layout = js.layout(js.fsdp("data", min_size=0), mesh, model.init, tx)
    step = js.make_step(model.loss, tx, layout, engine=js.explicit())
    found = split_scalars(js.collectives(step.compile(batch_of()), mesh))[0]
    count = {row.kind: row.count for row in js.plan.summary(found)}
    # 2 blocks of 12 arrays and 7 others, each gathered forward and each gradient scattered once. Backward a block needs
    # its 4 matrices and 2 scales again, and not its biases.
    assert count == {"all-gather": 7 + 2 * 12 + 2 * 6, "reduce-scatter": 2 * 12 + 7}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": np.zeros(2, np.int32)}, 'a dict with "images" and "labels", got'),
        ({"images": np.zeros((2, 9, 8, 3), np.uint8)}, r"uint8 or floats \[rows, 8, 8, 3\], got uint8\[2, 9, 8, 3\]"),
        ({"images": np.zeros((2, 8, 8, 3), np.int32)}, r"uint8 or floats .* got int32"),
        ({"images": np.zeros((2, 8, 8, 3), np.uint8)}, r'batch\["labels"\] must be integers \[2\].* got none'),
        (
            {"images": np.zeros((2, 8, 8, 3), np.uint8), "labels": np.zeros((2, 1), np.int32)},
            r"one for each image, got int32\[2, 1\]",
        ),
    ],
)
def test_a_wrong_batch_is_refused_by_name(batch, message):
    model = vit(**SMALL)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.loss, jax.eval_shape(model.init, KEY), batch, KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 3}, "patches of 3 pixels do not divide an image of 8"),
        ({"heads": 3}, "width 16 is not divisible by heads 3"),
        ({"depth": 0}, "sizes must be at least 1"),
        ({"mean": (0.5, 0.5)}, "mean must be 3 numbers"),
        ({"stddev": 0.0}, "stddev"),
    ],
)
def test_wrong_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        vit(**SMALL | changes)


def test_a_context_is_refused_since_images_have_no_positions():
    model, tx = vit(**SMALL), optax.adam(1e-3)
    layout = js.layout(js.compose(js.ddp("data"), js.context()), js.make_mesh(data=4, context=2), model.init, tx)
    step = js.make_step(model.loss, tx, layout, engine=js.explicit())
    with pytest.raises(ValueError, match=r"js\.context splits the positions of rows, but a batch of images has none"):
        step.compile(batch_of())
