"""Compare the arrays that a program moves with the collectives that a strategy allows.

The name of each mesh axis tells what it splits (`axes.use_of`). Over axes that split rows, parameters may be gathered
and gradients summed. Over axes that split weights, activations move as needed. Over axes for contexts and experts,
activations are exchanged by all-to-alls too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from jaxshard.checks.collectives.compare import smallest
from jaxshard.checks.collectives.comparison import Comparison
from jaxshard.checks.collectives.promise import SLACK
from jaxshard.checks.collectives.surprise import Surprise, merged, wanted_axes
from jaxshard.checks.programs.arguments import BATCH, EITHER, OPTIMIZER, PARAMETER, Argument
from jaxshard.checks.programs.axes import EXCHANGED, ROWS, SPLIT, STAGES, axes_for, words
from jaxshard.checks.programs.moves import ACTIVATION, GRADIENT, MOMENT, SCALAR, WEIGHT, Move
from jaxshard.core.layout import human_bytes
from jaxshard.core.mesh import axis_size
from jaxshard.hlo import hlo
from jaxshard.hlo.found import SUMS, Collective
from jaxshard.hlo.groups import UNKNOWN
from jaxshard.hlo.trail import SCATTERED

_SMALL = 16_384
"""The most elements of an array that may stay replicated."""
_VOCABULARY = ("embed", "lm_head", "logit", "unembed", "wte", "vocab", "shared")
_MORE = 0.1
"""The share of an array that may be moved beyond the promise, since compilers may take an iteration out of a loop."""
_COPIES = ("replica", "dp", "dcn", "diloco")


class Terms(NamedTuple):
    """The collectives that a strategy allows in a step with a single micro-batch.

    Attributes:
      gathers: how often each weight may be gathered: 2 under FSDP, for the forward and the backward pass.
      renewals: how often each new parameter may be gathered after a sharded update.
      split: the roles (parameter, optimizer state) whose large arrays are stored sharded over the axes that split rows.
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


def judge(
    strategy: str, mesh: Mesh, arguments: Sequence[Argument], moves: Sequence[Move], microbatches: int = 1
) -> Comparison:
    """Compare the arrays that a program moves with the collectives that a strategy allows.

    Args:
      strategy: a key of `TERMS`, such as "fsdp".
      mesh: the mesh; the names of its axes tell what they split.
      arguments: the arguments of the program.
      moves: the arrays that its collectives move.
      microbatches: the number of micro-batches of a step.
    """
    judged = _Judge(strategy, mesh, arguments, moves, microbatches)
    # Arrays that are certain to be an argument use up its promise first, then those with the fewest candidates.
    order = sorted(range(len(moves)), key=lambda at: _doubt(moves[at]))
    problems = {at: why for at in order if (why := judged.problem(moves[at]))}
    small = smallest({at: moves[at] for at in problems if not judged.is_strict(moves[at])}, judged.slack)
    surprises = merged(
        Surprise(moves[at], why, _constraint(moves[at], judged.rows_alone))
        for at, why in problems.items()
        if at not in small
    )
    return Comparison(
        promised=(),
        found=tuple(moves),
        surprises=tuple(sorted(surprises, key=lambda one: -(one.found.bytes or 0))),
        missing=tuple(judged.missing()),
        tolerated=sum(one.bytes or 0 for one in small.values()),
        substitutes=tuple(judged.substitutes()),
        unread=tuple(judged.unread()),
        misplaced=tuple(judged.misplaced()),
    )


def _doubt(move: Move) -> tuple[bool, bool, int, float]:
    """Return the key by which arrays are sorted before they are compared with a strategy, the clearest first.

    Arrays known to be an argument come first, then gathers recognised by shape, then sums, some of which may be gathers
    that the compiler wrote as sums.
    """
    return move.by_shape, move.what == GRADIENT, len(move.arguments), -move.share


def _constraint(found: Collective, rows: Sequence[str]) -> str:
    """Write the `with_sharding_constraint` call that keeps the first array of a collective sharded over `rows`."""
    dims = [axes[0] if len(axes) == 1 else axes or None for axes in wanted_axes(found, rows)]
    return f"jax.lax.with_sharding_constraint(x, P({', '.join(map(repr, dims))}))"


class _Judge:
    """The collectives that a strategy allows on a mesh, and how often the program has moved each argument so far."""

    def __init__(
        self, strategy: str, mesh: Mesh, arguments: Sequence[Argument], moves: Sequence[Move], microbatches: int
    ) -> None:
        self.strategy, self.terms, self.mesh, self.microbatches = strategy, TERMS[strategy], mesh, microbatches
        self.arguments, self.moves = arguments, moves
        self.parameters = [one for one in arguments if one.role in (PARAMETER, EITHER)]
        self.large = [one for one in self.parameters if one.elements > _SMALL]
        self.rows, self.rows_alone = axes_for(mesh, ROWS, EXCHANGED), axes_for(mesh, ROWS)
        self.split, self.exchanged, self.stages = (axes_for(mesh, use) for use in (SPLIT, EXCHANGED, STAGES))
        self.free = axes_for(mesh, SPLIT, EXCHANGED, STAGES)
        self.copies = tuple(axis for axis in self.rows if strategy == "hsdp" and axis.startswith(_COPIES))
        self.longest = max((size for one in self.parameters for size in one.global_shape), default=1)
        parts = axis_size(mesh, self.split)
        self.vocabulary = {size * count for size in vocabularies_of(self.parameters) for count in (1, parts)}
        self.used: dict[tuple[str, int, tuple[str, ...]], float] = {}
        self.summed: Counter[tuple[str, ...]] = Counter()
        # Bytes over all devices; if the text does not say how an array is split, as gathers enlarge it.
        self.bytes = {one.number: hlo.nbytes((one.dtype, one.global_shape)) for one in arguments}
        for move in moves:
            for one in move.arguments if move.what == WEIGHT and not move.by_shape else ():
                larger = round(move.elements / max(1, move.share * one.elements))
                self.bytes[one.number] = max(self.bytes[one.number], larger * one.bytes)
        self.slack = int(SLACK * sum(self.bytes[one.number] for one in self.parameters))

    def problem(self, move: Move) -> str:
        """Say why the strategy does not allow a collective; "" if it does. Count how often arguments were moved."""
        axes = set(move.axes)
        if move.what == SCALAR:
            return ""
        if move.axes == UNKNOWN:
            return "among groups of devices that are no product of the mesh's axes: is --mesh in the right order?"
        if move.what == MOMENT:
            return f"{_names(move.arguments)}: no strategy communicates moments of the optimizer"
        if self._is_logits(move):
            return f"logits, {move.shapes[0][-1]:,} columns of a vocabulary: no strategy gathers them"
        if move.kind == "all-gather" or (move.what == WEIGHT and move.kind == "all-reduce"):
            return self._gather_problem(move)
        if move.kind in SUMS:
            return self._sum_problem(move)
        promised = axes <= set(self.exchanged)
        if move.kind == "collective-permute":
            if move.what == GRADIENT:
                self._excess(move, "sum", self.microbatches)
            # Allowed: rings that gather or scatter piece by piece, stages, keys and values, borders of padded shards.
            is_border = move.trail.maker == SCATTERED
            promised = move.what in (WEIGHT, GRADIENT) or axes <= set(self.free) or is_border
        where = f", but over {words(self.exchanged)}" if self.exchanged and move.kind != "collective-permute" else ""
        why = f"{move.what} moved by {move.kind} over {words(move.axes)}: no strategy promises that{where}"
        return "" if promised else why

    def is_strict(self, move: Move) -> bool:
        """Return True for arrays that are reported however small they are, such as optimizer moments and logits."""
        is_split_weight = move.what == WEIGHT and not move.by_shape and bool(set(move.axes) & set(self.split))
        rows = move.what == ACTIVATION and move.elements > self.longest  # more numbers than there are features
        large = rows and move.kind != "collective-permute"
        return move.what == MOMENT or is_split_weight or large or self._is_logits(move)

    def _is_logits(self, move: Move) -> bool:
        shape = move.shapes[0]
        computed = move.what == ACTIVATION and move.kind in ("all-gather", "all-to-all")
        return computed and len(shape) > 1 and shape[-1] in self.vocabulary

    def _gather_problem(self, move: Move) -> str:
        axes, by_shape, names = set(move.axes), move.by_shape, _names(move.arguments)
        rows = words([axis for axis in move.axes if axis in self.rows])
        if axes <= set(self.free) and (by_shape or move.what not in (WEIGHT, GRADIENT)):
            return ""
        if move.what not in (WEIGHT, GRADIENT):
            return f"{move.what} gathered over {rows}: every device gets the rows of all"
        if not by_shape and axes & set(self.split) and len(move.shapes[0]) > 1:
            return f"{names}: a weight must not be gathered over {words(self.split)}, which splits its use"
        if axes & set(self.copies):
            return f"{names}: hsdp replicates weights over {words(self.copies)}"
        most = self.microbatches * self.terms.gathers + by_shape * self.terms.renewals
        by_schedule = self.stages and self.terms.gathers  # the schedule of the pipeline decides how often
        times = "" if by_schedule else self._excess(move, "gather", most)
        promise = f"gathers each weight {most} times at most" if most else "gathers no weight"
        return f"{names}: {times}; {self.strategy} {promise}" if times else ""

    def _sum_problem(self, move: Move) -> str:
        axes = set(move.axes)
        if not axes & {*self.rows, *self.stages}:
            return ""
        if move.what != GRADIENT:
            if move.elements <= self.longest or axes <= {*self.exchanged, *self.stages}:
                return ""
            rows = words([axis for axis in move.axes if axis in self.rows])
            return f"{move.what} summed over {rows}: devices computed with shards of a weight that should be gathered"
        times = self._excess(move, "sum", self.microbatches)
        if not times and move.kind == "all-reduce" and self.terms.split and axes & set(self.rows):
            self.summed[move.axes] += move.bytes or 0
        gathers = self.terms.gathers * self.microbatches
        if times and move.kind == "all-reduce" and gathers and not self._excess(move, "gather", gathers):
            return ""  # a gather that is written as a sum of shards
        names, count = _names(move.arguments), "once" if self.microbatches == 1 else f"{self.microbatches} times"
        return f"by its shape the gradient of {names}: {times}; {self.strategy} sums it {count}" if times else ""

    def _excess(self, move: Move, stage: str, most: int) -> str:
        """Count a move of arguments; return how often they were moved, in words, if more than `most` times; else "".

        `stage` is "gather" or "sum": both are counted separately.
        """
        if move.times is None:
            return "in a loop of unknown trip count"
        keys = [(stage, one.number, move.axes) for one in move.arguments]
        rest = move.times
        for key in keys if move.by_shape else keys[:1]:
            taken = min(rest, max(0.0, most - self.used.get(key, 0.0)))
            self.used[key] = self.used.get(key, 0.0) + taken
            rest -= taken
        if rest <= _MORE:
            return ""
        self.used[keys[0]] = self.used.get(keys[0], 0.0) + rest
        times = sum(self.used.get(key, 0.0) for key in keys) / len(keys)
        return "once" if times == 1 else f"{times:.3g} times{' each' if len(keys) > 1 else ''}"

    def substitutes(self) -> Iterator[str]:
        """Yield a line for each set of axes over which all-reduces sum gradients in place of reduce-scatters."""
        for axes, size in self.summed.items():
            yield f"all-reduce in place of reduce-scatter over {words(axes)}, {human_bytes(size)}"

    def misplaced(self) -> Iterator[str]:
        """Yield a line for each argument that is replicated although the strategy shards it, or vice versa."""
        for one in self.arguments:
            split = [axis for axes in one.splits or () for axis in axes if axis in self.rows]
            wanted = one.role in self.terms.split
            if one.splits is None:
                continue
            if one.role == BATCH and len(one.shape) > 1:
                if unsplit := [axis for axis in self.rows_alone if axis not in split]:
                    yield f"{one.name}: every device along {words(unsplit)} is given the rows of all"
            elif wanted and not split and one.elements > _SMALL and self.rows:
                array = f"{one.name}, {one.dtype}{list(one.shape)}, {human_bytes(one.bytes)} on every device"
                yield f"{array}: {self.strategy} splits it over {words(self.rows)}"
            elif split and not wanted and one.role in (PARAMETER, OPTIMIZER):
                yield f"{one.name} is split over {words(split)}: {self.strategy} keeps it replicated there"

    def missing(self) -> Iterator[str]:
        """Yield a line on parameters whose gradient is never summed; under FSDP also on parameters never gathered."""
        gathered, summed = ({number for of, number, _ in self.used if of == stage} for stage in ("gather", "sum"))
        if self.terms.gathers and (rest := [one for one in self.large if one.number not in gathered]):
            yield f"a gather of {_names(rest)}: already replicated, used sharded, or gathered in another form"
        if self.rows and (rest := [one for one in self.large if one.number not in summed]):
            yield f"a sum of the gradient of {_names(rest)}: in another form, or joined with others"

    def unread(self) -> Iterator[str]:
        """Yield a line if the strategy needs gathers of weights, or sums of gradients, and the program has none."""
        over = {*self.rows, *UNKNOWN}
        kinds = {one.kind for one in self.moves if one.what != SCALAR and set(one.axes) & over}
        if not self.large or not self.rows or kinds - {"all-gather", *SUMS}:
            return
        size = human_bytes(sum(self.bytes[one.number] for one in self.large))
        if (self.terms.gathers or self.terms.renewals) and not kinds & {"all-gather", "all-reduce"}:
            yield f"gathers of weights over {words(self.rows)}: parameters of {size}, and nothing is gathered"
        if not kinds & set(SUMS):
            yield f"sums of gradients over {words(self.rows)}: parameters of {size}, and nothing is summed"


def vocabularies_of(parameters: Sequence[Argument]) -> set[int]:
    """Return the sizes of vocabularies: the longest dimensions of parameters with names such as "embed" and "lm_head".

    A size that other parameters have too is left out, because it is the number of features. The number of features is
    the longest dimension if each device has only a small shard of the vocabulary.
    """
    named = [one for one in parameters if any(word in one.name.lower() for word in _VOCABULARY)]
    others = {size for one in parameters if one not in named for size in one.global_shape}
    return {max(one.global_shape) for one in named if len(one.shape) > 1} - others


def _names(arguments: Sequence[Argument]) -> str:
    more = f" or one of {len(arguments) - 2} more" if len(arguments) > 2 else ""
    return " or ".join(one.name for one in arguments[:2]) + more
