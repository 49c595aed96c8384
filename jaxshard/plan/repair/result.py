"""What a repair returns: the edits that help, with the bytes that each saves, and those that were tried in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxshard.checks.collectives import describe
from jaxshard.checks.collectives.compare import Comparison, Surprise
from jaxshard.checks.parity import Parity
from jaxshard.core.layout import human_bytes
from jaxshard.core.pictures import page
from jaxshard.core.pictures.style import GREY, SKY
from jaxshard.core.text_table import Table
from jaxshard.plan.repair.edits import Edit, edit_str
from jaxshard.plan.repair.parts import Parts
from jaxshard.training.step import Step


class Change(NamedTuple):
    """A number before an edit and after it."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"{human_bytes(self.before)} before, {human_bytes(self.after)} after"


@dataclass(frozen=True)
class Repair:
    """An edit that removes surprises.

    Attributes:
      edit: what to change.
      removed: the surprises that are gone with it.
      unexpected: bytes of all surprises, per step and device.
      moved: bytes of all collectives, promised ones too; an all-reduce counts twice.
      resting: bytes per device of parameters, gradients and optimizer state.
      parity: the edited step against one device; None where it could not run, and the edit can't change values.

    Example:
        for repair in js.plan.repair(init_fn, loss_fn, tx, js.fsdp(), mesh, batch, engine=js.auto()):
            print(repair)
    """

    edit: Edit
    removed: tuple[Surprise, ...]
    unexpected: Change
    moved: Change
    resting: Change
    parity: Parity | None

    def as_dict(self) -> dict[str, Any]:
        """Return the edit for JSON."""
        return {
            "place": self.edit.place,
            "edit": self.edit.what,
            "code": self.edit.code,
            "removes": [surprise.as_dict() for surprise in self.removed],
            "unexpected_bytes": [self.unexpected.before, self.unexpected.after],
            "collective_bytes": [self.moved.before, self.moved.after],
            "resting_bytes": [self.resting.before, self.resting.after],
            "saved_bytes": self.unexpected.before - self.unexpected.after,
            "parity": None if self.parity is None else self.parity.ok,
        }

    def __str__(self) -> str:
        head = f"{self.edit.place}: {self.edit.what}"
        code = f"\n    {self.edit.code}" if self.edit.code else ""
        gone = "".join(f"\n    removes {_short(surprise)}" for surprise in self.removed)
        rests = "" if self.resting.before == self.resting.after else f"\n    at rest: {self.resting}"
        sizes = f"\n    unexpected: {self.unexpected}\n    all collectives: {self.moved}{rests}"
        kept = "not compared with one device, but no value can change" if self.parity is None else "parity kept"
        return f"{head}{code}{gone}{sizes}\n    {kept}"

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        return page.page(page.preformatted(str(self)), _bars(self))


@dataclass(frozen=True)
class Tried:
    """An edit that was tried and not kept, and why not."""

    edit: Edit
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the edit for JSON."""
        return {"place": self.edit.place, "edit": self.edit.what, "code": self.edit.code, "why": self.why}

    def __str__(self) -> str:
        return f"{edit_str(self.edit)}\n    {self.why}"


@dataclass(frozen=True)
class Repairs:
    """The outcome of `js.plan.repair`.

    Attributes:
      before: the audit of the step as it was written.
      after: the audit with all edits.
      edits: the edits that help, in the order in which they were made; each is counted on top of those before it.
      tried: the edits that did not help.
      parts: the parts of the step with all edits made.
    """

    before: Comparison
    after: Comparison
    edits: tuple[Repair, ...]
    tried: tuple[Tried, ...]
    parts: Parts

    @property
    def ok(self) -> bool:
        """True if no surprise is left."""
        return self.after.ok

    def make_step(self) -> Step:
        """Return the step with all edits made, as `js.make_step` would if they stood in the files."""
        return self.parts.make_step()

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for JSON."""
        return {
            "repaired": self.ok,
            "repairs": [one.as_dict() for one in self.edits],
            "unrepaired": [surprise.as_dict() for surprise in self.after.surprises],
            "tried": [one.as_dict() for one in self.tried],
        }

    def __str__(self) -> str:
        if self.before.ok:
            return "no surprises, nothing to repair"
        count = len(self.edits)
        lines = [f"{n}. {one}" for n, one in enumerate(self.edits, 1)]
        if self.ok:
            return "\n".join([f"{count} edit{'s' * (count > 1)} remove{'s' * (count == 1)} all surprises:", *lines])
        left = [f"- {_short(surprise)}" for surprise in self.after.surprises]
        tried = [f"- {one}" for one in self.tried]
        head = [f"{count} edit{'s' * (count > 1)} help{'s' * (count == 1)}:", *lines] if count else []
        return "\n".join([*head, "no edit was found for:", *left, "tried:", *tried])

    def _repr_html_(self) -> str:
        """Show the same in a notebook: each edit, with its code and the bytes before and after."""
        if self.before.ok:
            return page.page(page.verdict(True, str(self)))
        count = len(self.edits)
        verb = f"remove{'s' * (count == 1)} all surprises" if self.ok else f"help{'s' * (count == 1)}"
        tried = page.listing(map(str, self.tried))
        return page.page(
            page.verdict(self.ok, f"{count} edit{'s' * (count != 1)} {verb}") if count else "",
            *(page.preformatted(f"{n}. {one}") + _bars(one) for n, one in enumerate(self.edits, 1)),
            "" if self.ok else page.verdict(False, "no edit was found for"),
            page.listing(_short(surprise) for surprise in self.after.surprises),
            page.folded(f"{len(self.tried)} tried and not kept", tried) if self.tried else "",
        )


def unexpected_bytes(comparison: Comparison) -> int:
    """Return the bytes of all surprises; one whose number of executions is unknown counts once."""
    return sum(_size(surprise) for surprise in comparison.surprises)


def moved_bytes(comparison: Comparison) -> int:
    """Return the bytes of all collectives; an all-reduce counts twice, for it is a reduce-scatter and an all-gather.

    One whose number of executions is unknown counts once.
    """
    sizes = ((one.kind, sum(one.sizes) if one.bytes is None else one.bytes) for one in comparison.found)
    return sum(size * (1 + (kind == "all-reduce")) for kind, size in sizes)


def without(before: Sequence[Surprise], after: Sequence[Surprise]) -> tuple[Surprise, ...]:
    """Return the surprises of `before` that are not among those `after`, by kind, axes and shape."""
    left = [_key(one) for one in after]
    gone = []
    for one in before:
        if _key(one) in left:
            left.remove(_key(one))
        else:
            gone.append(one)
    return tuple(gone)


def _key(surprise: Surprise) -> tuple[Any, ...]:
    found = surprise.found
    return found.kind, found.axes, found.shapes, found.count


def _size(surprise: Surprise) -> int:
    found = surprise.found
    return found.bytes if found.bytes is not None else sum(found.sizes)


def _short(surprise: Surprise) -> str:
    return describe.describe(surprise.found).replace("\n    at", " at")


def _bars(repair: Repair) -> str:
    """Draw the bytes before and after."""
    changes = {"unexpected": repair.unexpected, "all collectives": repair.moved}
    if repair.resting.before != repair.resting.after:
        changes["at rest"] = repair.resting
    rows, bars = [], []
    largest = max(max(change) for change in changes.values())
    for name, change in changes.items():
        for when, size in zip(("before", "after"), change, strict=True):
            rows.append((f"{name}, {when}", human_bytes(size)))
            colour = GREY if when == "before" else SKY
            part = {when: (size, human_bytes(size))}
            bars.append(page.bar(part, {when: colour}, whole=largest, width=240, height=12))
    return page.table(Table(rows, "<>"), last=bars)
