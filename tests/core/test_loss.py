"""Means, sums and maxima combine as numbers of one set of rows; what is no loss is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.core.loss import as_loss

NUMBERS = st.floats(-100, 100, width=32)
WEIGHTS = st.floats(0.125, 100, width=32)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(NUMBERS, WEIGHTS), min_size=1, max_size=6), cut=st.integers(0, 6), scale=NUMBERS)
def test_means_of_parts_combine_to_the_mean_of_all_rows(rows, cut, scale):
    values, weights = np.array(rows).T

    def mean(part: slice) -> js.Mean:
        return js.Mean((values * weights)[part].sum(), weights[part].sum())

    whole = js.combine(mean(slice(cut)), mean(slice(cut, None)))
    average = np.average(values, weights=weights)
    assert float(whole.value) == pytest.approx(average, rel=1e-4, abs=1e-4)
    both = scale * whole + mean(slice(None)) * 2
    assert float(both.value) == pytest.approx((scale + 2) * average, rel=1e-4, abs=1e-2)


def test_terms_of_a_sum_stay_apart_when_parts_combine():
    a, b = js.Mean(6.0, 3.0) + js.Mean(1.0, 1.0), js.Mean(0.0, 1.0) + js.Mean(5.0, 2.0)
    assert float(js.combine(a, b).value) == 6 / 4 + 6 / 3


@pytest.mark.parametrize("total", [0.0, 5.0, np.nan, np.inf])
def test_a_mean_without_weight_is_zero_and_has_gradient_zero(total):
    assert float(js.Mean(total, 0.0).value) == 0
    assert float(jax.grad(lambda total: js.Mean(total, 0.0).value)(total)) == 0


def test_no_gradient_passes_through_a_weight():
    def value(x):
        return js.Mean(3 * x, x).value

    assert float(jax.grad(value)(2.0)) == 1.5


def test_totals_and_weights_are_kept_in_f32_at_least():
    """In bf16 a weight of 257 is 256, and one more micro-batch of one token is lost."""
    mean = js.Mean(jnp.int32(3), True)
    assert mean.totals[0].dtype == mean.weights[0].dtype == jnp.float32
    assert js.Mean(jnp.bfloat16(3), jnp.float16(1)).totals[0].dtype == jnp.float32
    weights = [js.Mean(jnp.bfloat16(1), jnp.bfloat16(weight)) for weight in (256, 1)]
    assert float(js.combine(*weights).weights[0]) == 257
    with jax.enable_x64(True):
        assert js.Mean(jnp.float64(3), 1).totals[0].dtype == jnp.float64


def test_sums_and_maxima_combine():
    assert js.combine(js.Sum(2), js.Sum(3)) == js.Sum(5)
    assert js.combine(js.Max(2), js.Max(3)) == js.Max(3)


@pytest.mark.parametrize(
    "value, times, total",
    [
        (jnp.int32(2**30), 5, 5 * 2**30),
        (jnp.uint8(200), 3, 600),
        (jnp.bool_(True), 3, 3),
        (jnp.bfloat16(1), 300, 300),
        (jnp.float32(2**24), 1, 2**24),
        (jnp.float32(1), 3, 3),
        (np.int64(2**40), 3, 3 * 2**40),
    ],
    ids=str,
)
def test_sums_neither_wrap_nor_drift(value, times, total):
    found = js.Sum(value)
    for _ in range(times - 1):
        found = js.combine(found, js.Sum(value))
    assert int(found.value) == total


def test_a_number_added_to_a_large_one_is_not_lost():
    large = js.combine(js.Sum(jnp.float32(2**24)), js.Sum(jnp.float32(1)))
    assert float(large.value) == 2**24 + 1
    many = functools.reduce(js.combine, [js.Mean(jnp.float32(21.6), jnp.float32(8))] * 20_000)
    assert float(many.value) == pytest.approx(float(np.float32(21.6)) / 8, rel=1e-7)


@pytest.mark.parametrize("number", [jnp.ones(3), np.ones((1,))])
def test_totals_and_weights_are_scalars(number):
    with pytest.raises(ValueError, match=r"Mean: total must be a scalar, got shape \(.*\); sum over the rows first"):
        js.Mean(number, 1.0)
    with pytest.raises(ValueError, match="Mean: weight must be a scalar"):
        js.Mean(1.0, number)


def test_means_add_to_means_and_scale_by_scalars_only():
    with pytest.raises(TypeError):
        js.Mean(1.0, 1.0) + 1.0
    with pytest.raises(TypeError):
        js.Mean(1.0, 1.0) * jnp.ones(3)
    with pytest.raises(TypeError):
        js.Mean(1.0, 1.0) * js.Mean(1.0, 1.0)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (jnp.ones(3), r"an array of shape \(3,\); return js.Mean\(values.sum\(\), values.size\)"),
        (None, "must return a scalar, js.Mean or js.Loss, got NoneType"),
        ((jnp.float32(1), {}), r"got tuple; .*js.Loss\(value, state=..., metrics=...\)"),
        ({"loss": jnp.float32(1)}, "got dict"),
        ("loss", "got str"),
        (3, "must return a real floating scalar, got dtype int32"),
        (jnp.int32(3), "got dtype int32"),
        (True, "got dtype bool"),
        (jnp.complex64(3), "got dtype complex64"),
        (js.Sum(jnp.float32(1)), "got Sum"),
        (js.Loss(jnp.ones(3)), r"an array of shape \(3,\)"),
        (js.Loss(1.0, metrics={"accuracy": jnp.float32(1)}), "metric 'accuracy' must be a js.Mean, js.Sum or js.Max"),
        (js.Loss(1.0, metrics={"loss": js.Sum(jnp.float32(1))}), "metric 'loss'.*another name"),
        (js.Loss(1.0, metrics=[js.Sum(1.0)]), "metrics must be a dict.*got list"),
    ],
)
def test_what_is_no_loss(output, message):
    with pytest.raises(TypeError, match=message):
        as_loss(output)


@pytest.mark.parametrize("output", [jnp.float32(2), 2.0, js.Mean(4.0, 2.0), js.Loss(2.0), js.Loss(js.Mean(4.0, 2.0))])
def test_what_is_a_loss(output):
    value = as_loss(output).value
    assert float(value.value if isinstance(value, js.Mean) else value) == 2


@pytest.mark.parametrize("swap", [False, True])
def test_a_penalty_is_added_as_a_mean_of_weight_one(swap):
    def loss(w):
        mean, penalty = js.Mean(w * 6.0, 3.0), w**2
        return ((penalty + mean) if swap else (mean + penalty)).value

    with pytest.raises(TypeError, match=r"js.Mean adds to another js.Mean alone, got .*as js.Mean\(penalty, 1\)"):
        jax.grad(loss)(2.0)
    with pytest.raises(TypeError, match=r"js.Mean\(penalty, 1\)"):
        np.float32(1) + js.Mean(6.0, 3.0) if swap else js.Mean(6.0, 3.0) + 1
