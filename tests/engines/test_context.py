"""Positions split over an axis: losses to 1e-6 and gradients to 1e-5 of one device's, with every engine and mesh."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import jaxshard as js

ROWS, SEQ = 8, 32


def llama(**changes):
    sizes = {"vocab": 64, "width": 32, "depth": 2, "heads": 8, "kv_heads": 4, "hidden": 64, "seq": SEQ}
    return js.models.llama(**sizes | changes)


def gpt(**changes):
    return js.models.gpt(**{"vocab": 64, "width": 32, "depth": 2, "heads": 8, "seq": SEQ} | changes)


def plain_rows(seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, 64, (ROWS, SEQ + 1), dtype=np.int32)}


def packed_rows(seed=0):
    """Rows of documents with odd lengths, their positions from 0, and weight 0 for labels of the next document."""
    rng = np.random.default_rng(seed)
    begins = np.zeros((ROWS, SEQ), bool)
    for row in begins:
        row[rng.choice(SEQ, 4, replace=False)] = True
    begins[:, 0] = True
    number = np.arange(SEQ)
    starts = np.maximum.accumulate(np.where(begins, number, 0), axis=1)
    last = np.concatenate([begins[:, 1:], np.ones((ROWS, 1), bool)], axis=1)
    return plain_rows(seed) | {
        "segment_ids": begins.cumsum(1).astype(np.int32),
        "positions": (number - starts).astype(np.int32),
        "weights": np.where(last, 0, rng.uniform(0.5, 2, last.shape)).astype(np.float32),
    }


def make_strategy(axes, how="gather"):
    context = tuple(axis for axis in axes if axis.startswith("context"))
    parts = [js.fsdp(tuple(axis for axis in axes if axis not in ("tensor", "pipe")), min_size=0)]
    parts.append(js.context(context, how=how))
    if "tensor" in axes:
        parts.append(js.tensor())
    if "pipe" in axes:
        parts.append(js.pipeline("pipe", chunks=1))
    return js.compose(*parts)


def check(model, axes, batch, engine, how="gather"):
    mesh = js.make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)
    strategy = make_strategy(axes, how)
    report = js.parity(model.init, model.loss, optax.sgd(0.1), strategy, mesh, batch, engine=engine)
    report.check()
    return report


def test_packed_rows_under_explicit_to_1e_6():
    check(llama(), {"data": 2, "context": 4}, packed_rows(), js.explicit(microbatches=2))


def test_dropout_is_that_of_one_device():
    check(gpt(dropout=0.3), {"context": 4}, plain_rows(), js.explicit())


MESHES = [
    {"context": 2},
    {"context": 4},
    {"context": 8},
    {"data": 2, "context": 4},
    {"context": 4, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit(), js.auto(), js.explicit(microbatches=2, scatter="end")], ids=str)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("make", [llama, gpt])
def test_every_mesh_equals_one_device_to_1e_6(make, axes, engine):
    for batch in (plain_rows(), packed_rows()):
        check(make(), axes, batch, engine)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ulysses", "usp", "ring"])
@pytest.mark.parametrize("engine", [js.explicit(), js.auto()], ids=lambda engine: engine.name)
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_form_equals_one_device_to_1e_6(how, engine, tensor):
    axes = {"context0": 2, "context1": 2} if how == "usp" else {"context": 4}
    check(llama(), {**axes, "tensor": tensor}, packed_rows(), engine, how)
