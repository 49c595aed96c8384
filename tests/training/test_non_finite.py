"""Steps whose loss or gradient is not finite: they change nothing but their number, under every engine and policy."""

import itertools
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.checkpoint.runs import assert_same
from tests.engines.pipeline.pipes import small_gpt, stack_toy
from tests.engines.programs import Program, scalar_traffic
from tests.toys import normal, quick_compile

pytestmark = pytest.mark.fast_cases(2)

TX = optax.adam(1e-2)


def mesh(**axes):
    return js.make_mesh(jax.devices()[: math.prod(axes.values())], **axes)


GPT = {
    "explicit": (js.zero2(min_size=0), {"data": 8}, js.explicit(microbatches=2, compute_dtype=jnp.bfloat16)),
    "auto": (js.fsdp(min_size=0), {"data": 8}, js.auto()),
    "tensor": (js.compose(js.fsdp(min_size=0), js.tensor()), {"data": 2, "tensor": 2}, js.explicit()),
    "pipelined": (js.pipeline(), {"pipe": 2}, js.pipelined(microbatches=4)),
}


@pytest.mark.slow  # fast are `test_which_gradient_is_not_finite_is_known` and what `js.fit` skips
@pytest.mark.parametrize("name", GPT)
def test_a_bad_step_changes_nothing_but_its_number(name):
    """NaN in the weight of one row; the steps after it are those of a run that never had its batch, bit for bit."""
    strategy, axes, engine = GPT[name]
    toy = small_gpt(2) if name == "tensor" else stack_toy(depth=5, rows=16)
    spoiled = toy.batch | {"weights": toy.batch["weights"].copy()}
    spoiled["weights"][5] = np.nan
    layout = js.layout(strategy, mesh(**axes), toy.init_fn, TX)
    with quick_compile():
        step = js.make_step(toy.loss_fn, TX, layout, engine=engine)
        run, metrics = step(js.init(toy.init_fn, TX, layout, 0), toy.batch)
    assert not metrics["bad"] and metrics["bad"].grads == ()
    before = js.clone(run)
    without, _ = step(js.clone(before)._replace(step=before.step + 1), toy.batch)

    run, metrics = step(run, spoiled)
    assert int(run.step) == 2
    assert_same(run._replace(step=before.step), before)
    assert math.isnan(metrics["loss"]) and math.isnan(metrics["grad_norm"])
    assert metrics["bad"] and float(metrics["bad"]) == 1 and bool(metrics["bad"].flags[0])
    assert len(metrics["bad"].paths) == len(jax.tree.leaves(layout.shapes.params))
    assert metrics["bad"].grads == metrics["bad"].paths
    with pytest.raises(js.BadStep, match=r"step 2 is bad: loss nan, the gradients of all \d+ parameters.*Rollback"):
        js.check_finite(metrics, step=2)

    run, metrics = step(run, toy.batch)
    assert_same(run, without)
    js.check_finite(metrics)


# A model of four parameters whose gradients are those of x alone, scale alone, ...: 13 does not divide, c is frozen.


def init_fn(key):
    params = {"a": normal(0, 13, 3), "b": jnp.ones((3,)), "c": jnp.ones((3,)), "d": jnp.ones((16,))}
    return js.Model(params, {"seen": jnp.zeros(()), "key": jax.random.key(3)})


def loss_fn(model, batch, key):
    p, x = model.params, batch["x"]
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(js.row_keys(key, len(x)))
    rows = jnp.square(x @ p["a"] * p["c"] + p["b"] + 0.1 * noise).sum(-1) + (batch["y"][:, None] * p["d"]).sum(-1)
    state = model.state | {"seen": model.state["seen"] + 1}
    return js.Loss(js.Mean(rows.sum(), len(x)), state=state)


def numbered(step, **changes):
    rng = np.random.default_rng(step)
    batch = {"x": rng.normal(size=(16, 13)).astype(np.float32), "y": rng.normal(size=16).astype(np.float32)}
    for name, value in changes.items():
        batch[name][3] = value
    return batch


@cache
def first():
    return js.init(init_fn, TX, made()[0], 0)


def start():
    return js.clone(first())


@cache
def made(engine=None, trainable=lambda path: True):
    layout = js.layout(js.fsdp(min_size=0), mesh(data=8), init_fn, TX, trainable=trainable)
    step = js.make_step(loss_fn, TX, layout, engine=engine or js.explicit())
    with quick_compile():
        step.compile(numbered(0))
    return layout, step


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", [js.auto(), js.explicit()], ids=["auto", "explicit"])
def test_which_gradient_is_not_finite_is_known(engine):
    """The last one: 3e38 times the sum of 16 ones is infinite, its gradients of 3e38 / 16 are not."""
    layout, step = made(engine=engine, trainable=lambda path: path != "c")
    run = js.init(init_fn, TX, layout, 0)
    before = js.clone(run)
    for changes, grads in [({"x": np.nan}, ("a", "b")), ({"y": np.nan}, ("d",)), ({"y": 3e38}, ())]:
        run, metrics = step(run, numbered(0, **changes))
        assert metrics["bad"] and metrics["bad"].paths == ("a", "b", "d")
        assert metrics["bad"].grads == grads
        assert_same(run._replace(step=before.step), before)
    with pytest.raises(js.BadStep, match="this step is bad: loss inf, all gradients are finite"):
        js.check_finite(metrics)
    run, metrics = step(run, numbered(0))
    assert not metrics["bad"] and float(run.state["seen"]) == 1


@pytest.mark.slow
def test_a_finite_gradient_whose_square_overflows_is_not_bad():
    _, metrics = made()[1](start(), numbered(0, y=1e24))
    assert not metrics["bad"] and math.isinf(metrics["grad_norm"]) and math.isfinite(metrics["loss"])


class Rows:
    """A source of `numbered` batches, of which some are changed."""

    batch = 16

    def __init__(self, **changes):
        self.changes = {int(name[1:]): value for name, value in changes.items()}

    def rows(self, step, rows):
        return jax.tree.map(lambda x: x[rows], numbered(step, **self.changes.get(step, {})))


def fit(batches, *, steps=6, **options):
    history = []
    run = js.fit(start(), made()[1], batches, steps=steps, callbacks=[history.append], **options)
    return run, history


def never_given(*left_out, steps=6):
    """The run to which these batches were never given."""
    run, step = start(), made()[1]
    for number in range(steps):
        if number in left_out:
            run = run._replace(step=run.step + 1)
        else:
            run, _ = step(run, numbered(number))
    return run


def test_raise_names_step_loss_and_leaves_and_hands_out_the_run():
    layout, _ = made()
    history = []
    with pytest.raises(js.BadStep, match=r"step 4 is bad: loss nan, the gradient is not finite of d\. .*skip") as bad:
        js.fit(
            start(), made()[1], js.batches(Rows(n3={"y": np.nan}), layout), steps=6,
            callbacks=[history.append],
        )  # fmt: skip
    assert bad.value.step == 4 and [record.metrics["bad"] for record in history] == [0, 0, 0, 1]
    assert_same(bad.value.run, never_given(3, steps=4))


def test_skip_counts_and_equals_a_run_without_the_batch():
    layout, _ = made()
    run, history = fit(js.batches(Rows(n2={"y": np.nan}, n5={"x": np.inf}), layout), bad_steps="skip")
    assert [record.metrics["bad"] for record in history] == [0, 0, 1, 0, 0, 1]
    assert_same(run, never_given(2, 5))


def test_a_training_whose_steps_were_all_bad_has_failed():
    with pytest.raises(
        js.BadStep, match=r"all 3 steps were bad, the last of them step 3; nothing was trained"
    ) as error:
        fit([numbered(step, x=np.nan) for step in range(3)], steps=3, bad_steps="skip")
    assert int(error.value.run.step) == error.value.step == 3


def test_skipping_forever_ends():
    always = itertools.repeat(numbered(0, y=np.nan))
    with pytest.raises(js.BadStep, match=r"step 50 is bad: .*all of the 50 last steps"):
        fit(always, steps=100, bad_steps="skip")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("bad", "every", "steps"), [(4, 3, [4, 5, 6]), (5, 4, [5, 6])], ids=["middle", "last"])
def test_rollback_equals_skip_when_all_before_was_well(bad, every, steps, tmp_path):
    layout, _ = made()
    batches = js.batches(Rows(**{f"n{bad}": {"y": np.nan}}), layout)
    with js.Checkpointer(tmp_path, layout, every=every, data=lambda: batches.position) as checkpointer:
        run, history = fit(batches, bad_steps=js.Rollback(checkpointer.restore), on_run=[checkpointer])
        checkpointer.save(run)
    assert_same(run, never_given(bad))
    assert [record.step for record in history] == [*range(1, bad + 2), *steps]
    assert [record.step for record in history if record.metrics["bad"]] == [bad + 1] * 2
    assert js.latest_step(tmp_path) == 6 and batches.position == 6


@cache
def spoiling():
    """Plain descent whose loss is zero until a parameter is infinite."""

    def loss_fn(model, batch, key):
        d = model.params["d"]
        return js.Mean((batch["y"][:, None] * (d - jax.lax.stop_gradient(d))).sum(), 16.0)

    tx = optax.sgd(1e2)
    layout = js.layout(js.fsdp(min_size=0), mesh(data=8), init_fn, tx)
    return layout, js.make_step(loss_fn, tx, layout), lambda: js.init(init_fn, tx, layout, 0)


def test_rollback_heals_a_run_that_was_spoiled(tmp_path):
    """Batch 2 makes d infinite with a gradient of 6e36; the spoiled run was saved, and is passed over."""
    layout, step, start = spoiling()
    batches, history = js.batches(Rows(n2={"y": 1e38}), layout), []
    with js.Checkpointer(tmp_path, layout, every=1) as checkpointer:
        run = js.fit(
            start(), step, batches, steps=6, callbacks=[history.append], on_run=[checkpointer],
            bad_steps=js.Rollback(checkpointer.restore),
        )  # fmt: skip
    assert [record.step for record in history] == [1, 2, 3, 3, 4, 5, 6]
    assert [record.metrics["bad"] for record in history] == [0, 0, 1, 1, 0, 0, 0]
    expected = start()
    for number in (0, 1, 3, 4, 5):
        expected, _ = step(
            expected._replace(step=jax.device_put(np.int32(number), expected.step.sharding)), numbered(number)
        )
    assert_same(run, expected)
    assert js.latest_step(tmp_path) == 6


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", [js.explicit(), js.auto()], ids=["explicit", "auto"])
def test_an_update_that_is_not_finite_is_blamed_on_its_own_step(engine):
    """From finite gradients: the step, its cause and the parameter are named, under every policy."""
    tx = optax.chain(optax.masked(optax.scale(np.inf), {"a": False, "b": False, "c": False, "d": True}), optax.sgd(1.0))
    layout = js.layout(js.fsdp(min_size=0), mesh(data=8), init_fn, tx)
    step = js.make_step(loss_fn, tx, layout, engine=engine)
    start = js.init(init_fn, tx, layout, 0)
    _, metrics = step(js.clone(start), numbered(0))
    assert metrics["bad"] and metrics["bad"].grads == () and metrics["bad"].params == ("d",)
    what = "all gradients are finite, but the update made infinite or NaN d. The run is spoiled. Go back to a saved one"
    with pytest.raises(js.BadStep, match=f"this step is bad: .*{what}"):
        js.check_finite(metrics)
    for policy in ("raise", "skip"):
        with pytest.raises(js.BadStep, match=f"step 1 is bad: .*{what}") as error:
            js.fit(js.clone(start), step, [numbered(0)] * 3, steps=3, bad_steps=policy)
        assert error.value.step == 1


def test_the_last_update_of_a_training_is_looked_at():
    """Skipping ends with an error, too: nothing can go on from this run."""
    _, step, start = spoiling()
    batches = [numbered(number, **({"y": 1e38} if number == 2 else {})) for number in range(3)]
    with pytest.raises(js.BadStep, match=r"step 3 is bad: .*the update made infinite or NaN d. The run is spoiled"):
        js.fit(start(), step, batches, steps=3, bad_steps="skip")


def test_parameters_that_were_infinite_before_are_nobodys_fault():
    """A mask of -inf among the trained parameters, whose gradient is zero, as one device trains it."""

    def init(key):
        return {"mask": jnp.where(jnp.arange(8) % 2 == 0, 0.0, -jnp.inf), "w": jnp.ones(8)}

    def loss(params, batch, key):
        hidden = jax.nn.softmax(params["mask"] + batch["x"], where=jnp.arange(8) % 2 == 0)
        return js.Mean((hidden * params["w"]).sum(), 8.0)

    layout = js.layout(js.fsdp(min_size=0), mesh(data=8), init, optax.sgd(0.1))
    run, metrics = js.make_step(loss, optax.sgd(0.1), layout)(
        js.init(init, optax.sgd(0.1), layout, 0), {"x": np.ones((8, 8), np.float32)}
    )
    assert not metrics["bad"] and np.isinf(run.params["mask"]).sum() == 4


@pytest.mark.slow
def test_rollback_gives_up_when_it_does_not_help(tmp_path):
    layout, _ = made()
    batches = js.batches(Rows(**{f"n{number}": {"y": np.nan} for number in range(2, 20)}), layout)
    with js.Checkpointer(tmp_path, layout, every=100) as checkpointer:
        checkpointer.save(first())
        with pytest.raises(js.BadStep, match=r"step 6 is bad: .*after 3 returns to step 0: .*learning rate"):
            fit(batches, steps=20, bad_steps=js.Rollback(checkpointer.restore, limit=3))


@pytest.mark.slow
def test_rollback_without_a_saved_run_or_batches_that_go_back(tmp_path):
    layout, _ = made()
    with js.Checkpointer(tmp_path, layout, every=100) as checkpointer:
        back = js.Rollback(checkpointer.restore)
        with pytest.raises(
            js.BadStep,
            match=r"step 1 is bad: loss nan.*, and there is no run to go back to: .*no run with finite parameters was "
            "saved; save one before the first",
        ):
            fit(js.batches(Rows(n0={"y": np.nan}), layout), bad_steps=back)
        for batches, kind in [
            ([numbered(0)] * 6, "list"),
            (itertools.repeat(numbered(0)), "repeat"),
            (js.batches(iter([numbered(0)] * 6), layout), "batches of an iterator without a state"),
        ]:
            with pytest.raises(
                TypeError, match=rf"needs batches that can go back, got {kind}; make them with js.batch"
            ):
                fit(batches, bad_steps=back)
    with pytest.raises(ValueError, match=r"bad_steps must be 'raise', 'skip' or js.Rollback.*got 'ignore'"):
        fit([], bad_steps="ignore")


def test_metrics_of_other_steps_are_refused_by_name():
    with pytest.raises(ValueError, match=r"metrics of a js.make_step, with \"bad\", got \['loss'\]"):
        js.check_finite({"loss": jnp.float32(0)})


def test_the_guard_communicates_nothing_and_needs_no_memory():
    """A scalar per gradient, which the norm needs, one per new parameter, and loss and weight.

    The state's counter is proven equal on all devices. 4 x 4 + 4 x 4 + 2 x 4 bytes.

    Parameters of 13 x 3 (padded to 16), 3 and 3 (padded to 8) and 16 in f32, with two moments of Adam each.
    """
    layout, step = made()
    compiled = step.compile(numbered(0))
    assert scalar_traffic(Program(layout, compiled)) == {("all-reduce", "data"): 40}
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * 4 * (16 * 3 + 8 + 8 + 16) // 8  # everything is updated in place


# Optimizers with a rule of their own.

OWN_RULES = {
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(1e-2)),
    "skip_not_finite": lambda: optax.MultiSteps(
        optax.adam(1e-2), 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
}


def quiet_init(key):
    return {"a": normal(0, 13, 3), "b": jnp.ones((3,))}


def quiet_loss(params, batch, key):
    rows = jnp.square(batch["x"] @ params["a"] + params["b"]).sum(-1)
    return js.Mean(rows.sum(), len(rows))


def one_device_states(tx, batches):
    """Parameters and optimizer state after every step, in plain optax."""
    params = quiet_init(jax.random.key(0))
    state = tx.init(params)

    @jax.jit
    def update(params, state, batch):
        grads = jax.grad(lambda params: quiet_loss(params, batch, None).value)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = update(params, state, batch)
        yield jax.device_get((params, state))


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_RULES)
@pytest.mark.parametrize("engine", [js.auto, js.explicit])
def test_an_optimizer_with_a_rule_of_its_own_counts_skips_and_lets_through_as_on_one_device(name, engine):
    """Four bad steps in a row among eight: apply_if_finite(2) skips two of them, and lets the others through."""
    tx = OWN_RULES[name]()
    batches = [numbered(step) for step in range(8)]
    for step in range(2, 6):
        batches[step]["x"][3, 4] = np.nan
    layout = js.layout(js.fsdp(min_size=0), mesh(data=8), quiet_init, tx)
    with quick_compile():
        step = js.make_step(quiet_loss, tx, layout, engine=engine())
        assert not step.guarded
        run, weights = js.init(quiet_init, tx, layout, 0), js.make_apply(lambda params: params, layout)
        for batch, (params, state) in zip(batches, one_device_states(tx, batches), strict=True):
            run, metrics = step(run, batch)
            assert "bad" not in metrics
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), weights(run), params)
            ours = [x.item() for x in jax.tree.leaves(run.opt_state) if not x.ndim]
            assert ours == [x.item() for x in jax.tree.leaves(state) if not x.ndim]
    assert np.isnan(params["a"]).any() == (name == "apply_if_finite")
    with pytest.raises(ValueError, match="a rule of its own"):
        js.check_finite(metrics)


def is_guarded(tx, **options):
    layout = js.layout(js.ddp(), mesh(data=2), quiet_init, tx)
    return js.make_step(quiet_loss, tx, layout, **options).guarded


def test_other_optimizers_are_guarded():
    assert is_guarded(TX) and not is_guarded(TX, guarded=False)
    rounded = js.optim.stochastic_round  # no rule, but around one
    assert is_guarded(rounded(TX)) and not is_guarded(rounded(optax.apply_if_finite(TX, 3)))


def replace_bad(test):
    return optax.stateless(lambda grads, _: jax.tree.map(lambda g: jnp.where(test(g), 0, g), grads))


@pytest.mark.parametrize(
    "test",
    [
        jnp.isnan,
        lambda g: ~jnp.isfinite(jnp.sum(g)),
        lambda g: jax.lax.cond(g.sum() > 1, jnp.isnan, lambda g: g != 0, g),
        lambda g: jax.lax.map(jax.jit(jnp.isnan), g),
        lambda g: jax.lax.while_loop(lambda i: jnp.isnan(g[i, 0] if g.ndim > 1 else g[i]), lambda i: i + 1, 0) > 0,
    ],
    ids=["isnan", "sum", "branch", "map", "while"],
)
def test_a_rule_of_ones_own_is_found_in_every_kind_of_program(test):
    assert not is_guarded(optax.chain(replace_bad(test), optax.sgd(0.1)))


def test_what_depends_on_no_gradient_is_no_rule():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: g * jnp.where(jnp.isfinite(state), 1.0, 0.5), grads), state + 1

    assert is_guarded(optax.GradientTransformation(lambda params: jnp.zeros(()), update))


def test_what_runs_inside_of_shard_map_alone_is_not_judged():
    """It is refused later, with a text of its own."""
    assert is_guarded(optax.stateless(lambda grads, _: jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads)))
