"""`js.save_safetensors` and `js.to_bytes`: write a model as safetensors, piece by piece.

A file is written as model.safetensors.draft: first a header without checksums, then the tensors, then the header again.
Once all drafts are complete they are renamed, and the index, if there are several, is written last.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
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
from jaxshard.core.local_path import local_path
from jaxshard.core.settings import with_own_settings
from jaxshard.distributed.together import failed_processes

MAX_BYTES = 5_000_000_000
"""The default for the most bytes of tensors in a file, as on Hugging Face."""
LEAST = 1 << 20
"""Bytes of a piece if many processes write, since each has a piece on every device."""
NamedPiece = tuple[str, Piece]
"""The name of a tensor, and some of its bytes."""


class Output(NamedTuple):
    """One tensor to write.

    Attributes:
      name: its name.
      tensor: its dtype and shape, as if at the beginning of the file.
      make: returns the array, or its bits as unsigned integers, on the devices. Collective.
      spec: the sharding of that array.
    """

    name: str
    tensor: Tensor
    make: Callable[[], jax.Array]
    spec: PartitionSpec


def outputs_of(arrays: Iterable[ModelArray], mesh: Mesh) -> list[Output]:
    """Return the outputs of a model's arrays, in model order."""

    def output(entry: Entry, stored: jax.Array) -> Output:
        spec = entry.shape_saved(mesh).sharding.spec
        return Output(entry.path, tensor_of(entry), lambda: entry.to_saved(stored, mesh), spec)

    return [output(*array) for array in arrays]


@with_own_settings
def save_safetensors(
    path: str | os.PathLike[str], run: Any, layout: Layout, *, max_bytes: int = MAX_BYTES, overwrite: bool = False
) -> Path:
    """Write the model of a run as a safetensors file, or as several with an index. Every process calls this.

    The file holds the parameters (of a `js.Model` its state too) in model order without padding, each under its path in
    what `init_fn` returns, joined by dots; random keys as their words. Of a model of `js.lora` it holds the matrices
    with the factors merged in (`js.merge_lora`), which takes the bytes of a second model on the devices.

    Each process needs host memory for only a piece of 16 MiB. Each device needs memory for its shards and, for each
    file being written, one array in model order (sharded as far as it divides) and a piece. Each piece takes an
    all-reduce or all-gathers of its size. Process k of n writes the files k, k + n, k + 2 n and so on.

    Args:
      path: the file, ending in .safetensors, on a disk that all processes see.
      run: a run, or the stored model alone.
      layout: how it is stored.
      max_bytes: bytes of tensors in one file. For more there are several, model-00001-of-00002.safetensors and so on,
        and model.safetensors.index.json says which tensor lies in which, as on Hugging Face. `js.load_safetensors`
        takes the same path for both.
      overwrite: replace the model that is there, once all of the new one is written. One file that replaces one file
        does so at once; where both models are several files there is none for a moment, and never a mixture.

    Returns:
      The absolute path; all files are complete and on disk.

    Raises:
      ValueError: two tensors would have one name; safetensors lacks a dtype; the run is not one of this layout; the
        path is an address such as gs://...
      FileExistsError: the file or its index is there, and `overwrite` is False.
      OSError: it could not be written. Nothing of it is left.

    Example:
        path = js.save_safetensors("model.safetensors", run, layout)
    """
    check_layout("js.save_safetensors(path, run, layout)", layout)
    path = local_path(path).absolute()
    if path.suffix != ".safetensors" or max_bytes < 1:
        raise ValueError(f"{path}, max_bytes={max_bytes}: name a file that ends with .safetensors, of at least 1 byte")
    outputs = outputs_of(model_arrays(run, layout), layout.mesh)
    return write_model(path, outputs, layout.mesh, max_bytes=max_bytes, overwrite=overwrite)


def write_model(
    path: Path,
    outputs: Iterable[Output],
    mesh: Mesh,
    *,
    max_bytes: int,
    metadata: Mapping[str, str] = {},
    overwrite: bool = False,
) -> Path:
    """Write tensors as a safetensors file, or as several with an index. Every process calls this.

    Args:
      path: the absolute path of the file.
      outputs: the tensors.
      mesh: their mesh.
      max_bytes: bytes of tensors in one file.
      metadata: more metadata of each file.
      overwrite: replace a model that is there.

    Returns:
      The path.

    Raises:
      FileExistsError, OSError: as `save_safetensors`.
    """
    files = _name_files(path, _divide_into_files(outputs, max_bytes))
    drafts = {name: path.with_name(f"{name}.draft") for name in files}
    first = jax.process_index() == 0
    _raise_in_all(path, _failure_of(_make_folder, path, overwrite) if first else None)
    try:
        _raise_in_all(path, _write_drafts(drafts, files, mesh, metadata))
        _raise_in_all(path, _failure_of(_commit, path, drafts, files) if first else None)
    finally:
        _delete(drafts.values())  # renamed drafts do not exist any more
    return path


@with_own_settings
def to_bytes(run: Any, layout: Layout) -> bytes:
    """Encode the model of a run as the bytes of one safetensors file. Every process calls this.

    Args:
      run: a run, or the stored model alone.
      layout: how it is stored.

    Returns:
      The content of `js.save_safetensors`: the complete model, on every process's host.

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
    """Write one safetensors file: the bytes of its tensors in their order, then the header with the checksums."""
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
    """Assign consecutive byte ranges to the tensors of a file."""
    placed, at = {}, 0
    for output in outputs:
        placed[output.name] = output.tensor._replace(start=at)
        at += output.tensor.size
    return placed


def sort_widest_first(outputs: Iterable[Output]) -> list[Output]:
    """Sort by decreasing item size, so that every tensor is aligned."""
    return sorted(outputs, key=lambda output: -jnp.dtype(output.tensor.dtype).itemsize)


def _divide_into_files(outputs: Iterable[Output], max_bytes: int) -> list[list[Output]]:
    """Fill files of at most `max_bytes` in model order; a larger tensor has a file of its own."""
    files: list[list[Output]] = [[]]
    room = max_bytes
    for output in outputs:
        if output.tensor.size > room and files[-1]:
            files.append([])
            room = max_bytes
        files[-1].append(output)
        room -= output.tensor.size
    return [sort_widest_first(file) for file in files]


def _name_files(path: Path, files: list[list[Output]]) -> dict[str, list[Output]]:
    if len(files) == 1:
        return {path.name: files[0]}
    return {f"{path.stem}-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def stream_outputs(outputs: Iterable[Output], mesh: Mesh, limit: int) -> Iterator[NamedPiece]:
    """Yield (name, piece) of a file's tensors, in the order of its bytes. Collective."""
    for output in outputs:
        for piece in stream_pieces(output.make(), mesh, output.spec, limit):
            yield output.name, piece


def _write_drafts(
    drafts: dict[str, Path], files: dict[str, list[Output]], mesh: Mesh, metadata: Mapping[str, str]
) -> OSError | None:
    """Write this process's files, and return the error if one fails; each process writes one file at a time.

    Pieces are collective, so that every process takes part in those of all files, to the end even if it can't write its
    own: with 2 processes and files a, b, c they go through  a0 b0 a1 b1 ...  together, and then through  c0 c1 ...
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


def _make_folder(path: Path, overwrite: bool) -> None:
    """Make the folder of a file, unless the file is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for there in (path, index_of(path)):
        if there.exists() and not overwrite:
            raise FileExistsError(f"{there} is there already; delete it, choose another name, or give overwrite=True")


def _commit(path: Path, drafts: dict[str, Path], files: dict[str, list[Output]]) -> None:
    """Give complete files their names, then write the index if there are several.

    Without the index the files of a set count as absent, so nothing is there until all of it is. So an old index goes
    before files that it may name are replaced; a single file, old or new, is read in preference to an index.
    """
    done: list[Path] = []
    index, old = index_of(path), find_model_files(path)
    try:
        if len(files) > 1:
            index.unlink(missing_ok=True)
        for name, draft in drafts.items():
            done.append(draft.rename(path.with_name(name)))
        if len(files) > 1:
            total = sum(output.tensor.size for file in files.values() for output in file)
            weights = {output.name: name for name, file in files.items() for output in file}
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            write_atomically(index, json.dumps(content, indent=2).encode() + b"\n")
            done.append(index)
        for file in old:
            if file not in done:
                file.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError:
        _delete([*done, index.with_name(f"{index.name}.draft")])
        raise


def _delete(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _failure_of(work: Callable[..., None], *args: Any) -> OSError | None:
    """Call a function, and return the OSError that it raised, or None."""
    try:
        work(*args)
    except OSError as error:
        return error
    return None


def _raise_in_all(path: Path, failure: OSError | None) -> None:
    """Raise in all processes if something went wrong in one. Collective."""
    failed = failed_processes(failure is not None, "js.save_safetensors")
    if isinstance(failure, FileExistsError):
        raise failure
    if failed:
        reason = failure or f"process {failed[0]} says why"
        message = f"{path}: the model could not be written, and nothing of it is left: {reason}"
        raise os_error(message, failure or OSError()) from None
