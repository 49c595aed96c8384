"""Gemma, and blocks that differ in their windows, under every engine against one device.

tests/hf/ compares the logits with those of transformers.
"""

import numpy as np
import optax
import pytest

import jaxshard as js

SIZES = {"vocab": 64, "width": 32, "depth": 4, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 32}
GEMMA = SIZES | {
    "head_dim": 16, "window": [5, 5, None, 7], "window_rope_base": 5e3, "rope_base": 1e5, "qk_norm": True,
    "query_scale": 24, "attention_cap": 5.0, "logit_cap": 4.0,
}  # fmt: skip
FSDP = js.fsdp("data", min_size=0)
CELLS = {
    "auto": (js.compose(FSDP, js.tensor()), {"data": 2, "tensor": 4}, js.auto()),
    "explicit": (js.compose(FSDP, js.tensor()), {"data": 4, "tensor": 2}, js.explicit(microbatches=2)),
    "pipelined": (js.compose(FSDP, js.pipeline()), {"pipe": 2, "data": 4}, js.pipelined(microbatches=2)),
    "context": (js.compose(FSDP, js.context("context")), {"data": 2, "context": 4}, js.explicit()),
}


def batch():
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (16, 24)), axis=1)
    tokens, targets = rng.integers(0, 64, (2, 16, 24))
    return {"tokens": tokens, "targets": targets, "segment_ids": segments}


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_of_gemma_is_that_of_one_device(cell):
    strategy, axes, engine = CELLS[cell]
    model = js.models.gemma(**GEMMA)
    result = js.parity(model.init, model.loss, optax.adam(1e-3), strategy, js.make_mesh(**axes), batch(), engine=engine)
    assert result.ok, result


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_with_biases_and_windows_is_that_of_one_device(cell):
    strategy, axes, engine = CELLS[cell]
    model = js.models.llama(**SIZES, qkv_bias=True, window=[None, 5, 7, None])
    result = js.parity(model.init, model.loss, optax.adam(1e-3), strategy, js.make_mesh(**axes), batch(), engine=engine)
    assert result.ok, result


def test_wrong_windows_are_refused():
    for window, error, text in (
        ([5, None], ValueError, "a list of 4, one for each block"),
        (0, ValueError, "must be at least 1"),
        (2.5, TypeError, "whole number or None, got 2.5"),
    ):
        with pytest.raises(error, match=text):
            js.models.llama(**SIZES, window=window)
    with pytest.raises(ValueError, match="query_scale"):
        js.models.gemma(**GEMMA | {"query_scale": 0})
