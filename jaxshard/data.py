"""Token corpora, an indexed global source of training windows, and the global batches made from it.

The sequence of global batches depends on (seed, step) alone: which rows a host reads follows from the layout, never the
other way round, and the position in the data is the step.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxshard._typing import PyTree

if TYPE_CHECKING:
    from jaxshard._layout import Layout

HELD_OUT = 0.08
"""The share of files, or of a single token array's end, that is held out."""

_BYTES = 256
_SEPARATOR = b"\0"
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_CHUNK, _SCANNED = 2**24, 64


class Corpus(NamedTuple):
    """Tokens to train on and tokens held out, in memory or memory-mapped.

    `digest` is a SHA-256 over the tokens of both, in hexadecimal: the standard library differs between Python versions,
    so a result names the text it was trained on. Of more than 2**30 tokens it covers the number and 64 evenly spaced
    pieces of 2**24.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    vocab: int
    digest: str


class Source(Protocol):
    """What `batches` reads: a global batch that any host can read any rows of.

    `batch` is the number of global rows of a step; `rows(step, rows)` is a tree of NumPy arrays [len(rows), ...], the
    given global rows of that step's batch, which depend on nothing else.
    """

    @property
    def batch(self) -> int: ...

    def rows(self, step: int, rows: np.ndarray) -> PyTree: ...


def stdlib() -> Corpus:
    """The source text of the running Python's standard library, as bytes (vocabulary 256), about 12 MB.

    All `*.py` files below `sysconfig`'s stdlib folder in the order of their paths, without installed packages
    (site-packages, dist-packages) and without test suites: some distributions leave those out, and where they are
    present they are twice as long as the library itself. A file is held out when a hash of its path says so.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {path.as_posix(): (root / path).read_bytes() for path in _files(root, "*.py", _NOT_THE_LIBRARY)}
    if not texts:
        raise ValueError(f"data: this Python has no library source (*.py below {root}); give data of your own")
    return _from_texts(f"stdlib-{sysconfig.get_python_version()}", texts)


def load(path: str | Path, *, dtype: Any = None, vocab: int | None = None) -> Corpus:
    """The corpus at a path: text, or tokens.

    - a folder: the bytes of every UTF-8 file below it, hidden ones left out and others named in a warning; files held
      out by a hash of their relative path, one at least;
    - a `.npy` file: a one-dimensional integer array, memory-mapped; `vocab` is needed unless it is uint8;
    - a `.bin` file: raw integers of the given `dtype` and `vocab`, memory-mapped;
    - any other file: its bytes, memory-mapped.

    Of a single file the last 8 % are held out. Token ids are compared with the vocabulary here (of more than 2**30
    tokens in evenly spaced pieces) and, where `windows` is given the vocabulary, again in every row that is read.

    Raises:
      FileNotFoundError: nothing at the path.
      ValueError: empty data, a missing dtype or vocabulary, token ids outside it.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"data: {path} does not exist; give a text file, a folder of text, a .npy or a .bin file"
        )
    if path.is_file() and path.suffix in (".npy", ".bin"):
        tokens = _token_array(path, dtype)
        if vocab is None and tokens.dtype != np.uint8:
            raise ValueError(f"data: the vocabulary of the {tokens.dtype} tokens in {path} is unknown; pass vocab=")
        return _from_tokens(path.name, tokens, _BYTES if vocab is None else vocab)
    if dtype is not None or vocab not in (None, _BYTES):
        raise ValueError(
            f"data: {path} is read as bytes, a vocabulary of {_BYTES}, but dtype={dtype}, vocab={vocab} were given; "
            "they are for .npy and .bin token arrays"
        )
    return _from_folder(path) if path.is_dir() else _from_tokens(path.name, _token_array(path, np.uint8), _BYTES)


def _from_folder(root: Path) -> Corpus:
    texts, skipped = {}, []
    for path in _files(root, "*", frozenset()):
        content = (root / path).read_bytes()
        try:
            content.decode()
            texts[path.as_posix()] = content
        except UnicodeDecodeError:
            skipped.append(path.as_posix())
    if not any(texts.values()):
        raise ValueError(f"data: the folder {root} has no text: {len(texts)} empty files, {len(skipped)} not UTF-8")
    if skipped:
        warnings.warn(f"data: left out {len(skipped)} files that are not UTF-8, such as {skipped[0]}", stacklevel=3)
    return _from_texts(root.resolve().name, texts)


@dataclass(frozen=True)
class Windows:
    """The indexed source that `windows` makes."""

    tokens: np.ndarray
    batch: int
    seq: int
    seed: int
    vocab: int | None = None

    @property
    def epoch_windows(self) -> int:
        """How many windows an epoch has: each token but the first is a target at most once."""
        return (len(self.tokens) - 1) // self.seq

    def rows(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        """{"tokens": int32[len(rows), seq + 1]}: the given global rows of the batch of a step."""
        rows = np.asarray(rows, np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < self.batch):
            raise ValueError(f"data: rows {rows.min()} to {rows.max()} of a batch of {self.batch} rows")
        epoch, position = np.divmod(np.int64(step) * self.batch + rows, self.epoch_windows)
        window = permute(position, size=self.epoch_windows, seed=self.seed, epoch=epoch)
        return {"tokens": _read(self.tokens, window * self.seq, self.seq, self.vocab)}


def windows(tokens: np.ndarray, *, batch: int, seq: int, seed: int, vocab: int | None = None) -> Windows:
    """A source of {"tokens": int32[batch, seq + 1]} from a token array, which is read lazily.

    The tokens are cut into windows of seq + 1, neighbours sharing one token. Step s takes the windows s * batch to
    (s + 1) * batch of an endless sequence that runs through all windows in an order drawn from (seed, epoch), then
    again in another order: no window comes twice in an epoch, and a batch may straddle two. With `vocab` the ids of
    every row that is read are checked.
    """
    _check_tokens(tokens, batch, seq)
    return Windows(tokens, batch, seq, seed, vocab)


def eval_batches(
    tokens: np.ndarray, *, batch: int, seq: int, limit: int | None = None, vocab: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Held-out batches {"tokens": int32[batch, seq + 1]}, a finite number; the last may be short.

    They come in the order of the text, as NumPy arrays with all global rows, the same on every host.
    `limit` is the largest number of windows: that many, evenly spaced over the text, so that a short evaluation is no
    sample of the first files alone. Without it every window comes once.
    """
    _check_tokens(tokens, batch, seq)
    if limit is not None and limit < 1:
        raise ValueError(f"data: limit must be at least 1 window, got {limit}")
    total = (len(tokens) - 1) // seq
    count = min(total, limit or total)
    chosen = np.arange(count) * total // count
    return ({"tokens": _read(tokens, part * seq, seq, vocab)} for part in np.split(chosen, range(batch, count, batch)))


def batches(source: Source, layout: Layout, *, start: Any = 0) -> Iterator[PyTree]:
    """Global batches from step `start` on, endless: each leaf a `jax.Array` [source.batch, ...] placed by the layout.

    Every host reads the rows that its own devices hold, each once, and nothing is communicated. `start` may be a
    `jax.Array` scalar: `start=run.step` goes on where a run stopped.
    """
    row = source.rows(int(start), np.zeros(1, np.int64))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((source.batch, *leaf.shape[1:]), leaf.dtype), row)
    shardings = jax.tree.map(layout.batch_sharding, shapes)

    def batch_of(step: int) -> PyTree:
        read: dict[tuple[int, int], PyTree] = {}

        def leaf_of(number: int, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
            def shard(index: Any) -> np.ndarray:
                first, last, _ = index[0].indices(source.batch)
                if (first, last) not in read:
                    read[first, last] = jax.tree.leaves(source.rows(step, np.arange(first, last)))
                return read[first, last][number][(slice(None), *index[1:])]

            return jax.make_array_from_callback(shape.shape, sharding, shard)

        leaves, tree = jax.tree.flatten(shapes)
        made = [leaf_of(i, *pair) for i, pair in enumerate(zip(leaves, jax.tree.leaves(shardings), strict=True))]
        return jax.tree.unflatten(tree, made)

    return map(batch_of, itertools.count(int(start)))


def local_batches(iterator: Iterable[PyTree], layout: Layout) -> Iterator[PyTree]:
    """Global batches, `jax.Array` leaves placed by the layout, from an iterator of this host's rows (NumPy arrays).

    All hosts give the same number of rows, in the order of their place in the global batch; hosts that hold the same
    rows (a tensor axis across hosts) give the same rows. Nothing is communicated.
    """

    def place(leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        if leaf.ndim == 0:
            raise ValueError("local_batches: every leaf needs rows in its first dimension, got a scalar")
        # Hosts may share rows: the share of the global batch that is here follows from the layout, not from the count.
        trial = (leaf.shape[0] * jax.process_count(), *leaf.shape[1:])
        held = _rows_here(layout.batch_sharding(jax.ShapeDtypeStruct(trial, leaf.dtype)), trial)
        shape = (leaf.shape[0] * trial[0] // held, *leaf.shape[1:])
        sharding = layout.batch_sharding(jax.ShapeDtypeStruct(shape, leaf.dtype))
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    return (jax.tree.map(place, batch) for batch in iterator)


def permute(position: np.ndarray, *, size: int, seed: int, epoch: np.ndarray | int) -> np.ndarray:
    """int64 values in [0, size): for a fixed (seed, epoch) a permutation of the positions 0 to size - 1.

    A Feistel network on pairs (left, right) in [a] x [b] with a * b just above `size`; a value outside is put through
    again until it lies inside. Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 3, 4.

    >>> sorted(permute(np.arange(7), size=7, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    position = np.asarray(position, np.int64)
    if position.size and not (position.min() >= 0 and position.max() < size):
        raise ValueError(f"permute: positions {position.min()} to {position.max()} are not all in 0 to {size - 1}")
    left_size = math.isqrt(max(size, 1))
    right_size = -(-size // left_size)
    key = _mix(_mix(np.uint64(seed % 2**64)) ^ np.broadcast_to(epoch, position.shape).astype(np.uint64))
    turn_keys = [_mix(key ^ np.uint64(turn)) for turn in range(8)]
    value = position.copy()
    outside = np.ones(position.shape, bool)
    while outside.any():
        left, right = np.divmod(value[outside], right_size)
        for turn in range(0, 8, 2):
            left = (left + _hash(right, turn_keys[turn][outside], left_size)) % left_size
            right = (right + _hash(left, turn_keys[turn + 1][outside], right_size)) % right_size
        value[outside] = left * right_size + right
        outside[outside] = value[outside] >= size
    return value


def _hash(x: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    return (_mix(key ^ x.astype(np.uint64)) % np.uint64(size)).astype(np.int64)


def _mix(x: Any) -> Any:
    """A hash of uint64 values: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _files(root: Path, pattern: str, skip: frozenset[str]) -> list[Path]:
    """The files below root in the order of their relative paths, none in a hidden folder or one that is skipped."""
    found = [path for path in root.rglob(pattern) if path.is_file()]
    wanted = (path.relative_to(root) for path in found)
    return sorted(path for path in wanted if not any(part in skip or part.startswith(".") for part in path.parts))


def _from_texts(name: str, texts: dict[str, bytes]) -> Corpus:
    """The corpus of several texts by relative path, each of them either trained on or held out."""
    texts = {path: text for path, text in texts.items() if text}
    if len(texts) < 2:
        whole = b"".join(texts.values())
        return _from_tokens(name, np.frombuffer(whole, np.uint8), _BYTES)
    share = {path: int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest()) / 2**64 for path in texts}
    by_share = sorted(texts, key=share.__getitem__)
    count = sum(value < HELD_OUT for value in share.values())
    held = set(by_share[: min(max(count, 1), len(texts) - 1)])

    def joined(paths: Iterable[str]) -> np.ndarray:
        return np.frombuffer(b"".join(texts[path] + _SEPARATOR for path in paths), np.uint8)

    train, held_out = joined(p for p in texts if p not in held), joined(p for p in texts if p in held)
    return Corpus(name, train, held_out, _BYTES, _digest([train, held_out]))


def _from_tokens(name: str, tokens: np.ndarray, vocab: int) -> Corpus:
    """The corpus of one token array, whose end is held out."""
    if not len(tokens):
        raise ValueError(f"data: {name} is empty")
    for chunk in _chunks(tokens):
        _check_ids(chunk, vocab)
    cut = len(tokens) - int(len(tokens) * HELD_OUT)
    return Corpus(name, tokens[:cut], tokens[cut:], vocab, _digest([tokens]))


def _token_array(path: Path, dtype: Any) -> np.ndarray:
    """The integers in a .npy or .bin file, memory-mapped."""
    if path.stat().st_size == 0:
        raise ValueError(f"data: {path} is empty")
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r")
        if dtype is not None and np.dtype(dtype) != tokens.dtype:
            raise ValueError(f"data: {path} holds {tokens.dtype}, but dtype={np.dtype(dtype)} was given; leave it out")
    else:
        if dtype is None:
            raise ValueError(f"data: {path} is raw, so its dtype must be given (such as uint16), and its vocab")
        size, item = path.stat().st_size, np.dtype(dtype).itemsize
        if size % item:
            raise ValueError(f"data: {path} has {size} bytes, no multiple of the {item} bytes of {np.dtype(dtype)}")
        tokens = np.memmap(path, np.dtype(dtype), "r")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"data: {path} must be a one-dimensional integer array, got {tokens.dtype}{tokens.shape}")
    return tokens


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """All of the tokens in pieces, or evenly spaced pieces of them when they are very many."""
    starts = np.arange(0, len(tokens), _CHUNK)
    if len(starts) > _SCANNED:
        starts = starts[np.linspace(0, len(starts) - 1, _SCANNED).astype(int)]
    return (tokens[start : start + _CHUNK] for start in starts)


def _digest(arrays: list[np.ndarray]) -> str:
    total = hashlib.sha256()
    for tokens in arrays:
        total.update(f"{tokens.dtype.str}{len(tokens)}".encode())
        for chunk in _chunks(tokens):
            total.update(np.ascontiguousarray(chunk).data)
    return total.hexdigest()


def _read(tokens: np.ndarray, starts: np.ndarray, seq: int, vocab: int | None) -> np.ndarray:
    """int32[len(starts), seq + 1]: the windows that begin at `starts`."""
    rows = tokens[starts[:, None] + np.arange(seq + 1)]
    _check_ids(rows, 2**31 if vocab is None else vocab)
    return rows.astype(np.int32)


def _check_ids(tokens: np.ndarray, vocab: int) -> None:
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab):
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(f"data: token id {wrong} is outside the vocabulary of {vocab} (0 to {vocab - 1})")


def _check_tokens(tokens: np.ndarray, batch: int, seq: int) -> None:
    if batch < 1 or seq < 1:
        raise ValueError(f"data: batch and seq must be at least 1, got batch={batch}, seq={seq}")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"data: tokens must be a one-dimensional integer array, got {tokens.dtype}{tokens.shape}")
    if len(tokens) < seq + 1:
        raise ValueError(
            f"data: {len(tokens)} tokens are too few for one window of seq + 1 = {seq + 1}; give more data or a seq of "
            f"at most {max(len(tokens) - 1, 0)}"
        )


def _rows_here(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> int:
    """How many different rows of a global array this process holds."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = {index[0].indices(shape[0])[:2] for index in indices if index is not None}
    return sum(last - first for first, last in spans)
