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
    for name in ("read",) if case == "phi3" else ("read", "made"):  # as a Mistral, whose tensors are not shared
        if name == "made":
            model.config = None
        again = open_folder(js.hf.save(tmp_path / name, run, layout, max_bytes=30_000))
        found = again.state_dict()
        assert found.keys() == original.keys()
        assert all(np.array_equal(x.numpy(), original[key].numpy()) for key, x in found.items())
        difference = np.abs(logits(again, tokens) - wanted).max()
        print(f"{case} {name}: logits differ by {difference}")
        assert difference == 0


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text"), [("gemma3", "gemma3"), ("mistral3", "mistral")])
def test_the_language_model_of_a_model_that_reads_images(kind, text, tmp_path):
    """Its logits are those of the full model for tokens without images."""
    transformers = pytest.importorskip("transformers")
    from tests.hf.transformers_models import logits

    settings = {"text_config": {"model_type": CASES[text][0], **CASES[text][1]}, "vision_config": VISION}
    config = transformers.AutoConfig.for_model(kind, **settings, tie_word_embeddings=kind == "gemma3")
    theirs = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    theirs.save_pretrained(tmp_path / "full")
    tokens = np.random.default_rng(1).integers(0, VOCAB, (ROWS, 48))
    model, layout, params = load(tmp_path / "full", *LAYOUTS["tensor"])
    found = js.models.logits(model, params, tokens)
    np.testing.assert_allclose(found, logits(theirs, tokens), atol=1e-4, rtol=0)
    saved = js.hf.save(tmp_path / "text", params, layout)
    again = transformers.AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").eval()
    np.testing.assert_allclose(logits(again, tokens), logits(theirs, tokens), atol=1e-5, rtol=0)
