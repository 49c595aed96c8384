"""Every family's weights on a layout, against the numbers of transformers."""

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.hf.checkpoints import CASES, SEEN, SHOWN, numbers, tokens, write_folder

TX = optax.sgd(0.1)
LAYOUTS = {
    "fsdp": (js.fsdp("data", min_size=0), {"data": 8}),
    "tensor": (js.compose(js.fsdp("data", min_size=0), js.tensor()), {"data": 2, "tensor": 4}),
    "pipe": (js.compose(js.fsdp("data", min_size=0), js.pipeline(chunks=1)), {"pipe": 2, "data": 4}),
}


def load(folder, strategy, axes, **settings):
    model = js.hf.model(folder, **settings)
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, TX)
    return model, layout, js.hf.load(folder, layout, **settings)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
    folder, stored = write_folder(tmp_path, case), numbers(case)
    model, _, params = load(folder, *LAYOUTS["fsdp"])
    found = np.asarray(jax.jit(lambda params, tokens: js.models.logits(model, params, tokens))(params, tokens()))
    np.testing.assert_allclose(found[:, SEEN, :SHOWN], stored["logits"], atol=1e-4, rtol=0)
    assert found.argmax(-1).tolist() == stored["best"]
