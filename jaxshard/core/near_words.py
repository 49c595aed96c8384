"""Suggest corrections of misspelt words: the nearest known word, and the list of known words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return "did you mean fsdp?" for the nearest of some words; "" if no word is near."""
    near = difflib.get_close_matches(word.lower(), list(words), 1)
    return f"did you mean {near[0]}?" if near else ""


def one_of(word: str, words: Iterable[str]) -> str:
    """Return "did you mean fsdp? Use one of ddp, zero1, fsdp"; only the second part if no word is near."""
    words = list(words)
    near, listed = did_you_mean(word, words), ", ".join(words)
    return f"{near} Use one of {listed}" if near else f"use one of {listed}"
