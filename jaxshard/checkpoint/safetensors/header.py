"""The header of a safetensors file (https://huggingface.co/docs/safetensors).

A file is the header's length as eight bytes, little-endian; the header as JSON; the bytes of the tensors:

    {"__metadata__": {"jaxshard": "1", "crc32:w": "7d3c9a01"},
     "w": {"dtype": "F32", "shape": [64, 48], "data_offsets": [0, 12288]}}

The metadata are an addition of jaxshard: the version of this addition, and the CRC-32 of every tensor. Files of other
programs have neither and can be read too. Headers are untrusted: every value is checked before use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxshard.storage.strict_json import decode_object

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
"""{name of a dtype in a header: JAX's name for it}."""
METADATA = "__metadata__"
CODES = {ours: name for name, ours in DTYPES.items()}
_LIMIT = 100_000_000
"""The largest number of bytes of a header, as in the `safetensors` library."""
_SUM = "crc32:"
_HEX = re.compile("[0-9a-f]{8}")


class Tensor(NamedTuple):
    """The dtype, shape and first byte of a tensor in a file; `start` is counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """The number of bytes of the tensor."""
        return math.prod(self.shape) * int(jnp.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Header(NamedTuple):
    """The decoded header of a safetensors file.

    Attributes:
      tensors: {name: tensor}.
      checksums: {name: CRC-32} of the tensors; {} for files that other programs wrote.
      length: the number of bytes before the first tensor.
      metadata: {key: text}, all entries of "__metadata__".
      size: the number of bytes of the complete file.
    """

    tensors: dict[str, Tensor]
    checksums: dict[str, int]
    length: int
    metadata: dict[str, str]
    size: int


def encode_header(tensors: Mapping[str, Tensor], checksums: Mapping[str, int], others: Mapping[str, str] = {}) -> bytes:
    """Encode the beginning of a file: the length of the header, and the header.

    The length does not depend on the values of the checksums, so that the header can be rewritten when they are known.
    The header is padded to a multiple of eight bytes, which aligns the tensors.

    Args:
      tensors: {name: tensor}, in the order of their bytes.
      checksums: {name: CRC-32} of each tensor.
      others: further metadata, with other keys than "jaxshard" and "crc32:<name>".
    """
    metadata = dict(others) | {"jaxshard": VERSION} | {_SUM + name: f"{checksums[name]:08x}" for name in tensors}
    fields: dict[str, Any] = {METADATA: metadata}
    for name, tensor in tensors.items():
        place = [tensor.start, tensor.start + tensor.size]
        fields[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode_header(start: bytes, size: int | None) -> Header:
    """Decode the header of a file.

    Args:
      start: the first bytes of the file, at least `header_size` bytes.
      size: the size of the file in bytes; None if it is not known.

    Raises:
      ValueError: this is not the header of a complete safetensors file, or a newer version of jaxshard wrote it.
    """
    end = header_size(start, size)
    fields = _decode_json(start[8:end])
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"its {METADATA} is no object of strings")
    tensors = {name: _decode_tensor(name, value) for name, value in fields.items()}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != at:
            raise ValueError(
                f"tensor {name!r} begins at byte {tensor.start} of the data, expected {at}: gap or overlap"
            )
        at += tensor.size
    if size is not None and end + at != size:
        raise ValueError(f"{size} bytes, and its header speaks of {end + at}: it was cut off, or more was added")
    return Header(tensors, _decode_checksums(metadata, tensors), end, metadata, end + at)


def header_size(start: bytes, size: int | None) -> int:
    """Return the number of bytes before the first tensor of a file, from the file's first eight bytes.

    Args:
      start: the first eight bytes of the file, or more; fewer only if the file is shorter.
      size: the size of the file in bytes; None if it is not known.

    Raises:
      ValueError: the file is shorter than its header, or the header is larger than 100 MB.
    """
    if len(start) < 8:
        raise ValueError(f"{len(start)} bytes are no safetensors file: it was cut off")
    length = int.from_bytes(start[:8], "little")
    room = _LIMIT if size is None else size
    if length > _LIMIT or (size is not None and length > size - 8):
        raise ValueError(f"a header of {length} bytes does not fit into {room}: it is no safetensors file, or cut off")
    return 8 + length


def _decode_json(text: bytes) -> dict[str, Any]:
    """Decode a JSON object in which all numbers must be integers of at most 19 digits."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word[:20]} is no size")

    def whole(word: str) -> int:
        return int(word) if word.isdigit() and len(word) < 20 else refuse(word)

    try:
        fields = decode_object(text, parse_int=whole, parse_float=refuse)
        "".join(fields).encode()  # half of a surrogate pair is no text
    except ValueError as error:
        raise ValueError(f"its header is not the JSON object of a safetensors file: {error}") from error
    return fields


def _decode_tensor(name: str, value: Any) -> Tensor:
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


def _decode_checksums(metadata: dict[str, str], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    checksums = {key.removeprefix(_SUM): value for key, value in metadata.items() if key.startswith(_SUM)}
    version = metadata.get("jaxshard")
    if version is None and not checksums:
        return {}
    if version != VERSION:
        raise ValueError(
            f"it has version {str(version)[:20]}, and this jaxshard reads version {VERSION}; update jaxshard"
        )
    if set(checksums) != set(tensors) or not all(map(_HEX.fullmatch, checksums.values())):
        raise ValueError("its checksums are not those of its tensors: the header was damaged")
    return {name: int(value, 16) for name, value in checksums.items()}
