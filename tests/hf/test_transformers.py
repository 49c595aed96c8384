"""Every family against transformers itself: logits under every layout, and folders written back."""

import numpy as np
import pytest

import jaxshard as js
from tests.hf.checkpoints import CASES, ROWS, VOCAB
from tests.hf.test_families import LAYOUTS, TX, load

EXPERTS = {"experts": (js.compose(js.fsdp("data", min_size=0), js.expert()), {"data": 2, "expert": 4})}


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
@pytest.mark.parametrize("name", [*LAYOUTS, *EXPERTS])
def test_logits_of_random_tokens(opened, name):
    case, folder, tokens, wanted = opened
    if name == "experts" and not case.startswith(("mixtral", "qwen3_moe")):
        return
    model, layout, params = load(folder, *(LAYOUTS | EXPERTS)[name])
    run = js.init(model.init, TX, layout, 0, init_from=params)
    found = js.make_apply(lambda params, tokens: js.models.logits(model, params, tokens), layout)(run, tokens)
    difference = np.abs(np.asarray(found) - wanted).max()
    print(f"{case} {name}: {difference:.1e} of logits up to {np.abs(wanted).max():.1f}")
    assert difference < 1e-4


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
