"""Calls of a step like an earlier one: they go to the program without further checks, and nothing else does."""

from __future__ import annotations

import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxshard as js
from tests.checkpoint.runs import assert_same
from tests.toys import normal, quick_compile

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.sgd(0.1, momentum=0.9)
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


def loss_fn(params, batch, key):
    errors = jnp.square(batch["x"] @ sum(params.values()))
    return js.Mean(errors.sum(), errors.size)


@cache
def made(count=2, devices=8):
    """The layout, a run to copy, the step and a placed batch of a model with `count` matrices."""

    def init_fn(key):
        return {f"w{i}": normal(i, 8, 8) for i in range(count)}

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(jax.devices()[:devices], data=devices), init_fn, TX)
    with quick_compile():
        step = js.make_step(loss_fn, TX, layout)
        step.compile(BATCH)
        run = js.init(init_fn, TX, layout, 0)
    return layout, run, step, jax.device_put(BATCH, layout.batch_shardings(BATCH))


def after_two_steps(count=2, devices=8):
    """Return a run that took two steps, of which the second was like the first, the step and the placed batch."""
    _, run, step, batch = made(count, devices)
    run = js.clone(run)
    for _ in range(2):
        run, _ = step(run, batch)
    return run, step, batch


def python_calls(fn):
    """Count the Python functions that a call of `fn` runs in this thread."""
    names = []
    sys.setprofile(lambda frame, event, arg: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return len(names)


def test_results_are_bit_equal_to_those_of_checked_calls():
    """A batch of NumPy arrays is placed in every call, so no call is like an earlier one."""
    _, run, step, batch = made()
    placed, checked = js.clone(run), js.clone(run)
    for _ in range(3):
        placed, metrics = step(placed, batch)
        checked, expected = step(checked, BATCH)
        assert_same(placed, checked)
        assert_same(metrics, expected)


def test_the_python_calls_of_a_later_step_do_not_depend_on_the_number_of_arrays():
    counts = []
    for count in (2, 12):
        run, step, batch = after_two_steps(count)
        run, _ = step(run, batch)  # the third call ends JAX's own look-ups
        counts.append(python_calls(lambda step=step, run=run, batch=batch: step(run, batch)))
    assert counts[0] == counts[1] < 45


def taken_by_jit(run):
    jax.jit(lambda run: jax.tree.map(lambda x: x + 1, run.params), donate_argnums=0)(run)


def taken_by_another_step(run):
    layout, *_ = made()
    js.make_step(lambda *given: loss_fn(*given), TX, layout)(run, BATCH)


TAKEN = {
    "its own step": lambda run: made()[2](run, made()[3]),
    "jax.jit": taken_by_jit,
    "delete": lambda run: jax.tree.map(lambda x: x.delete(), run.params),
    "the last leaf deleted": lambda run: jax.tree.leaves(run.opt_state)[-1].delete(),
    "the key deleted": lambda run: run.key.delete(),
    "another step": taken_by_another_step,
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("how", TAKEN)
def test_a_run_whose_arrays_were_taken_is_refused_and_crashes_nothing(how):
    run, step, batch = after_two_steps()
    TAKEN[how](run)
    if how == "the key deleted":
        with pytest.raises((ValueError, RuntimeError), match=r"delete|donate"):
            step(run, batch)
        return
    with pytest.raises(ValueError, match="donated to an earlier step"):
        step(run, batch)


def test_a_run_of_one_device_whose_arrays_were_taken_is_refused():
    run, step, batch = after_two_steps(devices=1)
    taken_by_jit(run)
    with pytest.raises(ValueError, match="donated to an earlier step"):
        step(run, batch)


def test_a_deleted_batch_is_refused_by_name():
    run, step, batch = after_two_steps()
    deleted = jax.tree.map(jnp.copy, batch)
    deleted["x"].delete()
    with pytest.raises(ValueError, match=r"arrays of the batch were donated to an earlier step.*: x"):
        step(run, deleted)
    step(run, batch)  # the run is as it was


def test_a_dictionary_that_was_changed_is_read_again():
    run, step, batch = after_two_steps()
    layout, *_ = made()
    halved = jax.tree.map(lambda x: x / 2, batch["x"])
    expected, _ = step(js.clone(run)._replace(params={**js.clone(run).params}), {"x": np.asarray(halved)})
    batch = dict(batch)
    batch["x"] = halved
    run, _ = step(run, batch)
    assert_same(run, expected)

    run.params["w0"] = jax.device_put(run.params["w0"], NamedSharding(layout.mesh, PartitionSpec()))
    with pytest.raises(ValueError, match=r"(?s)other shardings than the layout.*params/w0"):
        step(run, batch)


WRONG = {
    "a shape": (lambda run: run, lambda batch: {"x": batch["x"][:8]}, "other shapes or dtypes than the first"),
    "a dtype": (lambda run: run, lambda batch: {"x": batch["x"].astype(jnp.bfloat16)}, "other shapes or dtypes"),
    "a name": (lambda run: run, lambda batch: {"y": batch["x"]}, "x: missing"),
    "no run": (lambda run: run.params, lambda batch: batch, "run must be a js.TrainState"),
    "a pair": (lambda run: (run, {}), lambda batch: batch, "run is the pair that a step returned"),
    "swapped": (lambda run: {"x": 1}, lambda batch: made()[1], "run and batch are swapped"),
    "residuals": (lambda run: run._replace(residuals=run.params), lambda batch: batch, "the run has residuals"),
    "a parameter": (lambda run: run._replace(params={"w0": run.params["w0"]}), lambda batch: batch, "w1: missing"),
    "a parameter's shape": (
        lambda run: run._replace(params=run.params | {"w1": run.params["w1"][:, :4]}), lambda batch: batch,
        r"params/w1: expected float32\[8, 8\], got float32\[8, 4\]",
    ),
}  # fmt: skip


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("what", WRONG)
def test_what_a_step_refuses_at_first_it_refuses_later(what):
    change_run, change_batch, message = WRONG[what]
    run, step, batch = after_two_steps()
    with pytest.raises((TypeError, ValueError), match=message):
        step(change_run(run), change_batch(batch))
    step(run, batch)


def test_a_batch_that_was_placed_elsewhere_is_moved():
    run, step, batch = after_two_steps()
    expected, _ = step(js.clone(run), BATCH)
    layout, *_ = made()
    replicated = jax.device_put(batch, NamedSharding(layout.mesh, PartitionSpec()))
    run, _ = step(run, replicated)
    assert_same(run, expected)


SETTINGS = {
    "another mesh": lambda: jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)),
    "a transfer guard": lambda: jax.transfer_guard("disallow"),
    "64 bits": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_change_between_steps_change_no_result(setting):
    run, step, batch = after_two_steps()
    expected = js.clone(run)
    for _ in range(2):
        expected, _ = step(expected, batch)
    with SETTINGS[setting]():
        for _ in range(2):
            run, _ = step(run, batch)
    assert_same(run, expected)


def test_a_nan_of_a_later_step_is_found_under_debug_nans():
    run, step, batch = after_two_steps()
    bad = {"x": batch["x"].at[3].set(jnp.nan)}
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"a step made nan, .*metrics\['bad'\]"):
        step(run, bad)
