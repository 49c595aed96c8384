"""Evaluation is exact for any number of rows, and predictions come from a run as it is stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import mask, normal

pytestmark = [pytest.mark.fast_cases(1), pytest.mark.usefixtures("compiled_quickly")]

TX = optax.sgd(0.1)


def init_fn(key):
    return js.Model({"w": normal(0, 13, 3)}, {"shift": jnp.arange(3.0)})


def eval_fn(model, batch):
    out = batch["x"] @ model.params["w"] + model.state["shift"]
    error = jnp.square(out).sum(-1)
    return {
        "loss": js.Mean((error * batch["weights"]).sum(), batch["weights"].sum()) + 0.5 * js.Mean(out.sum(), out.size),
        "rows": js.Sum(jnp.ones_like(error).sum()),
        "largest": js.Max(error.max()),
        "smallest": js.Max(-error.min()),
    }


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(count, 13)).astype(np.float32), "weights": mask((max(count, 4),))[:count]}


def cut(batch, size):
    starts = range(0, len(batch["x"]), size)
    return [{name: x[start : start + size] for name, x in batch.items()} for start in starts]


@pytest.fixture(params=["fsdp", "ddp", "hsdp"])
def layout(request):
    mesh = {"replica": 2, "data": 4} if request.param == "hsdp" else {"data": 8}
    strategy = {"fsdp": js.fsdp, "ddp": lambda min_size: js.ddp(), "hsdp": js.hsdp}[request.param](min_size=0)
    return js.layout(strategy, js.make_mesh(**mesh), init_fn, TX)


def exact(batch):
    return {name: float(x.value) for name, x in jax.jit(eval_fn)(init_fn(None), batch).items()}


@pytest.mark.parametrize("count", [21, 16, 35, 5])
def test_batches_with_a_short_last_one_equal_exact_evaluation(layout, count):
    """Within 1e-6: 16 rows at a time, the last batch of 16, 5, 3 or the only one of 5."""
    run = js.init(init_fn, TX, layout, 0)
    result = js.evaluate(js.make_eval_step(eval_fn, layout), run, cut(rows(count), 16))
    assert result == pytest.approx(exact(rows(count)), rel=1e-6)
    assert not any(x.is_deleted() for x in jax.tree.leaves((run.params, run.state)))


def test_one_batch_gives_open_means():
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, TX)
    run, step = js.init(init_fn, TX, layout, 0), js.make_eval_step(eval_fn, layout)
    whole = {name: float(metric.value) for name, metric in step(run, rows(16)).items()}
    assert whole == pytest.approx(exact(rows(16)), rel=1e-6)
    first, last = (step(run, part) for part in cut(rows(16), 9))
    both = {name: float(js.combine(first[name], last[name]).value) for name in first}
    assert both == pytest.approx(whole, rel=1e-6)


def test_sums_over_many_batches_neither_wrap_nor_drift():
    """Tokens beyond 2**31 exactly, and a mean of 5,000 batches within 1e-9 of the numbers of a batch."""
    layout = js.layout(js.ddp(), js.make_mesh(data=8), init_fn, TX)
    run = js.init(init_fn, TX, layout, 0)

    def count_fn(model, batch):
        return {
            "tokens": js.Sum(batch["n"].sum()),
            "flags": js.Sum(batch["n"].max() > 0),
            "most": js.Max(batch["n"].max()),
        }

    batches = [{"n": np.full(16, 2**26, np.int32)}] * 4 + [{"n": np.full(9, 2**26, np.int32)}]
    found = js.evaluate(js.make_eval_step(count_fn, layout), run, batches)
    assert found == {"tokens": 73 * 2**26, "flags": 13, "most": 2**26}  # a short batch is evaluated row by row

    one = {"loss": js.Mean(jnp.float32(21.6), jnp.float32(8)) + js.Mean(jnp.float32(5), jnp.float32(0))}
    mean = js.evaluate(lambda run, batch: one, run, range(5_000))["loss"]
    assert mean == pytest.approx(float(np.float32(21.6)) / 8, rel=1e-9)


def test_a_batch_is_read_when_the_next_one_was_started():
    """Reading waits for the devices, so they have the next batch to do by then."""
    order = []

    class Result:
        def __init__(self, number):
            self.number = number
            order.append(f"start {number}")

        def __array__(self, dtype=None, copy=None):
            order.append(f"read {self.number}")
            return np.array(self.number, np.float32)

    assert js.evaluate(lambda run, batch: {"sum": js.Sum(Result(batch))}, None, range(3)) == {"sum": 3}
    assert order == ["start 0", "start 1", "read 0", "start 2", "read 1", "read 2"]


def test_a_metric_of_several_numbers_is_named():
    with pytest.raises(TypeError, match=r"the metric 'load' has the shape \[3\], but a number is returned"):
        js.evaluate(lambda run, batch: {"load": js.Sum(jnp.ones(3))}, None, [0])


def test_small_integers_and_flags_do_not_wrap_within_a_batch():
    def loss_fn(model, batch, key):
        small = js.Sum(batch["x"].max().astype(jnp.int8) + jnp.int8(100))
        flag, half = js.Sum(batch["x"].max() < 9), js.Sum(jnp.bfloat16(33))
        metrics = {"small": small, "flag": flag, "half": half}
        return js.Loss(js.Mean(jnp.square(batch["x"] @ model["w"]).sum(), len(batch["x"])), metrics=metrics)

    def init(key):
        return {"w": jnp.ones(4)}

    layout = js.layout(js.ddp(), js.make_mesh(data=8), init, TX)
    step = js.make_step(loss_fn, TX, layout, engine=js.explicit(microbatches=2))
    _, metrics = step(js.init(init, TX, layout, 0), {"x": np.zeros((16, 4), np.float32)})
    parts = 8 * 2
    assert {name: float(metrics[name]) for name in ("small", "flag", "half")} == {
        "small": 100 * parts, "flag": parts, "half": 33 * parts,
    }  # fmt: skip


def test_what_is_infinite_in_the_padding_does_not_leak():
    def log_fn(model, batch):
        return {"loss": js.Mean(jnp.log(batch["x"][:, 0]).sum() + 0 * model.params["w"].sum(), len(batch["x"]))}

    layout = js.layout(js.ddp(), js.make_mesh(data=8), init_fn, TX)
    run, step = js.init(init_fn, TX, layout, 0), js.make_eval_step(log_fn, layout)
    ones = {"x": np.ones((3, 13), np.float32)}
    assert float(step(run, ones)["loss"].value) == 0


def test_scalars_of_a_batch_count_for_every_row():
    def scaled(model, batch):
        return {"loss": batch["scale"] * eval_fn(model, batch)["loss"]}

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, TX)
    run, step = js.init(init_fn, TX, layout, 0), js.make_eval_step(scaled, layout)
    for count in (16, 11):
        value = float(step(run, rows(count) | {"scale": np.float32(2)})["loss"].value)
        assert value == pytest.approx(2 * exact(rows(count))["loss"], rel=1e-6)


# Bad input.


@pytest.fixture(scope="module")
def split():
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, TX)
    return js.init(init_fn, TX, layout, 0), layout


def test_batches_that_do_not_fit(split):
    run, layout = split
    step = js.make_eval_step(eval_fn, layout)
    with pytest.raises(ValueError, match="there are no batches to evaluate: the held-out data is empty"):
        js.evaluate(step, run, [])
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        step(run, rows(0))
    step(run, rows(9))  # padded to 16
    with pytest.raises(ValueError, match="an evaluation batch has 17 rows, more than the 16 of the first one"):
        step(run, rows(17))
    with pytest.raises(ValueError, match="0 rows"):
        step(run, rows(0))
    with pytest.raises(ValueError, match=r"same number of rows.*weights: 8.*so that none can be padded"):
        step(run, rows(16) | {"weights": np.ones(8, np.float32)})


@pytest.mark.parametrize("output", [jnp.float32(1), {"loss": jnp.float32(1)}, {"loss": 1.0}, js.Mean(1.0, 1.0), None])
def test_results_that_do_not_say_how_they_combine(split, output):
    run, layout = split
    with pytest.raises(TypeError, match=r"eval_fn must return a dict of js.Mean, js.Sum or js.Max, got"):
        js.make_eval_step(lambda model, batch: output, layout)(run, rows(16))


def test_a_run_of_another_layout(split):
    run, _ = split
    other = js.layout(js.ddp(), js.make_mesh(data=8), init_fn, TX)
    message = r"(?s)the run does not fit the layout.*params/w: expected float32\[13, 3\], got float32\[16, 3\]"
    with pytest.raises(ValueError, match=message):
        js.make_eval_step(eval_fn, other)(run, rows(16))
    with pytest.raises(ValueError, match=message):
        js.make_apply(lambda model: model.params, other)(run)


def test_a_run_without_an_optimizer_is_evaluated():
    layout = js.layout(js.ddp(), js.make_mesh(data=8), init_fn)
    run = js.init(init_fn, None, layout, 0)
    eval_step = js.make_eval_step(lambda model, batch: {"rows": js.Sum(len(batch["n"]))}, layout)
    assert js.evaluate(eval_step, run, [{"n": np.ones(16, np.float32)}]) == {"rows": 16}
