"""64-bit arrays of NumPy: floats are narrowed with a word, integers only where their values fit."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.core import narrowing
from jaxshard.core.narrowing import check_narrowing

TX = optax.sgd(0.1)


@pytest.fixture(autouse=True)
def nothing_told_yet():
    narrowing._warn_once.cache_clear()


def init_fn(key):
    return {"w": jnp.ones((4, 8))}


def loss_fn(params, batch, key):
    return js.Mean((jnp.square(batch["x"] @ params["w"]).sum(-1) * (batch["id"] >= 0)).sum(), len(batch["x"]))


def made():
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(jax.devices()[:2], data=2), init_fn, TX)
    return layout, js.make_step(loss_fn, TX, layout), js.init(init_fn, TX, layout, 0)


def batch(number, dtype):
    return {"x": np.ones((4, 4), np.float32), "id": np.array([number] * 4, dtype)}


def test_floats_are_told_once_by_path():
    tree = {"a": np.zeros(3), "b": {"c": np.zeros(2, np.complex128)}, "d": np.zeros(2, np.float32), "e": 1.5}
    told = (
        r"the tree is narrowed: a: float64 becomes float32, b/c: complex128 becomes complex64. Cast it yourself where "
        r"that is meant, or switch 64-bit numbers on: jax.config.update\(\"jax_enable_x64\", True\)"
    )
    with pytest.warns(UserWarning, match=told):
        check_narrowing(tree, "the tree")
    check_narrowing(tree, "the tree")  # a second warning would be an error here
    with jax.enable_x64(True):
        check_narrowing({"other": np.zeros(3), "id": np.array([2**40])}, "the tree")


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (2**31 - 1, "int64", True), (-(2**31), "int64", True), (2**31, "int64", False), (-(2**31) - 1, "int64", False),
        (2**32 - 1, "uint64", True), (2**32, "uint64", False), (2**32 - 1, "uint32", True),
    ],
)  # fmt: skip
def test_integers_pass_where_their_values_fit(value, dtype, fits):
    tree = {"id": np.array([0, value], dtype), "none": np.zeros(0, dtype)}
    if fits:
        return check_narrowing(tree, "the tree")
    with pytest.raises(
        ValueError, match=rf"numbers of the tree do not fit into 32 bits.*\n  - id: {dtype} holds {value}, "
    ):
        check_narrowing(tree, "the tree")
    return None


def test_steps_evaluation_and_batches_look_at_what_they_place():
    layout, step, run = made()
    evaluate = js.make_eval_step(lambda params, batch: {"n": js.Sum(batch["id"].sum())}, layout)
    apply = js.make_apply(lambda params, x: x, layout)
    run, _ = step(run, batch(7, np.int64))
    assert int(apply(run, np.int64(7))) == 7
    large = batch(2**31, np.int64)
    for use in (
        lambda: step(run, large),
        lambda: evaluate(run, large),
        lambda: apply(run, large["id"]),
        lambda: next(iter(js.batches([large], layout))),
        lambda: next(iter(js.local_batches(iter([large]), layout))),
    ):
        with pytest.raises(ValueError, match="int64 holds 2147483648, beyond -2147483648 to 2147483647 of int32"):
            use()
    with pytest.warns(UserWarning, match="the batch is narrowed: x: float64 becomes float32"):
        step(run, batch(7, np.int32) | {"x": np.ones((4, 4))})


def test_a_model_of_numpy_in_double_precision_is_told():
    with pytest.warns(UserWarning, match="the model is narrowed: kernel: float64 becomes float32"):
        layout = js.layout(
            js.ddp(), js.make_mesh(jax.devices()[:2], data=2), lambda key: {"kernel": np.zeros((4, 2))}, TX
        )
    assert layout.shapes.params["kernel"].dtype == jnp.float32
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="table: int64 holds 1099511627776"):
            js.layout(js.ddp(), layout.mesh, lambda key: js.Model({"w": jnp.ones(2)}, {"table": np.array([2**40])}), TX)
