"""The language model inside of a model that also reads images: its part of config.json, and the names of its tensors.

Such a model is read without its images, as the family of its language model, and saved as that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxshard.hf.families import GEMMA3, MISTRAL, Family

WITH_IMAGES: Mapping[str, Family] = {
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Mistral3ForConditionalGeneration": MISTRAL,
}
"""{architecture in config.json: family of its language model}."""

_SHARED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype")
"""Entries of the full model that are its language model's, unless this has its own."""
_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")


def take_text_part(entries: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entries of config.json for the language model; None for a model that reads no images."""
    family = next((WITH_IMAGES[name] for name in entries.get("architectures") or () if name in WITH_IMAGES), None)
    if family is None:
        return None
    found = {name: entries[name] for name in _SHARED if name in entries} | dict(entries.get("text_config") or {})
    if "tie_word_embeddings" in entries:
        found["tie_word_embeddings"] = entries["tie_word_embeddings"]
    found.pop("final_logit_softcapping", None)  # which transformers applies only without images
    return found | {"architectures": [family.architecture], "model_type": family.model_type}


def name_in_text_part(name: str) -> str | None:
    """Return the name that a tensor has in a file of the language model alone; None for what reads images.

    The name in the file of the full model is "language_model.model.norm.weight" or, from newer versions of
    transformers, "model.language_model.norm.weight"; that of the language model alone is "model.norm.weight".
    """
    if _IMAGES.fullmatch(name):
        return None
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")
