"""What every collective of a program moves: a weight, a gradient, a moment of the optimizer, an activation.

A value that is only moved and cast on its way from an argument is that argument (`collectives/origins`). Of the others
those that have the shape of a parameter, or of one block of it, are taken for its gradient where they are summed, and
for the weight itself, or its new value, where they are gathered; the rest are activations, integers (tokens, indices)
and scalars.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import Mesh

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.expected import Shape, normal_shape
from jaxshard.checks.collectives.found import SUMS, Collective, locate, pick
from jaxshard.checks.collectives.trail import PRODUCTS, operation_of, pass_of
from jaxshard.checks.collectives.transfers import is_transfer
from jaxshard.checks.programs.arguments import BATCH, EITHER, OPTIMIZER, PARAMETER, Argument
from jaxshard.checks.programs.axes import EXCHANGED, ROWS, SPLIT, STAGES, axes_for
from jaxshard.checks.programs.forms import chunks_of, forms_of, stacked_dim

WEIGHT, MOMENT, GRADIENT, ACTIVATION = "weight", "optimizer state", "gradient", "activation"
INTEGERS, SCALAR, INPUT = "integers", "scalar", "batch"
WHAT = (WEIGHT, GRADIENT, MOMENT, ACTIVATION, INPUT, INTEGERS, SCALAR)

_SCALARS = 16
"""Elements of a few joined scalars at most."""
_FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "chex", "numpy", "equinox", "haiku", "qwix", "haliax", "optimistix"}
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Move:
    """One array that a collective moves.

    Attributes:
      found: the collective, with this array alone; its `source` is the innermost line that is of no framework.
      what: one of `WHAT`.
      arguments: what it is of: one or several joined, or, where only its shape tells, all that it may be.
      share: the part of such an argument that one execution moves; 0 where there is none.
      by_shape: True if only its shape tells.
    """

    found: Collective
    what: str
    arguments: tuple[Argument, ...] = ()
    share: float = 0.0
    by_shape: bool = False

    @property
    def times(self) -> float | None:
        """Times that the whole array is moved per step; None in a loop of an unknown number of turns."""
        return None if self.found.count is None else self.found.count * self.share


def find_moves(module: hlo.Module, mesh: Mesh, arguments: Sequence[Argument]) -> tuple[Move, ...]:
    """List what the collectives of a program move, each of their arrays alone, in the order of the program."""
    known = _Known({one.number: one for one in arguments}, mesh)
    moves = []
    for executed, record in locate(module, mesh):
        record = replace(record, source=_place(record))
        between = is_transfer(executed.op)
        moves += [_move(pick(record, [part]), between, known) for part in range(len(record.shapes))]
    return tuple(moves)


class _Known:
    """The arguments by number, and the shapes by which parameters are known."""

    def __init__(self, arguments: Mapping[int, Argument], mesh: Mesh) -> None:
        self.arguments = arguments
        self._mesh, self._split = mesh, set(axes_for(mesh, SPLIT))
        self._rows = axes_for(mesh, ROWS, EXCHANGED)
        self._stages = {*axes_for(mesh, STAGES, EXCHANGED)}
        self._forms: dict[tuple[str, ...], dict[int, Mapping[Shape, float]]] = {}

    def alike(self, found: Collective) -> dict[int, float]:
        """The parameters whose shape, or whose block's, an array has, each with the share that it is."""
        passed_on = found.kind == "collective-permute" and set(found.axes) <= self._stages
        passed_on = passed_on or found.kind.endswith("all-to-all")
        if passed_on or set(found.axes) <= self._split or not found.dtype.startswith(("f", "bf")):
            return {}
        if found.axes not in self._forms:
            parameters = [one for one in self.arguments.values() if one.role in (PARAMETER, EITHER) and one.shape]
            axes = [axis for axis in found.axes if axis in self._mesh.shape]
            stacked = stacked_dim(parameters)
            self._forms[found.axes] = {
                one.number: forms_of(one, self._mesh, axes, self._rows, stacked) for one in parameters
            }
        form = normal_shape(found.shapes[0])
        forms = self._forms[found.axes]
        if is_ring(found):
            parts = [self._mesh.shape[axis] for axis in found.axes if axis in self._mesh.shape]
            own = {number: forms_of(self.arguments[number], self._mesh, ()) for number in forms}
            return {number: shares[form] / math.prod(parts) for number, shares in own.items() if form in shares}
        alike = {number: shares[form] for number, shares in forms.items() if form in shares}
        chunks = {number: chunks_of(shares, form, found.count or 0) for number, shares in forms.items()}
        return alike or {number: share for number, share in chunks.items() if share}


def _move(found: Collective, between_slices: bool, known: _Known) -> Move:
    trail = found.trail
    of = tuple(known.arguments[number] for number in trail.numbers if number in known.arguments)
    if of and not between_slices and (found.elements > _SCALARS or (len(of) == 1 and of[0].elements > _SCALARS)):
        roles = {one.role for one in of}
        what = INPUT if roles == {BATCH} else WEIGHT if roles & {PARAMETER, EITHER} else ACTIVATION
        # A gather may be written as a sum of what is zero elsewhere: its operand is as large as its result.
        width = len(found.groups[0]) if found.kind in ("all-gather", "all-reduce") else 1
        share = found.elements / (sum(one.elements for one in of) * trail.gathered * width)
        return Move(found, MOMENT if OPTIMIZER in roles else what, of, share)
    if found.elements <= _SCALARS:
        return Move(found, SCALAR)
    if between_slices and found.kind in SUMS:
        return Move(found, GRADIENT, by_shape=True)  # between slices arrays are padded to tiles, and several are joined
    if alike := known.alike(found):
        share = max(alike.values())
        summed = found.kind in SUMS or (is_ring(found) and pass_of(found.op_name) == "backward pass")
        of = tuple(known.arguments[number] for number, own in alike.items() if own == share)
        return Move(found, GRADIENT if summed else WEIGHT, of, share, True)
    return Move(found, ACTIVATION if found.dtype.startswith(("f", "bf")) else INTEGERS)


def is_ring(found: Collective) -> bool:
    """Return True for shards that go around a ring while a product is computed piece by piece."""
    return found.kind == "collective-permute" and operation_of(found.op_name) in PRODUCTS


def _place(record: Collective) -> str:
    """The innermost line of the program's own code: no framework's, and none of Python's library."""
    near = "near " if record.source.startswith("near ") else ""
    for frame in record.frames:
        if not _is_framework(Path(frame.rpartition(":")[0])):
            return near + frame
    return record.source


def _is_framework(file: Path) -> bool:
    parts = file.parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return parts[parts.index(folder) + 1] in _FRAMEWORKS
    return file.is_relative_to(_STDLIB) or "<" in str(file)
