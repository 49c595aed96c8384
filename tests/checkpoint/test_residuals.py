"""Residuals of gradients in checkpoints: bit for bit on as many devices, their sum on any other mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import nnx_toy

ENGINE = js.explicit(reduce_dtype=js.wire.int8(feedback=True), scatter="end")


def made(strategy, **axes):
    toy, tx = nnx_toy(), optax.sgd(0.1)
    mesh = js.make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)
    layout = js.layout(strategy, mesh, toy.init_fn, tx)
    return layout, js.make_step(toy.loss_fn, tx, layout, engine=ENGINE), js.init(toy.init_fn, tx, layout, 0)


def sums(run, layout):
    """The residuals added up over devices, without padding."""
    shapes = jax.tree.leaves(layout.shapes.params)
    found = [np.asarray(x).sum(0) for x in jax.tree.leaves(run.residuals)]
    return [x[tuple(map(slice, like.shape))] for x, like in zip(found, shapes, strict=True)]


@pytest.mark.slow
def test_a_run_goes_on_from_its_residuals(tmp_path):
    layout, step, run = made(js.fsdp(min_size=0), data=8)
    run, _ = step(run, nnx_toy().batch)
    js.save(tmp_path, run, layout)
    restored = js.restore(tmp_path, layout)
    jax.tree.map(np.testing.assert_array_equal, restored.residuals, run.residuals)
    assert jax.tree.map(lambda x: x.sharding, restored.residuals) == jax.tree.map(lambda x: x.sharding, run.residuals)
    js.save(tmp_path, run, layout)  # the same run is there
    with pytest.raises(ValueError, match="another run is there"):
        js.save(tmp_path, run._replace(residuals=()), layout)
    # Elsewhere no number of the sum is lost, and all devices have an even share.
    other, go_on, _ = made(js.hsdp(min_size=0), replica=2, data=2)
    moved = js.restore(tmp_path, other)
    for x, expected in zip(sums(moved, other), sums(run, layout), strict=True):
        np.testing.assert_allclose(x, expected, atol=1e-6 * np.abs(expected).max())
        assert expected.size < 8 or expected.any()  # of a few numbers nothing is rounded
    assert all((x == x[0]).all() for x in map(np.asarray, jax.tree.leaves(moved.residuals)))
    moved, metrics = go_on(moved, nnx_toy().batch)
    assert jnp.isfinite(metrics["loss"]) and int(moved.step) == 2
    # A layout without an optimizer reads no residuals.
    assert js.restore(tmp_path, js.layout(js.ddp(), layout.mesh, nnx_toy().init_fn)).residuals == ()


def test_bytes_of_a_run_do_not_leave_them_out_in_silence():
    layout, step, run = made(js.fsdp(min_size=0), data=8)
    with pytest.raises(ValueError, match=r"use js\.save, or leave them out"):
        js.run_to_bytes(step.with_residuals(run), layout)


def test_residuals_of_other_trained_parameters_are_named_with_what_to_do(tmp_path):
    def init_fn(key):
        return {"a": jnp.ones((16, 8)), "b": jnp.ones((16, 8))}

    def made(trainable, tx):
        layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx, trainable=trainable)
        step = js.make_step(lambda params, batch, key: js.Mean(batch.sum(), 8.0), tx, layout, engine=ENGINE)
        return layout, step.with_residuals(js.init(init_fn, tx, layout, 0))

    tx = optax.sgd(0.1)
    (some, run), (every, _) = made(lambda path: path == "a", tx), made(None, tx)
    js.save(tmp_path / "some", run, some)
    with pytest.raises(ValueError, match=r"restore with the trainable= .*\n  - residuals/b: not in the checkpoint"):
        js.restore(tmp_path / "some", every)
    other = js.layout(js.fsdp(min_size=0), every.mesh, init_fn, tx, trainable=lambda path: path == "b")
    with pytest.raises(ValueError, match="residuals/a: in the checkpoint, and not trained by the layout"):
        js.restore(tmp_path / "some", other)
    # What the message advises.
    js.save(tmp_path / "dropped", js.restore(tmp_path / "some", some)._replace(residuals=()), some)
    assert js.restore(tmp_path / "dropped", every).residuals == ()
