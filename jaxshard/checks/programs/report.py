"""The audit of a compiled step of which there is only the text: a report, or a comparison with a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from jaxshard.checks.collectives.describe import add_up, listed, place_of, times_str, total_size
from jaxshard.checks.collectives.found import KINDS
from jaxshard.checks.collectives.hlo import Module
from jaxshard.checks.collectives.instructions import in_host_memory, rematerialized
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.collectives.surprise import entries
from jaxshard.checks.programs.arguments import BATCH, EITHER, OPTIMIZER, PARAMETER, ROLES, Argument, read_arguments
from jaxshard.checks.programs.axes import EXCHANGED, ROWS, SPLIT, STAGES, axes_for, check_axes, position_mesh, words
from jaxshard.checks.programs.moves import SCALAR, WHAT, Move, find_moves
from jaxshard.checks.programs.terms import TERMS, Verdict, judge
from jaxshard.checks.programs.text import parse_program
from jaxshard.core.layout import human_bytes
from jaxshard.core.mesh import mesh_str
from jaxshard.core.text_table import Table, page

_SHOWN = 12
"""The number of entries of a list that are printed; JSON has them all."""


@dataclass(frozen=True)
class ProgramAudit:
    """The communication of a compiled step, by mesh axis, source line and array, and a strategy's verdict on it.

    Attributes:
      name: of the program, such as "jit_train_step".
      mesh: over the positions of its devices.
      arguments: the arrays that it is given.
      moves: the arrays that its collectives move.
      strategy: the one that it was compared with; None for a report alone.
      verdict: of the comparison; empty without a strategy.
      assumed: what the text does not say and the audit takes for granted, in words.
      program: what else its text says.
    """

    name: str
    mesh: Mesh
    arguments: tuple[Argument, ...]
    moves: tuple[Move, ...]
    strategy: str | None
    verdict: Verdict
    assumed: tuple[str, ...]
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

    @property
    def headline(self) -> str:
        """One sentence on the program and the verdict: bytes that move, bytes that the device waits for, surprises."""
        found = [move.found for move in self.moves if move.what != SCALAR]
        waits = [one for one in found if one.synchronous]
        size, waited = total_size(found), total_size(waits)
        waited = "all of them" if len(waits) == len(found) else waited
        moved = f"collectives move {size}, and the device waits for {waited}" if found else "no collectives"
        surprises = [one.found for one in self.verdict.surprises]
        of = f" ({total_size(surprises)})" if surprises else ""
        against = f"{self.strategy}: {self.outcome}{of}" if self.strategy else self.outcome
        return f"{self.name} for {self.mesh.size} devices ({mesh_str(self.mesh)}): {moved}; {against}"

    def rows(self) -> list[dict[str, Any]]:
        """Add up collectives: one dictionary per kind, axes and what is moved; scalars last."""
        rows = add_up((_labels(move), move.found) for move in self.moves)
        order = {what: number for number, what in enumerate(WHAT)}
        return sorted(
            rows, key=lambda row: (row["moves"] == SCALAR, KINDS.index(row["kind"]), row["axis"], order[row["moves"]])
        )

    def lines(self) -> list[dict[str, Any]]:
        """Add up collectives by source line, kind, axes and what is moved, the most bytes first; without scalars."""
        moves = [move for move in self.moves if move.what != SCALAR]
        lines = add_up(({"place": place_of(move.found)} | _labels(move), move.found) for move in moves)
        return sorted(lines, key=lambda one: -(one["bytes"] or 0))

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        verdict = self.verdict
        return {
            "ok": self.ok,
            "headline": self.headline,
            "devices": self.mesh.size,
            "mesh": dict(self.mesh.shape),
            "strategy": self.strategy,
            "arguments": [
                {"role": role, "arrays": len(of), "bytes": sum(one.bytes for one in of)}
                for role, of in self._by_role().items()
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
        """Write the headline, tables by role and axis, and lists by source line, of surprises and of assumptions."""
        return self.text()

    def text(self, *, all: bool = False) -> str:
        """Write what `str` does; with `all` entries of each list, and each surprise by itself."""
        return "\n\n".join([self.headline, *("\n".join(table.lines) for table in self._tables()), *self._lists(all)])

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        return page(self.headline, *self._tables(), "\n\n".join(self._lists(False)))

    def _by_role(self) -> dict[str, list[Argument]]:
        by_role = {role: [one for one in self.arguments if one.role == role] for role in ROLES}
        return {role: of for role, of in by_role.items() if of}

    def _tables(self) -> list[Table]:
        roles = [
            (role, f"{len(of):,}", human_bytes(sum(one.bytes for one in of))) for role, of in self._by_role().items()
        ]
        moved = [
            (row["kind"], row["axis"], row["moves"], "?" if row["count"] is None else f"{row['count']:,}",
             _size(row["bytes"]), _size(row["synchronous_bytes"]))
            for row in self.rows()
        ]  # fmt: skip
        head = ("collective", "axis", "moves", "times", "bytes", "waited for")
        return [Table(roles, "<>>", ("given", "arrays", "on each device")), Table(moved, "<<<>>>", head)]

    def _lists(self, all: bool) -> list[str]:
        verdict = self.verdict
        lines = [
            f"{one['kind']} over {one['axis']}, {times_str(one['count'])}, {_size(one['bytes'])}: {one['moves']}\n"
            f"    at {one['place']}"
            for one in self.lines()
        ]
        substitutes = [
            f"all-reduce in place of a reduce-scatter over {words(axes)}, {human_bytes(size)}"
            for axes, size in verdict.substitutes.items()
        ]
        cut = [
            ("by source line", lines),
            ("could not read", verdict.unread),
            ("surprises", entries(verdict.surprises, all=all)),
            ("not where the strategy puts it", verdict.misplaced),
            ("promised, but not recognised", verdict.missing),
            ("other kinds than promised", substitutes),
        ]
        lists = [listed(f"{title}: {len(of)}", of if all else _cut(of)) for title, of in cut]
        left = f"left to the compiler: {human_bytes(verdict.tolerated)}" if verdict.tolerated else ""
        return [text for text in (*lists, left, str(self.program), listed("assumed", self.assumed)) if text]


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
    try:
        return _audit(module, axes, strategy, microbatches)
    except (AssertionError, IndexError, KeyError, RecursionError, StopIteration) as error:
        raise ValueError(f"the HLO text is damaged: {type(error).__name__} {error}") from error


def _audit(module: Module, axes: dict[str, int], strategy: str | None, microbatches: int) -> ProgramAudit:
    several = "_xla_megascale_transfer_type=" in module.text
    mesh = position_mesh(axes, module.devices, slices=several)
    if strategy is not None:
        if strategy not in TERMS:
            raise ValueError(f"no strategy {strategy!r}: there are {', '.join(TERMS)}")
        check_axes(mesh, strategy)
    arguments = read_arguments(module, mesh)
    moves = find_moves(module, mesh, arguments)
    verdict = Verdict() if strategy is None else judge(strategy, mesh, arguments, moves, microbatches)
    # A program without any asynchronous collective, as every CPU's, waits for all: that needs no list.
    overlaps = any(not move.found.synchronous for move in moves)
    waited = {id(move.found): move.found for move in moves if overlaps and move.found.synchronous}
    program = Program(tuple(waited.values()), rematerialized(module.text), in_host_memory(module.text))
    assumed = tuple(_assumptions(mesh, module.devices, arguments, moves, strategy, microbatches))
    name = module.text.partition(",")[0].removeprefix("HloModule ").strip()
    return ProgramAudit(name, mesh, arguments, moves, strategy, verdict, assumed, program)


def _assumptions(
    mesh: Mesh,
    devices: int,
    arguments: Sequence[Argument],
    moves: Sequence[Move],
    strategy: str | None,
    microbatches: int,
) -> Iterator[str]:
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


def _labels(move: Move) -> dict[str, Any]:
    return {"kind": move.found.kind, "axis": "+".join(move.found.axes), "moves": move.what}


def _size(size: int | None) -> str:
    return "?" if size is None else human_bytes(size)


def _cut(entries: Sequence[str]) -> list[str]:
    """The first entries, and how many more there are."""
    rest = len(entries) - _SHOWN
    return [*entries[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
