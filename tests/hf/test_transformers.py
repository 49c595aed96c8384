"""What a run writes for every family is opened by transformers itself, bit for bit."""

import numpy as np
import pytest

import jaxshard as js
from tests.hf.checkpoints import CASES, ROWS, VOCAB
from tests.hf.test_families import LAYOUTS, TX, load


@pytest.fixture(scope="module", params=CASES)
def opened(request, tmp_path_factory):
    """The case, its folder as transformers wrote it, tokens, and transformers' logits of them."""
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason="extra hf-test")
    from tests.hf.transformers_models import logits, write

    folder = tmp_path_factory.mktemp(request.param)
    model = write(request.param, folder)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (4 * ROWS, 48))
    return request.param, folder, tokens, logits(model, tokens)


@pytest.mark.slow
def test_transformers_opens_what_is_saved(opened, tmp_path):
    """Bit for bit, with the configuration that was read, and with one that is made of the model."""
    from tests.hf.transformers_models import logits, open_folder

    case, folder, tokens, wanted = opened
    model, layout, params = load(folder, *LAYOUTS["tensor"])
    run = js.init(model.init, TX, layout, 0, init_from=params)
    original = open_folder(folder).state_dict()
    for name in ("read", "made"):
        if name == "made":
            model.config = None
        again = open_folder(js.hf.save(tmp_path / name, run, layout, max_bytes=30_000))
        found = again.state_dict()
        assert found.keys() == original.keys()
        assert all(np.array_equal(x.numpy(), original[key].numpy()) for key, x in found.items())
        difference = np.abs(logits(again, tokens) - wanted).max()
        print(f"{case} {name}: logits differ by {difference}")
        assert difference == 0
