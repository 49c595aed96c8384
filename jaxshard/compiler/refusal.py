"""Parse the error with which a compiler refuses a program that needs too much memory."""

from __future__ import annotations

import re
from typing import NamedTuple

# "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (39.08G) exceeds
# available HBM (15.75G)."; libtpu 0.0.52 puts "E1000: CompileTimeHbmOom: " before it.
_REFUSAL = re.compile(
    r"RESOURCE_EXHAUSTED: .*total memory required[^()]*\((?P<asked>[\d.]+[KMGT]?)\)"
    r" exceeds available HBM \((?P<usable>[\d.]+[KMGT]?)\)"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Refusal(NamedTuple):
    """The bytes in a compiler's out-of-memory error.

    Attributes:
      asked: bytes that the program needs, arguments included, as the compiler rounds them.
      usable: bytes that a program may use.
    """

    asked: int
    usable: int


def parse_refusal(message: str) -> Refusal | None:
    """Parse the bytes of a compiler's out-of-memory error; None for any other error.

    >>> parse_refusal(
    ...     "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (39.08G) "
    ...     "exceeds available HBM (15.75G)."
    ... )
    Refusal(asked=41961830481, usable=16911433728)
    """
    found = _REFUSAL.search(message)
    return None if found is None else Refusal(_bytes(found["asked"]), _bytes(found["usable"]))


def _bytes(text: str) -> int:
    unit = _UNITS.get(text[-1])
    return int(float(text) if unit is None else float(text[:-1]) * unit)
