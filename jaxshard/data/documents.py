"""`Documents`: the tokens of documents, with a mask of the tokens that are learned as labels; `tokenize` makes them."""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxshard.data.chat_template import ChatTemplate
from jaxshard.data.conversations import TEMPLATE, ByChatTemplate, ByLine
from jaxshard.data.corpus import HELD_OUT, Corpus, check_token_array, choose_held_out, read_texts
from jaxshard.data.records import Record, first_kind, read_records
from jaxshard.data.token_cache import TokenFiles, load_tokens, save_tokens
from jaxshard.data.tokenizer import Tokenizer
from jaxshard.storage.copies import local_copy
from jaxshard.storage.paths import as_path

_AT_ONCE = 1024
"""The number of documents that are tokenized at a time."""

_FORMAT = "2"
"""The version of the token cache's format, a part of the cache key; change it whenever the format changes."""


@dataclass(frozen=True)
class Documents:
    """Tokens of documents, one after another, in memory or memory-mapped.

    Attributes:
      tokens: integers [tokens].
      starts: int64[documents + 1]; document i is tokens[starts[i] : starts[i + 1]].
      answers: bool[tokens], True for tokens that are learned as labels; None if all tokens are.
      vocab: the size of the vocabulary, against which ids are checked in every row that is read; None for no check.
      lines: int64[documents], the line number of each document in its file; None if documents are not lines.
      name: the name of the documents in error messages.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray | None = None
    vocab: int | None = None
    lines: np.ndarray | None = None
    name: str = "documents"

    def __post_init__(self) -> None:
        check_token_array(self.tokens, self.name)
        starts, count = self.starts, len(self.tokens)
        if starts.ndim != 1 or not len(starts) or (starts[0], starts[-1]) != (0, count) or (np.diff(starts) < 1).any():
            raise ValueError(
                f"data: starts of {self.name} must grow from 0 to the number of tokens, {count}: no document is empty"
            )
        if self.answers is not None and (self.answers.shape != self.tokens.shape or self.answers.dtype != bool):
            raise ValueError(
                f"data: answers of {self.name} must be bool[{count}], one for each token, got "
                f"{self.answers.dtype}{list(self.answers.shape)}"
            )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def where(self, number: int) -> str:
        """Return a name of a document for error messages: "<name> line 7", or "<name> document 6" without lines."""
        return f"{self.name} document {number}" if self.lines is None else f"{self.name} line {self.lines[number]}"

    def part(self, first: int, last: int) -> Documents:
        """Return documents `first` to `last - 1`; their arrays are views, except `starts`, which is a copy."""
        begin, end = self.starts[first], self.starts[last]
        answers = None if self.answers is None else self.answers[begin:end]
        lines = None if self.lines is None else self.lines[first:last]
        starts = self.starts[first : last + 1] - begin
        return Documents(self.tokens[begin:end], starts, answers, self.vocab, lines, self.name)


def documents(
    tokens: Sequence[Int[np.ndarray, " tokens"]],
    *,
    answers: Sequence[Bool[np.ndarray, " tokens"]] | None = None,
    vocab: int | None = None,
) -> Documents:
    """Make documents from your own token arrays, to be packed by `js.data.packed`.

    Args:
      tokens: the token ids of each document, at least one per document.
      answers: for each document a mask of the tokens that are learned as labels; None for all tokens.
      vocab: if given, the token ids of every row that is read are checked against it.

    Returns:
      The documents, with a copy of the tokens.

    Raises:
      ValueError: an empty document, arrays that are not integers, or answers of another shape or dtype.

    Example:
        documents = js.data.documents([np.array([5, 1, 2, 0]), np.array([7, 0])], vocab=256)
        source = js.data.packed(documents, batch=2, seq=8, seed=0)
    """
    lengths = [len(one) for one in tokens]
    if empty := [number for number, length in enumerate(lengths) if not length]:
        raise ValueError(f"data: document {empty[0]} is empty; leave out the {len(empty)} empty document(s)")
    if answers is not None and [len(one) for one in answers] != lengths:
        raise ValueError("data: answers need one truth value for each token of each document")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    joined = None if answers is None else np.concatenate(answers or [np.zeros(0, bool)])
    return Documents(np.concatenate(tokens or [np.zeros(0, np.int32)]), starts, joined, vocab)


def tokenize(
    path: str | os.PathLike[str], tokenizer: Tokenizer, *, template: str | None = None, cache: str | Path | None = None
) -> Corpus[Documents]:
    r"""Tokenise the documents at a path: text, or prompts and conversations of which only the answers are learned.

    - A `.jsonl` file: one record in each line, all of one kind: {"text": ...}, {"prompt": ..., "completion": ...} or
      {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}. Other keys are ignored. In a conversation the
      messages of the roles "assistant" and "model" are answers. The last 8 % of the records are held out, at least one.
    - A folder: every UTF-8 file below it is a document; files are read and held out as by `js.data.load`.
    - Any other file is one document, whose last 8 % are held out.

    A document is tokenised in one call, with the special tokens that the tokenizer adds, so its tokens equal those of
    `transformers`. A token that contains a character of an answer belongs to the answer. The end token
    (`tokenizer.end`) is appended to every document that does not end with it; it is learned if the document ends with
    an answer. Empty documents are left out, with a warning.

    Conversations are written by the tokenizer's chat template, if it has one, as by `apply_chat_template` of
    transformers: nothing is appended. Answers are the tokens that it marks by `{% generation %}`, or else what it adds
    for each message of the assistant. It runs in a child process with limits of time and memory.

    The tokens are cached in files, named by a hash of the data, the tokenizer and the template.

    Args:
      path: a file or a folder, or an address, as in `js.data.load`.
      tokenizer: a tokenizer from `js.data.tokenizer`.
      template: a line for one message in which {role} and {content} are replaced, in the place of the chat template;
        "{role}:\n{content}\n" by default if the tokenizer has no chat template. An answer then includes the line's
        text after {content}.
      cache: the folder of the cache; by default `jaxshard/tokens` in $XDG_CACHE_HOME, or in ~/.cache.

    Returns:
      The corpus, whose parts are memory-mapped.

    Raises:
      FileNotFoundError: nothing at the path.
      ValueError: invalid lines, with their numbers; no documents, or no second document to hold out; a template that is
        invalid; a chat template that can't be used.

    Example:
        tokenizer = js.data.tokenizer("llama/")
        corpus = js.data.tokenize("chats.jsonl", tokenizer)
        source = js.data.packed(corpus.train, batch=32, seq=1024, seed=0)
    """
    texts = _open(local_copy(as_path(path)), tokenizer, template)
    key = hashlib.sha256()
    for fact in (_FORMAT, tokenizer.digest, texts.digest):
        key.update(f"{len(fact)} {fact}".encode())
    found = load_tokens(cache, texts.name, key.hexdigest())
    if found is None:
        found = _tokenize(texts, tokenizer)
        if (problem := save_tokens(cache, texts.name, key.hexdigest(), found)) is not None:
            warnings.warn(f"data: the tokens of {texts.name} are not kept: {problem}", stacklevel=2)
    no_end = f"{tokenizer.file} names no token that ends a text: give tokenizer_config.json beside it an eos_token"
    for note in (*texts.notes, *found.notes, *([] if texts.complete or tokenizer.end is not None else [no_end])):
        warnings.warn(f"data: {note}", stacklevel=2)
    joined = Documents(found.tokens, found.starts, found.answers, tokenizer.vocab, found.lines, texts.name)
    cut = len(joined) - found.held_out
    return Corpus(texts.name, joined.part(0, cut), joined.part(cut, len(joined)), tokenizer.vocab, found.digest)


class _Texts(NamedTuple):
    """The documents at a path, not yet tokenised.

    Attributes:
      name: the name of the file or folder.
      digest: the content's hash and template, a part of the cache key.
      records: `records()` reads the documents, and yields a `Record` for each.
      first_held: the index of the first held-out document, or None if the last 8 % are held out.
      notes: warnings about files that were left out.
      complete: True if the texts have all special tokens, so that a tokenizer adds none.
    """

    name: str
    digest: str
    records: Callable[[], Iterator[Record]]
    first_held: int | None = None
    notes: tuple[str, ...] = ()
    complete: bool = False


def _open(path: Path, tokenizer: Tokenizer, template: str | None) -> _Texts:
    """Find the documents at a path, and hash the bytes of the files, without tokenising.

    Raises:
      FileNotFoundError: nothing at the path.
      ValueError: the path has no documents, or the template is invalid or missing.
    """
    if not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist; give a .jsonl file, a text file or a folder of text")
    name = path.resolve().name
    if path.suffix in (".npy", ".bin") and path.is_file():
        raise ValueError(f"data: {path} holds token ids, for which there is no use of a tokenizer; read it without one")
    if path.is_dir():
        return _open_folder(path, name)
    with path.open("rb") as file:
        digest = f"{path.suffix} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    if path.suffix != ".jsonl":
        return _Texts(name, digest, lambda: iter([Record(_decode(path))]))
    program = tokenizer.chat_template
    if template is None and program is not None and first_kind(path) == "messages":
        records = functools.partial(_read_by_chat_template, path, program)
        return _Texts(name, f"{digest} {program.digest}", records, complete=True)
    line = TEMPLATE if template is None else template
    write = ByLine(line)
    return _Texts(name, f"{digest} {line}", lambda: read_records(path, write))


def _read_by_chat_template(path: Path, template: ChatTemplate) -> Iterator[Record]:
    with template.renderer() as renderer:
        yield from read_records(path, ByChatTemplate(renderer))


def _open_folder(path: Path, name: str) -> _Texts:
    texts, skipped = read_texts(path)
    if lines := [one for one in texts if one.endswith(".jsonl")]:
        raise ValueError(
            f"data: the folder {path} has {lines[0]}; give one .jsonl file, or a folder of text without any"
        )
    texts = {one: text for one, text in texts.items() if text}
    held = choose_held_out(texts) if len(texts) > 1 else set()
    order = sorted(texts, key=lambda one: one in held)  # a stable sort: held-out texts last
    digest = hashlib.sha256()
    for one in order:
        digest.update(f"{len(one)} {one} {len(texts[one])} ".encode() + texts[one])
    first_held = len(order) - len(held) if held else None
    notes = (skipped.removeprefix("data: "),) if skipped else ()
    return _Texts(name, digest.hexdigest(), lambda: (Record(texts[one].decode()) for one in order), first_held, notes)


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path} is not UTF-8 at byte {error.start}; a tokenizer takes text") from error


class _Encoded(NamedTuple):
    """A tokenised document.

    Attributes:
      number: the index of the document.
      line: the line number of the document in its file; 0 if the document is a file.
      ids: the token ids of the document.
      learned: bool[tokens], True for tokens that are learned as labels; None if all tokens are.
      straddling: the number of answers that begin in the middle of a token.
    """

    number: int
    line: int
    ids: np.ndarray
    learned: np.ndarray | None
    straddling: int


def _tokenize(texts: _Texts, tokenizer: Tokenizer) -> TokenFiles:
    """Tokenise all documents of a path into arrays in memory, and decide how many of them are held out."""
    dtype = np.uint16 if tokenizer.vocab <= 2**16 else np.int32
    found, empty = [], 0
    for one in _encode(texts, tokenizer):
        if one.ids.size:
            found.append(one._replace(ids=one.ids.astype(dtype)))
        else:
            empty += 1
    if not found:
        raise ValueError(f"data: {texts.name} has no documents with tokens")
    notes = [f"{texts.name}: left out {empty} empty document(s)"] if empty else []
    if straddling := sum(one.straddling for one in found):
        notes.append(
            f"{texts.name}: {straddling} answer(s) begin inside a token, which then counts as the answer's; better end "
            "prompts without a space, and begin answers with it"
        )
    tokens = np.concatenate([one.ids for one in found])
    starts = np.concatenate([[0], np.cumsum([len(one.ids) for one in found])]).astype(np.int64)
    learned = None if found[0].learned is None else np.concatenate([one.learned for one in found])
    lines = np.array([one.line for one in found], np.int64) if found[0].line else None
    if len(found) > 1:
        held = sum(one.number >= texts.first_held for one in found) if texts.first_held is not None else 0
        held = held if 0 < held < len(found) else max(1, int(len(found) * HELD_OUT))
        return TokenFiles(tokens, starts, learned, lines, held, tuple(notes))
    if lines is not None or len(tokens) < 2:
        raise ValueError(f"data: {texts.name} has one document, and one must be held out; give at least two")
    cut = min(len(tokens) - 1, len(tokens) - int(len(tokens) * HELD_OUT))
    return TokenFiles(tokens, np.array([0, cut, len(tokens)]), None, None, 1, tuple(notes))


def _encode(texts: _Texts, tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """Tokenise documents, and append the end token unless they are complete; one without text gets no tokens."""
    number, records = 0, texts.records()
    end = None if texts.complete else tokenizer.end
    while some := list(islice(records, _AT_ONCE)):
        with_answers = some[0].answers is not None  # a file has records of one kind
        parts = [record.text for record in some]
        spans: list[Any] = [None] * len(some)
        if with_answers:
            encoded = tokenizer.encode_with_spans(parts, add_special_tokens=not texts.complete)
            ids, spans = map(list, zip(*encoded, strict=True))
        else:
            ids = tokenizer.encode(parts)
        for record, its_ids, its_spans in zip(some, ids, spans, strict=True):
            its_ids = its_ids if record.text else its_ids[:0]
            yield _Encoded(number, record.line, *_end(record, its_ids, its_spans, end, tokenizer))
            number += 1


def _end(
    record: Record, ids: np.ndarray, spans: np.ndarray | None, end: int | None, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Append the end token to a document's ids if it is missing, and find the tokens that are learned.

    Args:
      record: the document, with the character ranges of its answers.
      ids: the token ids of its text.
      spans: int64[tokens, 2], (begin, end) of each token in the characters of the text; None if there are no answers.
      end: the id of the end token, or None to append nothing.
      tokenizer: the tokenizer.

    Returns:
      (ids, bool[tokens] of learned tokens or None for all, number of answers that begin inside a token).
    """
    if end is not None and ids.size and ids[-1] != end and not record.text.rstrip().endswith(tokenizer.text_of(end)):
        ids = np.append(ids, end)
    if record.answers is None or spans is None:
        return ids, None, 0
    learned, straddling = np.zeros(len(ids), bool), 0
    first, last = spans.T
    for begin, stop in record.answers:
        learned[: len(spans)] |= (first < stop) & (last > begin) & (last > first)
        straddling += bool(((first < begin) & (last > begin)).any())
    if end is not None and ids[-1] == end:  # the end token is learned if the document ends with an answer
        learned[-1] |= record.answers[-1][1] == len(record.text)
    return ids, learned, straddling
