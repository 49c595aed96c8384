"""The supported families of Hugging Face models, with the names of their tensors and sizes.

A line in a table of names has the path of an array of jaxshard, the name of the tensor in the files, and the mapping of
dimensions (tensor > array):

    blocks.q_proj.kernel    model.layers.{}.self_attn.q_proj.weight    hd c > c h d

Here the tensor [h * d, c] of each block becomes a slice [c, h, d] of jaxshard's stacked array. The first `{}` is the
index of the block, the array's first dimension; a second `{}` is the index of the expert, the array's second dimension.
A digit in place of a letter is a dimension of that size.

Several arrays may share a tensor, as queries, keys and values in Phi-3. Then the tensor's first dimension is a sum, and
the array is the part in brackets:

    blocks.k_proj.kernel    model.layers.{}.self_attn.qkv_proj.weight    hd+[kd]+kd c > c k d
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxshard.hf.entries import (
    EXPANSION,
    LAST_WINDOWS,
    ROPE,
    SWITCHED_WINDOW,
    TWO_ROPES,
    WINDOW,
    Group,
    windows_in_turn,
)
from jaxshard.models.decoder import Decoder
from jaxshard.models.gemma import gemma
from jaxshard.models.gpt import gpt
from jaxshard.models.llama import llama
from jaxshard.models.moe import moe


class Family(NamedTuple):
    """A family of models (such as Llama): how its tensors and config.json map to a function of `js.models`.

    Attributes:
      architecture: the entry "architectures" in config.json.
      model_type: the entry "model_type" in config.json.
      make: the function of `js.models` that builds the model.
      names: a table with a line for each array: its path, the name of its tensor, the mapping of dimensions.
      sizes: {argument of `make`: name of its entry in config.json}; "one|other" if the entry has two names.
      groups: groups of entries that are converted together.
      defaults: the values of entries that may be absent.
      only: {name: value} of entries with a single supported value, which is also their default.
      fixed: arguments that are the same for all models of the family.
      unread: the names of entries that have no effect in this family.
      unused: a regular expression for the names of tensors in the files that are not model weights.
      prefix: the prefix of most tensors' names. If a model was saved without its output layer, the names lack it.
    """

    architecture: str
    model_type: str
    make: Callable[..., Decoder]
    names: str
    sizes: Mapping[str, str]
    groups: tuple[Group, ...] = ()
    defaults: Mapping[str, Any] = {}
    only: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}
    unread: tuple[str, ...] = ()
    unused: str = r".*\.rotary_emb\.inv_freq"
    prefix: str = "model."

    def rows(self) -> list[list[str]]:
        """Split the lines of the table `names`: [path of the array, name of the tensor, mapping of dimensions]."""
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
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
_ENDS = """
embed.embed_tokens.embedding  model.embed_tokens.weight  v c > v c
head.norm.scale               model.norm.weight          c > c
head.lm_head.kernel           lm_head.weight             v c > c v
"""
_PROJECTIONS = """
blocks.q_proj.kernel  model.layers.{}.self_attn.q_proj.weight  hd c > c h d
blocks.k_proj.kernel  model.layers.{}.self_attn.k_proj.weight  kd c > c k d
blocks.v_proj.kernel  model.layers.{}.self_attn.v_proj.weight  kd c > c k d
blocks.o_proj.kernel  model.layers.{}.self_attn.o_proj.weight  c hd > h d c
"""
_ATTN_NORM = """
blocks.attn_norm.scale  model.layers.{}.input_layernorm.weight  c > c
"""
_ATTENTION = _ATTN_NORM + _PROJECTIONS
_HEAD_NORMS = """
blocks.q_norm.scale  model.layers.{}.self_attn.q_norm.weight  d > d
blocks.k_norm.scale  model.layers.{}.self_attn.k_norm.weight  d > d
"""
_MLP_NORM = """
blocks.mlp_norm.scale  model.layers.{}.post_attention_layernorm.weight  c > c
"""
_MLP = """
blocks.gate_proj.kernel  model.layers.{}.mlp.gate_proj.weight  f c > c f
blocks.up_proj.kernel    model.layers.{}.mlp.up_proj.weight    f c > c f
blocks.down_proj.kernel  model.layers.{}.mlp.down_proj.weight  c f > f c
"""
_DENSE = _ENDS + _ATTENTION + _MLP_NORM + _MLP

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    make=llama,
    names=_DENSE,
    sizes=_SIZES,
    groups=(ROPE,),
    defaults=_DEFAULTS | {"num_key_value_heads": None},
    only=_PLAIN | {"mlp_bias": False},
)

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    make=llama,
    names=_DENSE,
    sizes=_SIZES,
    groups=(ROPE, WINDOW),
    defaults=_DEFAULTS,
    only=_PLAIN,
)

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    make=llama,
    names=_DENSE
    + """
blocks.q_proj.bias  model.layers.{}.self_attn.q_proj.bias  hd > h d
blocks.k_proj.bias  model.layers.{}.self_attn.k_proj.bias  kd > k d
blocks.v_proj.bias  model.layers.{}.self_attn.v_proj.bias  kd > k d
""",
    sizes=_SIZES,
    groups=(ROPE, LAST_WINDOWS),
    defaults=_DEFAULTS,
    only={name: x for name, x in _PLAIN.items() if name != "attention_bias"},
    fixed={"qkv_bias": True},
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    make=llama,
    names=_DENSE + _HEAD_NORMS,
    sizes=_SIZES,
    groups=(ROPE, LAST_WINDOWS),
    defaults=_DEFAULTS | {"head_dim": 128},
    only=_PLAIN,
    fixed={"qk_norm": True},
)

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    make=llama,
    names=_ENDS
    + _ATTN_NORM
    + _MLP_NORM
    + """
blocks.q_proj.kernel     model.layers.{}.self_attn.qkv_proj.weight  [hd]+kd+kd c > c h d
blocks.k_proj.kernel     model.layers.{}.self_attn.qkv_proj.weight  hd+[kd]+kd c > c k d
blocks.v_proj.kernel     model.layers.{}.self_attn.qkv_proj.weight  hd+kd+[kd] c > c k d
blocks.o_proj.kernel     model.layers.{}.self_attn.o_proj.weight    c hd > h d c
blocks.gate_proj.kernel  model.layers.{}.mlp.gate_up_proj.weight    [f]+f c > c f
blocks.up_proj.kernel    model.layers.{}.mlp.gate_up_proj.weight    f+[f] c > c f
blocks.down_proj.kernel  model.layers.{}.mlp.down_proj.weight       c f > f c
""",
    sizes=_SIZES,
    groups=(ROPE, WINDOW),
    defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": None},
    only=_PLAIN,
    unread=("auto_map", "embd_pdrop", "original_max_position_embeddings", "resid_pdrop"),
)

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    make=llama,
    names=_ENDS
    + _PROJECTIONS
    + _MLP
    + """
blocks.q_norm.scale     model.layers.{}.self_attn.q_norm.weight            hd > h d
blocks.k_norm.scale     model.layers.{}.self_attn.k_norm.weight            kd > k d
blocks.attn_norm.scale  model.layers.{}.post_attention_layernorm.weight    c > c
blocks.mlp_norm.scale   model.layers.{}.post_feedforward_layernorm.weight  c > c
""",
    sizes=_SIZES,
    groups=(ROPE,),
    defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": None},
    only=_PLAIN,
    fixed={"qk_norm": "joint", "norm_after": True},
)

_ROUTED = "".join(line.replace("blocks.", "blocks.attention.") for line in _ATTENTION.splitlines(keepends=True))
_ROUTED_SIZES = _SIZES | {"k": "num_experts_per_tok"}

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    make=moe,
    names=_ENDS
    + _ROUTED
    + _MLP_NORM
    + """
blocks.router.kernel      model.layers.{}.block_sparse_moe.gate.weight           e c > c e
blocks.experts.gate_proj  model.layers.{}.block_sparse_moe.experts.{}.w1.weight  f c > c f
blocks.experts.up_proj    model.layers.{}.block_sparse_moe.experts.{}.w3.weight  f c > c f
blocks.experts.down_proj  model.layers.{}.block_sparse_moe.experts.{}.w2.weight  c f > f c
""",
    sizes=_ROUTED_SIZES | {"experts": "num_local_experts"},
    groups=(ROPE, WINDOW),
    defaults=_DEFAULTS | {"rope_theta": 1e6},
    only=_PLAIN | {"router_jitter_noise": 0.0},
    fixed={"normalize": True, "balance": 0.0},
)

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    make=moe,
    names=_ENDS
    + _ROUTED
    + _HEAD_NORMS.replace("blocks.", "blocks.attention.")
    + _MLP_NORM
    + """
blocks.router.kernel      model.layers.{}.mlp.gate.weight                  e c > c e
blocks.experts.gate_proj  model.layers.{}.mlp.experts.{}.gate_proj.weight  f c > c f
blocks.experts.up_proj    model.layers.{}.mlp.experts.{}.up_proj.weight    f c > c f
blocks.experts.down_proj  model.layers.{}.mlp.experts.{}.down_proj.weight  c f > f c
""",
    sizes=_ROUTED_SIZES
    | {"hidden": "moe_intermediate_size", "experts": "num_experts|num_local_experts", "normalize": "norm_topk_prob"},
    groups=(ROPE, SWITCHED_WINDOW),
    defaults=_DEFAULTS | {"norm_topk_prob": False},
    only=_PLAIN | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    fixed={"qk_norm": True, "balance": 0.0},
    unread=("intermediate_size",),
)

_GEMMA_SIZES = _SIZES | {
    "query_scale": "query_pre_attn_scalar",
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
_GEMMA_ONLY = {
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0,
    "use_bidirectional_attention": False,
}  # fmt: skip
_GEMMA = (
    _ENDS
    + _ATTENTION
    + _MLP
    + """
blocks.attn_post_norm.scale  model.layers.{}.post_attention_layernorm.weight    c > c
blocks.mlp_norm.scale        model.layers.{}.pre_feedforward_layernorm.weight   c > c
blocks.mlp_post_norm.scale   model.layers.{}.post_feedforward_layernorm.weight  c > c
"""
)
_GEMMA_DEFAULTS = _DEFAULTS | {"head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    make=gemma,
    names=_GEMMA,
    sizes=_GEMMA_SIZES,
    groups=(ROPE, windows_in_turn(2)),
    defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    only=_GEMMA_ONLY,
    unread=("hidden_act",),
)

_GEMMA3_DEFAULTS = _GEMMA_DEFAULTS | {
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1e6, "vocab_size": 262_208,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip

GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    make=gemma,
    names=_GEMMA + _HEAD_NORMS,
    sizes=_GEMMA_SIZES,
    groups=(TWO_ROPES, windows_in_turn(6)),
    defaults=_GEMMA3_DEFAULTS,
    only=_GEMMA_ONLY,
    fixed={"qk_norm": True},
    unread=("hidden_act",),
)

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    make=gpt,
    names="""
embed.wte.embedding     transformer.wte.weight                   v c > v c
embed.wpe               transformer.wpe.weight                   s c > s c
blocks.ln_1.scale       transformer.h.{}.ln_1.weight             c > c
blocks.ln_1.bias        transformer.h.{}.ln_1.bias               c > c
blocks.qkv.kernel       transformer.h.{}.attn.c_attn.weight      c 3hd > c h3d
blocks.qkv.bias         transformer.h.{}.attn.c_attn.bias        3hd > h3d
blocks.attn_out.kernel  transformer.h.{}.attn.c_proj.weight      f c > f c
blocks.attn_out.bias    transformer.h.{}.attn.c_proj.bias        c > c
blocks.ln_2.scale       transformer.h.{}.ln_2.weight             c > c
blocks.ln_2.bias        transformer.h.{}.ln_2.bias               c > c
blocks.mlp_in.kernel    transformer.h.{}.mlp.c_fc.weight         c f > c f
blocks.mlp_in.bias      transformer.h.{}.mlp.c_fc.bias           f > f
blocks.mlp_out.kernel   transformer.h.{}.mlp.c_proj.weight       f c > f c
blocks.mlp_out.bias     transformer.h.{}.mlp.c_proj.bias         c > c
head.ln_f.scale         transformer.ln_f.weight                  c > c
head.ln_f.bias          transformer.ln_f.bias                    c > c
head.lm_head.kernel     lm_head.weight                           v c > c v
""",
    sizes={
        "vocab": "vocab_size", "width": "n_embd", "depth": "n_layer", "heads": "n_head", "seq": "n_positions",
        "tied": "tie_word_embeddings",
    },
    groups=(EXPANSION,),
    defaults={"tie_word_embeddings": True},
    only={
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False,
    },
    unused=r".*\.attn\.(masked_)?bias",
    prefix="transformer.",
)  # fmt: skip

FAMILIES = {
    family.architecture: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE, GEMMA2, GEMMA3, GPT2)
}
"""{name of the architecture in config.json: family} of all families."""
