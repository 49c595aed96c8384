"""The costs of a compiled program apart from bytes: waits for collectives, recomputation, arrays in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxshard.hlo.found import Collective, arrays_only
from jaxshard.hlo.operation import Operation, total_size

_SHOWN = 8
"""The number of entries of a list that are printed; JSON has them all."""


@dataclass(frozen=True)
class Program:
    """The waits, the recomputation and the host arrays of a compiled step.

    None of these breaks a promise, but each takes time.

    Attributes:
      synchronous: the collectives for which a device waits; () on a CPU, which waits for all.
      rematerialized: instructions that the compiler computes again on its own, because the step would not fit
        otherwise.
      host: the arrays in host memory.

    Example:
        program = js.audit(step, batch).program
        len(program.synchronous), len(program.rematerialized)
    """

    synchronous: tuple[Collective, ...] = ()
    rematerialized: tuple[Operation, ...] = ()
    host: tuple[Operation, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON: "synchronous", "rematerialized" and "host", each a list of dictionaries."""
        lists = {"synchronous": self.synchronous, "rematerialized": self.rematerialized, "host": self.host}
        return {name: [one.as_dict() for one in entries] for name, entries in lists.items()}

    def __str__(self) -> str:
        """Write a section for each list that is not empty, largest entries first, without collectives of scalars."""
        return "\n\n".join("\n".join([title, *_largest(entries)]) for title, entries in self._lists())

    def titles(self) -> list[str]:
        """Return a line for each list that is not empty: its title, the number of its entries and their bytes."""
        return [title for title, _ in self._lists()]

    def _lists(self) -> list[tuple[str, Sequence[Operation]]]:
        lists: dict[str, Sequence[Operation]] = {
            "collectives that the device waits for": arrays_only(self.synchronous),
            "computed again by the compiler on its own, to save memory": self.rematerialized,
            "in host memory": self.host,
        }
        return [(f"{title}: {len(of)}, {total_size(of)}", of) for title, of in lists.items() if of]


def _largest(entries: Sequence[Operation]) -> list[str]:
    entries = sorted(entries, key=lambda one: -(one.bytes or 0))
    rest = entries[_SHOWN:]
    return [f"- {one}" for one in entries[:_SHOWN]] + [f"- and {len(rest)} more, {total_size(rest)}"] * bool(rest)
