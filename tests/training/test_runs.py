"""Copies of runs, runs with other parameters, gradients alone, and runs described."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.checkpoint.runs import assert_same
from tests.notebook_page import check_shows_text
from tests.toys import normal

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 13)).astype(np.float32)}


def init_fn(key):
    params = {"a": {"kernel": normal(0, 13, 3)}, "b": jnp.ones(3), "c": jnp.ones(3)}
    return js.Model(params, {"seen": jnp.zeros(())})


def loss_fn(model, batch, key):
    p = model.params
    rows = jnp.square(batch["x"] @ p["a"]["kernel"] * p["c"] + p["b"]).sum(-1)
    return js.Loss(js.Mean(rows.sum(), len(rows)), state={"seen": model.state["seen"] + 1})


def made(tx, *, trainable=lambda path: path != "c"):
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx, trainable=trainable)
    return layout, js.init(init_fn, tx, layout, 0), js.make_step(loss_fn, tx, layout)


DESCENT = optax.sgd(0.1)


@cache
def descent():
    """A run that no step is given, and its layout."""
    layout, run, _ = made(DESCENT)
    return layout, run


def test_a_clone_outlives_the_step_and_goes_on_alike():
    _, run, step = made(optax.adam(0.1))
    kept = js.clone(run)
    assert jax.tree.map(lambda x: x.sharding, kept) == jax.tree.map(lambda x: x.sharding, run)
    run, _ = step(run, BATCH)
    again, _ = step(js.clone(kept), BATCH)
    assert_same(run, again)
    first, _ = step(kept, BATCH)
    assert_same(first, again)
    with pytest.raises(ValueError, match="donated"):
        js.clone(kept)
    with pytest.raises(TypeError, match="TrainState"):
        js.clone({"a": 1})


def test_nobody_reads_a_run_that_was_donated():
    """A compiled program that is given such arrays ends the process."""
    layout, run, step = made(optax.sgd(0.1))
    apply = js.make_apply(lambda model, x: x @ model.params["a"]["kernel"], layout)
    evaluate = js.make_eval_step(lambda model, batch: {"n": js.Sum(batch["x"].sum())}, layout)
    uses = [
        lambda run: apply(run, BATCH["x"]),
        lambda run: evaluate(run, BATCH),
        lambda run: js.evaluate(evaluate, run, [BATCH]),
        lambda run: js.to_bytes(run, layout),
        lambda run: js.logical(run, layout),
        lambda run: js.run_to_bytes(run, layout),
    ]
    for use in uses:
        use(run)
    step(run, BATCH)
    for use in uses:
        with pytest.raises(ValueError, match="this run was donated to an earlier step"):
            use(run)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("opt_state", ["reset", "keep"])
def test_other_parameters_keep_or_reset_the_optimizer(opt_state):
    """Against plain optax with the same choice."""
    tx = optax.adam(0.1)
    layout, run, step = made(tx, trainable=lambda path: True)
    run, _ = step(run, BATCH)
    other = jax.tree.map(lambda x: np.asarray(x) * 0.5, js.logical(run, layout).params)
    old = js.logical(run, layout).opt_state
    new = js.replace_params(run, other, tx, layout, opt_state=opt_state)
    assert int(new.step) == 1 and float(new.state["seen"]) == 1

    @jax.jit
    def plain(params, state):
        grads = jax.grad(lambda p: loss_fn(js.Model(p, {"seen": jnp.zeros(())}), BATCH, None).value.value)(params)
        updates, _ = tx.update(grads, state, params)
        return optax.apply_updates(params, updates)

    expected = plain(other, old if opt_state == "keep" else tx.init(other))
    new, _ = step(new, BATCH)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), js.logical(new, layout).params, expected
    )


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (lambda: optax.chain(optax.lion(0.1), js.optim.averaged(optax.sgd(0.1), 0.9)), "1/average"),
        (lambda: optax.contrib.schedule_free_sgd(0.1), "z/"),
    ],
)
@pytest.mark.fast_cases(1)
def test_state_that_was_made_from_the_old_parameters_is_not_kept(tx, names):
    tx = tx()
    layout, run, _ = made(tx)
    other = js.logical(run, layout).params
    with pytest.raises(ValueError, match=f'made from the old parameters: .*{names}.*Use opt_state="reset"'):
        js.replace_params(run, other, tx, layout, opt_state="keep")
    assert js.replace_params(run, other, tx, layout, opt_state="reset").params is not None


def test_what_does_not_fit_is_refused():
    layout, run = descent()
    params = js.logical(run, layout).params
    with pytest.raises(ValueError, match=r"the model does not fit the layout(.|\n)*b: "):
        js.replace_params(run, params | {"b": np.ones(4, np.float32)}, DESCENT, layout, opt_state="keep")
    with pytest.raises(ValueError, match=r"the model has other dtypes than the layout(.|\n)*b: float64"):
        js.replace_params(run, params | {"b": np.ones(3)}, DESCENT, layout, opt_state="keep")
    with pytest.raises(ValueError, match='opt_state must be "keep" or "reset", got \'new\''):
        js.replace_params(run, params, DESCENT, layout, opt_state="new")
    with pytest.raises(ValueError, match="tx is not the one"):
        js.replace_params(run, params, optax.adam(0.1), layout, opt_state="reset")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("engine", [js.explicit(microbatches=2), None], ids=["explicit", "auto"])
def test_gradients_alone_are_those_of_one_device(engine):
    layout, run = descent()
    gradient = js.value_and_grad(loss_fn, layout, engine)
    loss, grads = gradient(run, BATCH)
    assert grads["c"] is None
    params = js.logical(run, layout).params
    expected, wanted = jax.jit(
        jax.value_and_grad(lambda p: loss_fn(js.Model(p, {"seen": jnp.zeros(())}), BATCH, None).value.value)
    )(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name in ("a", "b"):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), grads[name], wanted[name])
    again, _ = gradient(run, jax.tree.map(lambda x: x[:16], BATCH))  # the run is still there
    assert float(again) == float(loss)
    with pytest.raises(TypeError, match=r"write js.explicit\(\)"):
        js.value_and_grad(loss_fn, layout, js.explicit)


def test_a_run_is_described():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(0.25))
    layout, run, step = made(tx)
    history = []
    run = js.fit(
        run,
        step,
        [BATCH] * 3,
        steps=3,
        callbacks=[history.append],
        evaluate=lambda run: {"accuracy": 0.5},
        eval_every=2,
    )
    found = js.describe(run, layout, history)
    assert (found.step, found.parameters, found.trained) == (3, 45, 42)
    assert found.structure == {"a": 39, "b": 3, "c": 3} and found.bytes_per_device == layout.bytes_per_device()
    assert found.hyperparams["learning_rate"] == 0.25 and "ScaleByAdam" in found.optimizer
    assert found.metrics == history[-1].metrics and found.evaluation == {"accuracy": 0.5} and found.seconds > 0
    text = str(found)
    for words in ("step  ", "3 on data=8", "45, 42 trained", "learning_rate 0.25", "last evaluation", "accuracy 0.5"):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 200
    check_shows_text(found)
    layout, run = descent()
    assert "not in the optimizer's state" in str(js.describe(run, layout))
