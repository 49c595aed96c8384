"""`js.row_axes`: batch statistics of the global batch under either engine, and the engines that can have none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxshard as js
from jaxshard.hlo.found import split_scalars


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


@pytest.mark.slow
def test_the_statistics_are_one_mean_over_rows_forward_and_one_backward():
    (init_fn, loss_fn), batch = own_pair()
    mesh, tx = js.make_mesh(data=8), optax.sgd(0.1)
    layout = js.layout(js.ddp("data"), mesh, init_fn, tx)
    step = js.make_step(loss_fn, tx, layout, engine=js.explicit())
    assert js.audit(step, batch).ok
    arrays, _ = split_scalars(js.collectives(step.compile(batch), mesh))
    rows = {row.kind: (row.axes, row.bytes) for row in js.plan.summary(arrays)}
    params = sum(x.size for x in jax.tree.leaves(layout.shapes.params))
    # Of 8 channels a mean and a mean of squares, forward and backward.
    assert rows == {"all-reduce": (("data",), 4 * (params + 2 * 2 * 8))}


@pytest.mark.slow
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
    with pytest.raises(ValueError, match=r"row_axes: micro-batches are computed one after another.*leave out micro"):
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
