"""`save_safetensors` and `to_bytes`: a model as safetensors, piece by piece; files appear complete or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxshard.checkpoint.leaves import Entry
from jaxshard.checkpoint.manifest import sync_folder, write_file
from jaxshard.checkpoint.safetensors import header
from jaxshard.checkpoint.safetensors.header import Tensor
from jaxshard.checkpoint.safetensors.names import stored_leaves, tensors
from jaxshard.checkpoint.safetensors.pieces import LIMIT, Piece, fetch, pieces
from jaxshard.core.layout import Layout

MAX_BYTES = 5_000_000_000
LEAST = 1 << 20
"""Bytes of a piece where many processes write: each has one on every device."""
INDEX = ".index.json"


class Source(NamedTuple):
    """One tensor to be written: what it is called, and the array as stored."""

    entry: Entry
    stored: jax.Array


def save_safetensors(path: str | os.PathLike[str], run: Any, layout: Layout, *, max_bytes: int = MAX_BYTES) -> Path:
    """The path of a safetensors file with the model of a run, complete and on disk; every process calls it.

    The parameters (of a `js.Model` its state too) in model order without padding, each under its path in what `init_fn`
    returns, joined by dots; random keys as their words. `run` may be the stored model alone. Above `max_bytes` of
    tensors there are several files, model-00001-of-00002.safetensors and so on, and model.safetensors.index.json says
    which tensor lies in which, as on Hugging Face; `load_safetensors` takes the same path for both.

    No process holds more of the model on its host than a piece of 16 MiB, no device more than its shards and, for each
    file being written, one array in model order (split as far as it divides) and a piece. Process k writes every
    count-th file from k on, so that no file has two writers; all of them see one folder.

    Raises:
      ValueError: two tensors would have one name; safetensors lacks a dtype; the run is not one of this layout.
      FileExistsError: the file or its index is there.
      OSError: it could not be written. Nothing of it is left.
    """
    path = Path(path).absolute()
    if path.suffix != ".safetensors" or max_bytes < 1:
        raise ValueError(f"{path}, max_bytes={max_bytes}: name a file that ends with .safetensors, of at least 1 byte")
    files = _named(path, _planned(_sources(run, layout), max_bytes))
    drafts = {name: path.with_name(f"{name}.draft") for name in files}
    _agree(path, _prepared(path) if jax.process_index() == 0 else None)
    try:
        _agree(path, _write_all(drafts, files, layout))
        _agree(path, _committed(path, drafts, files) if jax.process_index() == 0 else None)
    finally:
        for draft in drafts.values():  # those that were renamed are gone
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
    return path


def to_bytes(run: Any, layout: Layout) -> bytes:
    """The model of a run as the bytes of one safetensors file, in every process; as `save_safetensors` writes it.

    Raises:
      ValueError: as `save_safetensors`.
    """
    opened = io.BytesIO()
    sources = _sorted(_sources(run, layout))
    writer = _Writer(opened, sources)
    for name, piece in _stream(sources, layout, LIMIT):
        writer.write(name, fetch(piece))
    writer.finish()
    return opened.getvalue()


class _Writer:
    """A safetensors file in the making: its tensors come in their order, then the header with the checksums."""

    def __init__(self, opened: BinaryIO, sources: Sequence[Source]):
        self._opened = opened
        self._tensors = _placed(sources)
        self._sums = dict.fromkeys(self._tensors, 0)
        opened.write(header.to_bytes(self._tensors, self._sums))

    def write(self, name: str, raw: bytes) -> None:
        self._opened.write(raw)
        self._sums[name] = zlib.crc32(raw, self._sums[name])

    def finish(self) -> None:
        self._opened.seek(0)
        self._opened.write(header.to_bytes(self._tensors, self._sums))
        self._opened.flush()


def _sources(run: Any, layout: Layout) -> list[Source]:
    wanted, _ = tensors(layout)
    return [Source(entry, x) for entry, x in zip(wanted, stored_leaves(run, layout), strict=True)]


def _placed(sources: Iterable[Source]) -> dict[str, Tensor]:
    """The tensors of a file, one behind the other."""
    placed, at = {}, 0
    for source in sources:
        tensor = tensor_of(source.entry)._replace(start=at)
        placed[source.entry.path] = tensor
        at += tensor.size
    return placed


def tensor_of(entry: Entry) -> Tensor:
    """What an array is in a file, at its beginning: random keys are their words."""
    if not entry.is_key:
        return Tensor(str(entry.dtype), entry.shape, 0)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(entry.shape, entry.dtype))
    return Tensor(str(words.dtype), words.shape, 0)


def _sorted(sources: Iterable[Source]) -> list[Source]:
    """Wide dtypes first, so that every tensor is aligned."""
    return sorted(sources, key=lambda source: -np.dtype(tensor_of(source.entry).dtype).itemsize)


def _planned(sources: Iterable[Source], max_bytes: int) -> list[list[Source]]:
    """The tensors of each file, in model order from file to file; only a tensor that is larger makes a larger file."""
    files: list[list[Source]] = [[]]
    room = max_bytes
    for source in sources:
        size = tensor_of(source.entry).size
        if size > room and files[-1]:
            files.append([])
            room = max_bytes
        files[-1].append(source)
        room -= size
    return [_sorted(file) for file in files]


def _named(path: Path, files: list[list[Source]]) -> dict[str, list[Source]]:
    if len(files) == 1:
        return {path.name: files[0]}
    return {f"{path.stem}-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def _stream(sources: Sequence[Source], layout: Layout, limit: int) -> Iterator[tuple[str, Piece]]:
    """The pieces of a file's tensors, one behind the other."""
    for entry, stored in sources:
        spec = entry.shape_saved(layout.mesh).sharding.spec
        for piece in pieces(entry.to_saved(stored, layout.mesh), layout.mesh, spec, limit):
            yield entry.path, piece


def _write_all(drafts: dict[str, Path], files: dict[str, list[Source]], layout: Layout) -> OSError | None:
    """Writes this process's files, as many processes at a time as there are; what went wrong with that.

    All take part in the pieces of all files, to the end even if they can't write theirs.
    """
    index, count = jax.process_index(), jax.process_count()
    failure: OSError | None = None
    names = list(files)
    for first in range(0, len(names), count):
        group = names[first : first + count]
        mine = group[index] if index < len(group) else None
        rows = zip_longest(*(_stream(files[name], layout, max(LEAST, LIMIT // len(group))) for name in group))
        own = (row[index] for row in rows) if mine else (None for _ in rows)
        if mine is not None:
            try:
                _write(drafts[mine], files[mine], own)
            except OSError as error:
                failure = failure or error
        for _ in own:
            pass
    return failure


def _write(draft: Path, sources: Sequence[Source], stream: Iterable[tuple[str, Piece] | None]) -> None:
    with draft.open("wb") as opened:
        writer = _Writer(opened, sources)
        for item in stream:
            if item is not None:
                writer.write(item[0], fetch(item[1]))
        writer.finish()
        os.fsync(opened.fileno())


def _prepared(path: Path) -> OSError | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for there in (path, path.with_name(path.name + INDEX)):
            if there.exists():
                return FileExistsError(f"{there} is there already; delete it, or choose another name")
    except OSError as error:
        return error
    return None


def _committed(path: Path, drafts: dict[str, Path], files: dict[str, list[Source]]) -> OSError | None:
    """Gives complete files their names, and writes the index last if there are several: before it there is nothing."""
    done: list[Path] = []
    try:
        for name, draft in drafts.items():
            done.append(draft.rename(path.with_name(name)))
        if len(files) > 1:
            total = sum(tensor.size for file in files.values() for tensor in _placed(file).values())
            weights = {source.entry.path: name for name, file in files.items() for source in file}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            write_file(path.with_name(path.name + INDEX), json.dumps(index, indent=2).encode() + b"\n")
        sync_folder(path.parent)
    except OSError as error:
        for file in (*done, path.with_name(f"{path.name}{INDEX}.draft")):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        return error
    return None


def _agree(path: Path, failure: OSError | None) -> None:
    """Raises in all processes if something went wrong in one."""
    failed = [jax.process_index()] if failure is not None else []
    if jax.process_count() > 1:
        flags = multihost_utils.process_allgather(np.int32(failure is not None))
        failed = np.flatnonzero(np.asarray(flags)).tolist()
    if isinstance(failure, FileExistsError):
        raise failure
    if failed:
        reason = failure or f"process {failed[0]} says why"
        raise OSError(f"{path}: the model could not be written, and nothing of it is left: {reason}") from failure
