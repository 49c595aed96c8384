"""What a compiled program costs beside its collectives' bytes: waiting, computing again, arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxshard.checks.collectives import describe
from jaxshard.checks.collectives.found import Collective, arrays_only
from jaxshard.checks.collectives.instructions import Instruction

_SHOWN = 8
"""The number of entries of a list that are printed; JSON has them all."""


@dataclass(frozen=True)
class Program:
    """Facts about the program that a compiler made of a step. None breaks a promise, but each takes time.

    Attributes:
      synchronous: the collectives for which a device waits; () on a CPU, which has no others.
      rematerialized: what the compiler computes again on its own, because the step would not fit otherwise.
      host: the arrays in host memory.

    Example:
        program = js.audit(step, batch).program
        len(program.synchronous), len(program.rematerialized)
    """

    synchronous: tuple[Collective, ...] = ()
    rematerialized: tuple[Instruction, ...] = ()
    host: tuple[Instruction, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the lists for JSON."""
        return {
            "synchronous": [describe.as_dict(one) for one in self.synchronous],
            "rematerialized": [one.as_dict() for one in self.rematerialized],
            "host": [one.as_dict() for one in self.host],
        }

    def __str__(self) -> str:
        """The three lists, the largest first; one that is empty is left out, and so are scalars."""
        return "\n\n".join(_largest(title, entries, write) for title, entries, write in self._lists() if entries)

    def titles(self) -> list[str]:
        """Return of each list only how many entries and bytes it has."""
        return [_title(title, entries) for title, entries, _ in self._lists() if entries]

    def _lists(self) -> tuple[tuple[str, Sequence[Any], Callable[[Any], str]], ...]:
        return (
            ("collectives that the device waits for", arrays_only(self.synchronous), describe.describe),
            ("computed again by the compiler on its own, to save memory", self.rematerialized, str),
            ("in host memory", self.host, str),
        )


def _largest(title: str, entries: Sequence[Any], write: Callable[[Any], str]) -> str:
    entries = sorted(entries, key=lambda one: -(one.bytes or 0))
    lines = [f"- {write(one)}" for one in entries[:_SHOWN]]
    if rest := entries[_SHOWN:]:
        lines.append(f"- and {len(rest)} more, {describe.total_size(rest)}")
    return "\n".join([_title(title, entries), *lines])


def _title(title: str, entries: Sequence[Any]) -> str:
    return f"{title}: {len(entries)}, {describe.total_size(entries)}"
