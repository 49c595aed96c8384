"""Find a folder with config.json and safetensors files, by its path or by its name on the Hugging Face hub."""

from __future__ import annotations

import os

from jaxshard.hf.hub import find_on_hub
from jaxshard.storage.paths import AnyPath, ObjectPath, as_path
from jaxshard.storage.strict_json import decode_object, read_plain_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_ANY_WEIGHTS = "model*.safetensors"
"""The names of all files with weights."""
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
    "chat_template.json",
)
"""The names of all files of a tokenizer."""

MORE_TEMPLATES = "additional_chat_templates/*.jinja"
"""The names of the files of further chat templates."""


def find_folder(name: str | os.PathLike[str], *, weights: bool = False) -> AnyPath:
    """Find a model's folder by its path, or else by the model's name "owner/name" on the Hugging Face hub.

    Args:
      name: a folder, an address s3://... or gs://..., or the name of a model on the hub, which `find_on_hub` finds in
        the hub's cache or downloads.
      weights: the weights are needed, too, not only the configuration and the tokenizer.

    Raises:
      FileNotFoundError: neither exists.
    """
    given = as_path(name)
    folder = given if isinstance(given, ObjectPath) else given.expanduser()
    if isinstance(folder, ObjectPath) or folder.is_dir():
        if not (folder / CONFIG).exists():
            raise FileNotFoundError(f"js.hf: {folder} has no {CONFIG}; name a folder with {CONFIG} and {WEIGHTS}")
        return folder.absolute()
    parts = str(name).split("/")
    if len(parts) != 2 or not all(parts) or str(name).startswith((".", "~")):
        raise FileNotFoundError(f"js.hf: there is no folder {folder}")
    return find_on_hub(str(name), (CONFIG, _ANY_WEIGHTS) if weights else (CONFIG,))


def end_tokens(folder: AnyPath) -> tuple[int, ...]:
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
