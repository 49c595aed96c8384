"""Parts of parameters that are cut before a step computes anything, as on TPUs, and after it: the same numbers."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.training import views
from tests.toys import normal

TX = optax.adam(0.1)


def init_fn(key):
    return {"w": normal(0, 16, 8), "v": normal(1, 8, 3)}


def loss_fn(params, batch, key):
    error = (batch["x"] @ params["w"] @ params["v"]) ** 2
    return js.Mean(error.sum(), error.size)


def trained(engine):
    """Parameters after two steps under ZeRO-1, the step's collectives, and the bytes of its temporaries."""
    mesh = js.make_mesh(data=8)
    layout = js.layout(js.zero1(min_size=0), mesh, init_fn, TX)
    batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    run, step = js.init(init_fn, TX, layout, 0), js.make_step(loss_fn, TX, layout, engine=engine)
    compiled = step.compile(batch)
    for _ in range(2):
        run, _ = step(run, batch)
    found = sorted(str((one.kind, one.elements, one.axes)) for one in js.collectives(compiled.as_text(), mesh))
    return jax.tree.map(np.asarray, run.params), found, compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit(microbatches=2), js.auto()], ids=["explicit", "auto"])
def test_parts_that_are_cut_first_change_neither_numbers_nor_collectives(engine, monkeypatch):
    params, collectives, size = trained(engine)
    monkeypatch.setattr(views, "is_tpu", lambda kind: True)
    first, same, held = trained(engine)
    jax.tree.map(np.testing.assert_array_equal, first, params)
    assert same == collectives and held <= size + 4 * (16 * 8 + 8 * 3) / 8 * 2
