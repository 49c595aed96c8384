"""`js.load_safetensors` and `js.from_bytes`: load a model for any layout; each device gets only its shards."""

from __future__ import annotations

import os
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxshard.checkpoint.leaves import Entry, list_differences
from jaxshard.checkpoint.safetensors.header import Header, Tensor, decode_header, header_size
from jaxshard.checkpoint.safetensors.index import index_of, parse_index
from jaxshard.checkpoint.safetensors.names import model_entries, tensor_of
from jaxshard.checkpoint.safetensors.parts import Range, Source, read_part
from jaxshard.core.keys import keys_of
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.settings import with_own_settings
from jaxshard.core.types import PyTree
from jaxshard.distributed.together import raise_together
from jaxshard.storage.copies import CHUNK, ends_at, read_range
from jaxshard.storage.paths import AnyPath, ObjectPath, as_path
from jaxshard.storage.strict_json import check_plain_file, read_plain_file

_POINT = "js.load_safetensors"


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
      file: the path of the file, for messages; or an object.
      tensor: the tensor's dtype, shape and first byte after the header.
      raw: the tensor's bytes in the memory-mapped file, which are read from disk when they are used; None for a tensor
        in an object.
      crc32: the tensor's checksum; None if the file has no checksums.
      start: the first byte of the tensor in the file.
    """

    file: str | ObjectPath
    tensor: Tensor
    raw: npt.NDArray[np.uint8] | None
    crc32: int | None
    start: int

    @property
    def source(self) -> Source:
        """The place of the tensor in its file."""
        return Source(self.file, self.start, self.tensor.dtype)

    def copy_part(self, index: Any) -> npt.NDArray[Any]:
        """Copy a part of the tensor, a slice for each dimension, to a new contiguous array."""
        shape = self.tensor.shape
        if self.raw is None:
            ranges = [Range(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True)]
            return read_part(self.source, shape, ranges)
        return np.array(self.raw.view(self.tensor.dtype).reshape(shape)[index], order="C")

    def is_damaged(self) -> bool:
        """Return True if the bytes of the tensor do not have its checksum."""
        if self.crc32 is None:
            return False
        if self.raw is not None:
            return zlib.crc32(self.raw.data) != self.crc32
        found, size = 0, self.tensor.size
        raw = Source(self.file, self.start, "uint8")
        for start in range(0, size, CHUNK):
            found = zlib.crc32(read_part(raw, [size], [Range(start, min(size, start + CHUNK))]).data, found)
        return found != self.crc32


@with_own_settings
def load_safetensors(path: str | os.PathLike[str], layout: Layout, *, verify: bool = True) -> PyTree:
    """Load a model from a safetensors file, or from several files with an index. Every process calls this.

    Pass the result to `js.init`, which stores it as the layout says:

        run = js.init(init_fn, tx, layout, key, init_from=js.load_safetensors("model.safetensors", layout))

    Each process copies from the files only what its devices need; of objects it reads these ranges of bytes.

    Args:
      path: the file; for several files their index, or its path without ".index.json". On a disk that all processes
        see, or an address s3://... or gs://...
      layout: the layout of the run.
      verify: first compare the bytes of the tensors with their checksums; each process compares a share of the tensors.
        Files that `js.save_safetensors` did not write have no checksums.

    Returns:
      A tree like the result of `init_fn`, of global arrays in model order, sharded over the mesh as far as the layout
      allows. For a layout of `js.lora`, the parameters of the model without factors, from which `js.init` starts.

    Raises:
      FileNotFoundError: there is neither the file nor an index of it.
      ValueError: a tensor is missing, unknown, or has another shape or dtype than the layout (the message names every
        such tensor; nothing is cast); a file is damaged, truncated or no safetensors file, or a file that the index
        lists is missing; the path is an address of another kind.
      OSError: an object store can't be reached or refuses.

    Example:
        js.save_safetensors("model.safetensors", run, layout)
        run = js.init(init_fn, tx, layout, 0, init_from=js.load_safetensors("model.safetensors", layout))
    """
    check_layout("js.load_safetensors(path, layout)", layout)
    path = as_path(path).absolute()
    check_exists(path, _POINT)
    found, problems = open_files(path)
    return _load_onto(layout, str(path), found, problems, verify=verify)


@with_own_settings
def from_bytes(raw: bytes, layout: Layout) -> PyTree:
    """Load a model from the bytes of a safetensors file. Every process calls this with the same bytes.

    Args:
      raw: the content of a file, such as the result of `js.to_bytes`.
      layout: the layout of the run.

    Returns:
      As `js.load_safetensors`.

    Raises:
      ValueError: as `js.load_safetensors`.

    Example:
        raw = js.to_bytes(run, layout)
        run = js.replace_params(run, js.from_bytes(raw, layout), tx, layout, opt_state="reset")
    """
    check_layout("js.from_bytes(raw, layout)", layout)
    problems: list[str] = []
    found = _open_buffer("the bytes", np.frombuffer(raw, np.uint8), problems)
    return _load_onto(layout, "the bytes", found, problems, verify=True)


def _load_onto(
    layout: Layout, what: str, found: dict[str, StoredTensor], problems: list[str], *, verify: bool
) -> PyTree:
    wanted, structure = model_entries(layout)
    raise_together(problems, ValueError, f"{what}: not a complete model", point=_POINT)
    check_tensors(wanted, what, found, verify=verify)
    placed = ((entry, place_tensor(entry, found[entry.path], layout)) for entry in wanted)
    return jax.tree.unflatten(structure, [keys_of(x, entry.dtype) for entry, x in placed])


def check_tensors(wanted: list[Entry], what: str, found: dict[str, StoredTensor], *, verify: bool) -> None:
    """Raise ValueError in all processes unless the tensors have the names, shapes and dtypes that a layout expects.

    Args:
      wanted: the entries of the layout's arrays.
      what: the name of the file, for messages.
      found: {name: tensor} in the files.
      verify: True to compare the bytes of the tensors with their checksums too.
    """
    differences = list_differences(
        {name: str(one.tensor) for name, one in found.items()}, {entry.path: str(tensor_of(entry)) for entry in wanted}
    )
    headline = (
        f"{what}: the tensors are not those of this layout, and nothing is cast or left out; make the layout from the "
        "init_fn and tx that they are of"
    )
    raise_together(differences, ValueError, headline, point=_POINT)
    if verify:
        mine = sorted(found)[jax.process_index() :: jax.process_count()]
        wrong = (f"{found[name].file}: tensor {name!r}" for name in mine if found[name].is_damaged())
        problems = [f"{text}: its bytes are not those that were saved" for text in wrong]
        raise_together(problems, ValueError, f"{what} is damaged", point=_POINT)


def place_tensor(entry: Entry, tensor: StoredTensor, layout: Layout) -> jax.Array:
    """Copy a tensor to the devices as a global array in model order, sharded as closely as possible to the layout.

    Random keys stay uint32 words.
    """
    sharding = entry.shape_saved(layout.mesh).sharding
    return jax.make_array_from_callback(tensor.tensor.shape, sharding, tensor.copy_part)


def check_exists(path: AnyPath, point: str) -> None:
    """Raise FileNotFoundError in all processes if any process finds neither the file nor its index. Collective."""
    there = path.exists() or index_of(path).exists()
    missing = [] if there else ["there is neither this file nor an index of it"]
    raise_together(missing, FileNotFoundError, f"{path}: no model is here", point=point)


def open_files(path: AnyPath) -> tuple[dict[str, StoredTensor], list[str]]:
    """Open a safetensors file, or all files in an index; return ({name: tensor}, messages about bad files).

    Files are memory-mapped, and of objects the headers are read.
    """
    problems: list[str] = []
    index = index_of(path)
    if index != path and (path.exists() or not index.exists()):
        return _open_file(path, problems), problems
    try:
        weights = parse_index(read_plain_file(index))
    except (OSError, ValueError) as error:
        problems.append(_describe_error(index, error))
        return {}, problems
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(weights.values())):
        file, expected = index.with_name(name), [tensor for tensor, at in weights.items() if at == name]
        there = _open_file(file, problems)
        problems += [f"{file}: tensor {one!r} is not of it by the index" for one in there if one not in expected]
        missing = [one for one in expected if there and one not in there]
        problems += [f"{file}: tensor {one!r} is missing, by the index it lies there" for one in missing]
        found |= there
    return found, problems


def _open_file(file: AnyPath, problems: list[str]) -> dict[str, StoredTensor]:
    try:
        if isinstance(file, ObjectPath):
            return _find_tensors(file, _read_header(file), None)
        check_plain_file(file)
        size = file.stat().st_size
        raw: npt.NDArray[np.uint8] = np.memmap(file, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except (OSError, ValueError) as error:
        problems.append(_describe_error(file, error))
        return {}
    return _open_buffer(str(file), raw, problems)


def _read_header(file: ObjectPath) -> Header:
    """Read the header of an object; raise ValueError if it is damaged, or if the object has another size."""
    length = header_size(read_range(file, 0, 8).content or b"", None)
    header = decode_header(read_range(file, 0, length).content or b"", None)
    if not ends_at(file, header.size):
        raise ValueError(f"its header speaks of {header.size} bytes: it was cut off, or more was added")
    return header


def _open_buffer(file: str, raw: npt.NDArray[np.uint8], problems: list[str]) -> dict[str, StoredTensor]:
    return open_buffer(file, raw, problems)[0]


def open_buffer(
    file: str, raw: npt.NDArray[np.uint8], problems: list[str]
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Decode the header of a file, without reading the bytes of tensors; append a message to `problems` on failure.

    Args:
      file: the path of the file, for messages.
      raw: the bytes of the file.
      problems: the list to which a message is appended.

    Returns:
      ({name: tensor}, the metadata of the file); two empty dicts if the file is damaged.
    """
    try:
        header = decode_header(raw[: header_size(raw[:8].tobytes(), raw.size)].tobytes(), raw.size)
    except ValueError as error:
        problems.append(f"{file}: {error}")
        return {}, {}
    return _find_tensors(file, header, raw), header.metadata


def _find_tensors(file: str | ObjectPath, header: Header, raw: npt.NDArray[np.uint8] | None) -> dict[str, StoredTensor]:
    """Return {name: tensor} of a file, by its header; `raw` is its content, or None for an object."""
    found = {}
    for name, tensor in header.tensors.items():
        start = header.length + tensor.start
        part = None if raw is None else raw[start : start + tensor.size]
        found[name] = StoredTensor(file, tensor, part, header.checksums.get(name), start)
    return found


def _describe_error(file: AnyPath, error: Exception) -> str:
    why = (error.strerror or error) if isinstance(error, OSError) else error
    return f"{file}: {str(why).removeprefix(f'{file}: ')}"
