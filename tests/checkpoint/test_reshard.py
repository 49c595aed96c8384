"""Any layout restores what any other saved, bit for bit, and training goes on as if nothing had been.

The same layout: losses bit-equal. Another: within 1e-6 relative of the run that was not interrupted.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.checkpoint.runs import LAYOUTS, assert_same, made

TX = optax.sgd(1e-2, momentum=0.9)
"""Its state has an array for every parameter; Adam would amplify rounding."""
SIZES = (1, 2, 4, 8)
NAMES = list(LAYOUTS)
CELLS = list(itertools.product(NAMES, NAMES, SIZES))


def saved_on(source: str, target: str, devices: int) -> int:
    """The devices of a cell's source: all pairs of counts occur, and a layout is also restored where it was saved."""
    if source == target:
        return devices
    return SIZES[(SIZES.index(devices) + NAMES.index(source) + NAMES.index(target)) % len(SIZES)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """`fn(name, devices) -> (folder, run, losses)`: saved after two steps; the run in model order; the next five."""

    @functools.cache
    def save(name, devices):
        here = made(name, devices, TX)
        run, _ = here.train(here.run(), 2)
        folder = tmp_path_factory.mktemp(f"{name}-{devices}")
        js.save(folder, run, here.layout)
        logical = jax.tree.map(np.asarray, js.logical(run, here.layout)._replace(key=jax.random.key_data(run.key)))
        return folder, logical, here.train(run, 5)[1]

    return save


def check(source, name, before, target, devices):
    folder, logical, losses = source(name, before)
    there = made(target, devices, TX)
    run = js.restore(folder, there.layout)
    back = js.logical(run, there.layout)._replace(key=jax.random.key_data(run.key))
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(logical), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == y.tobytes()
    again = there.train(run, 5)[1]
    if (name, before) == (target, devices):
        assert again == losses
    np.testing.assert_allclose(again, losses, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "devices"), CELLS)
def test_every_layout_goes_on(source, name, target, devices):
    check(source, name, saved_on(name, target, devices), target, devices)


def test_arrays_come_back_where_the_layout_stores_them(tmp_path):
    js.save(tmp_path, made("fsdp").run(), made("fsdp").layout)
    assert_same(js.restore(tmp_path, made("three").layout), made("three").run())
