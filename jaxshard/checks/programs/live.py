"""Name the arrays that are live at the peak of a program, by role and by the line of the user's model.

A compiler names its buffers after its own instructions: `%wide.param.0{23}` is element 23 of a loop's carry. Such a
value is followed back to the operation that makes it:

    %wide.param.0{23}           carried unchanged by the loop of the backward pass
    %while.7{12}                element 12 of the result of the forward pass's loop
    dynamic-update-slice(...)   which writes one block's part in each iteration: kept for the backward pass
    dot(...)                    jit(_step)/.../Block/dot_general, at model.py:183
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxshard.checks.collectives.expected import normal_shape
from jaxshard.compiler.dump import Assignment, Value
from jaxshard.core.our_code import is_outside_engines
from jaxshard.hlo import hlo
from jaxshard.hlo.asynchronous import find_start, operands_of, starts_computation
from jaxshard.hlo.dataflow import resolve
from jaxshard.hlo.source import find_reader, find_source
from jaxshard.hlo.trail import operation_of
from jaxshard.hlo.walk import Executed, executed

_FAR = 64
"""The number of loops and slices after which a search gives up."""
_ARGUMENTS = {"params": "parameters", "opt_state": "optimizer state", "state": "model state", "residuals": "gradients"}
_GATHERS = ("all_gather", "all-gather")
_MOVES = ("convert_element_type", "copy", "reshape", "sharding_constraint", "slice", "squeeze", "transpose")
"""Operations that move or cast a weight before it is used."""
_SUMS = ("psum_scatter", "reduce_scatter", "reduce-scatter", "all-reduce", "psum")


class Known(NamedTuple):
    """Shapes of the model, by which arrays at the peak are recognised.

    Attributes:
      weights: shapes of weights (`normal_shape`), of a stack and of one block: global, stored, and used on a device.
      vocabularies: the possible sizes of the vocabulary: global, and on one device if a mesh axis splits it.
    """

    weights: set[tuple[int, ...]]
    vocabularies: set[int]


@dataclass(frozen=True)
class LiveArray:
    """Equal arrays that are live at the peak of a program's memory.

    Attributes:
      bytes: the bytes of all these arrays on each device, padding included.
      role: such as "parameters", "gradients" or "kept activations"; `core/pictures/style.py` lists all.
      dtype: such as "bf16".
      shape: the shape of one array, on one device.
      count: the number of arrays.
      what: JAX's name of the operation that makes the arrays, such as "dot_general", or the name of the argument.
      source: `file:line` in the user's model; "" if it is not known.
      kept: True if a loop over blocks stores them block by block for the backward pass.
    """

    bytes: int
    role: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    what: str
    source: str = ""
    kept: bool = False

    def __str__(self) -> str:
        """Write the arrays in one line: count, dtype, shape, name, and the source line that makes them."""
        times = f"{self.count} x " if self.count > 1 else ""
        place = f"{self.what} at {self.source}" if self.source else self.what
        return f"{times}{self.dtype}{list(self.shape)} {place}"


def live_arrays(assignment: Assignment, text: str, known: Known) -> tuple[tuple[LiveArray, ...], str]:
    """Return the arrays that are live at the peak of a program's memory, and a description of that moment.

    Args:
      assignment: the compiler's assignment of memory.
      text: the text of the program, from the same dump.
      known: shapes of the compiled step's model.

    Returns:
      The arrays, arguments included, the largest first (equal arrays of one source line are added up); and the moment
      of the peak, such as "backward pass, at model.py:183 (dot_general)", or "" if it is not known.
    """
    program = _Program(text, known, assignment)
    return joined((*program.arguments(), *program.temporaries())), program.moment()


class _Program:
    """A compiled program with the shapes of its model; describes the arrays that are live at the peak of memory."""

    def __init__(self, text: str, known: Known, assignment: Assignment) -> None:
        self.module, self.known, self.assignment = hlo.parse(text), known, assignment
        self.places = _places(self.module, {value.name for value, _ in assignment.live} | {assignment.moment})
        self.peak = self.places.get(assignment.moment)

    def moment(self) -> str:
        """Describe what runs at the peak: "backward pass, at model.py:183 (dot_general)"; "" if it is not known."""
        if self.peak is None:
            return ""
        name, line = _named(*self.peak)
        when = "backward pass" if "transpose(" in name else "forward pass" if "jvp(" in name else "update"
        return f"{when}{f', at {line}' if line else ''} ({operation_of(name) or name or self.peak[1].opcode})"

    def arguments(self) -> Iterator[LiveArray]:
        """Yield the arguments of the step as `LiveArray`s named as in JAX, such as "run.params['head']"."""
        for number, op in self.module.arguments.items():
            if size := self.assignment.arguments.get(number, 0):
                dtype, shape = hlo.arrays(op.type)[0]
                role = _argument_role(op.op_name) or "batch"
                yield LiveArray(size, role, dtype, shape, 1, op.op_name or op.name)

    def temporaries(self) -> Iterator[LiveArray]:
        """Yield the temporaries that are live at the peak; skip a value whose memory another value already counts."""
        if size := self.assignment.results:
            yield LiveArray(size, "temporaries", "u8", (size,), 1, "results and constants")
        backward = self.peak is not None and "transpose(" in _named(*self.peak)[0]
        for value, added in self.assignment.live:
            if not added:
                continue
            dtype, shape = (hlo.arrays(value.type) or (("?", ()),))[0]
            if value.name not in self.places:
                yield LiveArray(added, "temporaries", dtype, shape, 1, value.name)
                continue
            scope, op, kept = _maker(*self.places[value.name], value)
            name, line = _named(scope, op)
            role = self._role(op, name, shape, kept, backward)
            what = operation_of(name) or name or op.opcode
            yield LiveArray(added, role, dtype, shape, 1, what, line, kept and role == "kept activations")

    def _role(self, op: hlo.Op, op_name: str, shape: tuple[int, ...], kept: bool, backward: bool) -> str:
        last = operation_of(op_name)
        if role := _argument_role(op_name):
            return "gathered weights" if role == "parameters" else role  # a copy of an argument
        if op.opcode.startswith(_GATHERS) or last in _GATHERS:
            return "gathered weights"
        made_backward = "transpose(" in op_name
        if op.opcode.startswith(_SUMS) or last in _SUMS:
            return "gradients"
        dims = normal_shape(shape)
        if dims in self.known.weights and (made_backward or last in _MOVES or op.opcode in _MOVES):
            return "gradients" if made_backward else "gathered weights"
        if len(dims) > 1 and self.known.vocabularies & set(dims) and not kept:
            return "logits"
        if made_backward:
            return "temporaries"
        again = "rematted_computation" in op_name or ("/checkpoint/" in op_name and backward)
        return "kept activations" if kept or (backward and "jvp(" in op_name and not again) else "temporaries"


def _places(module: hlo.Module, names: Iterable[str]) -> dict[str, tuple[hlo.Scope, hlo.Op]]:
    """Find instructions by name, each with its scope: the computation that has it, and the chain of its callers."""
    pattern = re.compile(rf"^(?:{'|'.join(map(re.escape, sorted(names)))}) = ")
    found: dict[str, Executed] = {}
    for one in executed(module, pattern, fused=False):
        found.setdefault(one.op.name, one)
    return {name: (one.scope, one.op) for name, one in found.items()}


def _named(scope: hlo.Scope, op: hlo.Op) -> tuple[str, str]:
    """Return (JAX's name of an operation, `file:line` of the user's model that makes or reads its result)."""
    source = find_source(scope, op)
    own = source.frames and is_outside_engines(source.line)
    return source.op_name, source.line if own else find_reader(scope, op).line


def _maker(scope: hlo.Scope, op: hlo.Op, value: Value) -> tuple[hlo.Scope, hlo.Op, bool]:
    """Return (scope, operation that makes a value, True if a loop writes the value block by block)."""
    path = tuple(int(index) for index in re.findall(r"\d+", value.element))
    name, kept = op.name, False
    for _ in range(_FAR):
        scope, op, path = resolve(scope, name, path)
        if op.opcode == "while" and path:
            scope = scope.enter(op, op.callee("body"))
            name = scope.computation.root
        elif op.opcode == "parameter" and path and scope.caller is not None and scope.caller.opcode == "while":
            name = scope.computation.root  # each iteration makes it anew
        elif op.opcode == "dynamic-update-slice":
            name, path, kept = op.operands[1], (), True
        elif op.opcode == "reduce-precision":  # of a value that a policy of `jax.checkpoint` keeps
            name, path = op.operands[0], ()
        elif starts_computation(start := find_start(scope.computation, op)):  # a buffer of an asynchronous computation
            scope = scope.enter(start, start.runs[0], operands_of(scope.computation, start))
            name, path = scope.computation.root, ()
        else:
            break
    return scope, op, kept


def _argument_role(op_name: str) -> str:
    """Return the role of an argument by JAX's name: "parameters" for "run.params['head']"; "" for an unknown name."""
    found = re.match(r"run\.(\w+)", op_name)
    if found:
        return _ARGUMENTS.get(found[1], "batch")
    return "batch" if re.match(r"batch\b", op_name) else ""


def joined(arrays: Iterable[LiveArray]) -> tuple[LiveArray, ...]:
    """Join equal arrays of the same source line to one `LiveArray` with the sum of bytes; return the largest first."""
    bytes_of, count_of = Counter[LiveArray](), Counter[LiveArray]()
    for one in arrays:
        kind = replace(one, bytes=0, count=0)
        bytes_of[kind] += one.bytes
        count_of[kind] += one.count
    return tuple(replace(kind, bytes=size, count=count_of[kind]) for kind, size in bytes_of.most_common())
