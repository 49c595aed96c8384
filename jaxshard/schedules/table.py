"""`Table`: the operations of every device of a pipeline in every tick, verified when the table is made.

The p devices form a ring, and each has v chunks of the model: stage k = chunk * p + device, of p v stages. With p = 2
and v = 2 a micro-batch goes around the ring twice:

    device 0: stage 0 ──> device 1: stage 1 ──> device 0: stage 2 ──> device 1: stage 3 ──> loss
              chunk 0               chunk 0               chunk 1               chunk 1

In a tick a device runs at most one forward (F), then one backward (B), then one weight gradient (W): the slots of the
tick. All devices go through a tick together, and values sent in a tick can be used from the next tick on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxshard.core.tree import raise_all

Kind = Literal["F", "B", "W"]
"""The kind of an operation: "F" forward, "B" backward, "W" only the weights' gradients of the backward.

Example:
    [op.kind for op in js.schedules.gpipe(2, 2).ops]    # "F", "B" or "W"
"""

KINDS: tuple[Kind, ...] = ("F", "B", "W")
"""The kinds of operations, in the order of the slots of a tick."""

Key: TypeAlias = tuple[Kind, int, int]
"""(kind, stage, micro-batch) of an operation, which must occur exactly once."""

_SHOWN = 20
"""The most problems that an error lists; further problems are only counted."""


class Op(NamedTuple):
    """One operation: its tick, device, kind ("F", "B" or "W"), chunk of the device, and micro-batch.

    All indices count from 0.

    Example:
        op = js.schedules.gpipe(2, 2).ops[0]
        op.tick, op.device, op.kind, op.microbatch
    """

    tick: int
    device: int
    kind: Kind
    chunk: int
    microbatch: int


class Problem(NamedTuple):
    """A reason why a pipeline can't run a table, in words; `op` is the wrong operation, None if one is missing."""

    op: Op | None
    text: str


@dataclass(frozen=True)
class Table:
    """The operations of a pipeline, sorted by tick, then slot (F, B, W), then device, and verified to run.

    `stages` is p, the number of devices; with `chunks` on each, the model has stages * chunks stages. Every operation
    comes after its inputs. So devices can't deadlock, even if they do not go through the ticks together but run their
    own operations in this order, each as soon as its inputs arrive. If the table has W operations, a B computes only
    the gradient of its stage's input; otherwise it also computes the weights' gradients.

    Raises:
      TypeError: a size that is not an integer, or an entry of the table that is not an operation.
      ValueError: the problems that `verify` finds.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    ops: tuple[Op, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_name(self.name):
            raise ValueError(f"the name of a schedule must be one line of text, got {self.name!r}")
        check_sizes(self.stages, self.microbatches, self.chunks)
        object.__setattr__(self, "ops", tuple(sorted(map(_as_op, self.ops), key=_order)))
        self.verify()

    @property
    def ticks(self) -> int:
        """Return the number of ticks of the table."""
        return self.ops[-1].tick + 1

    @property
    def splits_backward(self) -> bool:
        """Return True if the weights' gradients are separate operations."""
        return any(op.kind == "W" for op in self.ops)

    def stage(self, op: Op) -> int:
        """Return the stage of the model that `op` computes, chunk * p + device; stage 0 has the first blocks."""
        return op.chunk * self.stages + op.device

    def key(self, op: Op) -> Key:
        """Return (kind, stage, micro-batch), which identify an operation in a table."""
        return op.kind, self.stage(op), op.microbatch

    def inputs(self, op: Op) -> list[Key]:
        """Return (kind, stage, micro-batch) of each operation whose result `op` needs."""
        return [key for key, _ in _inputs(self.key(op), self.stages * self.chunks)]

    def verify(self) -> None:
        """Raise one ValueError that names every operation that is missing, duplicated, out of range or too early.

        Every stage runs one F and one B for every micro-batch, and one W if the table has any. An F comes at least a
        tick after the F of the previous stage, a B at least a tick after the B of the next stage. The last stage's B
        may be in the tick of its F, and a W in the tick of its B. A device runs at most one operation of a kind in a
        tick, and no tick is empty: ticks are never renumbered silently.
        """
        found = find_problems(self.ops, self.stages, self.microbatches, self.chunks)
        raise_all((problem.text for problem in found), ValueError, f"the schedule {self.name!r} can't run:")


def is_name(text: str) -> bool:
    """Return whether a schedule may have this name: one line of text that can be written to a CSV file."""
    return text.isprintable() and bool(text) and text == text.strip()


def check_sizes(stages: int, microbatches: int, chunks: int) -> None:
    """Raise a TypeError or ValueError unless all three are positive integers."""
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def find_problems(ops: Sequence[Op], stages: int, microbatches: int, chunks: int) -> list[Problem]:
    """Return why a pipeline can't run these operations: the first 20 reasons, then a count; [] if it can."""
    depth = stages * chunks
    found: list[Problem] = []
    good = []
    for op in ops:
        wrong = list(_out_of_range(op, stages, microbatches, chunks))
        found += (Problem(op, f"{_describe(op)}: {text}") for text in wrong)
        if not wrong:
            good.append(op)
    done: dict[Key, Op] = {}
    for op in sorted(good, key=_order):
        key = (op.kind, op.chunk * stages + op.device, op.microbatch)
        if key in done:
            found.append(Problem(op, f"{_describe(op)} is doubled: it stands at tick {done[key].tick} already"))
        else:
            done[key] = op
    found += _shared_slots(good)
    found += _premature(done, depth)
    found += _empty_ticks({op.tick for op in ops if op.tick >= 0})
    absent, shown = _missing(
        done, KINDS if any(op.kind == "W" for op in ops) else KINDS[:2], stages, chunks, microbatches
    )
    count = len(found) + absent
    found += shown
    return found if count <= _SHOWN else [*found[:_SHOWN], Problem(None, f"and {count - _SHOWN} more")]


def shorten(texts: Sequence[str]) -> list[str]:
    """Return the first 20 texts, followed by "and 5 more" if there are 5 more."""
    more = len(texts) - _SHOWN
    return [*texts[:_SHOWN], f"and {more} more"] if more > 0 else list(texts)


def _order(op: Op) -> tuple[int, int, int, int, int]:
    return op.tick, KINDS.index(op.kind), op.device, op.chunk, op.microbatch


def _as_op(entry: Iterable[Any]) -> Op:
    """Convert (tick, device, kind, chunk, micro-batch) to an `Op` with Python integers; raise if it is none."""
    try:
        tick, device, kind, chunk, microbatch = entry
        numbers = [operator.index(x) for x in (tick, device, chunk, microbatch)]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{entry!r} is no operation; give (tick, device, kind, chunk, microbatch)") from error
    if kind not in KINDS:
        raise ValueError(f"{entry!r}: the kind of an operation is F, B or W, got {kind!r}")
    return Op(numbers[0], numbers[1], kind, numbers[2], numbers[3])


def _out_of_range(op: Op, stages: int, microbatches: int, chunks: int) -> Iterator[str]:
    if op.tick < 0:
        yield "the tick is below 0"
    sizes = (op.device, stages, "device"), (op.chunk, chunks, "chunk"), (op.microbatch, microbatches, "micro-batch")
    for value, size, name in sizes:
        if not 0 <= value < size:
            yield f"there is no {name} {value}, only 0 to {size - 1}"


def _shared_slots(ops: Iterable[Op]) -> Iterator[Problem]:
    slots: dict[tuple[int, int, Kind], Op] = {}
    for op in ops:
        other = slots.setdefault(op[:3], op)
        if other is not op and other != op:
            text = f"{_describe(op)}: the device has another {op.kind} in that tick, of micro-batch {other.microbatch}"
            yield Problem(op, f"{text} and chunk {other.chunk}; one of a kind fits")


def _inputs(key: Key, depth: int) -> list[tuple[Key, int]]:
    """Return [(key, gap)] for the operations whose results an operation needs; a key is (kind, stage, micro-batch).

    An operation must come at least `gap` ticks after the operation with this key. `depth` is the number of stages of
    the model.
    """
    kind, stage, microbatch = key
    if kind == "F":
        return [(("F", stage - 1, microbatch), 1)] if stage > 0 else []
    if kind == "W":
        return [(("B", stage, microbatch), 0)]
    # A stage's B also needs its own F. For all stages except the last that follows from the B of the next stage.
    return [(("B", stage + 1, microbatch), 1)] if stage + 1 < depth else [(("F", stage, microbatch), 0)]


def _premature(done: dict[Key, Op], depth: int) -> Iterator[Problem]:
    for key, op in done.items():
        for needed, gap in _inputs(key, depth):
            source = done.get(needed)
            if source is not None and op.tick < source.tick + gap:
                text = f"{_describe(op)} is premature: it needs {_describe(source)}"
                yield Problem(op, f"{text}; move it to tick {source.tick + gap} or later")


def _missing(
    done: dict[Key, Op], kinds: Sequence[Kind], stages: int, chunks: int, microbatches: int
) -> tuple[int, list[Problem]]:
    """Return (the number of operations that the table lacks, a `Problem` for each of the first 20 of them)."""
    depth = stages * chunks
    count = len(kinds) * depth * microbatches - sum(key[0] in kinds for key in done)
    # Lazily, and only as far as needed: the sizes in a file may demand far more operations than the file has.
    wanted: Iterator[Key] = ((kind, stage, i) for kind in kinds for stage in range(depth) for i in range(microbatches))
    missing = (key for key in wanted if key not in done)
    return count, [Problem(None, f"{_name(key, stages)} is missing") for key in islice(missing, min(count, _SHOWN))]


def _empty_ticks(used: set[int]) -> Iterator[Problem]:
    ordered = sorted(used)
    for before, after in zip([-1, *ordered], ordered):
        if after > before + 1:
            some = f"tick {after - 1} holds" if after == before + 2 else f"ticks {before + 1} to {after - 1} hold"
            yield Problem(None, f"{some} no operation; number the ticks without gaps from 0")


def _describe(op: Op) -> str:
    return f"{op.kind} of micro-batch {op.microbatch}, chunk {op.chunk}, device {op.device} at tick {op.tick}"


def _name(key: Key, stages: int) -> str:
    kind, stage, microbatch = key
    return f"{kind} of micro-batch {microbatch}, chunk {stage // stages}, device {stage % stages}"
