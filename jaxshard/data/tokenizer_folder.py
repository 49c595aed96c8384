"""Read what the files beside a tokenizer.json say: its special tokens, the end of a text, and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxshard.data.chat_template import ChatTemplate

CONFIG, TOKENS = "tokenizer_config.json", "special_tokens_map.json"


def special_tokens(folder: Path) -> dict[str, str]:
    """Return {name: text} of the special tokens of a tokenizer, such as {"eos_token": "</s>"}."""
    named = read_object(folder / TOKENS) | read_object(folder / CONFIG)
    texts = {name: x.get("content") if isinstance(x, dict) else x for name, x in named.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def end_of_text(folder: Path, library: Any) -> int | None:
    """Return the id of the token that ends a text, or None if no file of the folder names one.

    It is "eos_token" of the tokenizer, or else the (first) "eos_token_id" in generation_config.json or config.json.

    Args:
      folder: the folder.
      library: the tokenizer, an object of the library tokenizers.

    Raises:
      ValueError: the tokenizer lacks its end token.
    """
    token = special_tokens(folder).get("eos_token")
    if token is not None:
        number: int | None = library.token_to_id(token)
        if number is None:
            raise ValueError(
                f"tokenizer: {folder / CONFIG} names the eos_token {token!r}, which tokenizer.json lacks; put that "
                "right in one of the two"
            )
        return number
    for file in ("generation_config.json", "config.json"):
        named = read_object(folder / file).get("eos_token_id")
        first = next(iter(named), None) if isinstance(named, list) else named
        if isinstance(first, int) and library.id_to_token(first) is not None:
            return first
    return None


def chat_template(folder: Path) -> ChatTemplate | None:
    """Find the chat template of a tokenizer; return None if it has none.

    It is in chat_template.jinja (others in additional_chat_templates/NAME.jinja), or else the entry "chat_template" of
    chat_template.json or tokenizer_config.json: a program, or a list of {"name": ..., "template": ...}.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        others = (folder / "additional_chat_templates").glob("*.jinja")
        programs = {one.stem: _read_text(one) for one in others} | {"default": _read_text(file)}
        return ChatTemplate(file, programs, special_tokens(folder))
    for file in (folder / "chat_template.json", folder / CONFIG):
        if named := read_object(file).get("chat_template"):
            programs = {"default": named} if isinstance(named, str) else _named(named, file)
            return ChatTemplate(file, programs, special_tokens(folder))
    return None


def _named(templates: Any, file: Path) -> dict[str, str]:
    try:
        found = {one["name"]: one["template"] for one in templates}
    except (TypeError, KeyError):
        found = {}
    if not found or not all(isinstance(text, str) for text in (*found, *found.values())):
        raise ValueError(
            f'tokenizer: {file}: chat_template must be text, or a list of {{"name": ..., "template": ...}}'
        )
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer: {file} is not UTF-8 at byte {error.start}") from error


def read_object(file: Path) -> dict[str, Any]:
    """Decode a JSON file with an object; return {} if the file does not exist, or has something else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_text(file))
    except ValueError as error:
        raise ValueError(f"tokenizer: {file} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}
