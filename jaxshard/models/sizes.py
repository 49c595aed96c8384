"""The ready-made sizes of all families, by name."""

from jaxshard.models.gpt import SIZES as GPT_SIZES
from jaxshard.models.llama import SIZES as LLAMA_SIZES
from jaxshard.models.recipe import Size

SIZES: dict[str, Size] = GPT_SIZES | LLAMA_SIZES
"""Every ready-made size; `SIZES["gpt2"].model(vocab=256)` builds one of them with another vocabulary."""
