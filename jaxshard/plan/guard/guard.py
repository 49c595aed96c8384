"""Record what a step communicates, needs and costs in a file, and compare it later: `js.guard`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxshard.compiler.topology import Target, parse_target
from jaxshard.core.types import PyTree
from jaxshard.plan.guard.changes import Change, compare
from jaxshard.plan.guard.file import Recorded, read_guard, write_guard
from jaxshard.plan.guard.measure import measure
from jaxshard.plan.guard.snapshot import Snapshot
from jaxshard.plan.guard.subject import subject_of
from jaxshard.storage.paths import as_path


class GuardChanged(AssertionError):
    """Raised by `js.guard` if a program changed against its file; the message has a sentence for each change.

    Example:
        try:
            js.guard(step, batch, "step.guard.json")
        except js.GuardChanged as changed:
            print(changed)    # a sentence for each change, with its usual cause
    """


@dataclass(frozen=True)
class Guarded:
    """The comparison of a program with the file of its guard.

    Attributes:
      target: the devices that it was compiled for, such as "v5e:4x4".
      snapshot: the present program.
      changes: the changes that matter.
      notes: what is better than recorded, and what was not compared.
    """

    target: str
    snapshot: Snapshot
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing that matters changed."""
        return not self.changes

    def __str__(self) -> str:
        """Write a headline, a sentence for each change with its advice, and the notes."""
        count = len(self.changes)
        headline = f"{self.target}: {f'{count} change' + 's' * (count > 1) if count else 'as recorded'}"
        lines = [headline, *(f"- {one}" for one in self.changes), *(f"  note: {one}" for one in self.notes)]
        return "\n".join([*lines, *["If all of this is meant, record the guard again."] * bool(count)])

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON can represent."""
        changes = [one._asdict() for one in self.changes]
        return {"target": self.target, "changes": changes, "notes": list(self.notes)} | self.snapshot.as_dict()

    def markdown(self) -> str:
        """Write the comparison as Markdown, for the comment of a pull request."""
        rows = [f"- **{one.text}**{f' (`{one.line}`)' if one.line else ''}: {one.cause}." for one in self.changes]
        rows += [f"- Note: {one}." for one in self.notes]
        return "\n".join([f"### `{self.target}`: {'as recorded' if self.ok else 'changed'}", "", *rows])


def guard(
    step: Any,
    batch: PyTree,
    file: str | os.PathLike[str],
    *,
    later: Sequence[PyTree] = (),
    topology: str | None = None,
    record: bool = False,
) -> Guarded:
    """Compare what a compiled step communicates, needs and costs with the file in which it was recorded.

    Compared are collectives by mesh axis, kind, role and array; how arguments are stored; peak memory, FLOPs,
    recomputation and the size of the compiled program. Source lines and names are shown, never compared. Use it in a
    test of your project: a layout that silently changed fails the test, in seconds and without an accelerator.

    Args:
      step: a `js.Step`, or any function that `jax.jit` returned.
      batch: of a `js.Step` a batch, as arrays or `jax.ShapeDtypeStruct`; of a jitted function the tuple of its
        arguments, with shardings.
      file: the file, such as "step.guard.json", kept under version control.
      later: the batches, or tuples of arguments, of later calls. JAX should compile no other program for them.
      topology: devices to compile for, such as "v5e:4x4", "2 x v5e:4x4" (two slices) or "h100:8"; by default those of
        the step. A jitted function has to be made for devices of `js.plan.topology_mesh`.
      record: True writes the file instead, and keeps its other targets.

    Returns:
      The comparison.

    Raises:
      GuardChanged: the program changed.
      OSError: there is no such file.
      ValueError: the file is damaged, or has no record for this target.
      TypeError: `step` can't be traced.

    Example:
      def test_step_communicates_as_recorded():
          js.guard(step, batch, "tests/step.guard.json")
    """
    target = None if topology is None else parse_target(topology)
    subject, path = subject_of((step, batch, *later), target), as_path(file)
    snapshot = measure(subject, target)
    name = target_name(subject.mesh, target)
    if record:
        known = read_guard(path) if path.is_file() else Recorded("", {})
        write_guard(path, known._replace(snapshots=known.snapshots | {name: snapshot}))
        return Guarded(name, snapshot)
    found = check(name, snapshot, read_guard(path).snapshots, str(file))
    if not found.ok:
        raise GuardChanged(f"{file}: {found}")
    return found


def check(name: str, snapshot: Snapshot, recorded: Mapping[str, Snapshot], file: str) -> Guarded:
    """Compare the snapshot of a target with the recorded one; ValueError if the target was not recorded."""
    if name not in recorded:
        raise ValueError(f"{file} has no record for {name}, but for {', '.join(recorded)}; record {name} too")
    return Guarded(name, snapshot, *compare(recorded[name], snapshot))


def target_name(mesh: jax.sharding.Mesh, target: Target | None) -> str:
    """Name a target: the topology, or platform and number of the devices at hand, such as "cpu:8"."""
    return str(target) if target is not None else f"{mesh.devices.flat[0].platform}:{mesh.size}"
