"""Find a folder with config.json and safetensors files, by its path or in the cache of the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from jaxshard.checkpoint.strict_json import decode_object, read_plain_file
from jaxshard.core.local_path import local_path

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
DRAWING = "generation_config.json"
"""The file with the default options of text generation."""

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The names of all files of a tokenizer."""


def find_folder(name: str | os.PathLike[str]) -> Path:
    """Find a model's folder by its path, or by the model's name "owner/name" in the cache of the Hugging Face hub.

    Args:
      name: a folder, or the name of a model on the hub. Nothing is downloaded.

    Raises:
      FileNotFoundError: neither exists; the message says how to download the model.
    """
    folder = local_path(name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).exists():
            raise FileNotFoundError(f"js.hf: {folder} has no {CONFIG}; name a folder with {CONFIG} and {WEIGHTS}")
        return folder.absolute()
    parts = str(name).split("/")
    if len(parts) != 2 or not all(parts) or str(name).startswith((".", "~")):
        raise FileNotFoundError(f"js.hf: there is no folder {folder}")
    cached = _cache() / f"models--{'--'.join(parts)}"
    revision = cached / "refs" / "main"
    if revision.is_file():
        snapshot = cached / "snapshots" / revision.read_text().strip()
        if (snapshot / CONFIG).exists():
            return snapshot
    raise FileNotFoundError(
        f"js.hf: there is no folder {folder}, and {_cache()} has no model {name}; nothing is downloaded here. Get its "
        f"{CONFIG} and *.safetensors with\n    hf download {name}\nor name a folder that has them"
    )


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text: "eos_token_id" in generation_config.json, then in config.json.

    Raises:
      ValueError: one of the files is damaged.
    """
    found: list[int] = []
    for path in (folder / DRAWING, folder / CONFIG):
        if not path.exists():
            continue
        try:
            named = decode_object(read_plain_file(path).lstrip()).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        found += [token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)]
    return tuple(dict.fromkeys(found))


def _cache() -> Path:
    """Return the cache folder of the Hugging Face hub, from HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME, or the default."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
