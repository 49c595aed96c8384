"""The facts about one compiled program that a guard keeps, in a form that is compared and written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from jaxshard.core.bounds import MOST_LISTED


@dataclass(frozen=True, order=True)
class Moved:
    """Arrays of one dtype and shape that collectives of one kind move over the same mesh axes.

    Attributes:
      axis: the mesh axes, joined by "+".
      kind: the kind of collective, such as "all-gather".
      moves: what the arrays are: "weight", "gradient", "activation" and so on.
      array: dtype and shape of one unscattered array, such as "f32[1024,512]".
      count: executions per step; None in a loop whose trip count is not known.
      bytes: bytes of all executions per step and device; None where the count is not known.
      waited: the bytes that the device waits for; None where the count is not known.
      line: the source line with the most bytes. It is shown and never compared.
    """

    axis: str
    kind: str
    moves: str
    array: str
    count: int | None
    bytes: int | None
    waited: int | None
    line: str


@dataclass(frozen=True, order=True)
class Given:
    """Arguments of the program with the same role, dtype, shape and sharding.

    Attributes:
      role: "parameter", "optimizer state", "batch" and so on.
      array: dtype and global shape, such as "f32[1024,512]".
      split: the mesh axes that split each dimension, such as "data,-"; "-" for a dimension that is not split, "?" if
        the sharding is not known.
      count: the number of arguments.
      bytes: the bytes of all of them on one device.
      name: the name of the first one. It is shown and never compared.
    """

    role: str
    array: str
    split: str
    count: int
    bytes: int
    name: str


@dataclass(frozen=True, order=True)
class Live:
    """Equal arrays that are live at the peak of memory. They are shown and never compared.

    Attributes:
      role: such as "parameters" or "kept activations".
      array: dtype and shape on one device.
      count: the number of arrays.
      bytes: their bytes on one device.
      line: the source line that makes them, or the name of the argument.
    """

    role: str
    array: str
    count: int
    bytes: int
    line: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The communication, memory and cost of one compiled program. All bytes are of one device.

    Attributes:
      mesh: the size of each mesh axis.
      compiler: the platform and version of the compiler, such as "cpu, jaxlib 0.10.2".
      collectives: the arrays that collectives move; scalars are left out.
      arguments: the arguments.
      live: the largest arrays at the peak of memory.
      peak_bytes: bytes that are live at once; None for a program that is given as text.
      flops: FLOPs of matrix products and convolutions over all devices; None if they can't be counted.
      rematerialized_bytes: bytes of arrays that the compiler computes again on its own, per step.
      instructions: the number of instructions of the compiled program, which compile time follows.
      programs: how many programs JAX compiles for the given lists of arguments.
      refusal: the compiler's message if it refused the program for lack of memory; "" otherwise.
    """

    mesh: Mapping[str, int]
    compiler: str
    collectives: tuple[Moved, ...] = ()
    arguments: tuple[Given, ...] = ()
    live: tuple[Live, ...] = ()
    peak_bytes: int | None = None
    flops: int | None = None
    rematerialized_bytes: int = 0
    instructions: int = 0
    programs: int = 1
    refusal: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as values that JSON can represent."""
        rows = {name: [vars(one) for one in getattr(self, name)] for name in _ROWS}
        return vars(self) | {"mesh": dict(self.mesh)} | rows


_ROWS: dict[str, Any] = {"collectives": Moved, "arguments": Given, "live": Live}
_MOST = 1 << 63


def snapshot_of(name: str, values: Any) -> Snapshot:
    """Make the snapshot of the target `name` from the values of `Snapshot.as_dict`.

    Raises:
      ValueError: an entry is missing, unknown, or of another type; the message names it.
    """
    made: Snapshot = _typed(Snapshot, name, values)
    rows: dict[str, Any] = {
        rows: tuple(_typed(kind, f"{name}: {rows}", row) for row in getattr(made, rows)) for rows, kind in _ROWS.items()
    }
    if sum(row.count for row in rows["arguments"]) > MOST_LISTED:
        raise ValueError(f"{name}: arguments: more than {MOST_LISTED} arrays")
    return replace(made, **rows)


def _typed(kind: Any, name: str, values: Any) -> Any:
    """Make a record of `kind` from its values by name; ValueError if one is missing, unknown, or of another type."""
    types = get_type_hints(kind)
    try:
        made = kind(**values)
    except TypeError as error:  # no object, or one that lacks a name or has another one
        raise ValueError(f"{name}: {error}") from error
    wrong = [f"{one!r} is {value!r}" for one, value in values.items() if not _fits(value, types[one])]
    if wrong:
        raise ValueError(f"{name}: {'; '.join(wrong)}")
    return made


def _fits(value: Any, kind: Any) -> bool:
    if kind == Mapping[str, int]:
        return isinstance(value, dict) and all(_fits(size, int) for size in value.values())
    if kind in (str, int, int | None):
        return isinstance(value, kind) and (value is None or kind is str or 0 <= value < _MOST)
    return isinstance(value, list)
