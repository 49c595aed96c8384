"""Checked gathers and reductions: the same training, and a transfer that goes wrong makes a bad step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxshard as js
from jaxshard.core import checked_moves


def init_fn(key):
    return {"up": jax.random.normal(key, (16, 32)) / 4, "down": jnp.ones((32, 8)) / 8}


def loss_fn(params, batch, key):
    y = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return js.Mean(jnp.square(y).sum(), y.size)


BATCH = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
TX = optax.adam(1e-2)


def made(gathers, reduction="native"):
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, TX)
    step = js.make_step(loss_fn, TX, layout, engine=js.explicit(gathers=gathers, reduction=reduction), donate=False)
    return layout, step, js.init(init_fn, TX, layout, 0)


def test_training_is_the_same_bits_and_costs_one_number_for_each_gather():
    results = []
    for gathers in ("plain", "checked"):
        layout, step, run = made(gathers)
        run, metrics = step(run, BATCH)
        found = js.collectives(step.compile(BATCH), layout.mesh)
        arrays = sorted((one.kind, one.shapes) for one in found if one.sizes[0] > 4)
        results.append((arrays, np.asarray(run.params["up"]), float(metrics["loss"])))
        gathered = sum(len(one.shapes) for one in found if one.kind == "all-gather")
        sums = sum(len(one.shapes) for one in found if one.kind == "all-reduce" and one.dtype == "u32")
        assert gathered == 2 and sums == (2 if gathers == "checked" else 0)
        assert js.audit(step, BATCH).ok
    (plain, up, loss), (checked, up_checked, loss_checked) = results
    assert plain == checked and (up == up_checked).all() and loss == loss_checked


def test_a_gather_that_goes_wrong_makes_a_bad_step_that_changes_nothing(monkeypatch):
    plain = checked_moves.gather

    def gather(x, spec, *, keep=()):
        whole = plain(x, spec, keep=keep)
        return jnp.where(lax.axis_index("data") == 3, whole.at[0, 0].multiply(1.0001), whole)

    monkeypatch.setattr(checked_moves, "gather", gather)
    _, step, run = made("checked")
    after, metrics = step(run, BATCH)
    assert metrics["bad"] and np.isnan(metrics["loss"])
    assert all((a == b).all() for a, b in zip(map(np.asarray, jax.tree.leaves(after.params)),
                                              map(np.asarray, jax.tree.leaves(run.params)), strict=True))  # fmt: skip
    with pytest.raises(js.BadStep, match="step 1 is bad: loss nan"):
        js.fit(run, step, [BATCH] * 2, steps=2)


def test_a_checked_reduction_is_the_ordered_one_and_costs_a_number_for_each_exchange_and_gather():
    results = []
    for reduction in ("ordered", "checked"):
        layout, step, run = made("plain", reduction)
        run, metrics = step(run, BATCH)
        found = js.collectives(step.compile(BATCH), layout.mesh)
        sums = sum(len(one.shapes) for one in found if one.kind == "all-reduce" and one.dtype == "u32")
        exchanged = sum(len(one.shapes) for one in found if one.kind == "all-to-all")
        # Two gradients are exchanged; the loss and its weight are gathered from all devices and added.
        assert (exchanged, sums) == (2, 4 if reduction == "checked" else 0)
        assert js.audit(step, BATCH).ok
        results.append((np.asarray(run.params["up"]), float(metrics["loss"]), float(metrics["grad_norm"])))
    (up, *scalars), (up_checked, *scalars_checked) = results
    assert (up == up_checked).all() and scalars == scalars_checked


def test_a_share_that_goes_wrong_makes_a_bad_step_that_changes_nothing(monkeypatch):
    plain = checked_moves.PLAIN

    def exchange(parts, axes):
        got = plain.exchange(parts, axes)
        return jnp.where(lax.axis_index("data") == 3, got.at[(0,) * got.ndim].multiply(1.0001), got)

    monkeypatch.setattr(checked_moves, "PLAIN", plain._replace(exchange=exchange))
    _, step, run = made("plain", "checked")
    after, metrics = step(run, BATCH)
    assert metrics["bad"] and np.isfinite(metrics["loss"])
    assert all((a == b).all() for a, b in zip(map(np.asarray, jax.tree.leaves(after.params)),
                                              map(np.asarray, jax.tree.leaves(run.params)), strict=True))  # fmt: skip


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="gathers must be 'plain' or 'checked', got 'sum'"):
        js.explicit(gathers="sum")
    with pytest.raises(ValueError, match="reduction must be 'native', 'ordered' or 'checked', got 'sum'"):
        js.explicit(reduction="sum")
    with pytest.raises(ValueError, match="reduction='checked' orders the native sums"):
        js.explicit(reduction="checked", reduce_dtype=js.wire.int8())
    assert js.explicit(gathers="checked").describe()["gathers"] == "checked"
    assert "gathers" not in js.explicit().describe()
