"""Residual networks: published numbers of parameters, batch statistics of the global batch, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxshard as js
from jaxshard.checks.collectives.found import split_scalars
from jaxshard.models.resnet import resnet

pytestmark = pytest.mark.fast_cases(2)

SMALL = {"image": 8, "classes": 8, "depths": (1, 1), "kind": "basic", "width": 8, "small": True}
KEY = jax.random.key(0)
TENSOR = js.compose(js.fsdp("data", min_size=0), js.tensor())


def batch_of(rows=16):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (rows, 8, 8, 3), dtype=np.uint8)
    # Rows that differ much, so that statistics of some of them are not those of all.
    images[: rows // 2] //= 4
    return {"images": images, "labels": random.integers(0, 8, rows).astype(np.int32)}


def noisy_init(model):
    """An `init` without scales of zero, behind which parameters have no gradient."""

    def init(key):
        made = model.init(key)
        return js.Model(jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), made.params), made.state)

    return init


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param("resnet18", 11_689_512, marks=pytest.mark.slow),
        ("resnet50", 25_557_032),
        pytest.param("resnet101", 44_549_160, marks=pytest.mark.slow),
    ],
)
def test_the_published_numbers_of_parameters(name, parameters):
    shapes = jax.eval_shape(js.models.make(name).init, KEY)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes.params)) == parameters


CELLS = {
    "ddp": (js.ddp("data"), {"data": 8}, js.explicit),
    "fsdp": (js.fsdp("data", min_size=0), {"data": 8}, js.explicit),
    "fsdp-auto": (js.fsdp("data", min_size=0), {"data": 8}, js.auto),
    "hsdp": (js.hsdp("replica", "data", min_size=0), {"replica": 2, "data": 4}, js.explicit),
    "tensor": (TENSOR, {"data": 2, "tensor": 4}, js.explicit),
    "tensor-auto": (TENSOR, {"data": 2, "tensor": 4}, js.auto),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_equals_that_of_one_device(cell, kind):
    strategy, axes, engine = CELLS[cell]
    model = resnet(**SMALL | {"kind": kind})
    tx = js.models.MomentumRecipe(batch=16, steps=9, learning_rate=0.1, warmup=1).optimizer()
    report = js.parity(noisy_init(model), model.loss, tx, strategy, js.make_mesh(**axes), batch_of(), engine=engine())
    assert report.ok, report
    assert any(one.what == "state" for one in report.differences)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["ddp", "fsdp", "fsdp-auto", "hsdp", "tensor"])
def test_a_step_communicates_what_was_promised(cell):
    strategy, axes, engine = CELLS[cell]
    # Sizes that differ from each other, so that nothing is matched by chance.
    model, tx = resnet(**SMALL | {"width": 24, "depths": (1, 2)}), optax.adam(1e-3)
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, tx)
    found = js.audit(js.make_step(model.loss, tx, layout, engine=engine()), batch_of())
    assert found.ok, found


@pytest.mark.slow
def test_the_collectives_of_ddp_as_literals():
    model, tx, mesh = resnet(**SMALL | {"depths": (1,)}), optax.sgd(0.1), js.make_mesh(data=8)
    layout = js.layout(js.ddp("data"), mesh, model.init, tx)
    found = js.collectives(js.make_step(model.loss, tx, layout, engine=js.explicit()).compile(batch_of()), mesh)
    arrays, _ = split_scalars(found)
    rows = {row.kind: (row.axes, row.bytes) for row in js.plan.summary(arrays)}
    params = sum(x.size for x in jax.tree.leaves(layout.shapes.params))
    # Three normalisations of 8 channels: a mean and a mean of squares each, forward and backward, and as new state.
    assert rows == {"all-reduce": (("data",), 4 * (params + 3 * 2 * 8 * 3))}


class Normalized(nn.Module):
    """A user's own module, whose normalisation asks for the axes of the rows."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, axis_name=js.row_axes() or None)(nn.Dense(8, use_bias=False)(x))
        return nn.Dense(4)(jnp.tanh(x))


def own_pair(rows=16):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 8)).astype(np.float32) * np.linspace(0.1, 3, rows, dtype=np.float32)[:, None]
    batch = {"x": x, "y": random.integers(0, 4, rows).astype(np.int32)}

    def loss(model, batch, train):
        nats = js.cross_entropy(model(batch["x"], train=train), batch["y"])
        return js.Mean(nats.sum(), nats.size)

    return js.linen(Normalized(), loss, batch), batch


@pytest.mark.parametrize("engine", [js.explicit, pytest.param(js.auto, marks=pytest.mark.slow)])
def test_row_axes_make_the_statistics_of_the_global_batch_under_either_engine(engine):
    (init_fn, loss_fn), batch = own_pair()
    report = js.parity(init_fn, loss_fn, optax.sgd(0.1), js.ddp("data"), js.make_mesh(data=8), batch, engine=engine())
    assert report.ok, report
    assert {one.leaf for one in report.differences if one.what == "state"} == {
        "batch_stats/BatchNorm_0/mean",
        "batch_stats/BatchNorm_0/var",
    }


@pytest.mark.parametrize("engine", [js.explicit, js.auto])
def test_micro_batches_are_refused_where_statistics_of_the_batch_are_asked_for(engine):
    (init_fn, loss_fn), batch = own_pair()
    layout = js.layout(js.ddp("data"), js.make_mesh(data=8), init_fn, optax.sgd(0.1))
    step = js.make_step(loss_fn, optax.sgd(0.1), layout, engine=engine(microbatches=2))
    with pytest.raises(ValueError, match=r"row_axes: the rows of the batch are computed in turns.*leave out micro"):
        step.compile(batch)


def test_a_pipeline_is_refused_where_statistics_of_the_batch_are_asked_for():
    def head(params, x, batch, key):
        centred = x - jax.lax.pmean(x.mean(0), js.row_axes())
        return js.Mean((centred**2).sum(), centred.size)

    model = js.Stacked(
        embed=lambda params, batch, key: batch["x"],
        block=lambda w, x, key: x @ w,
        head=head,
        num_blocks=2,
        init=lambda key: {"embed": {}, "block": jnp.eye(8), "head": {}},
    )
    tx = optax.sgd(0.1)
    layout = js.layout(
        js.compose(js.ddp("data"), js.pipeline("pipe", chunks=1)), js.make_mesh(data=4, pipe=2), model.init, tx
    )
    step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=2))
    with pytest.raises(ValueError, match=r"row_axes: .* instead of a pipeline"):
        step.compile({"x": np.ones((16, 8), np.float32)})


def test_outside_of_a_step_there_are_no_axes_of_rows():
    assert js.row_axes() == ()


def test_evaluation_takes_the_running_statistics():
    model, batch = resnet(**SMALL | {"depths": (1,)}), batch_of(4)
    made = jax.jit(noisy_init(model))(KEY)
    logits = jax.jit(model.logits)
    # A row's logits do not depend on the other rows.
    np.testing.assert_allclose(logits(made, batch["images"])[:1], logits(made, batch["images"][:1]), atol=1e-5)
    found = jax.jit(model.evaluate)(made, batch)
    expected = np.asarray(logits(made, batch["images"])).argmax(1) == batch["labels"]
    assert float(found["accuracy"].value) == expected.mean()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="kind must be one of basic, bottleneck, got 'wide'"):
        resnet(**SMALL | {"kind": "wide"})
    with pytest.raises(ValueError, match=r"depths\[1\]"):
        resnet(**SMALL | {"depths": (1, 0)})


def test_the_momentum_recipe_decays_matrices_and_lowers_its_rate_three_times():
    tx = js.models.MomentumRecipe(batch=1, steps=90, learning_rate=1.0, warmup=2, momentum=0.0).optimizer()
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    state, rates, decays = tx.init(params), [], []
    for _ in range(90):
        updates, state = tx.update({"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}, state, params)
        rates.append(-float(updates["scale"][0]))
        decays.append(-float(updates["kernel"][0, 0]) / rates[-1] - 1)
    np.testing.assert_allclose(decays, 1e-4, rtol=1e-2)
    np.testing.assert_allclose(rates[:3], [1 / 3, 2 / 3, 1], rtol=1e-5)
    np.testing.assert_allclose(
        [rates[at] for at in (29, 31, 59, 61, 79, 81)], [1, 0.1, 0.1, 0.01, 0.01, 1e-3], rtol=1e-4
    )
