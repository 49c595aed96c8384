"""Early stopping, asked by a loop of one's own and by `js.fit`."""

import contextlib
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.training.judge import EVALUATIONS
from tests.training.test_fit import evaluations, new_run, ones, step

NAN = math.nan


def ask(rule, losses, name="loss"):
    """The number of evaluations until it says stop; None if it never does."""
    for number, loss in enumerate(losses, 1):
        if rule({name: loss}):
            return number
    return None


@pytest.mark.parametrize(
    ("options", "losses", "stop"),
    [
        ({"patience": 2}, [5, 4, 4.5, 3, 3.5, 3.2, 1], 6),
        ({"patience": 2}, [5, 4, 3, 2, 1], None),
        ({"patience": 2}, [5, NAN, NAN, 1], 3),
        ({"patience": 1}, [NAN, 4, 3], None),
        # A tenth is no improvement by itself; three of them are.
        ({"patience": 2, "min_delta": 0.25}, [5, 4.9, 4.8, 4.0], 3),
        ({"patience": 3, "min_delta": 0.25}, [5, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4], None),
        ({"patience": 2, "mode": "max"}, [1, 2, 1.5, 2], 4),
        ({"max_worse": 1.0}, [5, 3, 3.9, 2, 2.9, 3.1], 6),
        ({"max_worse": 1.0, "mode": "max"}, [5, 3], 2),
        ({"max_worse": 1.0}, [5, NAN], 2),
    ],
)
def test_when_it_stops(options, losses, stop):
    rule = js.EarlyStopping(**options)
    assert ask(rule, losses) == stop
    assert bool(rule.reason) == (stop is not None)


def test_reason_best_and_last_are_told():
    rule = js.EarlyStopping(patience=2, min_delta=0.5, metric="accuracy", mode="max")
    assert (rule.reason, rule.best, rule.last) == ("", {}, {})
    for accuracy in (0.5, 0.75, 0.7):
        assert rule({"accuracy": jnp.float32(accuracy), "loss": 1.0}) == (accuracy == 0.7)
    assert rule.best == {"accuracy": 0.75, "loss": 1.0} and rule.last["accuracy"] == pytest.approx(0.7)
    assert rule.reason == "accuracy 0.7: not better than 0.5 by more than 0.5 for 2 evaluations"
    once = js.EarlyStopping(patience=1, min_delta=0.05)
    assert ask(once, [0.0319, 0.0290]) == 2
    assert once.reason == "loss 0.029: not better than 0.0319 by more than 0.05 for 1 evaluation"
    nothing = js.EarlyStopping(patience=1)
    assert ask(nothing, [NAN, NAN]) == 2 and nothing.reason == "loss nan: not better than any number for 1 evaluation"
    worse = js.EarlyStopping(max_worse=0.5)
    assert ask(worse, [2, 1, 1.75]) == 3 and worse.reason == (
        "loss 1.75 after a best of 1 is worse by 0.75, more than 0.5"
    )


def test_updates_that_become_tiny():
    rule = js.EarlyStopping(min_update=1e-3)
    assert not rule({"update_norm": 0.1}) and rule({"update_norm": 1e-4})
    assert rule.reason == "the last step changed the parameters by 0.0001, less than 0.001"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give it a rule: patience=, max_worse= or min_update="),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"patience": 1, "min_delta": -1.0}, "min_delta must be a finite number of at least 0, got -1.0"),
        ({"max_worse": NAN}, "max_worse must be a finite number of at least 0, got nan"),
        ({"patience": 1, "mode": "least"}, 'mode must be "min" or "max", got \'least\''),
    ],
)
def test_rules_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        js.EarlyStopping(**options)


def test_a_metric_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"needs 'accuracy' and 'update_norm' among the metrics, got \['loss'\]"):
        js.EarlyStopping(patience=1, metric="accuracy", min_update=0.1)({"loss": 1.0})


def test_fit_asks_after_every_evaluation():
    rule, history = js.EarlyStopping(2), []
    run = js.fit(
        new_run(), step, ones(), steps=20, evaluate=evaluations([5, 4, 4.5, 4.2, 1]), eval_every=2, stop=rule,
        callbacks=[history.append],
    )  # fmt: skip
    assert int(run.step) == 8 == len(history) and rule.best == {"loss": 4.0} and rule.last == {"loss": 4.2}


class Folder:
    """A checkpointer of which only the folder is used."""

    def __init__(self, folder):
        self.ledger = folder / ".goodput.json"

    def __call__(self, number, run):
        pass


def fit_in(folder, start, losses, **rules):
    """Training from a step that was restored, with an evaluation after every second step, until `losses` are over."""
    rule, losses = js.EarlyStopping(3, **rules), iter(losses)
    with contextlib.suppress(StopIteration):  # killed
        js.fit(
            new_run(start), step, ones(), steps=20, evaluate=lambda run: {"loss": next(losses)}, eval_every=2,
            stop=rule, on_run=[Folder(folder)],
        )  # fmt: skip
    return rule


def test_fit_goes_on_with_the_patience_after_a_restart(tmp_path):
    """It knows the evaluations up to the run's step, but not those of steps that are taken again."""
    fit_in(tmp_path, 0, [5, 4, NAN, 3])
    rule = fit_in(tmp_path, 7, [4.5, 4.2, 1])
    assert rule.best == {"loss": 4} and rule.reason == "loss 4.2: not better than 4 for 3 evaluations"
    with pytest.warns(UserWarning, match=r"no step is taken, .* for 3 evaluations; to train on, delete the file"):
        assert fit_in(tmp_path, 10, []).reason == rule.reason
    assert fit_in(tmp_path, 0, [2]).best == {"loss": 2}
    (tmp_path / EVALUATIONS).write_text("[[1]]")
    with pytest.warns(UserWarning, match="early stopping begins anew, because"):
        assert fit_in(tmp_path, 4, [3]).best["loss"] == 3


def test_a_restart_repeats_an_evaluation_that_was_interrupted(tmp_path):
    """The run of step 6 was saved; the process ended before its evaluation did."""
    fit_in(tmp_path, 0, [5, 4])
    rule = fit_in(tmp_path, 6, [4.5, 4.2])
    assert rule.best["loss"] == 4 and rule.last["loss"] == 4.2 and rule.waited == 2
    assert fit_in(tmp_path, 8, []).waited == 2  # step 8 was evaluated
    rule = fit_in(tmp_path, 10, [4.1])
    assert rule.reason == "loss 4.1: not better than 4 for 3 evaluations"
    js.fit(
        new_run(10),
        step,
        ones(),
        steps=0,
        evaluate=lambda run: {"loss": 0},
        stop=js.EarlyStopping(9),
        on_run=[Folder(tmp_path)],
    )
    # The norm of the update of a step of an earlier process is not known, and ends nothing.
    (tmp_path / EVALUATIONS).write_text('[[2, {"loss": 4, "update_norm": 1}]]')
    assert fit_in(tmp_path, 4, [3], min_update=0.1).best["loss"] == 3


def test_fit_without_evaluation_asks_after_every_step_that_was_not_bad():
    seen = []

    def with_bad(run, batch):
        run, metrics = step(run, batch)
        return run, metrics | {"bad": jnp.float32(run.step == 2)}

    run = js.fit(
        new_run(), with_bad, ones(), steps=9, bad_steps="skip",
        stop=lambda metrics: seen.append(metrics["loss"]) or metrics["loss"] == 4,
    )  # fmt: skip
    assert int(run.step) == 4 and seen == [1, 3, 4]


def test_the_norm_of_the_update_is_that_of_one_device():
    """Of what the parameters changed by, so that what bf16 rounds away counts as nothing."""

    def init(key):
        return {"a": jnp.ones((13, 3)), "b": jnp.ones(5, jnp.bfloat16), "frozen": jnp.ones(4)}

    def loss(params, batch, key):
        return js.Mean((batch["x"] @ params["a"]).sum() + params["b"].astype(jnp.float32).sum() * len(batch["x"]), 1.0)

    batch = {"x": np.full((8, 13), 0.5, np.float32)}
    for rate, expected in ((1e-2, np.sqrt(39 * 0.04**2 + 5 * 0.078125**2)), (1e-4, np.sqrt(39) * 4e-4)):
        tx = optax.sgd(rate)
        layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init, tx, trainable=lambda path: path != "frozen")
        made = js.make_step(loss, tx, layout)
        _, metrics = made(js.init(init, tx, layout, 0), batch)
        assert float(metrics["update_norm"]) == pytest.approx(expected, rel=1e-3)


def test_hyperparameters_that_the_state_shows_are_among_the_metrics():
    history = []
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.4, 0.0, 4), b1=0.5)
    both = optax.chain(tx, optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))

    def init(key):
        return {"a": jnp.ones((16, 4))}

    def loss(params, batch, key):
        return js.Mean(jnp.square(batch["x"] @ params["a"]).sum(), len(batch["x"]))

    for used, names in ((tx, {"learning_rate", "b1"}), (both, {"0/learning_rate", "1/learning_rate", "b1"})):
        layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init, used)
        history.clear()
        js.fit(
            js.init(init, used, layout, 0), js.make_step(loss, used, layout), [{"x": np.ones((8, 16), np.float32)}] * 3,
            steps=3, callbacks=[history.append],
        )  # fmt: skip
        assert names <= set(history[0].metrics)
        rate = "learning_rate" if used is tx else "0/learning_rate"
        assert [record.metrics[rate] for record in history] == pytest.approx([0.4, 0.3, 0.2])
