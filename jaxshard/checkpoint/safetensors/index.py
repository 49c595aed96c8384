"""The index of a model in several safetensors files: a JSON file that says which tensor is in which file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxshard.storage.paths import AnyPath
from jaxshard.storage.strict_json import decode_object, read_plain_file

INDEX = ".index.json"


def index_of(path: AnyPath) -> AnyPath:
    """Return the path of a model's index, "model.safetensors.index.json"; `path` is the model's file or the index."""
    return path if path.name.endswith(INDEX) else path.with_name(path.name + INDEX)


def parse_index(raw: bytes) -> dict[str, str]:
    """Decode the bytes of an index; return {name of a tensor: name of its file}.

    Raises:
      ValueError: the bytes are not an index, or list a file outside of the folder of the index.
    """
    weights = decode_object(raw).get("weight_map")
    if not isinstance(weights, dict) or not all(map(_is_file_name, weights.values())):
        raise ValueError("it has no weight_map of tensors to files beside it")
    return weights


def find_model_files(path: AnyPath) -> list[AnyPath]:
    """List the existing files of the model at a path: the index, then the file `path`, then the files in the index."""
    index = index_of(path)
    if not index.exists():
        return [path] if path.exists() else []
    try:
        names = set(parse_index(read_plain_file(index)).values())
    except (OSError, ValueError):
        names = set()  # the names in a damaged index are unknown
    files = [path, *(index.with_name(name) for name in sorted(names))]
    return [index, *(file for file in files if file.exists())]


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name and name.isprintable()
