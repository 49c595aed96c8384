"""`js.save_safetensors` and `js.to_bytes`: write a model as safetensors, piece by piece.

A file is written as model.safetensors.draft: first a header without checksums, then the tensors, then the header again,
with checksums. When all drafts are complete they are renamed; if there are several files, the index is written last.

Objects can't be renamed. Their drafts are files in a temporary folder of this machine, and are uploaded when all drafts
are complete.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxshard.checkpoint.leaves import Entry
from jaxshard.checkpoint.manifest import sync_folder, write_atomically
from jaxshard.checkpoint.os_errors import os_error
from jaxshard.checkpoint.safetensors.header import Tensor, encode_header
from jaxshard.checkpoint.safetensors.index import find_model_files, index_of
from jaxshard.checkpoint.safetensors.names import ModelArray, model_arrays, tensor_of
from jaxshard.checkpoint.safetensors.pieces import LIMIT, Piece, fetch_bytes, stream_pieces
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.settings import with_own_settings
from jaxshard.distributed.together import failed_processes
from jaxshard.storage.paths import AnyPath, ObjectPath, as_path

MAX_BYTES = 5_000_000_000
"""The default for the largest number of bytes of tensors in a file, as on Hugging Face."""
_MAX_OBJECT = 1_000_000_000
"""The largest number of bytes of tensors in an object, which is sent from memory."""
LEAST = 1 << 20
"""The smallest limit for the bytes of a piece; the limit falls with the number of files written at once."""
NamedPiece = tuple[str, Piece]
"""(name of a tensor, some of its bytes)."""


class Output(NamedTuple):
    """A tensor to write.

    Attributes:
      name: the name of the tensor.
      tensor: the dtype and shape of the tensor; its `start` is not used.
      make: `make()` returns the array on the devices, or its bits as unsigned integers. Collective.
      spec: the sharding of the array that `make` returns.
    """

    name: str
    tensor: Tensor
    make: Callable[[], jax.Array]
    spec: PartitionSpec


def outputs_of(arrays: Iterable[ModelArray], mesh: Mesh) -> list[Output]:
    """Return an `Output` (a tensor to write: name, shape and a function that makes it) for each array of a model."""

    def output(entry: Entry, stored: jax.Array) -> Output:
        spec = entry.shape_saved(mesh).sharding.spec
        return Output(entry.path, tensor_of(entry), lambda: entry.to_saved(stored, mesh), spec)

    return [output(*array) for array in arrays]


@with_own_settings
def save_safetensors(
    path: str | os.PathLike[str], run: Any, layout: Layout, *, max_bytes: int = MAX_BYTES, overwrite: bool = False
) -> AnyPath:
    """Write the model of a run as a safetensors file, or as several with an index. Every process calls this.

    The file has the parameters (for a `js.Model` its state too) in model order without padding. The name of a tensor is
    its path in the tree that `init_fn` returns, joined by dots; random keys are written as their uint32 words. For a
    model of `js.lora` the factors are merged into the matrices (`js.merge_lora`), which takes the memory of a second
    model on the devices.

    Arrays are copied to the host in pieces of at most 16 MiB, each by an all-reduce or all-gathers of its size, so a
    process needs host memory for one piece only. For each file that is being written, a device needs memory for a piece
    and for its part of one array in model order, which is split over the mesh axes that divide the array's dimensions.
    Process k of n writes the files k, k + n, k + 2 n and so on.

    At an address, each process first writes its files into a folder for temporary files (TMPDIR), then uploads one
    after another. It needs host memory for two copies of a file.

    Args:
      path: the file, ending in .safetensors, on a disk that all processes see; or an address s3://... or gs://...
      run: a `TrainState`, or only its model, as the layout stores it.
      layout: the layout of the run.
      max_bytes: the largest number of bytes of tensors in one file. A larger model is written as several files,
        model-00001-of-00002.safetensors and so on, and model.safetensors.index.json says which tensor is in which file,
        as on Hugging Face. `js.load_safetensors` takes the same path in both cases. At an address a file has at most
        1 GB of tensors (1,000,000,000 bytes), but a larger tensor is not divided.
      overwrite: True to replace an existing model, when all of the new model is written. A file that replaces a file
        does so at once. If a model has several files, there may be no model for a moment, but never a mixture of both.

    Returns:
      The absolute path, or the address as a `PathLike`; all files are complete and on disk.

    Raises:
      ValueError: two tensors would have the same name; safetensors lacks a dtype; the run does not fit the layout; the
        path is an address of another kind.
      FileExistsError: the file or its index exists, and `overwrite` is False.
      OSError: a file could not be written. No new file is left.

    Example:
        path = js.save_safetensors("model.safetensors", run, layout)
    """
    check_layout("js.save_safetensors(path, run, layout)", layout)
    path = as_path(path).absolute()
    if path.suffix != ".safetensors" or max_bytes < 1:
        raise ValueError(f"{path}, max_bytes={max_bytes}: name a file that ends with .safetensors, of at least 1 byte")
    outputs = outputs_of(model_arrays(run, layout), layout.mesh)
    return write_model(path, outputs, layout.mesh, max_bytes=max_bytes, overwrite=overwrite)


def write_model(
    path: AnyPath,
    outputs: Iterable[Output],
    mesh: Mesh,
    *,
    max_bytes: int,
    metadata: Mapping[str, str] = {},
    overwrite: bool = False,
) -> AnyPath:
    """Write tensors as a safetensors file, or as several with an index. Every process calls this.

    Args:
      path: the absolute path of the file, or its address.
      outputs: the tensors to write.
      mesh: the mesh of their arrays.
      max_bytes: the largest number of bytes of tensors in one file.
      metadata: metadata to add to each file.
      overwrite: True to replace an existing model.

    Returns:
      The path.

    Raises:
      FileExistsError, OSError: as `save_safetensors`.
    """
    most = min(max_bytes, _MAX_OBJECT) if isinstance(path, ObjectPath) else max_bytes
    files = _name_files(path, _divide_into_files(outputs, most))
    first = jax.process_index() == 0
    _raise_in_all(path, _failure_of(_make_folder, path, overwrite) if first else None)
    with _draft_folder(path) as folder:
        drafts = {name: folder / f"{name}.draft" for name in files}
        try:
            _raise_in_all(path, _write_drafts(drafts, files, mesh, metadata))
            _publish(path, drafts, files)
        finally:
            _delete(drafts.values())  # renamed drafts do not exist any more
    return path


@contextlib.contextmanager
def _draft_folder(path: AnyPath) -> Iterator[Path]:
    """Return a context with the folder of drafts: that of the model, or a temporary folder of this process."""
    if isinstance(path, Path):
        yield path.parent
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


@with_own_settings
def to_bytes(run: Any, layout: Layout) -> bytes:
    """Encode the model of a run as the bytes of one safetensors file. Every process calls this.

    Args:
      run: a `TrainState`, or only its model, as the layout stores it.
      layout: the layout of the run.

    Returns:
      The content of the file that `js.save_safetensors` would write: the complete model, in every process.

    Raises:
      ValueError: as `js.save_safetensors`.

    Example:
        raw = js.to_bytes(run, layout)
        params = js.from_bytes(raw, layout)
    """
    opened = io.BytesIO()
    outputs = sort_widest_first(outputs_of(model_arrays(run, layout), layout.mesh))
    write_file(opened, outputs, stream_outputs(outputs, layout.mesh, LIMIT))
    return opened.getvalue()


def write_file(
    opened: BinaryIO,
    outputs: Iterable[Output],
    pieces: Iterable[NamedPiece | None],
    *,
    metadata: Mapping[str, str] = {},
) -> None:
    """Write one safetensors file: the bytes of its tensors, then the header again with their checksums.

    Args:
      opened: the file.
      outputs: the tensors of the file, in the order of their bytes.
      pieces: the bytes of the tensors, as (name, piece) from `stream_outputs`; None is skipped.
      metadata: metadata to add to the header.
    """
    tensors = _place_tensors(outputs)
    checksums = dict.fromkeys(tensors, 0)
    opened.write(encode_header(tensors, checksums, metadata))
    for name, piece in filter(None, pieces):  # None: this file is complete, another one is not
        raw = fetch_bytes(piece)
        opened.write(raw)
        checksums[name] = zlib.crc32(raw, checksums[name])
    opened.seek(0)
    opened.write(encode_header(tensors, checksums, metadata))  # as long as before
    opened.flush()


def _place_tensors(outputs: Iterable[Output]) -> dict[str, Tensor]:
    """Return {name: tensor}, with a `start` for each tensor so that it begins where the previous one ends."""
    placed, at = {}, 0
    for output in outputs:
        placed[output.name] = output.tensor._replace(start=at)
        at += output.tensor.size
    return placed


def sort_widest_first(outputs: Iterable[Output]) -> list[Output]:
    """Sort tensors by decreasing size of an element (f32 before bf16), so that every tensor is aligned in the file."""
    return sorted(outputs, key=lambda output: -jnp.dtype(output.tensor.dtype).itemsize)


def _divide_into_files(outputs: Iterable[Output], max_bytes: int) -> list[list[Output]]:
    """Divide tensors, in their order, into files of at most `max_bytes`; a larger tensor gets its own file."""
    files: list[list[Output]] = [[]]
    room = max_bytes
    for output in outputs:
        if output.tensor.size > room and files[-1]:
            files.append([])
            room = max_bytes
        files[-1].append(output)
        room -= output.tensor.size
    return [sort_widest_first(file) for file in files]


def _name_files(path: AnyPath, files: list[list[Output]]) -> dict[str, list[Output]]:
    if len(files) == 1:
        return {path.name: files[0]}
    return {f"{path.stem}-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def stream_outputs(outputs: Iterable[Output], mesh: Mesh, limit: int) -> Iterator[NamedPiece]:
    """Yield (name of a tensor, piece) for tensors to write, one tensor after another, each from its first byte on.

    A piece is a contiguous part of a tensor, of at most `limit` bytes. Collective: every process must take all pieces.
    """
    for output in outputs:
        for piece in stream_pieces(output.make(), mesh, output.spec, limit):
            yield output.name, piece


def _write_drafts(
    drafts: dict[str, Path], files: dict[str, list[Output]], mesh: Mesh, metadata: Mapping[str, str]
) -> OSError | None:
    """Write this process's files, one after another; return the OSError if writing fails, or None.

    Fetching a piece is collective, so every process fetches the pieces of all files, even after it failed to write its
    own file. With 2 processes and files a, b, c they fetch the pieces a0 b0 a1 b1 ..., then c0 c1 ...
    """
    index, count = jax.process_index(), jax.process_count()
    failure: OSError | None = None
    names = list(files)
    for first in range(0, len(names), count):
        group = names[first : first + count]
        limit = max(LEAST, LIMIT // len(group))
        rounds = zip_longest(*(stream_outputs(files[name], mesh, limit) for name in group))
        if index < len(group):
            mine, own = group[index], (pieces[index] for pieces in rounds)
            failure = _failure_of(_write_draft, drafts[mine], files[mine], own, metadata) or failure
        for _ in rounds:
            pass  # take part in the remaining pieces, which are collective
    return failure


def _write_draft(
    draft: Path, outputs: Iterable[Output], pieces: Iterable[NamedPiece | None], metadata: Mapping[str, str]
) -> None:
    with draft.open("wb") as opened:
        write_file(opened, outputs, pieces, metadata=metadata)
        os.fsync(opened.fileno())


def _make_folder(path: AnyPath, overwrite: bool) -> None:
    """Create the folder of a file; raise FileExistsError if the file or its index exists and `overwrite` is False."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for there in (path, index_of(path)):
        if there.exists() and not overwrite:
            raise FileExistsError(f"{there} is there already; delete it, choose another name, or give overwrite=True")


def _publish(path: AnyPath, drafts: dict[str, Path], files: dict[str, list[Output]]) -> None:
    """Move complete drafts to their final names, write the index if there are several files, and delete old files.

    Collective: each process moves its own drafts. Readers ignore the files of a model without its index, so a model of
    several files appears at once when its index is written last. An old index is deleted first, since it may name files
    that are replaced. A single file needs no such care, because readers prefer the file to an index.

    Raises:
      OSError: in all processes, if any of them fails; then none of the new files is left.
    """
    index, old, moved = index_of(path), list[AnyPath](), list[AnyPath]()
    new = [path.with_name(name) for name in files]
    mine = [(path.with_name(name), draft) for name, draft in drafts.items()][jax.process_index() :: jax.process_count()]

    def begin() -> None:
        old.extend(find_model_files(path))
        if len(files) > 1:
            index.unlink(missing_ok=True)

    def move() -> None:
        for file, draft in mine:
            if isinstance(file, ObjectPath):
                file.write_bytes(draft.read_bytes())
            else:
                draft.rename(file)
            moved.append(file)

    def finish() -> None:
        if len(files) > 1:
            total = sum(output.tensor.size for file in files.values() for output in file)
            weights = {output.name: name for name, file in files.items() for output in file}
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            write_atomically(index, json.dumps(content, indent=2).encode() + b"\n")
            new.append(index)
        for file in old:
            if file not in new:
                file.unlink(missing_ok=True)
        if isinstance(path, Path):
            sync_folder(path.parent)

    first = jax.process_index() == 0
    try:
        _raise_in_all(path, _failure_of(begin) if first else None)
        _raise_in_all(path, _failure_of(move))
        _raise_in_all(path, _failure_of(finish) if first else None)
    except OSError:
        _delete([*moved, *([index, index.with_name(f"{index.name}.draft")] if first and moved else [])])
        raise


def _delete(files: Iterable[AnyPath]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _failure_of(work: Callable[..., None], *args: Any) -> OSError | None:
    """Call a function; return the OSError that it raised, or None if it succeeded."""
    try:
        work(*args)
    except OSError as error:
        return error
    return None


def _raise_in_all(path: AnyPath, failure: OSError | None) -> None:
    """Raise OSError in all processes if any process has a failure. Collective.

    Args:
      path: the path of the model, for the message.
      failure: this process's error, or None.
    """
    failed = failed_processes(failure is not None, "js.save_safetensors")
    if isinstance(failure, FileExistsError):
        raise failure
    if failed:
        reason = failure or f"process {failed[0]} says why"
        message = f"{path}: the model could not be written, and nothing of it is left: {reason}"
        raise os_error(message, failure or OSError()) from None
