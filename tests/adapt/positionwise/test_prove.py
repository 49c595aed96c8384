"""What the proof lets through, and what it refuses, by name and with the line of it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.adapt.positionwise.report import explain
from tests.adapt.positionwise.cases import GOOD, LENGTH, MIXING, PARTS, W, findings, mean_of, shapes


@pytest.mark.parametrize("name", GOOD)
def test_layers_that_treat_positions_one_by_one(name):
    assert not findings(mean_of(GOOD[name]))


@pytest.mark.parametrize("name", MIXING)
def test_layers_that_do_not_are_refused_by_name_and_line(name):
    layer, what = MIXING[name]
    found = [str(finding) for finding in findings(mean_of(layer))]
    assert re.search(what, found[0]), found
    assert re.match(r"(positionwise/cases.py:\d+|the loss)", found[0]), found


def _by_count(choose):
    """A layer that Python makes another one where a row has more than half of all positions."""

    def layer(x, w, b, key):
        return choose(x, jnp.sin(w), jnp.cos(w), x.shape[1] > LENGTH // 2)

    return layer


CHOSEN = {
    "weights": lambda x, u, v, many: x @ u - x @ v if many else x @ v - x @ u,
    "number": lambda x, u, v, many: x * (u[0, 0] if many else 2.0) + 0 * u[0, 0],
    "inside a call": lambda x, u, v, many: jax.checkpoint(lambda u, v: x @ (u if many else v))(u, v),
    "dimensions": lambda x, u, v, many: jax.lax.dot_general(x, u, (((2,), (0 if many else 1,)), ((), ()))),
    "order": lambda x, u, v, many: x * jax.lax.scan(lambda c, a: (c * jnp.tanh(c + a), None), u[0], v, reverse=many)[0],
    "experts": lambda x, u, v, many: js.moe(
        x, x[..., :2], lambda p, rows, dot: jax.nn.silu(dot(rows, p)) / (2 if many else 3), jnp.stack([u, v]), k=1
    )[0],
    "window": lambda x, u, v, many: js.attention(*[x[:, :, None]] * 3, causal=True, window=4 if many else 2)[:, :, 0],
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_what_python_chooses_by_the_number_of_positions_is_refused(name):
    found = [str(finding) for finding in findings(mean_of(_by_count(CHOSEN[name])))]
    assert found and re.search("depends on how many (positions )?there are", found[0]), found


def test_a_learned_table_as_long_as_a_row_is_told_to_take_positions():
    """table[:T], which is a slice on a part of the positions alone."""
    (found,) = findings(mean_of(lambda x, w, b, key: x + jnp.concatenate([w, w])[: x.shape[1]]))
    assert "slice" in str(found) and "table[js.positions(T)]" in found.fix


def test_all_places_are_found_at_once():
    def loss(w, b, key):
        x = b["x"] + jnp.arange(b["x"].shape[1])[:, None]
        x = jnp.cumsum(x, 1)
        x = jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x
        return js.Mean(jnp.roll(x, 1, 1).sum(), x.size)

    found = findings(loss)
    assert [finding.operation for finding in found] == ["iota", "cumsum", "dot_general", "slice", "concatenate"][
        : len(found)
    ]
    assert len({finding.where for finding in found}) == 4
    first = loss.__code__.co_firstlineno
    assert [int(finding.where.split(":")[1]) - first for finding in found[:4]] == [1, 2, 3, 4]
    text = explain(found, ("context",))
    assert "js.context over ['context']" in text
    assert "js.auto()" in text


def test_what_nothing_needs_is_not_asked_about():
    def loss(w, b, key):
        jnp.cumsum(b["x"], 1)
        return js.Mean(b["x"].sum(), b["x"].size)

    assert not findings(loss)


# Results


def results_of(make):
    return findings(lambda w, b, key: make(GOOD["dense"](b["x"], w, b, key), b, w))


@pytest.mark.parametrize(
    "make",
    [
        lambda y, b, w: js.Mean(y.sum(), y.size),
        lambda y, b, w: js.Mean(y.mean(), 1),
        lambda y, b, w: js.Mean((y.mean(-1) * (b["tokens"] > 0)).sum(), (b["tokens"] > 0).sum()),
        lambda y, b, w: js.Mean(y.sum(), y.size) + 0.1 * js.Mean((w**2).sum(), 1),
        lambda y, b, w: js.Mean(y.mean() + 0.1 * (w**2).sum(), 1),
        lambda y, b, w: js.Mean((y.mean(1) @ w).sum(), len(y)),
        lambda y, b, w: js.Mean((b["row"] * y.sum((1, 2))).sum(), y.size),
        lambda y, b, w: js.Mean(sum(y[:, :, i].sum() for i in range(3)), 3 * b["tokens"].size),
        lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), metrics={"a": js.Sum(y.sum()), "n": js.Sum(y.size)}),
        lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), metrics={"a": js.Max(y.max()), "b": js.Max(w.max())}),
        lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), metrics={"a": js.Sum(jnp.zeros(8).at[b["tokens"]].add(1.0))}),
        lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), state={"mean": y.mean((0, 1)), "count": jnp.int32(3)}),
    ],
    ids=[
        "mean", "local_mean", "masked", "penalty", "added_penalty", "linear", "row_weights", "start", "sums", "maxima",
        "counts", "state",
    ],
)  # fmt: skip
def test_results_that_devices_can_combine(make):
    assert not results_of(make)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda y, b, w: js.Mean(y.mean(), y.size), r"n\*\*1 times the total and n\*\*0 times the weight"),
        (lambda y, b, w: js.Mean(y.sum(), 1), r"n\*\*0 times the total and n\*\*1 times the weight"),
        (lambda y, b, w: js.Mean(y.sum() + 1, y.size), "what is added to it counts once for each device"),
        (lambda y, b, w: js.Mean(y.sum() ** 2, y.size), "integer_pow needs all of it"),
        (lambda y, b, w: js.Mean(y.sum() / b["tokens"].sum(), 1), "div needs all of it"),
        (lambda y, b, w: js.Mean(y.max(), 1), "is a js.Mean of a value that is not a sum"),
        (lambda y, b, w: js.Mean(jnp.sqrt(y.mean(1)).sum(), 1), "sqrt needs all of it"),
        (lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), metrics={"a": js.Sum(y.mean())}), "is a js.Sum of a value"),
        (lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), metrics={"a": js.Max(y.sum())}), "is a js.Max of a value"),
        (lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), metrics={"a": js.Sum(y)}), "is a js.Sum of a value"),
        (lambda y, b, w: js.Loss(js.Mean(y.sum(), y.size), state=y.sum((0, 1))), "the state .*is not the mean"),
        (lambda y, b, w: js.Mean(y.sum(), np.log(y.size)), "depends on how many positions there are"),
    ],
    ids=[
        "mean_by_count", "sum_by_one", "constant", "square", "divided", "maximum", "root", "metric_mean", "metric_max",
        "metric_array", "state", "number",
    ],
)  # fmt: skip
def test_results_that_they_can_t_combine(make, what):
    found = "\n".join(map(str, results_of(make)))
    assert re.search(what, found), found


# Arguments


def test_labels_cut_from_the_tokens_are_refused_with_the_fix():
    def loss(w, b, key):
        y = jax.nn.one_hot(b["tokens"][:, :-1], 8) @ w
        nats = js.cross_entropy(y, b["tokens"][:, 1:])
        return js.Mean(nats.sum(), nats.size)

    found = findings(loss)
    assert [finding.operation for finding in found] == ["slice", "slice"]
    assert "have the shifted array in the batch, such as tokens and targets" in str(found[0])


def test_arrays_of_different_lengths_are_no_positions_of_one_row():
    batch = shapes() | {"x": jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)}
    with pytest.raises(ValueError, match="the same number of positions"):
        findings(mean_of(GOOD["dense"]), W, batch)


def test_axes_of_the_context_may_not_be_named():
    loss = mean_of(lambda x, w, b, key: x + jax.lax.axis_index("context"))
    (found,) = findings(loss, axes=("context",), manual={"context": PARTS, "data": 2})
    assert "asks which device it is" in str(found)
    whole = mean_of(lambda x, w, b, key: x * jax.nn.sigmoid(jax.lax.psum(x.sum(1, keepdims=True), "context")))
    assert not findings(whole, axes=("context",), manual={"context": PARTS})
    more = mean_of(lambda x, w, b, key: jax.lax.psum(x, "context"))
    (found,) = findings(more, axes=("context",), manual={"context": PARTS})
    assert found.operation == "psum"
    fine = mean_of(lambda x, w, b, key: jax.lax.psum(x, "data") + jax.lax.axis_index("data"))
    assert not findings(fine, axes=("context",), manual={"context": PARTS, "data": 2})


# js.attention and js.head_loss


def attended(**extra):
    def layer(x, w, b, key):
        q = (x @ w).reshape(*x.shape[:2], 2, 4)
        return js.attention(q, q, q, **{name: make(x, b) for name, make in extra.items()})

    return mean_of(layer)


def test_attention_is_right_by_contract():
    causal = {"causal": lambda x, b: True}
    assert not findings(attended(**causal))
    assert not findings(attended(segment_ids=lambda x, b: b["tokens"], **causal))
    assert not findings(attended(bias=lambda x, b: jnp.ones((2, 1, 1)), **causal))


@pytest.mark.parametrize(
    ("extra", "operation"),
    [
        ({"bias": lambda x, b: jnp.zeros((x.shape[1], x.shape[1]))}, "broadcast_in_dim"),
        ({"mask": lambda x, b: (b["tokens"] > 0)[:, None, None]}, "js_mark"),
        ({"mask": lambda x, b: np.tri(x.shape[1], dtype=bool)}, "convert_element_type|ne"),
    ],
)
def test_arrays_beside_it_that_have_positions_are_refused(extra, operation):
    found = findings(attended(causal=lambda x, b: False, **extra))
    assert re.search(operation, found[0].operation), found


def test_keys_that_are_not_the_rows_are_refused():
    def layer(x, w, b, key):
        q, memory = x.reshape(*x.shape[:2], 2, 4), jnp.ones((x.shape[0], 6, 2, 4))
        return js.attention(q, memory, memory, causal=False)

    (found,) = findings(mean_of(layer))
    assert "should have the positions in dimension 1" in str(found)


def test_attention_over_another_dimension_is_refused():
    def layer(x, w, b, key):
        q = jnp.repeat(x[..., None, :], 3, 2).swapaxes(0, 1)
        return js.attention(q, q, q, causal=True)

    (found,) = findings(mean_of(layer))
    assert "should have the positions in dimension" in str(found)


def test_head_loss_is_followed():
    def loss(w, b, key):
        return js.head_loss(b["x"], w, b["tokens"], (b["tokens"] > 0), z_loss=1e-4, accuracy=True)

    assert not findings(loss)
    assert not findings(
        lambda w, b, key: js.head_loss(b["x"].astype(jnp.bfloat16), w.astype(jnp.bfloat16), b["tokens"])
    )
