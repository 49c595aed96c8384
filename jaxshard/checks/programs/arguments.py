"""List the arguments of a compiled step, with their roles (parameter, optimizer state, batch) inferred from names.

    HloModule jit_step, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }, ...
    %p.5 = f32[128,8]{1,0} parameter(1), sharding={devices=[2,4]<=[4,2]T(1,0)}, metadata={op_name="state.params['up']"}

is the argument 1, `state.params['up']`, a parameter of the model: its name says so, and its buffer is donated to its
new value. Names come from the arguments of the Python function. In a text without names, donated arrays may be
parameters or moments of the optimizer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from jaxshard.core.mesh import axis_size
from jaxshard.hlo import hlo
from jaxshard.hlo.groups import UNKNOWN, expand_iota

PARAMETER, OPTIMIZER, BATCH, EITHER, OTHER = "parameter", "optimizer state", "batch", "parameter or moment", "other"
ROLES = (PARAMETER, OPTIMIZER, EITHER, BATCH, OTHER)

_OPTIMIZER = {
    "opt_state", "opt_states", "optimizer", "optimizer_state", "opt", "mu", "nu", "momentum", "velocity", "exp_avg",
    "exp_avg_sq", "inner_state", "inner_states", "tx_state", "m", "v",
}  # fmt: skip
_PARAMETER = {"params", "param", "weights", "parameters", "graphstate", "model_params"}
_BATCH = {"batch", "data", "inputs", "example", "examples", "minibatch", "x", "y"}
_WORD = re.compile(r"[A-Za-z_]\w*")
_ALIAS = re.compile(r"\((\d+), \{[\d, ]*\}(?:, (?:may|must)-alias)?\)")
_SHARDY = re.compile(r"%arg(\d+): [^%]*?sdy\.sharding = #sdy\.sharding<@\w+, \[([^\]?:]*)\]")
_DIMENSION, _AXIS = re.compile(r"\{([^{}]*)\}"), re.compile(r'"([^"]*)"')
_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))( last_tile_dim_replicate)?")

Splits = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Argument:
    """An array argument of a compiled step.

    Attributes:
      number: the index among the program's arguments.
      name: the path in the function's arguments, such as "state.params['embed']"; "argument 3" where none is known.
      role: one of `ROLES`, such as "parameter" or "batch".
      dtype: the dtype as HLO writes it.
      shape: the shape of one device's shard.
      global_shape: the shape of the full array; the shape of the shard if the text does not say how the array is split.
      splits: for each dimension the mesh axes that split it; None if the text does not say.
    """

    number: int
    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    splits: tuple[tuple[str, ...], ...] | None

    @property
    def elements(self) -> int:
        """The number of elements on one device."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes on one device, without padding."""
        return hlo.nbytes((self.dtype, self.shape))


def read_arguments(module: hlo.Module, mesh: Mesh, splits: Mapping[int, Splits] | None = None) -> tuple[Argument, ...]:
    """List the array arguments of a program, in order.

    Args:
      module: the program.
      mesh: the mesh of the program.
      splits: {index of an argument: how it is split}, of `lowered_splits`; by default what the text of the compiled
        program says, which may be nothing.
    """
    head = module.text.partition("\n")[0].partition("entry_computation_layout=")[0]
    donated = {int(number) for number in _ALIAS.findall(head)}
    arrays = ((number, op, array) for number, op in module.arguments.items() for array in hlo.arrays(op.type)[:1])
    found = [
        _argument(number, op, array, number in donated, mesh, (splits or {}).get(number))
        for number, op, array in arrays
    ]
    # If the optimizer's arrays have telling names, the other donated ones are parameters, whatever their names.
    named = any(one.role == OPTIMIZER for one in found)
    return tuple(replace(one, role=PARAMETER) if named and one.role == EITHER else one for one in found)


def lowered_splits(text: str) -> dict[int, Splits]:
    """Return {index of an argument: the mesh axes that split each dimension} of a lowered program, as JAX writes it.

        func.func public @main(%arg0: tensor<256x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>}, ...

    An argument whose sharding is left to the compiler, or splits an axis of the mesh, is left out.
    """
    signature = next((line for line in text.splitlines() if " @main(" in line), "").partition(") -> ")[0]
    found = ((number, _DIMENSION.findall(dims)) for number, dims in _SHARDY.findall(signature))
    return {int(number): tuple(tuple(_AXIS.findall(dim)) for dim in dims) for number, dims in found}


def _argument(number: int, op: hlo.Op, array: hlo.Array, donated: bool, mesh: Mesh, splits: Splits | None) -> Argument:
    dtype, shape = array
    name, splits = op.op_name or f"argument {number}", splits or _splits(op.attributes, len(shape), mesh)
    parts = [math.prod(mesh.shape.get(axis, 1) for axis in axes) for axes in splits or [()] * len(shape)]
    global_shape = tuple(size * count for size, count in zip(shape, parts))
    return Argument(number, name, _role(op.op_name, dtype, shape, donated), dtype, shape, global_shape, splits)


def _role(label: str, dtype: str, shape: Sequence[int], donated: bool) -> str:
    """Infer the role of an argument, one of `ROLES`, from its name, its dtype, its shape and whether it is donated."""
    words = _WORD.findall(label.lower())
    if words[:1] and words[0] in _BATCH:
        return BATCH
    if not dtype.startswith(("f", "bf")):
        return BATCH if shape and not donated else OTHER
    if _OPTIMIZER & set(words):
        return OPTIMIZER if shape else OTHER
    if not shape:
        return OTHER
    if _PARAMETER & set(words):
        return PARAMETER
    if not donated:
        return BATCH if words and not words[0].startswith("arg") else OTHER
    return EITHER


def _splits(attributes: str, dims: int, mesh: Mesh) -> tuple[tuple[str, ...], ...] | None:
    """Parse the attribute `sharding=` of an argument: return the mesh axes that split each dimension; else None."""
    found = re.search(r"\bsharding=\{(.*)\}", attributes)
    if found is None:
        return None
    tiles = _TILES.search(found[1])
    if tiles is None:
        return ((),) * dims if "replicated" in found[1] else None
    shape = [int(size) for size in tiles[1].split(",")]
    ids = np.array([int(number) for number in tiles[4].split(",")]) if tiles[4] else expand_iota(tiles[2], tiles[3])
    if ids.size != mesh.size or math.prod(shape) != mesh.size or len(shape) < dims:
        return None
    return tuple(_axes_along(ids.reshape(shape), dim, mesh) for dim in range(dims))


def _axes_along(placed: np.ndarray, dim: int, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that split dimension `dim`; tile (i, j) of the array is on device `placed[i, j]`."""
    part = np.empty(mesh.size, int)
    part[placed.ravel()] = np.indices(placed.shape)[dim].ravel()
    part = part.reshape(tuple(mesh.shape.values()))
    axes = tuple(name for at, name in enumerate(mesh.axis_names) if np.ptp(part, axis=at).any())
    return axes if axis_size(mesh, axes) == placed.shape[dim] else UNKNOWN
