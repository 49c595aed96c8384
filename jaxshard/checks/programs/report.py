"""The audit of a compiled step of which there is only the text: a report, or a comparison with a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.compare import Surprise
from jaxshard.checks.collectives.describe import as_dict, place_of
from jaxshard.checks.collectives.found import KINDS
from jaxshard.checks.collectives.instructions import in_host_memory, rematerialized
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.collectives.short import group
from jaxshard.checks.programs.arguments import BATCH, EITHER, OPTIMIZER, PARAMETER, ROLES, Argument, read_arguments
from jaxshard.checks.programs.axes import EXCHANGED, ROWS, SPLIT, STAGES, axes_for, check_axes, position_mesh, words
from jaxshard.checks.programs.moves import SCALAR, WHAT, Move, find_moves
from jaxshard.checks.programs.terms import TERMS, Verdict, judge
from jaxshard.checks.programs.text import parse_program
from jaxshard.core.layout import human_bytes
from jaxshard.core.mesh import mesh_str
from jaxshard.core.pictures import page
from jaxshard.core.text_table import Table

_SHOWN = 12
"""The number of entries of a list that are printed; JSON has them all."""

_NOTHING = "no collectives"


@dataclass(frozen=True)
class ProgramAudit:
    """The communication of a compiled step, by mesh axis, source line and array, and a strategy's verdict on it.

    Attributes:
      mesh: over the positions of its devices.
      arguments: the arrays that it is given.
      moves: the arrays that its collectives move.
      strategy: the one that it was compared with; None for a report alone.
      verdict: of the comparison; empty without a strategy.
      assumed: what the text does not say and the audit takes for granted, in words.
      asynchronous: True if some collective runs while the device computes.
      program: what else its text says.
    """

    mesh: Mesh
    arguments: tuple[Argument, ...]
    moves: tuple[Move, ...]
    strategy: str | None
    verdict: Verdict
    assumed: tuple[str, ...]
    asynchronous: bool
    program: Program = field(default_factory=Program)

    @property
    def ok(self) -> bool:
        """True if a strategy was named and kept, or if none was."""
        return not self.verdict.surprises and not self.verdict.misplaced and not self.verdict.unread

    @property
    def outcome(self) -> str:
        """The verdict in a few words."""
        if self.strategy is None:
            return "no strategy named: nothing was compared"
        count = len(self.verdict.surprises) + len(self.verdict.misplaced)
        outcome = [f"{count} surprise{'s' * (count > 1)}"] if count else []
        unread = [one.partition(":")[0] for one in self.verdict.unread]
        outcome += [f"could not read {', '.join(unread)}"] if unread else []
        return "; ".join(outcome) or "nothing against the strategy"

    def rows(self) -> list[dict[str, Any]]:
        """Add up collectives: one dictionary per kind, axes and what is moved; scalars last."""
        groups: dict[tuple[Any, ...], list[Move]] = {}
        for move in self.moves:
            groups.setdefault((move.found.kind, move.found.axes, move.what), []).append(move)
        order = sorted(groups, key=lambda key: (key[2] == SCALAR, KINDS.index(key[0]), key[1], WHAT.index(key[2])))
        return [
            {"kind": kind, "axis": "+".join(axes), "moves": what} | _sums(groups[kind, axes, what])
            for kind, axes, what in order
        ]

    def lines(self) -> list[dict[str, Any]]:
        """Add up collectives by source line, kind, axes and what is moved, the most bytes first; without scalars."""
        groups: dict[tuple[Any, ...], list[Move]] = {}
        for move in self.moves:
            if move.what != SCALAR:
                key = (place_of(move.found), move.found.kind, move.found.axes, move.what)
                groups.setdefault(key, []).append(move)
        entries = [
            {"place": place, "kind": kind, "axis": "+".join(axes), "moves": what} | _sums(moves)
            for (place, kind, axes, what), moves in groups.items()
        ]
        return sorted(entries, key=lambda one: -(one["bytes"] or 0))

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        verdict = self.verdict
        return {
            "ok": self.ok,
            "devices": self.mesh.size,
            "mesh": dict(self.mesh.shape),
            "strategy": self.strategy,
            "arguments": [
                {"role": role, "arrays": len(of), "bytes": sum(one.bytes for one in of)}
                for role in ROLES
                if (of := [one for one in self.arguments if one.role == role])
            ],
            "collectives": self.rows(),
            "lines": self.lines(),
            "surprises": [one.as_dict() for one in verdict.surprises],
            "misplaced": list(verdict.misplaced),
            "missing": list(verdict.missing),
            "unread": list(verdict.unread),
            "substitutes": [{"axis": "+".join(axes), "bytes": size} for axes, size in verdict.substitutes.items()],
            "tolerated_bytes": verdict.tolerated,
            "assumed": list(self.assumed),
        } | self.program.as_dict()

    def __str__(self) -> str:
        """Tables by axis and by source line, then the surprises and what was assumed."""
        return self.text()

    def text(self, *, most: int | None = _SHOWN) -> str:
        """Write what `str` does, with so many entries of each list; None for all."""
        roles, moved = _roles(self.arguments), _table(self.rows(), self.asynchronous)
        lists = self._lists(grouped=most is not None)
        listed = [_listed(title, entries, shown and most) for title, entries, shown in lists]
        parts = (
            "\n".join(roles.lines),
            "\n".join(moved.lines) if moved.rows else _NOTHING,
            *listed[:-1],
            self._left_to_the_compiler(),
            str(self.program),
            listed[-1],
        )
        return "\n\n".join(part for part in parts if part)

    def _repr_html_(self) -> str:
        """Show the same in a notebook, with the verdict above where a strategy was named."""
        moved = _table(self.rows(), self.asynchronous)
        outcome = f"{self.strategy}: " + ("kept" if self.ok else self.outcome)
        lists = [
            page.title(f"{title}: {len(entries)}") + page.listing(_cut(entries, most))
            for title, entries, most in self._lists()
            if entries
        ]
        return page.page(
            page.verdict(self.ok, outcome) if self.strategy else "",
            page.table(_roles(self.arguments)),
            page.table(moved) if moved.rows else page.paragraph(_NOTHING),
            *lists,
            page.preformatted(self._left_to_the_compiler()),
            page.preformatted(str(self.program)),
        )

    def _lists(self, *, grouped: bool = True) -> list[tuple[str, Sequence[str], int | None]]:
        """Titles, entries, and how many of these are shown; surprises of one line and kind grouped to one entry."""
        verdict = self.verdict
        groups = group(verdict.surprises) if grouped else [(one,) for one in verdict.surprises]
        surprises = [_surprise(*of) for of in groups]
        substitutes = [
            f"all-reduce in place of a reduce-scatter over {words(axes)}, {human_bytes(size)}"
            for axes, size in verdict.substitutes.items()
        ]
        return [
            ("by source line", [_in_words(one) for one in self.lines()], _SHOWN),
            ("could not read", verdict.unread, _SHOWN),
            ("surprises", surprises, _SHOWN),
            ("not where the strategy puts it", verdict.misplaced, _SHOWN),
            ("promised, but not recognised", verdict.missing, _SHOWN),
            ("other kinds than promised", substitutes, _SHOWN),
            ("assumed", self.assumed, None),
        ]

    def _left_to_the_compiler(self) -> str:
        return f"left to the compiler: {human_bytes(self.verdict.tolerated)}" if self.verdict.tolerated else ""


def audit_program(
    text: str | bytes, axes: dict[str, int], *, strategy: str | None = None, microbatches: int = 1
) -> ProgramAudit:
    """Read what a compiled step communicates from its text alone, and compare it with a strategy.

    Args:
      text: of the program: `compiled.as_text()`, or the content of an XLA dump's `*after_optimizations.txt`.
      axes: name and size of each mesh axis, in the order of the mesh that it was compiled for. Their names say what
        they are for: data, fsdp and replica for rows, tensor and model for split weights, context and sequence,
        expert, pipe and stage.
      strategy: "ddp", "zero1", "zero2", "fsdp" or "hsdp"; by default nothing is compared.
      microbatches: into which the step divides its batch.

    Raises:
      ValueError: the text is of no compiled program, or of one for another number of devices; a strategy is named and
        an axis has a name that tells no use.

    Example:
      print(js.plan.audit_program(Path("step.txt").read_text(), {"data": 8}, strategy="fsdp"))
    """
    module = parse_program(text if isinstance(text, bytes) else text.encode())
    return audit_module(module, axes, strategy=strategy, microbatches=microbatches)


def audit_module(
    module: hlo.Module, axes: dict[str, int], *, strategy: str | None = None, microbatches: int = 1
) -> ProgramAudit:
    """Do the work of `audit_program` on a parsed program."""
    try:
        return _audit(module, axes, strategy, microbatches)
    except (AssertionError, IndexError, KeyError, RecursionError, StopIteration) as error:
        raise ValueError(f"the HLO text is damaged: {type(error).__name__} {error}") from error


def _audit(module: hlo.Module, axes: dict[str, int], strategy: str | None, microbatches: int) -> ProgramAudit:
    several = "_xla_megascale_transfer_type=" in module.text
    mesh = position_mesh(axes, module.devices, slices=several)
    if strategy is not None:
        if strategy not in TERMS:
            raise ValueError(f"no strategy {strategy!r}: there are {', '.join(TERMS)}")
        check_axes(mesh, strategy)
    arguments = read_arguments(module, mesh)
    moves = find_moves(module, mesh, arguments)
    verdict = Verdict() if strategy is None else judge(strategy, mesh, arguments, moves, microbatches)
    asynchronous = any(not move.found.synchronous for move in moves)
    waited = {id(move.found): move.found for move in moves if asynchronous and move.found.synchronous}
    program = Program(tuple(waited.values()), rematerialized(module.text), in_host_memory(module.text))
    assumed = tuple(_assumptions(mesh, module.devices, arguments, moves, strategy, microbatches))
    return ProgramAudit(mesh, arguments, moves, strategy, verdict, assumed, asynchronous, program)


def _assumptions(
    mesh: Mesh,
    devices: int,
    arguments: Sequence[Argument],
    moves: Sequence[Move],
    strategy: str | None,
    microbatches: int,
) -> Iterable[str]:
    yield f"the mesh is {mesh_str(mesh)}, with positions in this order"
    if mesh.size > devices:
        yield f"the program is that of one of {mesh.size // devices} slices, over which the mesh's outermost axes go"
    roles = Counter(one.role for one in arguments)
    named = ", ".join(f"{roles[role]} {role}" for role in (PARAMETER, OPTIMIZER, BATCH) if roles[role])
    if named:
        yield f"roles by the names of the arguments: {named}"
    if count := roles[EITHER]:
        yield f"{count} donated arrays of floats, whose names do not tell, are parameters or moments of the optimizer"
    by_shape = sum(move.by_shape for move in moves)
    if by_shape:
        what = "the weight where they are gathered, its gradient where they are summed"
        yield f"{by_shape} arrays have the shape of a parameter, or of one block of it, and are taken for it: {what}"
    if strategy is None:
        return
    for use in (ROWS, EXCHANGED, SPLIT, STAGES):
        if named_axes := axes_for(mesh, use):
            yield f"by its name {words(named_axes)} is for {use}"
    if not any(one.splits is not None for one in arguments):
        yield "the text has no shardings: how arrays rest is known only of those that are gathered"
    yield f"one step has {microbatches} micro-batch{'es' * (microbatches > 1)}; a tied weight counts as one"
    if TERMS[strategy].gathers and axes_for(mesh, STAGES):
        yield "the schedule of the pipeline says how often a weight is gathered"
    elif TERMS[strategy].gathers:
        yield "a weight may be gathered for the forward and for the backward pass"


def _sums(moves: Sequence[Move]) -> dict[str, Any]:
    counts, sizes = [one.found.count for one in moves], [one.found.bytes for one in moves]
    waited = [one.found.bytes for one in moves if one.found.synchronous]
    return {
        "count": None if None in counts else sum(count or 0 for count in counts),
        "bytes": None if None in sizes else sum(size or 0 for size in sizes),
        "synchronous_bytes": None if None in waited else sum(size or 0 for size in waited),
    }


def _roles(arguments: Sequence[Argument]) -> Table:
    sizes = {role: [one.bytes for one in arguments if one.role == role] for role in ROLES}
    rows = [(role, f"{len(of):,}", human_bytes(sum(of))) for role, of in sizes.items() if of]
    return Table(rows, "<>>", ("given", "arrays", "on each device"))


def _table(rows: Sequence[dict[str, Any]], asynchronous: bool) -> Table:
    cells = []
    for row in rows:
        waited = _size(row["synchronous_bytes"]) if asynchronous else "all"
        count = "?" if row["count"] is None else f"{row['count']:,}"
        cells.append((row["kind"], row["axis"], row["moves"], count, _size(row["bytes"]), waited))
    return Table(cells, "<<<>>>", ("collective", "axis", "moves", "times", "bytes", "waited for"))


def _in_words(one: dict[str, Any]) -> str:
    times = "? times" if one["count"] is None else "once" if one["count"] == 1 else f"{one['count']:,} times"
    arrays = ", ".join(f"{one['dtype']}{shape}" for shape in one.get("shapes", ()))
    what = one.get("moves") or arrays
    return f"{one['kind']} over {one['axis']}, {times}, {_size(one['bytes'])}: {what}\n    at {one['place']}"


def _surprise(largest: Surprise, *others: Surprise) -> str:
    """The largest surprise of a line, and how much the others of its kind there move."""
    sizes = [one.found.bytes for one in others]
    size = human_bytes(sum(one or 0 for one in sizes)) if None not in sizes else "?"
    more = f"and {len(others)} more of this kind there, {size}" if others else ""
    return "\n    ".join(filter(None, (_in_words(as_dict(largest.found)), largest.why, largest.cause, more)))


def _size(size: int | None) -> str:
    return "?" if size is None else human_bytes(size)


def _listed(title: str, entries: Sequence[str], most: int | None) -> str:
    lines = (f"- {one}" for one in _cut(entries, most))
    return "\n".join([f"{title}: {len(entries)}", *lines]) if entries else ""


def _cut(entries: Sequence[str], most: int | None) -> list[str]:
    """The first entries, and how many more there are."""
    rest = len(entries) - len(entries[:most])
    return [*entries[:most], *([f"and {rest} more"] if rest else [])]
