"""The parts of a step's time against sums made by hand."""

from dataclasses import replace

import pytest

from jaxshard.cost.hardware import chip
from jaxshard.plan.time.network import CollectiveCost
from jaxshard.plan.time.products import ProductCost
from jaxshard.plan.time.step_time import HOST, mfu_range, price_range, step_time

V5E = chip("TPU v5e")


def product(low, high):
    return ProductCost("model.py:1", "", "bfloat16", 1, 1.0, 1.0, low, (low, high))


def collective(kind, what, low, high):
    return CollectiveCost(kind, ("data",), 1, 1.0, 1.0, (low, high), "ici", what)


def test_what_is_hidden():
    products = [product(1.0, 2.0), product(0.5, 1.0)]
    moved = [
        collective("all-gather", "weight w", 1.0, 2.5),
        collective("reduce-scatter", "gradient of w", 0.4, 0.7),
        collective("all-gather", "new parameter w", 0.1, 0.2),
    ]
    time = step_time(products, moved, V5E)
    assert (time.compute, time.memory_bound, time.bubble, time.host) == ((1.5, 1.5), (0.0, 1.5), (0.0, 0.0), HOST)
    # At best 1.5 s of products hide 1.5 s of communication, at worst nothing does.
    assert time.exposed_communication == pytest.approx((0.0, 3.4))
    # Sums of activations stand between two products.
    time = step_time(products, [*moved, collective("all-reduce", "activations", 0.3, 0.6)], V5E)
    assert time.exposed_communication == pytest.approx((0.3, 4.0))
    time = step_time([product(0.5, 1.0)], moved, V5E)
    assert time.exposed_communication == pytest.approx((1.0, 3.4))
    assert (time.low, time.high) == pytest.approx((1.5, 4.4 + HOST[1]))
    assert time.middle == pytest.approx((5.9 + HOST[1]) / 2)


def test_a_bubble_idles():
    # The program's products are useful work and bubble together.
    time = step_time([product(1.0, 2.0)], [], V5E, bubble=0.2)
    assert (time.compute, time.bubble) == (pytest.approx((0.8, 0.8)), pytest.approx((0.2, 0.4)))
    assert (time.low, time.high) == pytest.approx((1.0, 2.0 + HOST[1]))


@pytest.mark.parametrize(
    ("kind", "dtype", "words"),
    [
        ("h100", "bfloat16", "80% of H100 SXM's peak, 989 TFLOP/s in bf16"),
        (
            "h100",
            "float32",
            "80% of H100 SXM's peak, 494.5 TFLOP/s in TF32, in which it multiplies f32",
        ),
        ("TPU v5e", "float32", "197 TFLOP/s in bf16, in which it multiplies f32: the step computes in f32"),
    ],
)
def test_the_peak_is_that_of_the_dtype_of_most_products(kind, dtype, words):
    small = ProductCost("model.py:2", "", "float64", 1, 0.5, 1.0, 1.0, (1.0, 2.0))
    large = replace(product(1.0, 2.0), dtype=dtype)
    assert words in step_time([small, large], [], chip(kind)).assumptions[0]


def test_figures_of_a_step():
    time = step_time([product(1.0, 2.0 - HOST[1])], [], V5E)
    assert mfu_range(4 * 98.5e12, time, V5E, 4) == pytest.approx((0.25, 0.5))
    # A billion tokens of 1,000 a second take 277.8 hours on each of 4 chips.
    assert price_range(1000, time, 4, 1.2)[0] == pytest.approx(1e6 / 3600 * 4 * 1.2)
