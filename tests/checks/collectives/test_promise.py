"""What layouts promise, in numbers written out."""

from __future__ import annotations

import optax
import pytest

import jaxshard as js
from jaxshard.checks.collectives.promise import promise
from tests.engines import test_collectives as literals
from tests.engines.programs import setups, torus_setups
from tests.hlo.programs import gpt_shapes
from tests.toys import gpt_toy

pytestmark = pytest.mark.fast_cases(1)

ADAM = optax.adam(1e-3)


def promised(toy, strategy, mesh, engine=None, tx=ADAM, **options):
    layout = js.layout(strategy, mesh, toy.init_fn, tx, **options)
    return promise(layout, engine or js.explicit(), toy.loss_fn, toy.batch)


def sums(promise, count=lambda one: one.bytes):
    """(kind, axes) -> bytes, or what `count` says, of the arrays that are promised."""
    found = {}
    for one in promise.expected:
        if one.shape is not None and one.axes and one.elements[1] > 1:
            key = (one.kind, "+".join(one.axes))
            found[key] = found.get(key, 0) + count(one)
    return found


def lists(promise, path):
    """What is promised of one parameter."""
    return [(one.kind, one.axes, one.shape, one.most) for one in promise.expected if one.what.split()[-1] == path]


@pytest.mark.parametrize("strategy", list(literals.EXPECTED)[::-1])
def test_the_promise_is_the_literals_of_every_strategy(strategy):
    axes, made = setups(0)[strategy]
    found = promised(gpt_shapes(16, **literals.SIZES), made, js.make_mesh(**axes))
    assert sums(found) == literals.EXPECTED[strategy]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(literals.TORUS)[::-1])
def test_the_promise_over_two_axes_is_the_literals_of_the_torus(strategy):
    """One stage per axis, gathers and scatters in opposite orders; the optimizer's gather takes both at once."""
    toy, made = gpt_shapes(8, **literals.TORUS_SIZES), torus_setups(2**14)[strategy]
    found = promised(toy, made, js.make_mesh(x=2, y=4))
    assert sums(found, lambda one: one.most * one.elements[1]) == literals.TORUS[strategy]


def test_over_a_tensor_axis_each_device_gathers_its_part():
    """Two blocks of a kernel 32 x 128: 64 columns on each tensor device, 8 of its 32 rows on each data device."""
    mesh = js.make_mesh(data=4, tensor=2)
    found = promised(gpt_toy(vocab=48), js.compose(js.fsdp(min_size=0), js.tensor()), mesh)
    assert lists(found, "blocks/mlp_in/kernel") == [
        ("all-gather", ("data",), (32, 64), 4),
        ("reduce-scatter", ("data",), (32, 64), 2),
    ]
    what = {never.what: never for never in found.never}
    assert what["logits, all 48 of a vocabulary"].vocab == 48
    assert {(32, 128), (4096,), (8, 128), (2, 32, 128)} <= what["the weight blocks/mlp_in/kernel"].shapes
    assert "the weight embed/wpe" not in what  # no rule splits it
    free = [(one.kind, one.axes) for one in found.expected if one.shape is None]
    assert free == [("all-reduce", ("tensor",))]
