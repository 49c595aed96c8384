"""Means that do not add up over parts of a batch are found in the program of a loss; right ones never are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.adapt.positionwise.rows import find_unequal_means

ROWS, PARTS = 4, 8


def nats_of(params, batch):
    return js.cross_entropy(jnp.tanh(batch["x"] @ params["w"]) @ params["v"], batch["y"])


def find(mean_of, rows=ROWS):
    """What is found of `mean_of(nats, batch, params, key)`."""
    params = {"w": jax.ShapeDtypeStruct((5, 6), jnp.float32), "v": jax.ShapeDtypeStruct((6, 7), jnp.float32)}
    shapes = {"x": ((rows, 5), jnp.float32), "y": ((rows,), jnp.int32), "mask": ((rows,), jnp.float32)}
    batch = {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()} | {
        "table": jax.ShapeDtypeStruct((7,), jnp.float32)
    }
    key = jax.eval_shape(lambda: jax.random.key(0))

    def loss_fn(params, batch, key):
        return mean_of(nats_of(params, batch), batch, params, key)

    has_rows = [name != "table" for name in sorted(batch)]
    args = (params, batch, key)
    return find_unequal_means(loss_fn, args, [False] * 2 + has_rows + [False], PARTS)


def log_p(params, batch):
    return jax.nn.log_softmax(batch["x"] @ params["w"] @ params["v"])


def dropped(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return nats_of(params, batch | {"x": batch["x"] * keep})


def dropped_by_row(params, batch, key):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (5,)))(js.row_keys(key, len(batch["x"])))
    return nats_of(params, batch | {"x": batch["x"] * keep})


def scanned(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x + w), None), batch["x"], jnp.ones((3, 5)))
    return x.sum(1)


FIXED = {
    "a number": lambda n, b, p, k: js.Mean(n.sum(), 32),
    "one": lambda n, b, p, k: js.Mean(n.sum(), 1),
    "of a table": lambda n, b, p, k: js.Mean(n.sum(), b["table"].sum()),
    "masked": lambda n, b, p, k: js.Mean(jnp.where(b["mask"] > 0, n, 0).sum(), 32),
    "one of two": lambda n, b, p, k: js.Mean(n.sum(), n.size) + 0.1 * js.Mean((n**2).sum(), 32),
    "indexed": lambda n, b, p, k: js.Mean(-log_p(p, b)[jnp.arange(len(b["y"])), b["y"]].sum(), 32),
    "one hot": lambda n, b, p, k: js.Mean(-(log_p(p, b) * jax.nn.one_hot(b["y"], 7)).sum(), 32),
    "of optax": lambda n, b, p, k: js.Mean(
        optax.softmax_cross_entropy_with_integer_labels(log_p(p, b), b["y"]).sum(), 32
    ),
    "dropout": lambda n, b, p, k: js.Mean(dropped(p, b, k).sum(), 32),
    "row keys": lambda n, b, p, k: js.Mean(dropped_by_row(p, b, k).sum(), 32),
    "remat": lambda n, b, p, k: js.Mean(jax.checkpoint(nats_of)(p, b).sum(), 32),
    "scanned": lambda n, b, p, k: js.Mean(scanned(p, b).sum(), 32),
    "a head": lambda n, b, p, k: js.Mean(js.head_loss(b["x"] @ p["w"], p["v"], b["y"]).totals[0], 32),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_weight_that_is_the_same_for_any_rows_is_found(name):
    (found,) = find(FIXED[name])
    assert found.startswith("the weight of js.Mean is no sum over rows: that of the whole batch is ")
    assert "those of its 8 parts add up to" in found and "return js.Mean(total, weight)" in found


def test_numbers_and_metrics_are_named():
    def loss(n, b, p, k):
        return js.Loss(js.Mean(n.sum(), n.size), metrics={"hits": js.Mean((n > 1).sum(), 32), "rows": js.Sum(n.size)})

    (found,) = find(loss)
    assert found.startswith("the metric 'hits': the weight of js.Mean is no sum over rows: ")
    assert "that of the whole batch is 32, those of its 8 parts add up to 256;" in found
    assert find(lambda n, b, p, k: {"loss": loss(n, b, p, k).metrics["hits"]})[0].startswith("the metric 'loss': ")


@pytest.mark.parametrize(
    "mean_of",
    [
        lambda n, b, p, k: js.Mean(n.mean(), n.size),
        lambda n, b, p, k: js.Mean(n.sum(), n.size) + js.Mean((p["w"] ** 2).sum(), n.size),
    ],
)
def test_a_total_that_is_the_same_for_any_rows_is_found_beside_a_weight_that_counts_them(mean_of):
    (found,) = find(mean_of)
    assert found.startswith("the total of js.Mean is no sum over rows, but its weight is: those of the 8 parts")


RIGHT = {
    "size": lambda n, b, p, k: js.Mean(n.sum(), n.size),
    "mask": lambda n, b, p, k: js.Mean((n * b["mask"]).sum(), b["mask"].sum()),
    "mask, at least one": lambda n, b, p, k: js.Mean((n * b["mask"]).sum(), jnp.maximum(b["mask"].sum(), 1)),
    "valid labels": lambda n, b, p, k: js.Mean(n.sum(), (b["y"] >= 0).sum()),
    "penalty": lambda n, b, p, k: js.Mean(n.sum(), n.size) + js.Mean((p["w"] ** 2).sum(), 1),
    "table": lambda n, b, p, k: js.Mean(n.sum(), n.size) + js.Mean((b["table"] ** 2).sum(), 7),
    "mean of means": lambda n, b, p, k: js.Mean(n.mean(), 1),
    "mean times rows": lambda n, b, p, k: js.Mean(n.mean() * len(n), len(n)),
    "normalized weights": lambda n, b, p, k: js.Mean((n * b["mask"] / b["mask"].sum()).sum(), 1),
    "softmax over rows": lambda n, b, p, k: js.Mean((n * jax.nn.softmax(b["mask"])).sum(), 1),
    "a product": lambda n, b, p, k: js.Mean(jnp.vdot(n, b["mask"] / len(n)), 1),
    "cumulated": lambda n, b, p, k: js.Mean(jnp.cumsum(n)[-1] / len(n), 1),
    "logarithm": lambda n, b, p, k: js.Mean(jax.nn.logsumexp(n) - jnp.log(len(n)), 1),
    "first row": lambda n, b, p, k: js.Mean(n[0], 1),
    "batch norm": lambda n, b, p, k: js.Mean(((b["x"] - b["x"].mean(0)) / b["x"].std(0)).mean(), 1),
    "contrastive": lambda n, b, p, k: js.Mean(jax.nn.logsumexp(b["x"] @ b["x"].T, -1).mean(), 1),
    "looped": lambda n, b, p, k: js.Mean(jax.lax.scan(lambda c, x: (c + x, None), 0.0, n)[0] / len(n), 1),
    "head": lambda n, b, p, k: js.head_loss(b["x"] @ p["w"], p["v"], b["y"], b["mask"], accuracy=True),
    "no mean": lambda n, b, p, k: n.mean(),
    "written for these rows": lambda n, b, p, k: js.Mean(n.reshape(ROWS).sum(), 32),
    "refused by itself": lambda n, b, p, k: js.Mean(n, 32),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_or_not_known_passes(name):
    assert find(RIGHT[name]) == []


@pytest.mark.parametrize(
    ("total", "weight"), [(lambda n: n.sum(), 32), (lambda n: n.sum(), 1), (lambda n: n.sum() / n.size, 1)]
)
def test_what_the_loss_sums_over_devices_itself_is_left_alone(total, weight):
    """Summed totals over a fixed weight are right, as every device has all of the total."""

    def loss_fn(x):
        return js.Mean(jax.lax.psum(total(x), "data"), weight)

    x = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    assert find_unequal_means(loss_fn, (x,), [True], PARTS, manual={"data": PARTS}) == []


def test_one_row_in_each_part():
    assert find(FIXED["a number"], rows=1) and not find(RIGHT["size"], rows=1)
