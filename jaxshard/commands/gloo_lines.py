"""Remove gloo's messages about connections from the output of a process.

Processes on CPUs exchange arrays by gloo, which writes a line for each device to standard output, without a setting to
turn that off: "[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7". Its threads
mix the pieces of their lines with each other's and with the program's.
"""

from __future__ import annotations

import re

_PIECE = re.compile(
    rb"(?P<first>\[Gloo\] Rank (?!\d+ (?!is connected to |peer ranks\. )))"  # else another message of gloo's
    rb"|(?P<later> is connected to | peer ranks\. |Expected number of connected peer ranks is : )"
    rb"|\d+"
)
_NUMBERS = 3
"""The numbers in a message."""


class GlooFilter:
    """Removes gloo's messages about connections from lines of output, also if a message is split over several lines.

    A message begins with words that no other output has. After them the filter expects a known count of numbers and one
    line break, in this or in later lines, and removes these too.
    """

    def __init__(self) -> None:
        self._numbers = 0
        self._breaks = 0

    def __call__(self, line: bytes) -> bytes | None:
        """Return a line without the pieces of gloo's messages; None if the line has nothing else.

        Args:
          line: a line without its line break.
        """
        kept, end = [], 0  # where gloo's last piece ended
        for found in _PIECE.finditer(line):
            if found["first"]:
                self._numbers += _NUMBERS
                self._breaks += 1
            elif not self._numbers:
                continue
            elif not found["later"]:
                if found.start() != end:
                    continue  # a number in the program's own words
                self._numbers -= 1
            kept.append(line[end : found.start()])
            end = found.end()
        rest = b"".join([*kept, line[end:]])
        if rest or not self._breaks:
            return rest
        self._breaks -= 1
        if not self._breaks:
            self._numbers = 0  # two numbers without anything between them count as one
        return None
