"""Every family's weights on a layout, against the numbers of transformers."""

import json

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.checkpoint.safetensors.reader import open_files
from jaxshard.hf.config import make_config
from tests.hf.checkpoints import CASES, SEEN, SHOWN, all_of, draw, numbers, tokens, write_folder, write_tensors

SIZES = {"vocab": 96, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "seq": 64}
FAST = ("gemma3",)
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


def slow_but(cases, fast):
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", slow_but(CASES, FAST))
def test_logits_are_those_of_transformers(case, tmp_path):
    folder, stored = write_folder(tmp_path, case), numbers(case)
    model, _, params = load(folder, *LAYOUTS["fsdp"])
    found = np.asarray(jax.jit(lambda params, tokens: js.models.logits(model, params, tokens))(params, tokens()))
    np.testing.assert_allclose(found[:, SEEN, :SHOWN], stored["logits"], atol=1e-4, rtol=0)
    assert found.argmax(-1).tolist() == stored["best"]


@pytest.mark.parametrize("case", slow_but(CASES, ["llama-llama3"]))
def test_what_is_saved_is_what_was_loaded(case, tmp_path):
    """Also from blocks in stages, and in several files."""
    folder = write_folder(tmp_path, case)
    for place, names in (
        (folder, ("tokenizer.json", "merges.txt", "other.txt")),
        (tmp_path / "saved", ("merges.txt",)),
    ):
        place.mkdir(exist_ok=True)
        for name in names:
            (place / name).write_text(f"{name} of {place.name}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    model, layout, params = load(folder, *LAYOUTS["pipe" if case == "gpt2" else "tensor"])
    run = js.init(model.init, TX, layout, 0, init_from=params)
    saved = js.hf.save(tmp_path / "saved", run, layout, max_bytes=20_000)
    found, problems = open_files(saved / "model.safetensors")
    assert not problems and len({one.file for one in found.values()}) > 1
    assert {name: list(one.tensor.shape) for name, one in found.items()} == numbers(case)["tensors"]
    assert all(np.array_equal(all_of(one), draw(name, one.tensor.shape)) for name, one in found.items())
    assert js.hf.model(saved).arguments == model.arguments
    assert (saved / "tokenizer.json").read_text() == f"tokenizer.json of {folder.name}"
    assert (saved / "additional_chat_templates" / "rag.jinja").read_text() == "documents"
    assert (saved / "merges.txt").read_text() == "merges.txt of saved" and not (saved / "other.txt").exists()
    with pytest.raises(FileExistsError, match="there already"):
        js.hf.save(saved, run, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "images"), [("model.language_model.", "model."), ("language_model.model.", "")])
def test_the_language_model_of_a_model_that_reads_images(body, images, tmp_path):
    """Under the names of both forms; it is saved as what it is."""
    stored = numbers("gemma3")
    inner = {name: x for name, x in stored["config"].items() if name not in ("architectures", "eos_token_id", "dtype")}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    config = json.dumps(outer | {"vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 4, "dtype": "float32"})
    (tmp_path / "config.json").write_text(config)
    arrays = {name.replace("model.", body, 1): draw(name, tuple(shape)) for name, shape in stored["tensors"].items()}
    arrays |= {f"{images}{part}.a.weight": np.ones(3) for part in ("vision_tower", "multi_modal_projector")}
    write_tensors(tmp_path / "model.safetensors", arrays)
    model, layout, params = load(tmp_path, *LAYOUTS["fsdp"])
    (tmp_path / "text").mkdir()
    plain, _, wanted = load(write_folder(tmp_path / "text", "gemma3"), *LAYOUTS["fsdp"])
    assert model.arguments == plain.arguments | {"logit_cap": None}  # as the full model in transformers has none
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, wanted)))
    saved = js.hf.save(tmp_path / "saved", params, layout)
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    found, _ = open_files(saved / "model.safetensors")
    assert found.keys() == stored["tensors"].keys()


@pytest.mark.slow
def test_another_tokenizer_takes_the_place_of_the_models_own(tmp_path):
    """Its files alone are copied; how tokens are drawn stays the model's."""
    folder = write_folder(tmp_path, "gpt2")
    for place, names in (
        (folder, ("tokenizer.json", "merges.txt", "generation_config.json")),
        (tmp_path / "words", ("any.json", "tokenizer_config.json", "generation_config.json")),
    ):
        place.mkdir(exist_ok=True)
        for name in names:
            (place / name).write_text(f"{name} of {place.name}")
    _, layout, params = load(folder, *LAYOUTS["fsdp"])
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        js.hf.save(tmp_path / "saved", params, layout, tokenizer=tmp_path / "absent")
    saved = js.hf.save(tmp_path / "saved", params, layout, tokenizer=tmp_path / "words" / "any.json")
    beside = {file.name: file.read_text() for file in saved.iterdir() if " of " in file.read_text(errors="ignore")[:60]}
    assert beside == {
        "tokenizer.json": "any.json of words",
        "tokenizer_config.json": "tokenizer_config.json of words",
        "generation_config.json": f"generation_config.json of {folder.name}",
    }


@pytest.mark.parametrize(
    ("make", "architecture"),
    [
        (lambda **sizes: js.models.llama(**sizes), "LlamaForCausalLM"),
        (
            lambda **sizes: js.models.llama(**sizes, window=5, rope_scaling=js.models.YarnScaling(4)),
            "MistralForCausalLM",
        ),
        (lambda **sizes: js.models.llama(**sizes, qkv_bias=True, window=[None, 5]), "Qwen2ForCausalLM"),
        (lambda **sizes: js.models.llama(**sizes, qk_norm=True, tied=True), "Qwen3ForCausalLM"),
        (lambda **sizes: js.models.llama(**sizes, qk_norm="joint", norm_after=True), "Olmo2ForCausalLM"),
        (lambda **sizes: js.models.moe(**sizes, experts=4, k=2), "MixtralForCausalLM"),
        (lambda **sizes: js.models.moe(**sizes, experts=4, k=2, qk_norm=True), "Qwen3MoeForCausalLM"),
        (lambda **sizes: js.models.gemma(**sizes, head_dim=8, window=[5, None], logit_cap=3.0), "Gemma2ForCausalLM"),
        (lambda **sizes: js.models.gemma(**sizes, head_dim=8, window=[5, 5], qk_norm=True), "Gemma3ForCausalLM"),
    ],
)
def test_a_model_without_a_configuration_gets_one(make, architecture):
    model = make(**SIZES)
    config = make_config(model, "float32")
    assert config.family.architecture == architecture
    assert config.entries["dtype"] == "float32" and config.entries["model_type"] == config.family.model_type


def test_a_model_that_no_family_is_is_not_saved():
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM: qkv_bias=True"):
        make_config(js.models.llama(**SIZES, qkv_bias=True, qk_norm=True), "float32")
