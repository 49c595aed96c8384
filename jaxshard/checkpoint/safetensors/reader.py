"""`js.load_safetensors` and `js.from_bytes`: load a model for any layout; each device gets only its shards."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxshard.checkpoint.leaves import Entry, list_differences
from jaxshard.checkpoint.safetensors.header import Tensor, decode_header, header_size
from jaxshard.checkpoint.safetensors.index import index_of, parse_index
from jaxshard.checkpoint.safetensors.names import model_entries, tensor_of
from jaxshard.checkpoint.strict_json import check_plain_file, read_plain_file
from jaxshard.core.keys import keys_of
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.local_path import local_path
from jaxshard.core.settings import with_own_settings
from jaxshard.core.types import PyTree
from jaxshard.distributed.together import raise_together

_POINT = "js.load_safetensors"


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
      file: the path of the file, for messages.
      tensor: the tensor's dtype, shape and first byte after the header.
      raw: the tensor's bytes; the file is memory-mapped, so bytes are read from disk when they are used.
      crc32: the tensor's checksum; None if the file has no checksums.
      start: the first byte of the tensor in the file.
    """

    file: str
    tensor: Tensor
    raw: npt.NDArray[np.uint8]
    crc32: int | None
    start: int

    @property
    def array(self) -> npt.NDArray[Any]:
        """The tensor as an array that shares the memory of `raw`."""
        return self.raw.view(self.tensor.dtype).reshape(self.tensor.shape)


@with_own_settings
def load_safetensors(path: str | os.PathLike[str], layout: Layout, *, verify: bool = True) -> PyTree:
    """Load a model from a safetensors file, or from several files with an index. Every process calls this.

    Pass the result to `js.init`, which stores it as the layout says:

        run = js.init(init_fn, tx, layout, key, init_from=js.load_safetensors("model.safetensors", layout))

    Each process copies from the files only what its devices need.

    Args:
      path: the file; for several files their index, or its path without ".index.json". On a disk that all processes
        see.
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
        lists is missing; the path is an address such as gs://...

    Example:
        js.save_safetensors("model.safetensors", run, layout)
        run = js.init(init_fn, tx, layout, 0, init_from=js.load_safetensors("model.safetensors", layout))
    """
    check_layout("js.load_safetensors(path, layout)", layout)
    path = local_path(path).absolute()
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
    placed = ((entry, place_tensor(entry, found[entry.path].array, layout)) for entry in wanted)
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
        wrong = (f"{found[name].file}: tensor {name!r}" for name in mine if _is_damaged(found[name]))
        problems = [f"{text}: its bytes are not those that were saved" for text in wrong]
        raise_together(problems, ValueError, f"{what} is damaged", point=_POINT)


def place_tensor(entry: Entry, array: npt.NDArray[Any], layout: Layout) -> jax.Array:
    """Copy a tensor to the devices as a global array in model order, sharded as closely as possible to the layout.

    Random keys stay uint32 words.
    """
    sharding = entry.shape_saved(layout.mesh).sharding
    return jax.make_array_from_callback(array.shape, sharding, lambda index: copy_part(array, index))


def copy_part(array: npt.NDArray[Any], index: Any) -> npt.NDArray[Any]:
    """Copy `array[index]`, the shard of a device, to a new contiguous array."""
    return np.array(array[index], order="C")


def _is_damaged(one: StoredTensor) -> bool:
    return one.crc32 is not None and zlib.crc32(one.raw.data) != one.crc32


def check_exists(path: Path, point: str) -> None:
    """Raise FileNotFoundError in all processes if any process finds neither the file nor its index. Collective."""
    there = path.exists() or index_of(path).exists()
    missing = [] if there else ["there is neither this file nor an index of it"]
    raise_together(missing, FileNotFoundError, f"{path}: no model is here", point=point)


def open_files(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Memory-map a safetensors file, or all files in an index; return ({name: tensor}, messages about bad files)."""
    problems: list[str] = []
    index = index_of(path)
    if index != path and (path.exists() or not index.exists()):
        return _map_file(path, problems), problems
    try:
        weights = parse_index(read_plain_file(index))
    except (OSError, ValueError) as error:
        problems.append(_describe_error(index, error))
        return {}, problems
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(weights.values())):
        file, expected = index.with_name(name), [tensor for tensor, at in weights.items() if at == name]
        there = _map_file(file, problems)
        problems += [f"{file}: tensor {one!r} is not of it by the index" for one in there if one not in expected]
        missing = [one for one in expected if there and one not in there]
        problems += [f"{file}: tensor {one!r} is missing, by the index it lies there" for one in missing]
        found |= there
    return found, problems


def _map_file(file: Path, problems: list[str]) -> dict[str, StoredTensor]:
    try:
        check_plain_file(file)
        size = file.stat().st_size
        raw: npt.NDArray[np.uint8] = np.memmap(file, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except (OSError, ValueError) as error:
        problems.append(_describe_error(file, error))
        return {}
    return _open_buffer(str(file), raw, problems)


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
    data = raw[header.length :]
    tensors = {
        name: StoredTensor(
            file,
            tensor,
            data[tensor.start : tensor.start + tensor.size],
            header.checksums.get(name),
            header.length + tensor.start,
        )
        for name, tensor in header.tensors.items()
    }
    return tensors, header.metadata


def _describe_error(file: Path, error: Exception) -> str:
    return f"{file}: {error.strerror if isinstance(error, OSError) else error}"
