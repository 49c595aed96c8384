"""Small models of every family, with and without transformers.

The weights are drawn by NumPy from the name of each tensor, so they are the same everywhere and are stored nowhere.
`numbers.json` has what transformers computes with them; tests/hf/write_numbers.py wrote it.
"""

import json
import zlib
from pathlib import Path

import numpy as np

from jaxshard.checkpoint.safetensors.header import CODES, Tensor
from jaxshard.checkpoint.safetensors.reader import StoredTensor

NUMBERS = Path(__file__).with_name("numbers.json")
VOCAB, ROWS, SEQ = 96, 2, 40
SEEN = (0, 5, 19, 39)  # positions whose logits are stored, of the tokens
SHOWN = 12  # so many of them

_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500000.0,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}

_GEMMA = _LLAMA | {
    "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
}  # fmt: skip

# Rows are longer than windows, and than the lengths that scaled models were trained on.
CASES = {
    "llama": ("llama", _LLAMA),
    "llama-llama3": ("llama", _LLAMA | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", _LLAMA | {"rope_parameters": _YARN, "num_hidden_layers": 2}),
    "llama-linear": (
        "llama",
        _LLAMA
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, "head_dim": 8}
        | {"num_hidden_layers": 2},
    ),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 7}),
    "qwen2": ("qwen2", _LLAMA | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("phi3", _LLAMA | {"sliding_window": 7, "pad_token_id": 0}),
    "olmo2": ("olmo2", _LLAMA | {"num_hidden_layers": 2}),
    "mixtral": ("mixtral", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11}),
    "qwen3_moe": (
        "qwen3_moe",
        _LLAMA | {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "n_inner": 96}),
    "gemma2": ("gemma2", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        "gemma3_text",
        _GEMMA | {"num_hidden_layers": 6, "sliding_window_pattern": 3, "final_logit_softcapping": 6.0},
    ),
    "gemma3-linear": (
        "gemma3_text",
        _GEMMA | {"tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
        | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }},
    ),
}  # fmt: skip
"""The model_type and configuration of each case."""


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a tensor: large enough that every part of the model makes a difference."""
    x = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if len(shape) == 1:
        # Norms of single heads are smaller: large logits of attention would make rounding errors large.
        center = (0.5 if "q_norm" in name or "k_norm" in name else 1) if name.endswith("weight") else 0
        return (0.3 * x + center).astype(np.float32)
    return (x / np.sqrt(shape[-1]) * (1.5 if "embed" in name or "wte" in name else 0.8)).astype(np.float32)


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ))


def numbers(case: str) -> dict:
    return json.loads(NUMBERS.read_text())[case]


def all_of(tensor: StoredTensor) -> np.ndarray:
    """The complete tensor, read from its file or object."""
    return tensor.copy_part((slice(None),) * len(tensor.tensor.shape))


def write_folder(folder: Path, case: str, **entries: object) -> Path:
    """Write config.json and model.safetensors of a case, as transformers does."""
    stored = numbers(case)
    (folder / "config.json").write_text(json.dumps(stored["config"] | entries))
    write_tensors(folder / "model.safetensors", {name: draw(name, tuple(s)) for name, s in stored["tensors"].items()})
    return folder


def write_tensors(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file as the `safetensors` library does: without our metadata."""
    placed, at = {}, 0
    for name, x in arrays.items():
        placed[name] = Tensor(str(x.dtype), x.shape, at)
        at += x.nbytes
    header = json.dumps(
        {
            name: {"dtype": CODES[one.dtype], "shape": one.shape, "data_offsets": [one.start, one.start + one.size]}
            for name, one in placed.items()
        }
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(x.tobytes() for x in arrays.values()))
