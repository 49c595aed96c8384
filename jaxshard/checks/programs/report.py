"""Report what a compiled step communicates, from its HLO text alone, and compare it with a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from jaxshard.checks.collectives.comparison import Comparison, listed
from jaxshard.checks.collectives.program import Program
from jaxshard.checks.programs.arguments import BATCH, EITHER, OPTIMIZER, PARAMETER, ROLES, Argument, read_arguments
from jaxshard.checks.programs.axes import EXCHANGED, ROWS, SPLIT, STAGES, axes_for, check_axes, position_mesh, words
from jaxshard.checks.programs.moves import SCALAR, WHAT, Move, find_moves
from jaxshard.checks.programs.terms import TERMS, Terms, judge
from jaxshard.checks.programs.text import parse_program
from jaxshard.core.layout import human_bytes
from jaxshard.core.mesh import mesh_str
from jaxshard.core.text_table import Table, page
from jaxshard.hlo.counts import bytes_str, grouped, number_str, total
from jaxshard.hlo.found import KINDS
from jaxshard.hlo.hlo import Module
from jaxshard.hlo.instructions import in_host_memory, rematerialized
from jaxshard.hlo.operation import by_line, describe, total_size

_SHOWN = 12
"""The number of entries of a list that are printed; JSON has them all."""


@dataclass(frozen=True)
class ProgramAudit:
    """The communication of a compiled step, by mesh axis, source line and array, compared with a strategy.

    Attributes:
      name: the name of the program, such as "jit_train_step".
      mesh: the mesh of the program, with a `Position` for each device.
      arguments: its array arguments.
      moves: the arrays that its collectives move.
      strategy: the name of the strategy with which the program is compared; None without a comparison.
      microbatches: the number of micro-batches of a step.
      comparison: the comparison with the strategy; it has no differences if no strategy was named.
      slices: the number of TPU slices of the mesh; the program is written for one slice.
    """

    name: str
    mesh: Mesh
    arguments: tuple[Argument, ...]
    moves: tuple[Move, ...]
    strategy: str | None
    microbatches: int
    comparison: Comparison
    slices: int

    @property
    def ok(self) -> bool:
        """True if the program keeps to the strategy, or if no strategy was named."""
        return self.comparison.ok

    @property
    def outcome(self) -> str:
        """The verdict of the comparison with the strategy in a few words, such as "2 surprises"."""
        if self.strategy is None:
            return "no strategy named: nothing was compared"
        return "nothing against the strategy" if self.ok else self.comparison.verdict

    @property
    def headline(self) -> str:
        """One sentence on the program and the verdict: bytes that move, bytes that the device waits for, surprises."""
        found = [move for move in self.moves if move.what != SCALAR]
        waits = [one for one in found if one.synchronous]
        waited = "all of them" if len(waits) == len(found) else total_size(waits)
        moved = f"collectives move {total_size(found)}, and the device waits for {waited}" * bool(found)
        surprises = [one.found for one in self.comparison.surprises]
        against = f"{self.strategy}: {self.outcome}" if self.strategy else self.outcome
        against += f" ({total_size(surprises)})" if surprises else ""
        name = f"{self.name} for {self.mesh.size} devices ({mesh_str(self.mesh)})"
        return f"{name}: {moved or 'no collectives'}; {against}"

    @property
    def assumed(self) -> list[str]:
        """The assumptions of the audit where the text says nothing, such as roles of arguments, one sentence each."""
        return [*self._assumed_of_arrays(), *(self._assumed_of_strategy(TERMS[self.strategy]) if self.strategy else ())]

    def _assumed_of_arrays(self) -> Iterator[str]:
        yield f"the mesh is {mesh_str(self.mesh)}, with positions in this order"
        if self.slices > 1:
            yield f"the program is that of one of {self.slices} slices, over which the mesh's outermost axes go"
        roles, by_shape = Counter(one.role for one in self.arguments), sum(move.by_shape for move in self.moves)
        if named := ", ".join(f"{roles[role]} {role}" for role in (PARAMETER, OPTIMIZER, BATCH) if roles[role]):
            yield f"roles by the names of the arguments: {named}"
        if count := roles[EITHER]:
            yield f"{count} donated arrays of floats, whose names do not tell, are parameters or optimizer moments"
        if by_shape:
            what = "the weight where they are gathered, its gradient where they are summed"
            yield f"{by_shape} arrays have the shape of a parameter or of one block of it, and are taken for it: {what}"

    def _assumed_of_strategy(self, terms: Terms) -> Iterator[str]:
        for use in (ROWS, EXCHANGED, SPLIT, STAGES):
            if axes := axes_for(self.mesh, use):
                yield f"by its name {words(axes)} is for {use}"
        if all(one.splits is None for one in self.arguments):
            yield "the text has no shardings: how an array is stored is known only if it is gathered"
        batches = f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        yield f"one step has {batches}; a tied weight counts as one"
        if terms.gathers and axes_for(self.mesh, STAGES):
            yield "the schedule of the pipeline says how often a weight is gathered"
        elif terms.gathers:
            yield "a weight may be gathered for the forward and for the backward pass"

    def rows(self) -> list[dict[str, Any]]:
        """Add up counts and bytes of collectives of the same kind, axes and label (`Move.what`); scalars come last.

        Returns:
          Dictionaries with the keys "kind", "axis", "moves" (the label), "count", "bytes" and "synchronous_bytes".
        """
        return sorted(
            map(_sums, grouped(self.moves, lambda move: move.title).values()),
            key=lambda row: (row["moves"] == SCALAR, KINDS.index(row["kind"]), row["axis"], WHAT.index(row["moves"])),
        )

    def lines(self) -> list[dict[str, Any]]:
        """Add up collectives as `rows` does, but for each source line ("place"), the most bytes first; no scalars."""
        return [{"place": of[0].place} | _sums(of) for of in self._by_line()]

    def _by_line(self) -> list[list[Move]]:
        return by_line((move for move in self.moves if move.what != SCALAR), lambda move: move)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as one dictionary of values that JSON can represent."""
        return self.comparison.as_dict() | {
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
            "assumed": self.assumed,
        }

    def __str__(self) -> str:
        """Write the report: headline, tables of arguments and collectives, source lines, surprises, assumptions."""
        return self.text()

    def text(self, *, all: bool = False) -> str:
        """Write the report as `str` does; with `all` no list is shortened and no surprises are grouped."""
        return "\n\n".join([self.headline, *("\n".join(table.lines) for table in self._tables()), *self._lists(all)])

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        return page(self.headline, *self._tables(), "\n\n".join(self._lists(False)))

    def _by_role(self) -> dict[str, list[Argument]]:
        found = grouped(self.arguments, lambda one: one.role)
        return {role: found[role] for role in ROLES if role in found}

    def _tables(self) -> list[Table]:
        roles = [
            (role, f"{len(of):,}", human_bytes(sum(one.bytes for one in of))) for role, of in self._by_role().items()
        ]
        moved = [
            (row["kind"], row["axis"], row["moves"], number_str(row["count"]), bytes_str(row["bytes"]),
             bytes_str(row["synchronous_bytes"]))
            for row in self.rows()
        ]  # fmt: skip
        head = ("collective", "axis", "moves", "times", "bytes", "waited for")
        return [Table(roles, "<>>", ("given", "arrays", "on each device")), Table(moved, "<<<>>>", head)]

    def _lists(self, all: bool) -> list[str]:
        lines = [describe(of) for of in self._by_line()]
        shown = lines if all else [*lines[:_SHOWN], *[f"and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)]
        program = str(self.comparison.program or "")
        lists = listed("by source line", shown), *self.comparison.differences(all=all), program
        return [text for text in (*lists, listed("assumed", self.assumed)) if text]


def audit_program(
    text: str | bytes, axes: dict[str, int], *, strategy: str | None = None, microbatches: int = 1
) -> ProgramAudit:
    """List what a compiled step communicates, from its HLO text alone, and compare it with a strategy.

    Args:
      text: the text of the program: `compiled.as_text()`, or the content of an XLA dump's `*after_optimizations.txt`.
      axes: name and size of each mesh axis, in the order of the mesh that it was compiled for. The names tell the use
        of each axis: data, fsdp and replica for rows, tensor and model for split weights, context and sequence, expert,
        pipe and stage.
      strategy: "ddp", "zero1", "zero2", "fsdp" or "hsdp"; by default nothing is compared.
      microbatches: the number of micro-batches of a step.

    Returns:
      The audit; `print` it, or check `audit.ok`.

    Raises:
      ValueError: the text is not that of a compiled program, or is for another number of devices; a strategy is named
        and the name of an axis does not tell its use.

    Example:
      print(js.plan.audit_program(Path("step.txt").read_text(), {"data": 8}, strategy="fsdp"))
    """
    module = parse_program(text if isinstance(text, bytes) else text.encode())
    try:
        return _audit(module, axes, strategy, microbatches)
    except (ArithmeticError, AssertionError, IndexError, KeyError, RecursionError, StopIteration) as error:
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
    compared = Comparison((), moves, (), ())
    if strategy is not None:
        compared = judge(strategy, mesh, arguments, moves, microbatches)
    # A program without asynchronous collectives, such as a CPU's, waits for all: that needs no list.
    waited = tuple(one for one in moves if one.synchronous) if not all(one.synchronous for one in moves) else ()
    compared = replace(compared, program=Program(waited, rematerialized(module.text), in_host_memory(module.text)))
    name = module.text.partition(",")[0].removeprefix("HloModule ").strip()
    return ProgramAudit(
        name, mesh, arguments, moves, strategy, microbatches, compared, slices=mesh.size // module.devices
    )


def _sums(of: Sequence[Move]) -> dict[str, Any]:
    """Make one row of `ProgramAudit.rows`: add up counts and bytes of arrays with the same kind, axes and label."""
    return {
        "kind": of[0].kind,
        "axis": "+".join(of[0].axes),
        "moves": of[0].what,
        "count": total(one.count for one in of),
        "bytes": total(one.bytes for one in of),
        "synchronous_bytes": total(one.bytes for one in of if one.synchronous),
    }
