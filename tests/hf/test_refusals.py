"""What js.hf refuses, by name."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.hf.checkpoints import draw, numbers, write_folder, write_tensors

TX = optax.sgd(0.1)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, "llama-yarn")


def layout_of(model):
    return js.layout(js.fsdp(), js.make_mesh(data=8), model.init, TX)


def test_an_unknown_architecture_names_the_nearest_ones(folder):
    write_folder(folder, "llama-yarn", architectures=["Llama4ForCausalLM"])
    with pytest.raises(
        ValueError, match=r"Llama4ForCausalLM is not known; the nearest known ones are LlamaForCausalLM"
    ):
        js.hf.model(folder)
    write_folder(folder, "llama-yarn", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(
        ValueError, match=r"LlamaForSequenceClassification is not known; the nearest .* LlamaForCausalLM"
    ):
        js.hf.model(folder)


def test_entries_that_are_not_supported_are_named_all_at_once(folder):
    changes = {
        "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "partial_rotary_factor": 0.5,
        "quantization_config": {"bits": 4}, "embedding_multiplier": 12.0, "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]},
    }  # fmt: skip
    write_folder(folder, "llama-yarn", **changes)
    with pytest.raises(ValueError) as caught:
        js.hf.model(folder)
    message = str(caught.value)
    assert all(name in message for name in changes), message
    assert "longrope" in message and "known are default, linear, llama3 and yarn" in message


def test_an_entry_that_makes_no_difference_can_be_left_out(folder):
    write_folder(folder, "llama-yarn", made_by="somebody")
    with pytest.raises(ValueError, match=r"made_by: 'somebody'.*ignore=\['made_by'\]"):
        js.hf.model(folder)
    model = js.hf.model(folder, ignore=["made_by"])
    js.hf.load(folder, layout_of(model), ignore=["made_by"])


def test_older_configurations_say_the_same(folder):
    new = js.hf.model(folder)
    config = numbers("llama-yarn")["config"]
    scaling = dict(config.pop("rope_parameters"))
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": {"type": scaling.pop("rope_type"), **scaling}}
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    old = js.hf.model(folder)
    assert old.arguments | {"head_dim": None} == new.arguments | {"head_dim": None}


def test_tensors_and_places_are_named_all_at_once(folder):
    shapes = numbers("llama-yarn")["tensors"]
    arrays = {name: draw(name, tuple(shape)) for name, shape in shapes.items()}
    del arrays["model.layers.1.mlp.up_proj.weight"]
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    arrays["model.norm.weight"] = np.zeros(33, np.float32)
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(jnp.bfloat16)
    write_tensors(folder / "model.safetensors", arrays)
    with pytest.raises(ValueError) as caught:
        js.hf.load(folder, layout_of(js.hf.model(folder, dtype="float32")))
    message = str(caught.value)
    for text in (
        "model.layers.1.mlp.up_proj.weight: missing, expected float32[48, 32]",
        "model.layers.0.self_attn.q_proj.bias: float32[32], not in the layout",
        "model.norm.weight: float32[33], expected float32[32]",
        "lm_head.weight: bfloat16[96, 32], expected float32[96, 32]",
    ):
        assert text in message, message


def test_files_that_are_missing_or_cut_off_are_named(folder):
    layout = layout_of(js.hf.model(folder))
    file = folder / "model.safetensors"
    names = list(numbers("llama-yarn")["tensors"])
    index = {name: f"model-0000{1 + (i % 3)}-of-00003.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    raw = file.read_bytes()
    file.unlink()
    (folder / "model-00001-of-00003.safetensors").write_bytes(raw[:-100])
    with pytest.raises(ValueError) as caught:
        js.hf.load(folder, layout)
    message = str(caught.value)
    assert "model-00001-of-00003.safetensors" in message and "cut off" in message
    for missing in ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        assert f"{missing}: No such file" in message
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: no model is here"):
        js.hf.load(folder, layout)


def test_dtypes_are_kept_unless_others_are_asked_for(folder):
    shapes = numbers("llama-yarn")["tensors"]
    arrays = {name: draw(name, tuple(shape)).astype(jnp.bfloat16) for name, shape in shapes.items()}
    write_tensors(folder / "model.safetensors", arrays)
    kept = js.hf.load(folder, layout_of(js.hf.model(folder)))
    assert kept["head"]["lm_head"]["kernel"].dtype == jnp.bfloat16
    wide = layout_of(js.hf.model(folder, dtype="float32"))
    cast = js.hf.load(folder, wide, dtype="float32")
    wanted = arrays["lm_head.weight"].T.astype(np.float32)
    np.testing.assert_array_equal(cast["head"]["lm_head"]["kernel"], wanted)
    with pytest.raises(ValueError, match=r"lm_head.weight: bfloat16\[96, 32\], expected float32\[96, 32\]"):
        js.hf.load(folder, wide)


def test_a_tied_head_may_be_there_twice_if_it_is_the_same(tmp_path):
    folder = write_folder(tmp_path, "llama-llama3")
    shapes = numbers("llama-llama3")["tensors"]
    arrays = {name: draw(name, tuple(shape)) for name, shape in shapes.items()}
    table = arrays["model.embed_tokens.weight"]
    write_tensors(folder / "model.safetensors", arrays | {"lm_head.weight": table})
    layout = layout_of(js.hf.model(folder))
    js.hf.load(folder, layout)
    write_tensors(folder / "model.safetensors", arrays | {"lm_head.weight": table + 1})
    with pytest.raises(ValueError, match=r"lm_head.weight: float32\[96, 32\], not in the layout"):
        js.hf.load(folder, layout)


def test_gpt2_as_it_was_published_has_shorter_names_and_masks(tmp_path):
    folder = write_folder(tmp_path, "gpt2")
    model = js.hf.model(folder)
    layout = layout_of(model)
    wanted = js.hf.load(folder, layout)
    arrays = {name: draw(name, tuple(shape)) for name, shape in numbers("gpt2")["tensors"].items()}
    arrays = {name.removeprefix("transformer."): x for name, x in arrays.items()}
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 4, 4), np.float32) for i in range(4)}
    write_tensors(folder / "model.safetensors", arrays | masks)
    found = js.hf.load(folder, layout)
    np.testing.assert_array_equal(found["blocks"]["qkv"]["kernel"], wanted["blocks"]["qkv"]["kernel"])


def test_a_joined_tensor_and_rotary_positions_of_phi3(tmp_path):
    folder = write_folder(tmp_path, "phi3")
    arrays = {name: draw(name, tuple(shape)) for name, shape in numbers("phi3")["tensors"].items()}
    arrays["model.layers.0.self_attn.qkv_proj.weight"] = np.zeros((32, 32), np.float32)
    write_tensors(folder / "model.safetensors", arrays)
    with pytest.raises(ValueError, match=r"qkv_proj.weight: float32\[32, 32\], expected float32\[64, 32\]"):
        js.hf.load(folder, layout_of(js.hf.model(folder)))
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0]}
    write_folder(folder, "phi3", rope_parameters=rope)
    with pytest.raises(ValueError, match=r"(?s)partial_rotary_factor: only 1 is supported.*the type 'longrope'"):
        js.hf.model(folder)
