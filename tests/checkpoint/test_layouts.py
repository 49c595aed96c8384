"""What one layout saved any other restores, bit for bit."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.checkpoint.leaves import entries, split
from tests.checkpoint.runs import LAYOUTS, TX, assert_same, made

NAMES = list(LAYOUTS)
PAIRS = [("one", "three"), ("three", "fsdp"), ("pipeline", "hsdp"), ("tensor", "zero1"), ("ddp", "pipeline")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_another_layout_restores(source, target, tmp_path):
    js.save(tmp_path, made(source).run(), made(source).layout)
    assert_same(js.restore(tmp_path, made(target).layout), made(target).run())


@pytest.mark.slow
@pytest.mark.parametrize("source", NAMES)
def test_every_layout_restores(source, tmp_path):
    js.save(tmp_path, made(source).run(), made(source).layout)
    for target in NAMES:
        assert_same(js.restore(tmp_path, made(target).layout), made(target).run())


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("three", "zero1"), ("fsdp", "pipeline"), ("tensor", "three")])
def test_training_goes_on_under_another_layout(source, target, tmp_path):
    """Losses equal to 1e-5 relative: Adam amplifies the rounding of the steps before."""
    here, there = made(source), made(target)
    run, step = here.run(), js.make_step(here.toy.loss_fn, TX, here.layout, engine=here.engine)
    run, _ = step(run, here.toy.batch)
    js.save(tmp_path, run, here.layout)
    losses = there.steps(js.restore(tmp_path, there.layout), 3)
    np.testing.assert_allclose(losses, here.steps(run, 3), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((50257, 1600), P(None, ("x", "z"))),
        ((1600, 6400), P(None, ("x", "z"))),
        ((20, 14), P("x", "z")),
        ((7, 11), P(None, None)),
        ((), P()),
    ],
)
def test_logical_arrays_are_split_over_the_mesh(shape, spec):
    assert split(shape, js.make_mesh(jax.devices(), x=4, z=2)) == spec


@pytest.mark.parametrize("name", ["fsdp", "three"])
def test_no_device_holds_an_array_whole_on_the_way(name):
    layout = made(name).layout
    for entry in entries(layout)[0]:
        saved = entry.shape_saved(layout.mesh)
        held = np.prod(saved.sharding.shard_shape(saved.shape))
        assert held <= max(np.prod(saved.shape) / 2, 128), entry
