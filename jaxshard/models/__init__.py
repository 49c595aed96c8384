"""Ready-made models of all families."""

from jaxshard.models import gpt, llama
from jaxshard.models.decoder import Size

SIZES: dict[str, Size] = gpt.SIZES | llama.SIZES
"""Every ready-made size; `SIZES["gpt2"].model(vocab=256)` is one of them with another vocabulary."""
