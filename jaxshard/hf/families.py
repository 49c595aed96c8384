"""The families of models whose weights can be read: of each the names of its tensors and of its sizes.

A line of a table of names is one of our arrays, the tensor in the files, and how the dimensions of the one become those
of the other:

    blocks.q_proj.kernel    model.layers.{}.self_attn.q_proj.weight    hd c > c h d

So a tensor [h * d, c] of each block is [c, h, d] of ours. `{}` counts the blocks, which are our first dimension, and
after it the experts, our second one. A digit is a dimension of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxshard.models.decoder import Decoder
from jaxshard.models.llama import llama


class Family(NamedTuple):
    """A family of models: the names of its tensors, and of its sizes in config.json.

    Attributes:
      architecture: its name in config.json.
      model_type: likewise.
      make: the function of `js.models` that builds the model.
      names: the table of its tensors.
      sizes: of each argument of `make` the entry of config.json.
      defaults: the values of entries that may be absent.
      only: entries of which one value alone is supported; also what they are if they are absent.
      unused: patterns of tensors in the files that are no weights.
    """

    architecture: str
    model_type: str
    make: Callable[..., Decoder]
    names: str
    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = {}
    unused: str = r".*\.rotary_emb\.inv_freq"

    def rows(self) -> list[list[str]]:
        """Return the table's rows: ours, theirs, dimensions."""
        return [line.split(maxsplit=2) for line in self.names.splitlines() if line.strip()]


_SIZES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "intermediate_size",
    "seq": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_DEFAULTS = {"head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
_ENDS = """
embed.embed_tokens.embedding  model.embed_tokens.weight  v c > v c
head.norm.scale               model.norm.weight          c > c
head.lm_head.kernel           lm_head.weight             v c > c v
"""
_ATTENTION = """
blocks.attn_norm.scale  model.layers.{}.input_layernorm.weight   c > c
blocks.q_proj.kernel    model.layers.{}.self_attn.q_proj.weight  hd c > c h d
blocks.k_proj.kernel    model.layers.{}.self_attn.k_proj.weight  kd c > c k d
blocks.v_proj.kernel    model.layers.{}.self_attn.v_proj.weight  kd c > c k d
blocks.o_proj.kernel    model.layers.{}.self_attn.o_proj.weight  c hd > h d c
"""
_MLP = """
blocks.mlp_norm.scale    model.layers.{}.post_attention_layernorm.weight  c > c
blocks.gate_proj.kernel  model.layers.{}.mlp.gate_proj.weight             f c > c f
blocks.up_proj.kernel    model.layers.{}.mlp.up_proj.weight               f c > c f
blocks.down_proj.kernel  model.layers.{}.mlp.down_proj.weight             c f > f c
"""

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    llama,
    _ENDS + _ATTENTION + _MLP,
    _SIZES,
    _DEFAULTS | {"num_key_value_heads": None},
    {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)

FAMILIES = {family.architecture: family for family in (LLAMA,)}
"""All families by the name of their architecture in config.json."""
