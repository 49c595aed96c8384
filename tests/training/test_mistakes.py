"""Mistakes that people make with arguments: each is refused before anything runs, with what to write instead."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

TX = optax.sgd(0.1)
BATCH = {"x": np.ones((8, 8), np.float32)}


def init_fn(key):
    return {"w": jnp.ones((8, 4))}


def loss_fn(params, batch, key):
    return js.Mean(jnp.square(batch["x"] @ params["w"]).sum(), len(batch["x"]))


def two_arguments(params, batch):
    return loss_fn(params, batch, None)


@cache
def layout(tx=TX):
    return js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx)


@cache
def step():
    return js.make_step(loss_fn, TX, layout())


@cache
def run():
    return js.init(init_fn, TX, layout(), 0)


@cache
def model():
    return js.models.gpt(vocab=16, width=16, depth=1, heads=2, seq=8)


def evaluate(run, batches):
    return {}


LOSS = r"loss_fn is called as loss_fn\(model, batch, key\), and two_arguments\(params, batch\) can't be"
SEVERAL = "batches must be an iterable of batches, got a "
ORDER = "layout must be a js.Layout, got "
OTHER_ORDER = "in another order"
TUPLE = "several mesh axes for one dimension are a tuple; write js."

MISTAKES = {
    "loss": (lambda: js.make_step(two_arguments, TX, layout()), LOSS),
    "loss of value_and_grad": (lambda: js.value_and_grad(two_arguments, layout()), LOSS),
    "loss of parity": (lambda: js.parity(init_fn, two_arguments, TX, js.ddp(), js.make_mesh(data=8), BATCH), LOSS),
    "eval_fn": (lambda: js.make_eval_step(loss_fn, layout()), r"eval_fn is called as eval_fn\(model, batch\)"),
    "init_fn": (lambda: js.layout(js.ddp(), js.make_mesh(data=8), lambda: {}), r"init_fn is called as init_fn\(key\)"),
    "evaluate the loss": (lambda: js.make_eval_step(model().loss, layout()), "got model.loss; pass model.evaluate"),
    "train on metrics": (lambda: js.make_step(model().evaluate, TX, layout()), "got model.evaluate; pass model.loss"),
    "init with the model": (lambda: js.init(model(), TX, layout(), 0), "got the model itself; pass model.init"),
    "train on the model": (lambda: js.make_step(model(), TX, layout()), "got the model itself; pass model.loss"),
    "evaluate the model": (lambda: js.make_eval_step(model(), layout()), "got the model itself; pass model.evaluate"),
    "swapped layout": (lambda: js.layout(js.make_mesh(data=8), js.fsdp(), init_fn, TX), "strategy is a mesh; write js"),
    "auto": (lambda: js.make_step(loss_fn, TX, layout(), engine=js.auto), r"makes one: write js.auto\(\)"),
    "pipelined": (
        lambda: js.make_step(loss_fn, TX, layout(), engine=js.pipelined),
        r"makes one: write js.pipelined\(microbatches=8\)",
    ),
    "make with the loss": (lambda: js.init(model().loss, TX, layout(), 0), "got model.loss; pass model.init"),
    "fit one batch": (lambda: js.fit(run(), step(), BATCH, steps=1), f"fit: {SEVERAL}dict with x"),
    "fit one array": (lambda: js.fit(run(), step(), BATCH["x"], steps=1), f"fit: {SEVERAL}ndarray"),
    "fit a function": (lambda: js.fit(run(), step(), lambda: [], steps=1), f"fit: {SEVERAL}function"),
    "evaluate one batch": (lambda: js.evaluate(evaluate, run(), BATCH), f"evaluate: {SEVERAL}dict with x"),
    "fit swapped": (lambda: js.fit(step(), run(), [BATCH], steps=1), OTHER_ORDER),
    "fit without step": (lambda: js.fit(run(), [BATCH], step(), steps=1), "step must be a function"),
    "evaluate swapped": (lambda: js.evaluate(run(), evaluate, [BATCH]), "eval_step must be what js.make_eval_step"),
    "restore": (lambda: js.restore(layout(), "run"), rf"{ORDER}str; write js.restore\(dir, layout\)"),
    "save": (lambda: js.save("run", layout(), run()), "got Layout; the arguments are in another order"),
    "save the run first": (lambda: js.save(run(), "run", layout()), r"dir is a run; write js.save\(dir, run, layout\)"),
    "save_safetensors": (lambda: js.save_safetensors("x.safetensors", layout(), run()), rf"{ORDER}TrainState"),
    "load_safetensors": (lambda: js.load_safetensors(layout(), "x.safetensors"), rf"{ORDER}str"),
    "make_apply": (lambda: js.make_apply(layout(), lambda params: 0), r"fn must be a function fn\(model, \*args\)"),
    "logical": (lambda: js.logical(layout(), run()), "got Layout; the arguments are in another order"),
    "a strategy": (lambda: js.make_step(loss_fn, TX, js.fsdp()), r"got Composed;.*make it by js.layout\(strategy"),
    "Checkpointer": (lambda: js.Checkpointer(layout(), "run", every=1), rf"{ORDER}str; write js.Checkpointer\(dir"),
    "every": (lambda: js.Checkpointer("run", layout(), every="10"), r"every must be a whole number, got '10' \(str\)"),
    "keep": (lambda: js.Checkpointer("run", layout(), every=1, keep=2.0), "keep must be a whole number, got 2.0"),
    "memory": (lambda: js.MemoryCheckpointer(layout(), every="1"), "every must be a whole number, got '1'"),
    "watch": (lambda: js.ReplicaWatch(layout(), every=True), "every must be a whole number, got True"),
    "patience": (lambda: js.EarlyStopping("3"), "patience must be a whole number, got '3'"),
    "steps": (lambda: js.fit(run(), step(), [BATCH], steps="1"), "steps must be a whole number, got '1'"),
    "eval_every": (
        lambda: js.fit(run(), step(), [], steps=1, evaluate=evaluate, eval_every="2"),
        "eval_every must be a whole number, got '2'",
    ),
    "fsdp": (lambda: js.fsdp("data", "tensor"), rf"{TUPLE}fsdp\(\('data', 'tensor'\)\).*js.tensor\(\)"),
    "ddp": (lambda: js.ddp("x", "y"), rf"{TUPLE}ddp\(\('x', 'y'\)\)"),
    "zero2": (lambda: js.zero2("x", "y", "z"), rf"{TUPLE}zero2\(\('x', 'y', 'z'\)\)"),
    "hsdp": (lambda: js.hsdp("r", "x", "y"), rf"{TUPLE}hsdp\('r', \('x', 'y'\)\)"),
    "expert": (lambda: js.expert("x", "y"), rf"{TUPLE}expert\(\('x', 'y'\)\)"),
    "context": (lambda: js.context("x", "y"), rf"{TUPLE}context\(\('x', 'y'\)\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_what_to_write(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = MISTAKES[name]
    with pytest.raises(TypeError, match=f"(?s){message}"):
        call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "call", [lambda: js.init(init_fn, TX, layout(None), 0), lambda: js.make_step(loss_fn, TX, layout(None))]
)
def test_a_layout_without_an_optimizer_says_so(call):
    with pytest.raises(ValueError, match=r"made without an optimizer.*js.layout\(strategy, mesh, init_fn, tx\)"):
        call()


def test_a_mesh_larger_than_the_devices_gives_no_advice_that_fails():
    with pytest.raises(ValueError, match="data=8, tensor=2 needs 16 devices, but there are 8; take smaller") as caught:
        js.make_mesh(data=8, tensor=2)
    assert "jax.devices()[:16]" not in str(caught.value)


def test_what_is_printed_of_a_donated_run_and_of_metrics():
    before = js.init(init_fn, TX, layout(), 0)
    after, metrics = step()(before, BATCH)
    assert "donated to an earlier step" in repr(before) and "params={" in repr(after)
    assert "'bad': Bad(bad=False)" in str(metrics)
    _, metrics = step()(after, {"x": np.full((8, 8), np.nan, np.float32)})
    assert repr(metrics["bad"]) == "Bad(bad=True, grads=('w',))"
