"""js.parity: passes what is right; finds what is wrong, names its leaves and says why."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import jaxshard as js
from tests.notebook_page import check_shows_text
from tests.toys import cross_entropy, normal, quick_compile

pytestmark = pytest.mark.fast_cases(1)

ROWS, FEATURES, CLASSES = 16, 12, 7
LEAVES = {f"Dense_{number}/{leaf}" for number in (0, 1) for leaf in ("kernel", "bias")}
NUMBERS = r"the total of the loss over the whole batch is [\d.]+, those of its 8 parts add up to [\d.]+: "


@pytest.fixture(autouse=True)
def quickly():
    with quick_compile():
        yield


class Net(nn.Module):
    """An MLP 12 -> 16 -> 7, with batch statistics or dropout if asked for."""

    norm: bool = False
    axis: str | None = None
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False, axis_name=self.axis)(x)
        x = nn.Dropout(self.rate, deterministic=self.rate == 0)(x)
        return nn.Dense(CLASSES)(jnp.tanh(x))


def init_fn(key):
    """Of `Net`, whose layers are faster to trace where they are written out as in `plain`."""
    return {
        "Dense_0": {"kernel": normal(0, FEATURES, 16) / FEATURES**0.5, "bias": jnp.zeros(16)},
        "Dense_1": {"kernel": normal(1, 16, CLASSES) / 4, "bias": jnp.zeros(CLASSES)},
    }


def make_batch():
    """Rows whose weights rise from 0 to 2, so that devices hold very different shares."""
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.arange(ROWS) % CLASSES, "weights": np.linspace(0, 2, ROWS, dtype=np.float32)}


def plain(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    return cross_entropy(hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"], batch)


def run(loss_fn=plain, *, init=init_fn, engine=None, tx=None, strategy=None, axes=None, batch=None, **options):
    mesh, strategy = js.make_mesh(**(axes or {"data": 8})), strategy or js.ddp()
    batch = make_batch() if batch is None else batch
    return js.parity(
        init, loss_fn, tx or optax.sgd(0.1), strategy, mesh, batch, engine=engine or js.explicit(), **options
    )


def check_fails(report, why, *, kinds=("gradient", "loss")):
    """What differs, by kind, and the causes by the start of what is said of them."""
    assert not report.ok
    assert tuple(sorted({one.what for one in report.failures})) == kinds
    with pytest.raises(AssertionError) as error:
        report.check()
    page = check_shows_text(report)
    assert page.text[0] == report.headline and "DIFFERS" in " ".join(page.text)
    assert str(report) in str(error.value) and str(error.value).count("why: ") == len(why), report
    assert all(one.name in str(error.value).splitlines()[0] for one in report.failures)
    for pattern in why:
        assert any(re.search(pattern, line) for line in report.why), report


# What is right passes.


@pytest.mark.parametrize(
    "strategy, axes, engine",
    [
        (js.compose(js.fsdp(min_size=1), js.tensor([("Dense_0/kernel", (None, "mlp")), ("mlp", "split")])),
         {"data": 4, "tensor": 2}, js.explicit(microbatches=2)),
        (js.zero2(min_size=1), {"data": 8}, js.explicit()),
        (js.hsdp(min_size=1), {"replica": 2, "data": 4}, js.auto()),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:tensor. ")
def test_a_right_step_passes(strategy, axes, engine):
    """Loss to 1e-6, gradients and updates to 1e-5; Adam's own amplification is not charged."""
    progress: list[js.Progress] = []
    report = run(strategy=strategy, axes=axes, engine=engine, tx=optax.adam(0.1), progress=progress.append)
    report.check()
    phases = [one.phase for one in progress]
    assert phases[:2] == ["compiling for one device", f"compiling for {report.where}"]
    assert phases[2] == "comparing the batch: the given one" and phases[-1] == "finished"
    assert len(phases) == 4 + max(1, len(report.batches))
    assert report.ok and not report.failures and not report.why and not report.notes
    names = {one.name for one in report.differences}
    assert names == {"loss"} | {f"{what} {leaf}" for what in ("gradient", "update") for leaf in LEAVES}
    allowed = {one.what: one.allowed for one in report.differences}
    assert allowed == pytest.approx({"loss": 1e-6, "gradient": 1e-5, "update": 1e-5})
    assert report.losses[0] == pytest.approx(report.losses[1], rel=1e-6) and report.losses[1] > 1
    assert max(one.error for one in report.differences) > 0, "another order of summation leaves its trace"
    apart = "rows sorted by x, rows sorted by y, one row for each device, numbers moved apart between devices"
    told = (
        () if engine.compiler_chooses else (f"shown for 5 batches: the given one, {apart}", "not shown: that no other")
    )
    lines = str(report).splitlines()
    assert lines[0].endswith("against one device, in f32: all 9 arrays agree") and len(lines[8:]) == len(told)
    assert all(line.startswith(text) for line, text in zip(lines[8:], told, strict=True))
    assert re.match(r"  loss \d\.\d+, on one device \d\.\d+: \S+ apart, allowed 1e-06  ok$", lines[1])
    assert [line.split() for line in lines[2:4]] == [["gradient", "update"], ["allowed", "1e-05", "1e-05"]]
    assert {line.split()[0] for line in lines[4:8]} == LEAVES and all(line.endswith("ok") for line in lines[4:8])
    (table,) = check_shows_text(report).tables
    assert [" ".join(row).split() for row in table] == [line.split() for line in lines[2:8]]


# What is wrong is found and explained.


def branch_on_the_mean(params, batch, key):
    """Every device has a positive mean on the batch of the test, as all rows together have."""
    loss = plain(params, batch, key)
    return js.Mean(jnp.where(batch["x"].mean() > 0, 1, 2) * loss.totals[0], loss.weights[0])


def weigh_gradient(params, batch, key):
    """A factor that is one but for its gradient, which depends on the mean."""
    loss, mean = plain(params, batch, key), batch["x"].mean()
    size = sum(jnp.square(x).sum() for x in jax.tree.leaves(params))
    return js.Mean(loss.totals[0] * jnp.where(mean > 0, 1.0, 1.0 + size - lax.stop_gradient(size)), loss.weights[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "kinds", "last"),
    [
        (branch_on_the_mean, ("gradient", "loss"), "numbers moved apart between devices"),
        (weigh_gradient, ("gradient",), "numbers moved apart between devices"),
    ],
)
def test_a_branch_that_all_devices_take_alike_is_found_on_other_batches(loss, kinds, last):
    batch = make_batch()
    batch["x"] += 1 - batch["x"].mean(1, keepdims=True)  # the mean of each row is 1
    assert run(loss, batch=batch, engine=js.auto()).ok
    report = run(loss, batch=batch)
    assert tuple(sorted({one.what for one in report.failures})) == kinds
    assert report.batches[0] == "the given one" and report.batches[-1].startswith(last)
    assert f"\nbatch: {report.batches[-1]}; no difference with the given one" in str(report)
    if "loss" in kinds:
        assert any("the rows are not independent" in line for line in report.why)


@pytest.mark.slow
def test_a_batch_that_is_not_finite_on_one_device_says_nothing():
    """The square root of 1 - t, which moving t apart takes below zero."""

    def loss(params, batch, key):
        one = plain(params, batch, key)
        return js.Mean(one.totals[0] + jnp.sqrt(1 - batch["t"]).sum() * jnp.square(params["Dense_0"]["kernel"]).sum(),
                       one.weights[0])  # fmt: skip

    report = run(loss, batch=make_batch() | {"t": np.linspace(0, 0.9, ROWS, dtype=np.float32)})
    assert report.ok and "numbers moved apart between devices" not in report.batches
    assert report.notes == (
        "numbers moved apart between devices: not finite on one device, so that this batch says nothing",
    )


def init_norm(key):
    variables = Net(norm=True).init(key, jnp.zeros((2, FEATURES)))
    return js.Model(variables["params"], variables["batch_stats"])


def norm(axis, model, batch, key):
    variables = {"params": model.params, "batch_stats": model.state}
    logits, new = Net(norm=True, axis=axis).apply(variables, batch["x"], mutable=["batch_stats"])
    return js.Loss(cross_entropy(logits, batch), new["batch_stats"])


@pytest.mark.slow
def test_batch_statistics_of_local_rows():
    """Loss to 1e-6, gradients, updates and state to 1e-5 with the axis or under auto; wrong by a lot without."""
    report = run(partial(norm, None), init=init_norm)
    check_fails(
        report,
        [NUMBERS + r"the rows are not independent .*nn.BatchNorm\(axis_name="],
        kinds=("gradient", "loss", "state"),
    )
    assert {one.leaf for one in report.failures if one.what == "state"} == {"BatchNorm_0/var"}
    assert next(one for one in report.failures if one.leaf == "Dense_1/kernel").error > 0.1
    report = run(partial(norm, "data"), init=init_norm)
    report.check()
    assert report.notes == (
        "the loss names mesh axes, so that on one device they were given size 1",
        "state, proven equal on all devices and in all micro-batches and taken once: BatchNorm_0/mean, BatchNorm_0/var",
        "state: its floats times 1.25 in a second step, from the same parameters",
    )
    assert {one.name for one in report.differences} >= {"state BatchNorm_0/mean", "state BatchNorm_0/var"}
    run(partial(norm, None), init=init_norm, engine=js.auto()).check()


@pytest.mark.slow
def test_a_penalty_is_not_blamed_for_batch_statistics():
    """Its weight is 1 on every device, and its mean is the same on all of them."""

    def penalized(model, batch, key):
        loss = norm(None, model, batch, key)
        penalty = 0.1 * jnp.square(model.params["Dense_0"]["kernel"]).sum()
        return js.Loss(loss.value + js.Mean(penalty, 1), loss.state)

    report = run(penalized, init=init_norm)
    check_fails(report, [NUMBERS + "the rows are not independent"], kinds=("gradient", "loss", "state"))


@pytest.mark.slow
def test_a_module_that_stays_as_it_is_and_names_the_axis_of_pmap():
    """Both ways that the error names. Loss to 1e-6, gradients, updates and state to 1e-5."""
    loss = partial(norm, "batch")
    with pytest.raises(
        ValueError, match=r"axis_size=1, axis_name='batch'\).*js.make_mesh\(batch=-1\), js.fsdp\('batch'\)"
    ):
        run(loss, init=init_norm, engine=js.auto())
    bound = jax.vmap(loss, in_axes=None, out_axes=None, axis_size=1, axis_name="batch")
    run(bound, init=init_norm, engine=js.auto(), strategy=js.fsdp(min_size=0)).check()
    run(loss, init=init_norm, axes={"batch": 8}, strategy=js.fsdp("batch", min_size=0)).check()


def local_mean(params, batch, key):
    return js.Mean(plain(params, batch, key).value, 1.0)


def mean_of_means(params, batch, key):
    return js.Mean(plain(params, batch, key).value * len(batch["x"]), len(batch["x"]))


def fixed_weight(params, batch, key):
    """The engine sees no fixed weight in a maximum over the rows; where it sees one, it refuses the loss."""
    return js.Mean(plain(params, batch, key).totals[0], 16.0 + 0 * batch["x"].max())


def summed_twice(params, batch, key):
    mean = plain(params, batch, key)
    return js.Mean(lax.psum(mean.totals[0], "data"), mean.weights[0])


WEIGHT = r"the weight of js.Mean is no sum over rows: that of the whole batch is {}, those of its 8 parts add up to {};"


@pytest.mark.parametrize(
    "loss_fn, why",
    [
        (local_mean, [WEIGHT.format(1, 8) + r".* depends on other rows, .* use js.auto\(\)"]),
        (mean_of_means, [NUMBERS + "the rows are not independent .* a mean of local means"]),
        (fixed_weight, [WEIGHT.format(16, 128), "8 times too small, and 8 is the size of axis 'data'"]),
        (summed_twice, ["8 times too large, and 8 is the size of axis 'data'", r"leave collectives .*\(psum, pmean\)"]),
    ],
)
def test_losses_whose_parts_do_not_add_up(loss_fn, why):
    check_fails(run(loss_fn), why)


def test_a_weight_that_the_step_refuses_is_reported_and_one_of_a_metric_raised():
    """The report has the sentence of the step, and the loss that the step would have had."""

    def seen(params, batch, key):
        return js.Mean(plain(params, batch, key).totals[0], 16.0)

    report = run(seen)
    check_fails(report, [WEIGHT.format(16, 128)], kinds=("loss",))
    assert report.losses[0] == pytest.approx(report.losses[1] / 8, rel=1e-6) and report.losses[1] > 1
    assert str(report).count("\n") == 3 and "was not run" in report.notes[-1]
    hits = js.Mean(1.0, 16.0)
    with pytest.raises(TypeError, match="the metric 'hits': " + WEIGHT.format(16, 128)):
        run(lambda params, batch, key: js.Loss(plain(params, batch, key), metrics={"hits": hits * len(batch["x"])}))


@pytest.mark.slow
def test_the_factor_is_the_product_of_the_axes_that_give_it():
    report = run(fixed_weight, strategy=js.hsdp(), axes={"replica": 2, "data": 4})
    check_fails(report, ["8 times too small, and 8 is the size of axes 'replica' x 'data'", WEIGHT.format(16, 128)])


def stock_dropout(params, batch, key):
    return cross_entropy(Net(rate=0.5).apply({"params": params}, batch["x"], rngs={"dropout": key}), batch)


def own_key(params, batch, key):
    return stock_dropout(params, batch, jax.random.key(3))


def row_dropout(params, batch, key):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (FEATURES,)))(js.row_keys(key, len(batch["x"])))
    return plain(params, batch | {"x": jnp.where(kept, 2 * batch["x"], 0)}, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_fn, why",
    [
        (
            stock_dropout,
            r"random numbers for all rows at once \(nn.Dropout does\).*js.row_keys\(key, rows\), or use js.au",
        ),
        (own_key, "random numbers from a key of its own, which repeat on every device; draw .* js.row_keys"),
    ],
)
def test_random_numbers_that_depend_on_the_device(loss_fn, why):
    check_fails(run(loss_fn), [NUMBERS + "the loss draws " + why])


@pytest.mark.slow
def test_random_numbers_that_depend_on_the_micro_batch():
    report = run(stock_dropout, engine=js.auto(microbatches=2))
    assert report.headline.startswith("data=8 under js.auto(microbatches=2) against one device")
    why = r"each micro-batch draws for its own rows; draw .*js.row_keys.*, or use js.auto\(\) without microbatches=$"
    check_fails(report, [NUMBERS.replace("8", "2") + ".*" + why])


@pytest.mark.slow  # `test_keys_of_rows_are_the_same_under_every_engine` is fast
@pytest.mark.parametrize(
    "loss_fn, engine",
    [
        (row_dropout, js.explicit(microbatches=2)),
        (stock_dropout, js.auto()),
        (row_dropout, js.auto(microbatches=2)),
    ],
)
def test_random_numbers_of_rows_pass(loss_fn, engine):
    """Loss to 1e-6, gradients to 1e-5."""
    run(loss_fn, engine=engine).check()


# What else is said.


def test_numbers_that_are_not_finite_fail():
    batch = make_batch()
    batch["x"][0, 0] = np.nan
    report = run(batch=batch)
    check_fails(report, [], kinds=("gradient", "loss", "update"))
    assert "not finite: loss, gradient Dense_0/bias, " in str(report)
    assert "on both sides at the same places, so that nothing can be compared" in str(report)


@pytest.mark.slow
def test_lower_precision_is_computed_in_f32_and_products_in_full_precision():
    """Loss to 1e-6, gradients and updates to 1e-5, though parameters, batch and engine have bf16.

    GPUs and TPUs multiply f32 in less by default.
    """
    seen = []

    def loss_fn(params, batch, key):
        seen.append(jax.config.jax_default_matmul_precision)
        return plain(params, batch, key)

    batch = make_batch() | {"x": make_batch()["x"].astype(jnp.bfloat16)}
    report = run(
        loss_fn,
        init=lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_fn(key)),
        engine=js.explicit(compute_dtype=jnp.bfloat16),
        batch=batch,
    )
    report.check()
    assert report.notes == (
        "compute_dtype of the engine left out: all is computed in f32",
        "batch in bfloat16 were cast to float32",
        "parameters in bfloat16 were cast to float32",
    )
    assert set(seen) == {"float32"} and len(seen) >= 2 and jax.config.jax_default_matmul_precision is None


def test_an_optimizer_that_depends_on_the_layout():
    """The gradients agree to 1e-5: it is the update that is at fault."""
    calls = []

    def update(updates, state, params=None):
        calls.append(None)  # another update every time that it is traced
        return jax.tree.map(lambda u: u * len(calls), updates), state

    report = run(tx=optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    check_fails(report, ["given the same gradients the optimizer alone differs"], kinds=("update",))


def test_frozen_parameters_and_updates_of_nothing():
    """Loss to 1e-6, gradients to 1e-5."""
    report = run(tx=optax.sgd(0.0), trainable=lambda path: path.startswith("Dense_1"))
    report.check()
    assert {one.leaf for one in report.differences if one.what == "gradient"} == {"Dense_1/kernel", "Dense_1/bias"}
    assert report.notes == ("all updates are zero on one device, so that the optimizer is not compared",)


@pytest.mark.slow
def test_state_that_each_device_computes_from_its_rows():
    """The loss and gradients agree to 1e-6 and 1e-5: it is the state alone that is at fault."""

    def loss_fn(model, batch, key):
        loss = plain(model.params, batch, key)
        return js.Loss(loss, {"largest": batch["x"].max(), "seen": model.state["seen"] + 1})

    def init(key):
        return js.Model(init_fn(key), {"largest": jnp.zeros(()), "seen": jnp.zeros((), jnp.int32)})

    report = run(loss_fn, init=init)
    check_fails(
        report, ["new state is the mean of what each device computes from its own rows: .*js.auto"], kinds=("state",)
    )
    assert [one.name for one in report.failures] == ["state largest"]


def test_what_can_not_be_compared_is_refused():
    with pytest.raises(TypeError, match=r"return js.Mean\(total, weight\)"):
        run(lambda *args: plain(*args).value)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="must be made of this process's own devices"):
        js.parity(init_fn, plain, optax.sgd(0.1), js.ddp(), mesh, make_batch())
    with pytest.raises(ValueError, match=r"names an axis that it does not run over \(unbound axis name: other"):
        run(lambda params, batch, key: js.Mean(lax.psum(1.0, "other"), 1.0))


# The model's state


def stateful(new):
    """A model with a state of a float and an integer, and its loss; `new(state, batch)` is the new state."""

    def init(key):
        return js.Model(init_fn(key), {"sum": jnp.zeros(()), "steps": jnp.zeros((), jnp.int32)})

    def loss(model, batch, key):
        return js.Loss(plain(model.params, batch, key), state=new(model.state, batch))

    return init, loss


@pytest.mark.slow
def test_what_is_proven_of_each_kind_of_state_is_told():
    """State to 1e-5."""
    init, loss = stateful(lambda old, batch: {"sum": js.Sum(batch["weights"].sum()), "steps": old["steps"] + 1})
    report = run(loss, init=init)
    assert report.ok
    assert [note for note in report.notes if note.startswith("state")] == [
        "state, proven equal on all devices and in all micro-batches and taken once: steps",
        "state, declared, added over devices and micro-batches: sum/value",
        "state: its floats times 1.25 in a second step, from the same parameters",
    ]


@pytest.mark.parametrize(
    "new, last",
    [
        # Nothing comes of it while the state is zero.
        (lambda old, batch: old | {"sum": 1 + old["sum"] * batch["weights"].sum()}, "the given one in a second step"),
        (lambda old, batch: old | {"sum": old["sum"] + batch["weights"].sum()}, "the given one"),
    ],
    ids=["second step", "first step"],
)
def test_a_float_that_adds_up_over_rows_but_is_averaged_is_found(new, last):
    """No program tells it from a mean."""
    init, loss = stateful(new)
    report = run(loss, init=init)
    assert [one.name for one in report.failures] == ["state sum"]
    assert report.batches[-1].startswith(last)
    assert any("js.Sum" in line for line in report.why)
