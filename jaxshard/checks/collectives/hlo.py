"""Compiled programs as text: computations, operations, where a value comes from, and how often a loop runs.

Only what the audit needs of HLO's text format (`compiled.as_text()`). Lines are split when a computation is first
looked at and an operation is parsed when it is asked for: a large model's text has megabytes, and few lines matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

Array = tuple[str, tuple[int, ...]]  # dtype and shape
Path = tuple[int, ...]  # indices into nested tuples

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-~]+) .*\{$")
_NAME = re.compile(r"%([\w.\-~]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NOT_DATA = ("token", "opaque")
# Attributes come before metadata and backend_config, whose strings may contain anything.
_FREE_TEXT = re.compile(r", (?:metadata|backend_config)=")
_CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^}]*\}|%[\w.\-~]+)"
)
_BITS = re.compile(r"[a-z]+(\d+)")


class Op(NamedTuple):
    """One operation: its name, the text of its type, opcode, operands, attributes, and the free text after them."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    inside: str  # the text between the parentheses
    attributes: str
    notes: str

    @property
    def callees(self) -> tuple[str, ...]:
        return tuple(name for group in _CALLEES.findall(self.attributes) for name in _NAME.findall(group))

    def callee(self, attribute: str) -> str:
        found = re.search(rf"\b{attribute}=%([\w.\-~]+)", self.attributes)
        assert found is not None, f"{self.opcode} {self.name} has no {attribute}"
        return found[1]

    def attribute(self, name: str) -> str | None:
        """The text of an attribute without nested commas, such as `index=3`."""
        found = re.search(rf"\b{name}=([^,\s]+)", self.attributes)
        return None if found is None else found[1]


class Computation:
    """A named list of operations; `lines` keeps their order, which is the schedule."""

    def __init__(self, name: str, body: list[str]) -> None:
        self.name = name
        self._body = body
        self._parsed: dict[str, Op] = {}

    @cached_property
    def lines(self) -> dict[str, str]:
        found = {}
        for line in self._body:
            left, equals, right = line.partition(" = ")
            if equals:
                found[left.split("%")[-1]] = right
        return found

    @cached_property
    def root(self) -> str:
        line = next(line for line in reversed(self._body) if line.lstrip().startswith("ROOT "))
        return line.partition(" = ")[0].split("%")[-1]

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """For every value the operations that use it."""
        found: dict[str, list[str]] = {}
        for name, line in self.lines.items():
            for operand in dict.fromkeys(_NAME.findall(_FREE_TEXT.split(line)[0])):
                found.setdefault(operand, []).append(name)
        return found

    def __getitem__(self, name: str) -> Op:
        if name not in self._parsed:
            self._parsed[name] = _parse_op(name, self.lines[name])
        return self._parsed[name]


class Module(NamedTuple):
    """A program: its first line, its computations by name, the entry's name, and the tables of source lines."""

    header: str
    computations: dict[str, Computation]
    entry: str
    frames: Mapping[int, tuple[str, ...]]

    @property
    def devices(self) -> int:
        """Over how many devices the program runs."""
        sizes = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", self.header)
        return math.prod(int(size) for size in sizes)


class Scope(NamedTuple):
    """A computation as `caller` in `parent` runs it on `arguments`; `body` is set inside a while loop."""

    computation: Computation
    parent: Scope | None = None
    caller: Op | None = None
    arguments: tuple[str, ...] = ()
    body: Computation | None = None


def parse(text: str) -> Module:
    """The module that an optimized program's text describes.

    Raises:
      TypeError: the text is not HLO (a lowered program prints StableHLO).
    """
    if not text.startswith("HloModule"):
        raise TypeError(
            f"expected the HLO text of a compiled program, got text that starts with {text[:40]!r}; pass what "
            "jax.jit(...).lower(...).compile() returns"
        )
    lines = text.splitlines()
    computations: dict[str, Computation] = {}
    tables: list[str] = []
    entry = ""
    body: list[str] | None = None
    for line in lines[1:]:
        if line.startswith("}"):
            body = None
        elif body is not None:
            body.append(line)
        elif head := _HEAD.match(line):
            body = []
            computations[head[2]] = Computation(head[2], body)
            entry = head[2] if head[1] else entry
        else:
            tables.append(line)
    return Module(lines[0], computations, entry, _stack_frames(tables))


def _parse_op(name: str, line: str) -> Op:
    """The operation from what stands right of the equals sign: `TYPE opcode(operands), attributes`."""
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    opcode, _, _ = line[end:].lstrip().partition("(")
    opening = line.index("(", end)
    closing = _closing(line, opening)
    inside, rest = line[opening + 1 : closing], line[closing + 1 :]
    cut = _FREE_TEXT.search(rest)
    split = len(rest) if cut is None else cut.start()
    return Op(name, line[:end], opcode.strip(), tuple(_NAME.findall(inside)), inside, rest[:split], rest[split:])


def _closing(text: str, opening: int) -> int:
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return opening + found.start()
    raise ValueError(f"unbalanced parentheses in the HLO line {text[:120]!r}")


def arrays(type_text: str) -> tuple[Array, ...]:
    """Dtype and shape of every array in a type, tuples flattened; tokens are left out."""
    found = ((dtype, dims) for dtype, dims in _ARRAY.findall(type_text) if dtype not in _NOT_DATA)
    return tuple((dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)) for dtype, dims in found)


def nbytes(array: Array) -> int:
    """Bytes of one array without padding; types narrower than a byte count as packed."""
    dtype, shape = array
    bits = 8 if dtype == "pred" else int(_BITS.match(dtype)[1])  # type: ignore[index]
    return -(-math.prod(shape) * bits // 8)


def resolve(module: Module, scope: Scope, name: str, path: Path = ()) -> tuple[Scope, Op, Path]:
    """The operation that makes a value, seen through tuples, copies, calls and loops that hand it on as it is."""
    while True:
        op = scope.computation[name]
        match op.opcode:
            case "get-tuple-element":
                path = (int(op.attribute("index") or 0), *path)
                name = op.operands[0]
            case "tuple" if path:
                name, path = op.operands[path[0]], path[1:]
            case "copy" | "copy-start" | "copy-done" | "bitcast" | "convert" | "reshape" | "optimization-barrier":
                name = op.operands[0]
            case "fusion" | "call":
                scope = Scope(module.computations[op.callees[0]], scope, op, op.operands)
                name = scope.computation.root
            case "while" if path and _unchanged(module, module.computations[op.callee("body")], path[0]):
                name = op.operands[0]
            case "parameter" if scope.parent is not None:
                if scope.body is None:
                    name = scope.arguments[int(op.inside)]
                elif path and _unchanged(module, scope.body, path[0]):
                    name = scope.arguments[0]
                else:
                    return scope, op, path
                scope = scope.parent
            case _:
                return scope, op, path


def _unchanged(module: Module, body: Computation, index: int) -> bool:
    """Whether a loop's body hands element `index` of its carry on as it got it."""
    at, op, path = resolve(module, Scope(body), body.root, (index,))
    return at.computation is body and op.opcode == "parameter" and path == (index,)


def integer(module: Module, scope: Scope, name: str, path: Path = ()) -> int | None:
    """The value of an integer scalar where it is known from constants alone, else None."""
    scope, op, path = resolve(module, scope, name, path)
    if op.opcode == "constant":
        return int(op.inside) if re.fullmatch(r"-?\d+", op.inside) else None
    if op.opcode not in ("add", "subtract", "multiply", "maximum", "minimum") or path:
        return None
    left, right = (integer(module, scope, operand) for operand in op.operands)
    if left is None or right is None:
        return None
    values = {"add": left + right, "subtract": left - right, "multiply": left * right}
    return values.get(op.opcode, max(left, right) if op.opcode == "maximum" else min(left, right))


def trip_count(module: Module, scope: Scope, loop: Op) -> int | None:
    """How often the body of a while loop runs: what the compiler noted, else from its counter, else None.

    TPU programs carry no note. A counter is an element of the carry that starts at a constant, moves by a constant and
    is compared with a constant.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.notes):
        return int(noted[1])
    condition = module.computations[loop.callee("condition")]
    body = module.computations[loop.callee("body")]
    inner, compare, _ = resolve(module, Scope(condition, scope, loop, loop.operands, body), condition.root)
    if compare.opcode != "compare":
        return None
    direction = compare.attribute("direction") or ""
    left, right = compare.operands
    index = _carried(module, inner, left, condition)
    if index is None:
        left, right, direction = right, left, {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
        index = _carried(module, inner, left, condition)
    if index is None:
        return None
    start = integer(module, scope, loop.operands[0], (index,))
    limit = integer(module, inner, right)
    step = _step(module, Scope(body, scope, loop, loop.operands, body), index)
    if start is None or limit is None or not step:
        return None
    return _turns(start, limit, step, direction)


def _carried(module: Module, scope: Scope, name: str, owner: Computation) -> int | None:
    """Which element of the loop's carry a value is, if it is one."""
    at, op, path = resolve(module, scope, name)
    carried = op.opcode == "parameter" and at.computation is owner and len(path) == 1
    return path[0] if carried else None


def _step(module: Module, scope: Scope, index: int) -> int | None:
    at, op, path = resolve(module, scope, scope.computation.root, (index,))
    if op.opcode not in ("add", "subtract") or path:
        return None
    left, right = op.operands
    if op.opcode == "add" and _carried(module, at, left, scope.computation) != index:
        left, right = right, left
    if _carried(module, at, left, scope.computation) != index:
        return None
    amount = integer(module, at, right)
    return amount if amount is None or op.opcode == "add" else -amount


def _turns(start: int, limit: int, step: int, direction: str) -> int | None:
    distance = limit - start
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction not in ("LT", "LE") if step > 0 else direction not in ("GT", "GE"):
        return None
    inclusive = direction in ("LE", "GE")
    return max(0, distance // step + 1 if inclusive else -(-distance // step))


def _stack_frames(lines: list[str]) -> dict[int, tuple[str, ...]]:
    """For every stack frame id, `file:line` from the innermost frame outwards."""
    tables: dict[str, dict[int, str]] = {"FileNames": {}, "FileLocations": {}, "StackFrames": {}}
    table: dict[int, str] = {}
    for line in lines:
        key, _, entry = line.partition(" ")
        if key.isdigit():
            table[int(key)] = entry
        elif line.strip():
            table = tables.setdefault(line.strip(), {})
    places = {
        number: f"{tables['FileNames'].get(_field(entry, 'file_name_id'), '?').strip(chr(34))}:{_field(entry, 'line')}"
        for number, entry in tables["FileLocations"].items()
    }
    frames = {
        number: (_field(entry, "file_location_id"), _field(entry, "parent_frame_id"))
        for number, entry in tables["StackFrames"].items()
    }
    # XLA prints the parent's number plus one, so that 1 stands for none. A 0 would show that it has stopped doing so.
    shift = 0 if any(parent == 0 for _, parent in frames.values()) else 1
    stacks: dict[int, tuple[str, ...]] = {}
    for number in frames:
        stack: list[str] = []
        at = number
        while at in frames and len(stack) < len(frames):
            place, parent = frames[at]
            stack.append(places.get(place, "?"))
            at = parent - shift
        stacks[number] = tuple(stack)
    return stacks


def _field(entry: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", entry)
    return int(found[1]) if found else 0
