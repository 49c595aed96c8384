"""Trace an array that a collective moves: the argument that it is or the operation that computes it, and its reader.

    %h   = f32[4,512] dot(%x, %w), metadata={op_name="jit(step)/jvp(Net)/Dense_0/dot_general" ...}       maker
    %all = f32[4,512] all-reduce(%h), ...
    %y   = f32[4,512] tanh(%all), metadata={op_name="jit(step)/jvp(Net)/tanh" stack_frame_id=7}          reader

An array that is only moved and cast on its way from an argument of the step is that argument, such as
`run.params['up']`, the weight up.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxshard.hlo import hlo
from jaxshard.hlo.dataflow import resolve
from jaxshard.hlo.origins import find_origin
from jaxshard.hlo.source import find_reader, find_source

_HANDED_ON = (
    "copy-done", "copy-start", "convert", "opt-barrier", "pad", "reduce-precision", "transpose", "slice",
)  # fmt: skip
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
"""JAX's names of the operations that contract dimensions."""
COLLECTIVES = (
    "all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "psum_scatter", "reduce_scatter",
)  # fmt: skip
"""JAX's names of the operations that communicate."""
SCATTERED = "reduce-scatter"
"""The `Trail.maker` of a shard that a reduce-scatter left."""
_FAR = 16
"""The number of steps after which the search for a maker gives up."""
_ROLES = {"params": "weight", "opt_state": "optimizer state", "state": "state"}
_KEY = re.compile(r"\['?([^'\]]+)'?\]|\.(\w+)")


class Trail(NamedTuple):
    """Where an array that a collective moves comes from, and which operation reads it.

    Attributes:
      arguments: the arguments of the step that the array is a copy of, such as "weight blocks/wq" or "batch tokens"; ()
        if the array is computed.
      maker: JAX's name of the operation that computes the array, such as "dot_general", or "reduce-scatter" if that
        collective does; "" if `arguments` is not empty, or if the compiler lost the name.
      made_at: the line of the maker in the model, or "".
      reader: JAX's name of the nearest operation, in the user's code or in a library, that uses the collective's
        result; "" if no such operation is near.
      read_at: the source line of the reader, or "".
      dim: the dimension that is gathered, scattered or cut into parts; None for other collectives.
      numbers: the indices of `arguments` among the arguments of the program.
      gathered: the factor by which earlier all-gathers enlarged `arguments`; 1 without earlier all-gathers.
    """

    arguments: tuple[str, ...] = ()
    maker: str = ""
    made_at: str = ""
    reader: str = ""
    read_at: str = ""
    dim: int | None = None
    numbers: tuple[int, ...] = ()
    gathered: int = 1


def find_trail(scope: hlo.Scope, op: hlo.Op, part: int) -> Trail:
    """Find where the array with index `part` of a collective comes from, and which operation reads the result."""
    if part >= len(op.operands):
        return Trail()
    name = op.operands[part]
    numbers, gathered = find_origin(scope, name)
    reader = find_reader(scope, op)
    dim = re.search(r"\bdimensions=\{(\d+)\}", op.attributes)
    trail = Trail(reader=operation_of(reader.op_name), read_at=reader.line, dim=int(dim[1]) if dim else None)
    if numbers:
        labels = (scope.module.arguments[number].op_name or f"argument {number}" for number in numbers)
        return trail._replace(arguments=tuple(map(argument_words, labels)), numbers=numbers, gathered=gathered)
    maker, made_at = _maker(scope, name)
    return trail._replace(maker=maker, made_at=made_at)


def _maker(scope: hlo.Scope, name: str) -> tuple[str, str]:
    """Return (JAX's name of the operation that computes a value, its source line); "" for an unknown name or line."""
    for _ in range(_FAR):
        scope, op, path = resolve(scope, name)
        if op.opcode not in _HANDED_ON or path or not op.operands:
            break
        name = op.operands[0]
    source = find_source(scope, op)
    scattered = op.opcode == "dynamic-slice" and scope.computation[op.operands[0]].opcode == "all-reduce"
    own = SCATTERED if scattered or op.opcode == SCATTERED else operation_of(source.op_name)
    return own, source.line.removeprefix("near ") if source.frames else ""


def argument_words(label: str) -> str:
    """Describe an argument of a step by its role and path, from its name in the program.

    >>> argument_words("run.params['blocks']['wq']")
    'weight blocks/wq'
    >>> argument_words("batch['tokens']")
    'batch tokens'
    """
    found = re.match(r"(?:run\.(\w+)|(batch)\b)(.*)", label)
    if found is None:
        return label
    role = _ROLES.get(found[1], found[1] or found[2])
    keys = [quoted or plain for quoted, plain in _KEY.findall(found[3])]
    return f"{role} {'/'.join(keys)}" if keys else role


def operation_of(op_name: str) -> str:
    """Return the name of an operation, the last part of JAX's path of names; "" for an argument.

    >>> operation_of("jit(step)/jvp(Net)/Dense_0/dot_general")
    'dot_general'
    >>> operation_of("jit(step)/transpose(jvp(Net/Dense_0/dot_general))")
    'dot_general'
    """
    if op_name.startswith(("run.", "batch")):
        return ""
    name = op_name.rpartition("/")[2]
    return name if "(" in name else name.rstrip(")")


def pass_of(op_name: str) -> str:
    """Return the pass that an operation belongs to, from JAX's path of names; "" if the path does not tell.

    Passes are "forward pass", "forward pass again" (recomputation) and "backward pass".

    >>> pass_of("jit(step)/transpose(jvp(Net))/mul")
    'backward pass'
    """
    if "rematted_computation" in op_name:
        return "forward pass again"
    if "transpose(" in op_name:
        return "backward pass"
    return "forward pass" if "jvp(" in op_name else ""
