"""Greedy tokens are those of transformers' `generate`, for every family, on one device and on eight."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxshard as js
from tests.hf import checkpoints, transformers_models

LENGTH, CLOSE = 64, 1e-5
PROMPTS = [[5, 17, 3, 88, 41], [2, 9], [71, 70, 69, 68, 67, 66, 65, 64, 63]]

MESHES = {
    "one device": (js.fsdp, {"data": 1}),
    "fsdp": (js.fsdp, {"data": 8}),
    "tensor": (lambda: js.compose(js.fsdp(), js.tensor()), {"data": 2, "tensor": 4}),
    "pipeline": (lambda: js.compose(js.fsdp(), js.pipeline("pipe", chunks=1)), {"data": 4, "pipe": 2}),
}


@pytest.fixture(scope="module", params=sorted(checkpoints.CASES))
def opened(request, tmp_path_factory):
    """(the folder of a case with room for all new tokens, what transformers generates, its logits of any tokens)"""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    kind, entries = checkpoints.CASES[request.param]
    longer = {name: 128 for name in ("max_position_embeddings", "n_positions") if name in entries}
    folder: Path = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoints.CASES, request.param, (kind, entries | longer))
        model = transformers_models.write(request.param, folder)
    options = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        rows = [model.generate(torch.tensor([row]), **options, eos_token_id=None)[0].tolist() for row in PROMPTS]
    return folder, rows, lambda row: transformers_models.logits(model, np.array([row]))[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_greedy_tokens_of_transformers(opened, mesh):
    folder, expected, logits = opened
    strategy, axes = MESHES[mesh]
    model = js.hf.model(folder)
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    layout = js.layout(strategy(), js.make_mesh(devices, **axes), model.init)
    found = js.generate(model, js.hf.load(folder, layout), layout, PROMPTS, length=LENGTH)
    for row, other in zip(found, expected, strict=True):
        assert len(row) == len(other)
        if row != other:  # only where two tokens are as likely as each other
            at = next(at for at, (one, two) in enumerate(zip(row, other)) if one != two)
            best = np.sort(logits(other[:at]))[-2:]
            assert best[1] - best[0] < CLOSE, f"{row[at]}, not {other[at]}, at {at}; the two best logits are {best}"
