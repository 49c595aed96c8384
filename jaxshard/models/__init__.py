"""Ready-made models: decoder-only transformers in common sizes.

Imports `core/`, `adapt/` and `layers/`.
"""

from jaxshard.models.decoder import Decoder as Decoder
from jaxshard.models.decoder import logits as logits
from jaxshard.models.gemma import gemma as gemma
from jaxshard.models.gpt import gpt as gpt
from jaxshard.models.llama import llama as llama
from jaxshard.models.moe import moe as moe
from jaxshard.models.quantize import quant_rules as quant_rules
from jaxshard.models.readout import embed_tokens as embed_tokens
from jaxshard.models.readout import logits_of_embedded as logits_of_embedded
from jaxshard.models.recipe import Recipe as Recipe
from jaxshard.models.recipe import Size as Size
from jaxshard.models.rope import LinearScaling as LinearScaling
from jaxshard.models.rope import RopeScaling as RopeScaling
from jaxshard.models.rope import YarnScaling as YarnScaling
from jaxshard.models.sizes import SIZES as SIZES
from jaxshard.models.sizes import make as make
