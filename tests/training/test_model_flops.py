"""The model FLOPs that a step counts by itself, beside those counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import gpt_toy

WIDTH, HIDDEN, ROWS = 8, 16, 16
FIRST, SECOND = 2 * ROWS * WIDTH * HIDDEN, 2 * ROWS * HIDDEN * WIDTH
BATCH = {"x": np.ones((ROWS, WIDTH), np.float32)}


def init_fn(key):
    return {"first": jnp.ones((WIDTH, HIDDEN)), "second": jnp.ones((HIDDEN, WIDTH))}


def loss_fn(params, batch, key):
    x = jnp.tanh(batch["x"] @ params["first"]) @ params["second"]
    return js.Mean(jnp.square(x).sum(), x.size)


def with_state(key):
    return js.Model(init_fn(key), {"mean": jnp.zeros(WIDTH), "projection": jnp.ones((WIDTH, WIDTH))})


def loss_with_state(model, batch, key):
    x = batch["x"] @ model.state["projection"]
    total, weight = jnp.square(x).sum(), x.size
    loss = loss_fn(model.params, {"x": x}, key) + js.Mean(total, weight)
    return js.Loss(loss, state=model.state | {"mean": model.state["mean"] + x.mean(0)})


def local_loss(params, batch, key):
    """A loss for the rows of one device, which names the mesh axis itself."""
    return loss_fn(params, batch, key) * jax.lax.psum(1, "data")


def counted(init, loss, engine=None, *, batch=BATCH, mesh=None, strategy=None, **options):
    tx, mesh = optax.sgd(0.1), mesh or js.make_mesh(data=8)
    layout = js.layout(strategy or js.fsdp("data", min_size=0), mesh, init, tx, **options)
    return js.make_step(loss, tx, layout, engine=engine).model_flops(batch)


@pytest.mark.parametrize("engine", [None, js.explicit(microbatches=2), js.auto(microbatches=2)])
def test_a_step_counts_the_global_batch_three_times(engine):
    assert counted(init_fn, loss_fn, engine) == 3 * (FIRST + SECOND)


def test_a_model_with_state():
    assert counted(with_state, loss_with_state) == 3 * (FIRST + SECOND + 2 * ROWS * WIDTH * WIDTH)


def test_replicas_that_train_by_themselves():
    assert counted(init_fn, loss_fn, strategy=js.local("data", every=2)) == 3 * (FIRST + SECOND)


def test_a_pipeline_counts_what_one_device_does():
    toy, key = gpt_toy(depth=4), jax.random.key(0)
    mesh, strategy = js.make_mesh(pipe=4, data=2), js.compose(js.pipeline(chunks=1), js.fsdp("data", min_size=0))
    engine = js.pipelined(microbatches=4)
    found = counted(toy.init_fn, toy.loss_fn, engine, batch=toy.batch, mesh=mesh, strategy=strategy)
    assert found == js.plan.train_flops(toy.loss_fn, jax.eval_shape(toy.init_fn, key), toy.batch, key) > 0


def test_gradients_of_frozen_parameters_are_left_out():
    assert counted(init_fn, loss_fn, trainable=lambda path: path == "second") == FIRST + SECOND + SECOND
    # The gradient of the first needs that of its output, and none of the batch.
    assert counted(init_fn, loss_fn, trainable=lambda path: path == "first") == FIRST + SECOND + SECOND + FIRST


def test_lora_has_the_gradients_of_activations_and_factors():
    tuned_init, tuned_loss = js.lora(init_fn, loss_fn, rank=2, match=["*"])
    factors = sum(2 * ROWS * 2 * (rows + columns) for rows, columns in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    found = counted(tuned_init, tuned_loss)
    assert FIRST + 2 * SECOND < found <= FIRST + 2 * SECOND + 3 * factors


def test_a_loss_that_names_mesh_axes_is_not_known_and_trains():
    tx, history = optax.sgd(0.1), []
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), init_fn, tx)
    step = js.make_step(local_loss, tx, layout, engine=js.explicit())
    assert step.model_flops(BATCH) is None
    js.fit(js.init(init_fn, tx, layout, 0), step, [BATCH], steps=1, callbacks=[history.append])
    assert "flops_per_second" not in history[0].speed


def test_fit_counts_them_once_unless_told():
    seen = []

    def counting(params, batch, key):
        seen.append(batch["x"].shape)
        return loss_fn(params, batch, key)

    tx, history = optax.sgd(0.1), []
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), init_fn, tx)
    step = js.make_step(counting, tx, layout, engine=js.explicit())
    run, traces = js.init(init_fn, tx, layout, 0), []
    for steps, flops in ((1, 0), (2, None), (3, None), (4, 7e6)):
        run = js.fit(run, step, [BATCH], steps=steps, flops=flops, callbacks=[history.append])
        traces.append(len(seen))
    assert [count - traces[0] for count in traces] == [0, 1, 1, 1]
    rates = [one.speed.get("flops_per_second") for one in history]
    assert rates[0] is None and step.compile_seconds > 0
    expected = [3 * (FIRST + SECOND)] * 2 + [7e6]
    assert rates[1:] == pytest.approx([flops / one.seconds for flops, one in zip(expected, history[1:], strict=True)])
    assert "mfu" not in history[1].speed  # a CPU has no known peak
