"""`Corpus`: text or token ids, in memory or memory-mapped, with a part held out for evaluation.

For a folder, a hash of each file's path decides whether the file is held out. So adding or removing a file does not
change whether other files are held out. Of a single file or token array the end is held out.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from jaxshard.storage.copies import local_copy
from jaxshard.storage.paths import as_path

HELD_OUT = 0.08
"""The fraction of the files, or of a single token array, that is held out.

Example:
    count = int(len(tokens) * (1 - js.data.HELD_OUT))
    train, held_out = tokens[:count], tokens[count:]
"""

_BYTES = 256
_SEPARATOR = b"\0"
_TELL_VOCAB = "give the size of its vocabulary (vocab=50257, on the command line --vocab 50257)"
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_CHUNK = 2**24
"""The number of tokens that are checked and hashed at a time."""
_MAX_CHUNKS = 64
"""The largest number of chunks that are checked and hashed; of 2**40 tokens, these are one token in a thousand."""


Part = TypeVar("Part")


class Corpus(NamedTuple, Generic[Part]):
    """Tokens to train on and tokens held out, in memory or memory-mapped.

    Attributes:
      name: the name of the file or folder; for the standard library "stdlib-" and the Python version.
      train: integers [number of tokens]; from `tokenize`, `js.data.Documents`.
      held_out: tokens for evaluation, of the same type as `train`.
      vocab: the size of the vocabulary; all ids are from 0 to vocab - 1.
      digest: SHA-256 over the tokens of `train` and `held_out`, in hexadecimal, to identify the text in results (the
        standard library differs between Python versions). For more than 2**30 tokens it covers their number and 64
        evenly spaced chunks of 2**24 tokens.
    """

    name: str
    train: Part
    held_out: Part
    vocab: int
    digest: str


def stdlib() -> Corpus[np.ndarray]:
    """Load the source text of the running Python's standard library: about 12 MB of text that every machine has.

    The text is that of all `*.py` files below `sysconfig`'s stdlib folder, sorted by path, without installed packages
    (site-packages, dist-packages) and without test suites, which some distributions leave out and which are twice as
    long as the library itself. A hash of its path decides whether a file is held out.

    Returns:
      A corpus of bytes, uint8, with a vocabulary of 256.

    Raises:
      ValueError: this Python comes without the source of its library.

    Example:
        corpus = js.data.stdlib()
        source = js.data.windows(corpus.train, batch=32, seq=128, seed=0, vocab=corpus.vocab)
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {path.as_posix(): (root / path).read_bytes() for path in _list_files(root, "*.py", _NOT_THE_LIBRARY)}
    if not texts:
        raise ValueError(f"data: this Python has no library source (*.py below {root}); give data of your own")
    return _join_texts(f"stdlib-{sysconfig.get_python_version()}", texts)


def load(path: str | os.PathLike[str], *, dtype: Any = None, vocab: int | None = None) -> Corpus[np.ndarray]:
    """Load the corpus at a path: text, whose bytes are the tokens, or token ids.

    - A folder: the bytes of every UTF-8 file below it. Hidden files are left out, and with a warning also files that
      are not UTF-8. Files are held out by a hash of their relative path, at least one.
    - A `.npy` file: a one-dimensional integer array, memory-mapped; needs `vocab` unless it is uint8.
    - A `.bin` file: raw integers, memory-mapped; needs `dtype` and `vocab`.
    - Any other file: its bytes, memory-mapped; with a warning if they are not UTF-8.

    The last 8 % of a single file are held out. Token ids are checked against the vocabulary here (of more than 2**30
    tokens, only evenly spaced chunks) and, if you pass `vocab` to `windows`, again in every row that is read.

    Args:
      path: a file or a folder, or an address s3://... or gs://... Objects are first copied to `jaxshard/objects` in
        $XDG_CACHE_HOME, or in ~/.cache.
      dtype: the integer type of a `.bin` file, such as "uint16".
      vocab: the size of the vocabulary of a `.npy` or `.bin` file. The vocabulary of text is 256, all bytes.

    Returns:
      The tokens to train on and the held-out tokens.

    Raises:
      FileNotFoundError: nothing at the path.
      ValueError: empty data, a dtype or vocabulary that is missing or not allowed, token ids outside the vocabulary.

    Example:
        corpus = js.data.load("notes.txt")
        source = js.data.windows(corpus.train, batch=8, seq=16, seed=0, vocab=corpus.vocab)
    """
    path = local_copy(as_path(path))
    if not path.exists():
        raise FileNotFoundError(
            f"data: {path} does not exist; give a text file, a folder of text, a .npy or a .bin file"
        )
    if path.is_file() and path.suffix in (".npy", ".bin"):
        tokens = _map_tokens(path, dtype)
        if vocab is None and tokens.dtype != np.uint8:
            raise ValueError(f"data: the vocabulary of the {tokens.dtype} tokens in {path} is unknown; {_TELL_VOCAB}")
        return _split_tokens(path.name, tokens, _BYTES if vocab is None else vocab)
    if dtype is not None or vocab not in (None, _BYTES):
        raise ValueError(
            f"data: {path} is read as bytes, a vocabulary of {_BYTES}, but it came with the dtype {dtype} and the "
            f"vocabulary {vocab}; they are for token ids in .npy and .bin files"
        )
    if path.is_dir():
        return _load_folder(path)
    if not _begins_as_text(path):
        warnings.warn(f"data: {path} is not UTF-8; its bytes are the tokens, whatever they mean", stacklevel=2)
    return _split_tokens(path.name, _map_tokens(path, np.uint8), _BYTES)


def _begins_as_text(path: Path) -> bool:
    """Return True if the first 64 KiB of a file are UTF-8, except that the last character may be incomplete."""
    with path.open("rb") as opened:
        beginning = opened.read(1 << 16)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return True


def _load_folder(root: Path) -> Corpus[np.ndarray]:
    texts, skipped = read_texts(root)
    if skipped:
        warnings.warn(skipped, stacklevel=3)
    return _join_texts(root.resolve().name, texts)


def read_texts(root: Path) -> tuple[dict[str, bytes], str]:
    """Read all UTF-8 files below a folder.

    Returns:
      ({relative path: content}, a message about skipped files or "").

    Raises:
      ValueError: there is no text.
    """
    texts, skipped = {}, []
    for path in _list_files(root, "*", frozenset()):
        content = (root / path).read_bytes()
        try:
            content.decode()
            texts[path.as_posix()] = content
        except UnicodeDecodeError:
            skipped.append(path.as_posix())
    if not any(texts.values()):
        raise ValueError(f"data: the folder {root} has no text: {len(texts)} empty files, {len(skipped)} not UTF-8")
    return texts, f"data: left out {len(skipped)} files that are not UTF-8, such as {skipped[0]}" if skipped else ""


def _list_files(root: Path, pattern: str, skip: frozenset[str]) -> list[Path]:
    """Return the sorted relative paths of the files below a folder that match a pattern.

    Hidden files are left out, and files below a hidden folder or a folder whose name is in `skip`.
    """
    found = (path.relative_to(root) for path in root.rglob(pattern) if path.is_file())
    return sorted(path for path in found if not any(part in skip or part.startswith(".") for part in path.parts))


def _join_texts(name: str, texts: dict[str, bytes]) -> Corpus[np.ndarray]:
    """Make a corpus from {relative path: text}. Each text is for training or held out; a single text is divided."""
    texts = {path: text for path, text in texts.items() if text}
    if len(texts) < 2:
        return _split_tokens(name, np.frombuffer(b"".join(texts.values()), np.uint8), _BYTES)
    held = choose_held_out(texts)

    def join(paths: Iterable[str]) -> np.ndarray:
        return np.frombuffer(b"".join(texts[path] + _SEPARATOR for path in paths), np.uint8)

    train, held_out = join(p for p in texts if p not in held), join(p for p in texts if p in held)
    return Corpus(name, train, held_out, _BYTES, hash_tokens([train, held_out]))


def choose_held_out(paths: Collection[str]) -> set[str]:
    """Choose by a hash of each path which of two or more paths are held out: at least one, but not all."""
    # A hash in [0, 1) for each path.
    share = {path: int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest()) / 2**64 for path in paths}
    by_share = sorted(paths, key=share.__getitem__)
    count = sum(value < HELD_OUT for value in share.values())
    return set(by_share[: min(max(count, 1), len(paths) - 1)])


def _split_tokens(name: str, tokens: np.ndarray, vocab: int) -> Corpus[np.ndarray]:
    """Make a corpus from one array of tokens; the last 8 % are held out."""
    if not len(tokens):
        raise ValueError(f"data: {name} is empty")
    for chunk in _sample_chunks(tokens):
        check_ids(chunk, vocab)
    cut = len(tokens) - int(len(tokens) * HELD_OUT)
    return Corpus(name, tokens[:cut], tokens[cut:], vocab, hash_tokens([tokens]))


def _map_tokens(path: Path, dtype: Any) -> np.ndarray:
    """Memory-map the integers in a .npy or raw file; raise ValueError unless they are a one-dimensional array."""
    if path.stat().st_size == 0:
        raise ValueError(f"data: {path} is empty")
    if path.suffix == ".npy":
        tokens = _map_npy(path)
        if dtype is not None and np.dtype(dtype) != tokens.dtype:
            raise ValueError(
                f"data: {path} holds {tokens.dtype}, but the dtype {np.dtype(dtype)} was given; leave it out"
            )
    else:
        if dtype is None:
            raise ValueError(f"data: {path} is raw, so its dtype must be given (such as uint16); also {_TELL_VOCAB}")
        size, item = path.stat().st_size, np.dtype(dtype).itemsize
        if size % item:
            raise ValueError(f"data: {path} has {size} bytes, no multiple of the {item} bytes of {np.dtype(dtype)}")
        tokens = np.memmap(path, np.dtype(dtype), "r")
    check_token_array(tokens, str(path))
    return tokens


def _map_npy(path: Path) -> np.ndarray:
    """Memory-map a .npy file; raise ValueError if its header can't be read, or if it is an archive such as .npz."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise ValueError(f"data: {path} is an archive, such as .npz; save the tokens alone, with np.save")
    try:
        tokens: np.ndarray = np.load(path, mmap_mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy evaluates the header as Python source, so a wrong header may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data: {path} is no .npy file that can be read: {reason}") from error
    return tokens


def _sample_chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yield all tokens in chunks; if there are more than 2**30 tokens, only 64 evenly spaced chunks."""
    starts = np.arange(0, len(tokens), _CHUNK)
    if len(starts) > _MAX_CHUNKS:
        starts = starts[np.linspace(0, len(starts) - 1, _MAX_CHUNKS).astype(int)]
    return (tokens[start : start + _CHUNK] for start in starts)


def hash_tokens(arrays: list[np.ndarray]) -> str:
    """Return the SHA-256 of arrays of tokens, in hexadecimal; a very large array is hashed in evenly spaced chunks."""
    total = hashlib.sha256()
    for tokens in arrays:
        total.update(f"{tokens.dtype.str}{len(tokens)}".encode())
        for chunk in _sample_chunks(tokens):
            total.update(np.ascontiguousarray(chunk).data)
    return total.hexdigest()


def check_token_array(tokens: np.ndarray, name: str) -> None:
    """Raise ValueError unless `tokens` is a one-dimensional integer array."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"data: {name} must be a one-dimensional integer array, got {tokens.dtype}{tokens.shape}")


def check_ids(tokens: np.ndarray, vocab: int) -> None:
    """Raise ValueError if a token id is outside the vocabulary."""
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab):
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(f"data: token id {wrong} is outside the vocabulary of {vocab} (0 to {vocab - 1})")
