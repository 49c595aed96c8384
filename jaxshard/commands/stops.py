"""End generated text at the model's end of text, and at the tokens and texts of --stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxshard.data.tokenizer import FILE, Tokenizer
from jaxshard.hf.folder import end_tokens
from jaxshard.storage.paths import AnyPath


class Bytes:
    """The tokenizer of models that were trained on bytes: the tokens of a text are its bytes in UTF-8."""

    end = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return for each text its UTF-8 bytes, as token ids."""
        return [self.encode_part(text) for text in texts]

    def encode_part(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text that may begin within another text, as token ids."""
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """Convert token ids, which are bytes, to text; invalid UTF-8 becomes replacement characters."""
        return bytes(tokens).decode(errors="replace")


class Stops(NamedTuple):
    """Tokens and texts at which generated text ends; they are cut off.

    Attributes:
      tokens: the stop tokens, as token ids.
      texts: the stop texts.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...] = ()

    def sequences(self, words: Tokenizer | Bytes | None) -> list[list[int]]:
        """Return the token sequences at which `js.generate` stops early: stop tokens, and stop texts as tokens.

        A stop text that the tokenizer can't encode is left out, and a model may write a stop text with other tokens. So
        `cut_text` looks for the stop texts again in the output.
        """
        assert words is not None or not self.texts, "parse_stops refuses texts without a tokenizer"
        pieces = [words.encode_part(text) for text in self.texts] if words is not None else []
        known = [piece for text, piece in zip(self.texts, pieces) if words is not None and text in words.decode(piece)]
        return [[token] for token in self.tokens] + known

    def cut(self, row: Sequence[int], prompt: int) -> list[int]:
        """Return the tokens of a row before the first stop token; the first `prompt` tokens are not searched."""
        ends = (at for at in range(prompt, len(row)) if row[at] in self.tokens)
        return list(row[: next(ends, len(row))])

    def cut_text(self, row: Sequence[int], prompt: int, words: Tokenizer | Bytes) -> str:
        """Return the text of a row before the first stop token or text; the first `prompt` tokens are not searched."""
        text, before = words.decode(self.cut(row, prompt)), words.decode(row[:prompt])
        # A prompt may end within a letter, which is one with the tokens after it.
        start = next((at for at, (one, other) in enumerate(zip(text, before)) if one != other), len(before))
        return text[: min((at for at in (text.find(stop, start) for stop in self.texts) if at >= 0), default=len(text))]


def ends_of_text(words: Tokenizer | Bytes | None, folder: AnyPath | None) -> tuple[int, ...]:
    """Return the end-of-text token ids of a tokenizer and of the Hugging Face model in a folder."""
    own = () if words is None or words.end is None else (words.end,)
    return tuple(dict.fromkeys(own + (() if folder is None else end_tokens(folder))))


def parse_stops(given: Sequence[str], words: Tokenizer | Bytes | None, ends: tuple[int, ...]) -> Stops:
    r"""Parse the values of --stop: token ids with commas between them, or texts; \n is a line break.

    Args:
      given: the values.
      words: the tokenizer, or None.
      ends: the model's own end-of-text tokens, which are added.

    Raises:
      ValueError: a text is given, but no tokenizer.
    """
    tokens, texts = list(ends), []
    for value in given:
        parts = [part.strip() for part in value.split(",")]
        if all(part.isdecimal() for part in parts):
            tokens += map(int, parts)
        elif words is None:
            raise ValueError(
                f"--stop {value}: the model has no {FILE} beside it to make tokens of text; give --tokenizer PATH, or "
                "token ids such as 2,7"
            )
        else:
            texts.append(value.replace("\\n", "\n").replace("\\t", "\t"))
    return Stops(tuple(dict.fromkeys(tokens)), tuple(texts))
