"""The differences between the bytes of a promise and those of a program, each under the names of its arrays.

They add up: what was promised and all differences together are the bytes that were found. Three kinds there are

- arrays that are promised, and move more seldom, in another dtype, padded, or in another form than counted;
- arrays that are promised without a number of bytes: activations over tensor axes, tokens of experts;
- arrays that nothing promised: surprises, and what is so small that it is left to the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.accounts import Account
from jaxshard.checks.collectives.cause import array_words, cause
from jaxshard.checks.collectives.describe import place_of
from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.found import Collective
from jaxshard.core.layout import human_bytes
from jaxshard.core.text_table import first_words

UNASKED, AS_NEEDED, SMALL = "not promised", "promised as needed", "left to the compiler"
WIDENED = "sent as f32 by a CPU's compiler"


@dataclass(frozen=True)
class Difference:
    """A difference between promise and program, per step and device.

    Attributes:
      what: the arrays in words: parameters by their paths, activations by the operation and the line that compute them.
      why: the reason.
      kinds: the collectives that were found, such as "all-reduce over tensor"; of none those that were promised.
      place: the line of the user's model, or ""; of promised arrays their names say where they are.
      promised: bytes of whole arrays, at most.
      found: bytes of whole arrays.

    Example:
        for difference in js.audit(step, batch).differences:
            print(difference.what, difference.bytes, difference.why)
    """

    what: str
    why: str
    kinds: tuple[str, ...]
    place: str
    promised: int
    found: int

    @property
    def bytes(self) -> int:
        """Bytes that were found beyond the promise; below 0 for fewer."""
        return self.found - self.promised

    def as_dict(self) -> dict[str, Any]:
        """Return the difference for JSON."""
        return {
            "what": self.what,
            "why": self.why,
            "kinds": list(self.kinds),
            "place": self.place,
            "promised": self.promised,
            "found": self.found,
        }

    def __str__(self) -> str:
        sign = "-" if self.bytes < 0 else "+"
        size = f"{sign}{human_bytes(abs(self.bytes))}, {', '.join(self.kinds)}"
        place = f"\n    at {self.place}" if self.place else ""
        return f"{size}: {self.what}{place}\n    {self.why}"


def find_differences(
    accounts: Iterable[Account],
    as_needed: Iterable[tuple[Expected, Collective]],
    small: Iterable[Collective],
    unasked: Iterable[Collective],
    *,
    on_cpu: bool = False,
) -> tuple[Difference, ...]:
    """Return the differences of a comparison, the largest first.

    Args:
      accounts: of the promised arrays (`matching.Allowances.accounts`).
      as_needed: arrays that a promise without a number covers, each with that promise.
      small: arrays that are left to the compiler.
      unasked: arrays that nothing promised.
      on_cpu: the compiler is a CPU's, which sends bf16 as f32.
    """
    found = list(_of_accounts(accounts, on_cpu))
    found += _grouped((one, f"{AS_NEEDED}: {promise.what}") for promise, one in as_needed)
    found += _grouped((one, SMALL) for one in small)
    found += _grouped((one, UNASKED) for one in unasked)
    return tuple(sorted(found, key=lambda one: -abs(one.bytes)))


def _of_accounts(accounts: Iterable[Account], on_cpu: bool) -> Iterator[Difference]:
    """One difference for all arrays with the same reason."""
    groups: dict[tuple[Any, ...], list[Account]] = {}
    for one in accounts:
        if one.promised != one.found:
            kinds = tuple(dict.fromkeys(map(_kind, one.covered or one.forms)))
            role = next(iter(one.names)).partition(" ")[0]
            groups.setdefault((kinds, role, _reason(one, role, on_cpu)), []).append(one)
    for (kinds, _, why), ones in groups.items():
        names = first_words(list(dict.fromkeys(name for one in ones for name in one.names)))
        yield Difference(names, why, kinds, "", sum(one.promised for one in ones), sum(one.found for one in ones))


def _reason(account: Account, role: str, on_cpu: bool) -> str:
    """Why promised arrays move more or less than promised."""
    covered = [one for one in account.covered if one.elements > 1]
    if not covered:
        return {
            "weight": "not gathered: devices multiply with their parts of it and move activations, or nothing needs it",
            "gradient": "not summed in this form: what is moved for it is named apart, or nothing needs it",
        }.get(role, "not moved: it is there already, or nothing needs it")
    return (
        "; ".join(_reasons(account, covered, role, on_cpu)) or "more elements than the array has: the compiler pads it"
    )


def _reasons(account: Account, covered: list[Collective], role: str, on_cpu: bool) -> Iterator[str]:
    wanted = {one.wire_dtype for one in account.forms} - {""}
    for dtype in sorted({one.dtype for one in covered if one.dtype.startswith(("f", "bf"))} - wanted) if wanted else ():
        promised = " or ".join(sorted(wanted))
        narrower = all(hlo.bits_of(dtype) < hlo.bits_of(one) for one in wanted)
        why = "rounded before it is moved, as its product rounds it anyway" if narrower else "its cast comes after"
        by_cpu = on_cpu and dtype == "f32" and wanted <= {"bf16", "f16"}
        yield WIDENED if by_cpu else f"in {dtype} in place of {promised}: {why}"
    rings = any(one.kind == "collective-permute" for one in covered)
    if rings:
        yield "in shards around a ring, or over the borders of padded ones"
    promised_elements = sum(one.elements[1] * (one.most or 0) for one in account.forms)
    elements = sum(one.elements * (one.count or 0) for one in covered)
    if elements < promised_elements and not rings:
        yield {
            "weight": "less often: kept from one use to the next, or used in parts",
            "gradient": "less often: those of a weight's uses are added first and summed over devices once, or are "
            "moved in another form, which is named apart",
        }.get(role, "less often: the rest is there already, or nothing needs it")
    elif elements > promised_elements and not rings:
        yield "padded by the compiler, or each use by itself"


def _kind(one: Collective | Expected) -> str:
    return f"{one.kind} over {'+'.join(one.axes)}"


def _grouped(arrays: Iterable[tuple[Collective, str]]) -> list[Difference]:
    """One difference per place and reason, with the largest array as the name of all."""
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for one, how in arrays:
        if one.elements > 1:
            groups.setdefault((_kind(one), place_of(one), cause(one), how), []).append(one)
    found = []
    for (kind, place, why, how), ones in groups.items():
        words = list(dict.fromkeys(map(array_words, sorted(ones, key=lambda one: -(one.bytes or 0)))))
        what = words[0] + (f" and {len(words) - 1} more" if len(words) > 1 else "")
        size = sum(one.bytes or 0 for one in ones)
        found.append(Difference(what, f"{how}; {why}", (kind,), place, 0, size))
    return found
