"""The header of a safetensors file: eight bytes of length, then JSON that says where every tensor lies.

The format is https://huggingface.co/docs/safetensors. Ours has in its metadata "jaxshard", the version of what follows,
and "crc32:NAME" for every tensor; files of others have neither and are read all the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

VERSION = "1"
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""The names of dtypes in a header, and ours."""
METADATA = "__metadata__"
_NAMES = {ours: name for name, ours in DTYPES.items()}
_LIMIT = 100_000_000
"""Bytes of the longest header, as in the reader of the `safetensors` library."""
_SUM = "crc32:"
_HEX = re.compile("[0-9a-f]{8}")


class Tensor(NamedTuple):
    """One tensor of a file: its bytes are `size` from `start` on, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * int(jnp.dtype(self.dtype).itemsize)


class Header(NamedTuple):
    """What a file holds, the checksums in it by tensor, and how many bytes of it come before the data."""

    tensors: dict[str, Tensor]
    sums: dict[str, int]
    length: int


def is_known(dtype: str) -> bool:
    """Whether the format has a name for a dtype."""
    return dtype in _NAMES


def to_bytes(tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> bytes:
    """The header as a file begins with it: as long whatever the checksums are."""
    fields: dict[str, Any] = {METADATA: {"jaxshard": VERSION} | {_SUM + name: f"{sums[name]:08x}" for name in tensors}}
    for name, tensor in tensors.items():
        place = [tensor.start, tensor.start + tensor.size]
        fields[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse(start: bytes, size: int) -> Header:
    """The header of a file of `size` bytes, of which `start` are the first: all that `length_of` asks for.

    Raises:
      ValueError: it is not the header of a complete safetensors file, or a newer version of ours.
    """
    end = length_of(start, size)
    fields = _fields(start[8:end])
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"its {METADATA} is no object of strings")
    tensors = {name: _tensor(name, value) for name, value in fields.items()}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != at:
            raise ValueError(
                f"tensor {name!r} begins at byte {tensor.start} of the data, expected {at}: gap or overlap"
            )
        at += tensor.size
    if end + at != size:
        raise ValueError(f"{size} bytes, and its header speaks of {end + at}: it was cut off, or more was added")
    return Header(tensors, _sums(metadata, tensors), end)


def length_of(start: bytes, size: int) -> int:
    """How many bytes of a file come before the data: the first eight say it.

    Raises:
      ValueError: more than the file has, or than any header has.
    """
    if size < 8:
        raise ValueError(f"{size} bytes are no safetensors file: it was cut off")
    length = int.from_bytes(start[:8], "little")
    if length > _LIMIT or length > size - 8:
        raise ValueError(f"a header of {length} bytes does not fit into {size}: it is no safetensors file, or cut off")
    return 8 + length


def _fields(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("one key twice")
        "".join(made).encode()  # half of a surrogate pair is no text
        return made

    def refuse(word: str) -> Any:
        raise ValueError(f"{word[:20]} is no size")

    def whole(word: str) -> int:
        return int(word) if word.isdigit() and len(word) < 20 else refuse(word)

    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with a brace")
        fields: dict[str, Any] = json.loads(
            text.decode(), object_pairs_hook=once, parse_constant=refuse, parse_float=refuse, parse_int=whole
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not the JSON object of a safetensors file: {error}") from error
    return fields


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} has other fields than dtype, shape and data_offsets")
    dtype, shape, place = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has the dtype {str(dtype)[:20]}, none of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(place) or len(place) != 2:
        raise ValueError(f"tensor {name!r}: shape and data_offsets must be lists of sizes")
    tensor = Tensor(DTYPES[dtype], tuple(shape), place[0])
    if tensor.start + tensor.size != place[1]:
        raise ValueError(f"tensor {name!r} of {tensor.size} bytes lies in bytes {place[0]} to {place[1]} of the data")
    return tensor


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _sums(metadata: dict[str, str], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    sums = {key.removeprefix(_SUM): value for key, value in metadata.items() if key.startswith(_SUM)}
    version = metadata.get("jaxshard")
    if version is None and not sums:
        return {}
    if version != VERSION:
        raise ValueError(
            f"it has version {str(version)[:20]}, and this jaxshard reads version {VERSION}; update jaxshard"
        )
    if set(sums) != set(tensors) or not all(map(_HEX.fullmatch, sums.values())):
        raise ValueError("its checksums are not those of its tensors: the header was damaged")
    return {name: int(value, 16) for name, value in sums.items()}
