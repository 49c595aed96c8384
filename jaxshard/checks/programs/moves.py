"""Label each array that a collective moves: weight, gradient, optimizer state, activation, batch, integers or scalar.

A moved or cast copy of an argument is that argument (`hlo/origins`). Any other array that has the shape of a
parameter, or of one block of it, is taken for its gradient if it is summed, and for the weight or its new value if it
is gathered. The rest are activations, integers (tokens, indices) and scalars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxshard.checks.collectives.expected import Shape, normal_shape
from jaxshard.checks.programs.arguments import BATCH, EITHER, OPTIMIZER, PARAMETER, Argument
from jaxshard.checks.programs.axes import EXCHANGED, ROWS, SPLIT, STAGES, axes_for
from jaxshard.checks.programs.forms import chunks_of, forms_of, stacked_dim
from jaxshard.hlo import hlo
from jaxshard.hlo.found import SUMS, Collective, locate, pick
from jaxshard.hlo.trail import PRODUCTS, operation_of, pass_of
from jaxshard.hlo.transfers import is_transfer

WEIGHT, MOMENT, GRADIENT, ACTIVATION = "weight", "optimizer state", "gradient", "activation"
INTEGERS, SCALAR, INPUT = "integers", "scalar", "batch"
WHAT = (WEIGHT, GRADIENT, MOMENT, ACTIVATION, INPUT, INTEGERS, SCALAR)

_SCALARS = 16
"""An array of at most so many elements counts as scalars that the compiler joined."""


@dataclass(frozen=True, kw_only=True)
class Move(Collective):
    """An array that a collective moves, labelled as weight, gradient, activation and so on.

    Attributes:
      what: the label, one of `WHAT`.
      arguments: the argument of the step that the array is a copy or the gradient of. There are several if the compiler
        joined their arrays, or if the array is recognised by a shape that several arguments have.
      share: the fraction of such an argument that one execution moves; 0 without arguments.
      by_shape: True if the label is inferred from the shape alone.
    """

    what: str
    arguments: tuple[Argument, ...] = ()
    share: float = 0.0
    by_shape: bool = False

    @property
    def title(self) -> str:
        """Kind, axes and label: "all-gather over data (weight)"."""
        return f"{super().title} ({self.what})"

    @property
    def times(self) -> float | None:
        """The number of times that a full argument is moved per step, `count * share`; None if `count` is unknown."""
        return None if self.count is None else self.count * self.share


def find_moves(module: hlo.Module, mesh: Mesh, arguments: Sequence[Argument]) -> tuple[Move, ...]:
    """List the arrays that the collectives of a program move, each with its label, in the order of the program."""
    known = _Known({one.number: one for one in arguments}, mesh)
    return tuple(
        Move(**vars(one), **_label(one, is_transfer(executed.op), known))
        for executed, record in locate(module, mesh)
        for one in (pick(record, [part]) for part in range(len(record.arrays)))
    )


class _Known:
    """The arguments of a program by their index, and the shapes by which its parameters are recognised."""

    def __init__(self, arguments: Mapping[int, Argument], mesh: Mesh) -> None:
        self.arguments = arguments
        self._mesh, self._split = mesh, set(axes_for(mesh, SPLIT))
        self._rows = axes_for(mesh, ROWS, EXCHANGED)
        self._stages = {*axes_for(mesh, STAGES, EXCHANGED)}
        self._parameters = [one for one in arguments.values() if one.role in (PARAMETER, EITHER) and one.shape]
        self._stacked = stacked_dim(self._parameters)
        self._forms: dict[tuple[str, ...], dict[int, Mapping[Shape, float]]] = {}

    def alike(self, found: Collective) -> dict[int, float]:
        """Return the parameters whose shape fits an array, as {index of the argument: fraction of it in the array}."""
        passed_on = found.kind == "collective-permute" and set(found.axes) <= self._stages
        passed_on = passed_on or found.kind.endswith("all-to-all")
        if passed_on or set(found.axes) <= self._split or not found.dtype.startswith(("f", "bf")):
            return {}
        form, axes = normal_shape(found.shapes[0]), [axis for axis in found.axes if axis in self._mesh.shape]
        if is_ring(found):
            parts = math.prod(self._mesh.shape[axis] for axis in axes)
            own = {one.number: forms_of(one, self._mesh, ()) for one in self._parameters}
            return {number: shares[form] / parts for number, shares in own.items() if form in shares}
        if found.axes not in self._forms:
            self._forms[found.axes] = {
                one.number: forms_of(one, self._mesh, axes, self._rows, self._stacked) for one in self._parameters
            }
        forms = self._forms[found.axes]
        alike = {number: shares[form] for number, shares in forms.items() if form in shares}
        chunks = {number: chunks_of(shares, form, found.count or 0) for number, shares in forms.items()}
        return alike or {number: share for number, share in chunks.items() if share}


def _label(found: Collective, between_slices: bool, known: _Known) -> dict[str, Any]:
    """Label the one array of a collective; return the attributes what, arguments, share and by_shape of its `Move`.

    `between_slices` is True for a transfer between TPU slices, whose arrays are padded and joined.
    """
    trail, small = found.trail, found.elements <= _SCALARS
    of = tuple(known.arguments[number] for number in trail.numbers if number in known.arguments)
    if of and not between_slices and (not small or (len(of) == 1 and of[0].elements > _SCALARS)):
        roles = {one.role for one in of}
        what = INPUT if roles == {BATCH} else WEIGHT if roles & {PARAMETER, EITHER} else ACTIVATION
        # A gather may be written as a sum of what is zero elsewhere: its operand is as large as its result.
        width = len(found.groups[0]) if found.kind in ("all-gather", "all-reduce") else 1
        share = found.elements / (sum(one.elements for one in of) * trail.gathered * width)
        return {"what": MOMENT if OPTIMIZER in roles else what, "arguments": of, "share": share}
    if small:
        return {"what": SCALAR}
    if between_slices and found.kind in SUMS:
        return {"what": GRADIENT, "by_shape": True}  # arrays are padded to tiles there, and several are joined
    if alike := known.alike(found):
        share = max(alike.values())
        summed = found.kind in SUMS or (is_ring(found) and pass_of(found.op_name) == "backward pass")
        of = tuple(known.arguments[number] for number, own in alike.items() if own == share)
        return {"what": GRADIENT if summed else WEIGHT, "arguments": of, "share": share, "by_shape": True}
    return {"what": ACTIVATION if found.dtype.startswith(("f", "bf")) else INTEGERS}


def is_ring(found: Collective) -> bool:
    """Return True for a permute that passes shards around a ring while a matrix product is computed piece by piece."""
    return found.kind == "collective-permute" and operation_of(found.op_name) in PRODUCTS
