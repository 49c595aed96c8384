"""What a strategy promises of arrays that are known from the program alone, and which collectives break it.

The axes are known by their names in `--mesh`: over those of the rows parameters may be gathered and gradients summed,
over those that split weights activations are moved as needed, over those of contexts and experts exchanged too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.sharding import Mesh

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.found import Collective
from jaxshard.checks.collectives.groups import UNKNOWN
from jaxshard.checks.collectives.promise import SLACK
from jaxshard.checks.collectives.surprise import Surprise, merged, wanted_axes
from jaxshard.checks.collectives.trail import SCATTERED
from jaxshard.checks.programs.arguments import BATCH, EITHER, OPTIMIZER, PARAMETER, Argument
from jaxshard.checks.programs.axes import EXCHANGED, ROWS, SPLIT, STAGES, axes_for, words
from jaxshard.checks.programs.moves import ACTIVATION, GRADIENT, INPUT, INTEGERS, MOMENT, SCALAR, WEIGHT, Move
from jaxshard.core.layout import human_bytes

_SMALL = 16_384
"""Elements up to which an array may stay whole."""
_VOCABULARY = ("embed", "lm_head", "logit", "unembed", "wte", "vocab", "shared")
_MORE = 0.1
"""Of an array that may be moved more: turns that a compiler takes out of a loop, to begin the next one early."""
_COPIES = ("replica", "dp", "dcn", "diloco")


class Terms(NamedTuple):
    """The terms of a strategy for one step of one micro-batch.

    Attributes:
      gathers: times that each weight may be gathered from where it rests.
      renewals: times that each new parameter may be gathered from where the optimizer is split.
      split: the roles whose large arrays rest split over axes of the rows.
    """

    gathers: int
    renewals: int
    split: tuple[str, ...]


TERMS = {
    "ddp": Terms(0, 0, ()),
    "zero1": Terms(0, 1, (OPTIMIZER,)),
    "zero2": Terms(0, 1, (OPTIMIZER,)),
    "fsdp": Terms(2, 0, (PARAMETER, EITHER, OPTIMIZER)),
    "hsdp": Terms(2, 0, (PARAMETER, EITHER, OPTIMIZER)),
}


@dataclass
class Verdict:
    """The differences from the terms of a strategy.

    Attributes:
      surprises: collectives that nothing promised.
      misplaced: arrays that do not rest as the strategy says.
      missing: what was promised and not found.
      unread: kinds of collectives of which the program, as it was read, has none, though the strategy needs them.
      substitutes: bytes of all-reduces in place of reduce-scatters, by their axes.
      tolerated: bytes that were left to the compiler.
    """

    surprises: list[Surprise] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    substitutes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    tolerated: int = 0


def judge(
    strategy: str, mesh: Mesh, arguments: Sequence[Argument], moves: Sequence[Move], microbatches: int = 1
) -> Verdict:
    """Compare what a program moves with what a strategy promises."""
    judged = _Judge(strategy, mesh, arguments, moves, microbatches)
    verdict = Verdict(substitutes=judged.substitutes)
    slack = int(SLACK * sum(judged.bytes[one.number] for one in judged.parameters))
    # What is known to be an argument uses up its promise first, then what may be the fewest.
    problems = {at: judged.problem(moves[at]) for at in sorted(range(len(moves)), key=lambda at: _doubt(moves[at]))}
    for at, why in sorted(problems.items(), key=lambda item: moves[item[0]].found.bytes or 0):
        found = moves[at].found
        fits = found.bytes is not None and found.bytes <= slack - verdict.tolerated
        if why and fits and not judged.is_strict(moves[at]):
            verdict.tolerated += found.bytes or 0
        elif why:
            verdict.surprises.append(Surprise(found, why, _constraint(found, axes_for(mesh, ROWS))))
    verdict.surprises = sorted(merged(verdict.surprises), key=lambda one: -(one.found.bytes or 0))
    verdict.misplaced += judged.misplaced()
    verdict.missing += judged.missing()
    verdict.unread += judged.unread(moves)
    return verdict


def _doubt(move: Move) -> tuple[bool, bool, int, float]:
    """The order in which promises are used up; sums come last, of which some may be gathers."""
    return move.by_shape, move.what == GRADIENT, len(move.arguments), -move.share


def _constraint(found: Collective, rows: Sequence[str]) -> str:
    """The call that keeps the first array of a collective split as it is before it is moved."""
    dims = [axes[0] if len(axes) == 1 else axes or None for axes in wanted_axes(found, rows)]
    return f"jax.lax.with_sharding_constraint(x, P({', '.join(map(repr, dims))}))"


class _Judge:
    """The terms of a strategy on a mesh, and what of them is used up."""

    def __init__(
        self, strategy: str, mesh: Mesh, arguments: Sequence[Argument], moves: Sequence[Move], microbatches: int
    ) -> None:
        self.strategy, self.terms, self.mesh, self.microbatches = strategy, TERMS[strategy], mesh, microbatches
        self.arguments = arguments
        self.parameters = [one for one in arguments if one.role in (PARAMETER, EITHER)]
        self.rows, self.split = axes_for(mesh, ROWS, EXCHANGED), axes_for(mesh, SPLIT)
        self.copies = tuple(axis for axis in self.rows if strategy == "hsdp" and axis.startswith(_COPIES))
        self.free = axes_for(mesh, SPLIT, EXCHANGED, STAGES)
        self.exchanged, self.stages = axes_for(mesh, EXCHANGED), axes_for(mesh, STAGES)
        self.longest = max((size for one in self.parameters for size in one.whole), default=1)
        parts = math.prod(mesh.shape[axis] for axis in self.split)
        self.vocabulary = {size * count for size in vocabularies_of(self.parameters) for count in (1, parts)}
        self.used: dict[tuple[str, int, tuple[str, ...]], float] = {}
        self.substitutes: Counter[tuple[str, ...]] = Counter()
        # Bytes over all devices; where the text does not say how an array is split, by how gathers make it larger.
        self.bytes = {one.number: hlo.nbytes((one.dtype, one.whole)) for one in self.arguments}
        for move in moves:
            for one in move.arguments if move.what == WEIGHT and not move.by_shape else ():
                larger = round(move.found.elements / max(1, move.share * one.elements))
                self.bytes[one.number] = max(self.bytes[one.number], larger * one.bytes)

    def problem(self, move: Move) -> str:
        """Return why a collective is a surprise, or ""."""
        found, axes = move.found, set(move.found.axes)
        if move.what == SCALAR:
            return ""
        if found.axes == UNKNOWN:
            return "among groups of devices that are no product of the mesh's axes: is --mesh in the right order?"
        if move.what == MOMENT:
            return f"{_names(move)}: moments of the optimizer stay where they are, under every strategy"
        if self._is_logits(move):
            return f"logits, {found.shapes[0][-1]:,} columns of a vocabulary: no strategy gathers them"
        if found.kind == "all-gather" or (move.what == WEIGHT and found.kind == "all-reduce"):
            return self._gather_problem(move)
        if found.kind in ("all-reduce", "reduce-scatter"):
            return self._sum_problem(move)
        if found.kind == "collective-permute":
            if move.what == GRADIENT:
                self._take(move, "sum", self.microbatches)
            # Rings that gather or scatter piece by piece, stages, keys and values; the borders of padded shards.
            borders = any(trail.maker == SCATTERED for trail in found.trails)
            promised = move.what in (WEIGHT, GRADIENT) or axes <= set(self.free) or borders
        else:
            promised = axes <= set(self.exchanged)
        where = f", but over {words(self.exchanged)}" if self.exchanged else ""
        why = f"{move.what} moved by {found.kind} over {words(found.axes)}: no strategy promises that{where}"
        return "" if promised else why

    def is_strict(self, move: Move) -> bool:
        """Return True for a surprise however small it is: moments, logits, split weights, activations of all rows."""
        is_split_weight = move.what == WEIGHT and not move.by_shape and bool(set(move.found.axes) & set(self.split))
        rows = move.what == ACTIVATION and move.found.elements > self.longest  # more numbers than there are features
        large = rows and move.found.kind != "collective-permute"
        return move.what == MOMENT or is_split_weight or large or self._is_logits(move)

    def _is_logits(self, move: Move) -> bool:
        shape = move.found.shapes[0]
        computed = move.what == ACTIVATION and move.found.kind in ("all-gather", "all-to-all")
        return computed and len(shape) > 1 and shape[-1] in self.vocabulary

    def _gather_problem(self, move: Move) -> str:
        axes, by_shape = set(move.found.axes), move.by_shape
        rows = words([axis for axis in move.found.axes if axis in self.rows])
        if axes <= set(self.free) and (by_shape or move.what not in (WEIGHT, GRADIENT)):
            return ""
        if move.what in (INTEGERS, INPUT):
            return f"{move.what} gathered over {rows}, over which every device has its own rows"
        if move.what not in (WEIGHT, GRADIENT):
            return f"an activation gathered over {rows}: every device gets the rows of all"
        if not by_shape and axes & set(self.split) and len(move.found.shapes[0]) > 1:
            return f"{_names(move)}: a weight must not be gathered over {words(self.split)}, which splits its use"
        if axes & set(self.copies):
            return f"{_names(move)}: hsdp keeps whole copies over {words(self.copies)}"
        most = self.microbatches * self.terms.gathers + by_shape * self.terms.renewals
        by_schedule = self.stages and self.terms.gathers  # as often as the schedule of the pipeline turns
        if by_schedule or self._take(move, "gather", most):
            return ""
        promise = f"gathers each weight {most} times at most" if most else "gathers no weight"
        return f"{_names(move)}: {self._times(move, 'gather')}{self.strategy} {promise}"

    def _sum_problem(self, move: Move) -> str:
        found, axes = move.found, set(move.found.axes)
        if not axes & {*self.rows, *self.stages}:
            return ""
        if move.what != GRADIENT:
            if found.elements <= self.longest or axes <= {*self.exchanged, *self.stages}:
                return ""
            rows = words([axis for axis in found.axes if axis in self.rows])
            return f"{move.what} summed over {rows}: devices computed with parts of a weight in place of the whole one"
        if self._take(move, "sum", self.microbatches):
            if found.kind == "all-reduce" and self.terms.split and axes & set(self.rows):
                self.substitutes[found.axes] += found.bytes or 0
            return ""
        gathers = self.terms.gathers * self.microbatches
        if found.kind == "all-reduce" and gathers and self._take(move, "gather", gathers):
            return ""  # a gather that is written as a sum of shards
        count = "once" if self.microbatches == 1 else f"{self.microbatches} times"
        return f"by its shape the gradient of {_names(move)}: {self._times(move, 'sum')}{self.strategy} sums it {count}"

    def _take(self, move: Move, stage: str, most: int) -> bool:
        """Use up what is promised of an argument over these axes; False where nothing has room."""
        if move.times is None:
            return False
        rest = move.times
        for one in move.arguments if move.by_shape else move.arguments[:1]:
            key = (stage, one.number, move.found.axes)
            taken = min(rest, max(0.0, most - self.used.get(key, 0.0)))
            self.used[key] = self.used.get(key, 0.0) + taken
            rest -= taken
        if rest > _MORE:
            key = (stage, move.arguments[0].number, move.found.axes)
            self.used[key] = self.used.get(key, 0.0) + rest
        return rest <= _MORE

    def _times(self, move: Move, stage: str) -> str:
        if move.times is None:
            return "as often as a loop turns; "
        used = [self.used.get((stage, one.number, move.found.axes), 0.0) for one in move.arguments]
        times = sum(used) / max(1, len(used))
        each = " each" if len(used) > 1 else ""
        return "once; " if times == 1 else f"{times:.3g} times{each}; "

    def misplaced(self) -> Iterator[str]:
        """Yield the large arrays that are split over the rows and should not be, or whole and should be split."""
        for one in self.arguments:
            if one.role == BATCH and one.splits is not None and len(one.shape) > 1:
                own = axes_for(self.mesh, ROWS)
                if whole := [axis for axis in own if axis not in {name for axes in one.splits for name in axes}]:
                    yield f"{one.name}: every device along {words(whole)} is given the rows of all"
            if one.splits is None or one.role not in (PARAMETER, OPTIMIZER, EITHER):
                continue
            split = [axis for axes in one.splits for axis in axes if axis in self.rows]
            wanted = one.role in self.terms.split
            if wanted and not split and one.elements > _SMALL and self.rows:
                array = f"{one.name}, {one.dtype}{list(one.shape)}, {human_bytes(one.bytes)} on every device"
                yield f"{array}: {self.strategy} splits it over {words(self.rows)}"
            elif split and not wanted and one.role != EITHER:
                yield f"{one.name} is split over {words(split)}: {self.strategy} keeps it whole there"

    def missing(self) -> Iterator[str]:
        """Yield parameters whose gradient's sum was not recognised, and under FSDP those that nothing gathers."""
        large = [one for one in self.parameters if one.elements > _SMALL]
        sums = {number for stage, number, _ in self.used if stage == "sum"}
        gathers = {number for stage, number, _ in self.used if stage == "gather"}
        if self.terms.gathers and (rest := [one for one in large if one.number not in gathers]):
            yield f"a gather of {_listed(rest)}: whole already, used split, or gathered in another form"
        if self.rows and (rest := [one for one in large if one.number not in sums]):
            yield f"a sum of the gradient of {_listed(rest)}: in another form, or joined with others"

    def unread(self, moves: Sequence[Move]) -> Iterator[str]:
        """Yield the kinds of which no array moves over the rows: either they are not there, or in an unknown form."""
        large = [one for one in self.parameters if one.elements > _SMALL]
        kinds = {one.found.kind for one in moves if one.what != SCALAR and set(one.found.axes) & {*self.rows, *UNKNOWN}}
        if not large or not self.rows or kinds - {"all-gather", "all-reduce", "reduce-scatter"}:
            return
        size = human_bytes(sum(self.bytes[one.number] for one in large))
        if (self.terms.gathers or self.terms.renewals) and not kinds & {"all-gather", "all-reduce"}:
            yield f"gathers of weights over {words(self.rows)}: parameters of {size}, and nothing is gathered"
        if not kinds & {"all-reduce", "reduce-scatter"}:
            yield f"sums of gradients over {words(self.rows)}: parameters of {size}, and nothing is summed"


def vocabularies_of(parameters: Sequence[Argument]) -> set[int]:
    """Return the sizes of vocabularies: the longest dimensions of parameters whose names speak of one.

    One that others have too is that of the features, where a device has a small part of the vocabulary.
    """
    named = [one for one in parameters if any(word in one.name.lower() for word in _VOCABULARY)]
    others = {size for one in parameters if one not in named for size in one.whole}
    return {max(one.whole) for one in named if len(one.shape) > 1} - others


def _names(move: Move) -> str:
    return _listed(move.arguments)


def _listed(arguments: Sequence[Argument]) -> str:
    more = f" or one of {len(arguments) - 2} more" if len(arguments) > 2 else ""
    return " or ".join(one.name for one in arguments[:2]) + more
