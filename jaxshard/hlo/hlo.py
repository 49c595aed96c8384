"""Parse the HLO text of compiled programs into computations and operations, as far as the audit needs them.

What `compiled.as_text()` prints looks like this, a little shortened:

    HloModule jit_step, is_scheduled=true, num_partitions=8        <- Module.devices
    FileNames                                                      <- tables of source lines, for Module.frames
    1 "/home/user/model.py"
    ...
    %body (c: (s32[], f32[64,16])) -> (s32[], f32[64,16]) {        <- a Computation, called by others
      %c = (s32[], f32[64,16]{1,0}) parameter(0)
      %x = f32[64,16]{1,0} get-tuple-element(%c), index=1
      ROOT %r = f32[64,16]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={stack_frame_id=3}
    }
    ENTRY %main (p: f32[64,16]) -> f32[64,16] { ... }              <- Module.entry

The last line of `%body` becomes this `Op`:

    name="r"  type="f32[64,16]{1,0}"  opcode="all-reduce"  operands=("x",)  callees=("add",)
    attributes=", replica_groups={{0,1},{2,3}}, to_apply=%add"  notes=", metadata={stack_frame_id=3}"

A large model's text has megabytes, of which few lines matter. So a computation is cut into lines when it is first
used, and an operation is parsed when it is first asked for.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

Array = tuple[str, tuple[int, ...]]
"""Dtype, as HLO writes it ("f32", "bf16", "pred"), and shape."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-~]+) .*\{$")
_NAME = re.compile(r"%([\w.\-~]+)")
_OP = re.compile(r"\s+(?:ROOT )?%?[\w.\-~]+ = ")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NOT_DATA = ("token", "opaque")
FREE_TEXT = re.compile(r", (?:frontend_attributes|metadata|backend_config)=")
"""The beginning of free text, which follows the attributes and may contain anything."""
_CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^}]*\}|%[\w.\-~]+)"
)
_COMBINING = (
    "all-reduce", "map", "reduce", "reduce-scatter", "reduce-window", "scatter", "select-and-scatter", "sort", "topk",
)  # fmt: skip
"""Opcodes whose computations combine or compare elements."""
_BITS = re.compile(r"[a-z]+(\d+)")
OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
"""Finds the opcode in the line of an operation."""
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ELEMENT = re.compile(r"%([\w.\-~]+)#(\d+)")


class Op(NamedTuple):
    """One HLO operation of a compiled program.

    Attributes:
      name: the name of the operation and of its value, without the percent sign.
      type: the text of the value's type, such as "f32[64,16]{1,0}", or a tuple of these.
      opcode: what it does, such as "all-reduce" or "get-tuple-element".
      operands: the names of the values that it takes.
      inside: the text between the parentheses: operands, a parameter's number or a constant's value.
      attributes: the text after the parentheses, up to free text.
      notes: free text: metadata with the source line, and notes of the compiler.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    notes: str

    @property
    def callees(self) -> tuple[str, ...]:
        """The names of all computations that the operation calls; branches of a conditional in their order."""
        return tuple(name for group in _CALLEES.findall(self.attributes) for name in _NAME.findall(group))

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of the computations that it runs as parts of the program, such as a loop's body.

        Left out are computations that combine or compare two elements, such as the addition of an all-reduce, and the
        computation of an asynchronous `-update` or `-done`, which the `-start` runs.
        """
        names_only = self.opcode.removesuffix("-start") in _COMBINING or self.opcode.endswith(("-update", "-done"))
        return () if names_only else self.callees

    def callee(self, attribute: str) -> str:
        """Return the computation's name in an attribute such as `body=%name` of a loop, without the percent sign."""
        return (self.attribute(attribute) or "").removeprefix("%")

    def attribute(self, name: str) -> str | None:
        """Return the text of an attribute up to a comma, such as "3" of `index=3`; None without this attribute."""
        found = re.search(rf"\b{name}=([^,\s]+)", self.attributes)
        return None if found is None else found[1]

    @property
    def op_name(self) -> str:
        """JAX's path of names in the operation's metadata, or the name of an argument; "" where there is none."""
        found = _OP_NAME.search(self.notes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


class Computation:
    """A named list of operations; `computation[name]` is the parsed `Op`.

    Attributes:
      name: the name of the computation, without the percent sign.
    """

    def __init__(self, name: str, body: list[str]) -> None:
        self.name = name
        self._body = body
        self._parsed: dict[str, Op] = {}

    @cached_property
    def lines(self) -> dict[str, str]:
        """{operation's name: the text after its equals sign}, in scheduled order.

        `as_text()` writes an element of a tuple as an operation, `get-tuple-element(%while.3), index=2`. XLA's dumps
        write the operand `%while.3#2` instead; then the `get-tuple-element` is added here.
        """
        found: dict[str, str] = {}
        for line in self._body:
            left, equals, right = line.partition(" = ")
            while "#" in right and (element := _ELEMENT.search(FREE_TEXT.split(right)[0])):
                whole, index = element.groups()
                name = f"{whole}.element{index}"
                right = f"{right[: element.start()]}%{name}{right[element.end() :]}"
                if name not in found:
                    of = _element_types(found[whole])[int(index)]
                    found[name] = f"{of} get-tuple-element(%{whole}), index={index}"
            if equals:
                found[left.split("%")[-1]] = right
        return found

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.lines)}

    @cached_property
    def root(self) -> str:
        """The name of the operation whose value the computation returns."""
        line = next(line for line in reversed(self._body) if line.lstrip().startswith("ROOT "))
        return line.partition(" = ")[0].split("%")[-1]

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """{name of a value: the names of the operations that use it}."""
        found: dict[str, list[str]] = {}
        for name, line in self.lines.items():
            for operand in dict.fromkeys(_NAME.findall(FREE_TEXT.split(line)[0])):
                found.setdefault(operand, []).append(name)
        return found

    def __getitem__(self, name: str) -> Op:
        if name not in self._parsed:
            op = self._parsed[name] = _parse_op(name, self.lines[name])
            # Every search for the source of a value ends, because an operation uses only values of lines above it.
            if late := [one for one in op.operands if self._positions.get(one, -1) >= self._positions[name]]:
                raise ValueError(f"the line of %{name} uses %{late[0]}, which is computed later")
        return self._parsed[name]


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed HLO program.

    Attributes:
      devices: the number of devices that it runs on.
      computations: the computations by name.
      entry: the name of the computation that runs first.
      frames: {number of a stack frame: its stack}, each stack `file:line` from the innermost frame outwards.
      text: the full text.
    """

    devices: int
    computations: dict[str, Computation]
    entry: str
    frames: Mapping[int, tuple[str, ...]]
    text: str

    @cached_property
    def calls(self) -> dict[str, set[str]]:
        """{name of a computation: the names of the computations that its operations call}."""
        return {
            name: {callee for op, line in of.lines.items() if _CALLEES.search(line) for callee in of[op].callees}
            for name, of in self.computations.items()
        }

    @cached_property
    def arguments(self) -> dict[int, Op]:
        """{index: operation} of the program's arguments, which are the `parameter` operations of its entry."""
        entry = self.computations[self.entry]
        found = (entry[name] for name, line in entry.lines.items() if " parameter(" in line)
        return dict(sorted((int(op.inside), op) for op in found))


class Scope(NamedTuple):
    """A computation with the chain of calls that leads to it, since it may be called from several places.

    Attributes:
      module: the program.
      computation: the computation.
      parent: the scope of its caller; None for the entry.
      caller: the operation in `parent` that calls it.
      arguments: the names of the values in `parent` that become the computation's parameters; the body of a loop has a
        single parameter, the tuple that the loop carries.
    """

    module: Module
    computation: Computation
    parent: Scope | None = None
    caller: Op | None = None
    arguments: tuple[str, ...] = ()

    @property
    def callers(self) -> Iterator[tuple[Scope, Op]]:
        """The chain of calls to this computation, innermost first: (scope of the calling operation, the operation)."""
        scope = self
        while scope.parent is not None and scope.caller is not None:
            yield scope.parent, scope.caller
            scope = scope.parent

    def enter(self, caller: Op, name: str, arguments: tuple[str, ...] | None = None) -> Scope:
        """Return the scope of the computation `name` that `caller` calls with `arguments` (by default its operands)."""
        arguments = caller.operands if arguments is None else arguments
        return Scope(self.module, self.module.computations[name], self, caller, arguments)


def parse(text: str) -> Module:
    """Parse the text of an optimized program.

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
    body: list[str] | None = None  # of the computation that the line is in
    for line in lines[1:]:
        if line == "}" or line.startswith("}, execution_thread="):
            body = None
        elif body is not None and (not body or _OP.match(line)):
            body.append(line)
        elif body is not None:  # the description of a Pallas kernel may span several lines
            body[-1] += f" {line}"
        elif head := _HEAD.match(line):
            body = []
            computations[head[2]] = Computation(head[2], body)
            entry = head[2] if head[1] else entry
        else:
            tables.append(line)
    devices = math.prod(map(int, re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", lines[0])))
    return Module(devices, computations, entry, _parse_stack_frames(tables), text)


def _parse_op(name: str, line: str) -> Op:
    """Parse an operation from the text after its equals sign, `TYPE opcode(operands), attributes, free text`."""
    opcode = OPCODE.search(line)
    rest = line[opcode.end() :] if opcode else ""
    closing = next(iter(_outside(rest, ")")), None)
    if opcode is None or closing is None:
        raise ValueError(f"the line of %{name} is cut off: {line[:120]!r}")
    inside, rest = rest[:closing], rest[closing + 1 :]
    attributes = FREE_TEXT.split(rest)[0]
    notes = rest[len(attributes) :]
    return Op(name, line[: opcode.start()], opcode[1], tuple(_NAME.findall(inside)), inside, attributes, notes)


def _element_types(line: str) -> list[str]:
    """Return the element types of the tuple type at the start of a line: `(f32[8], s32[]) ...` -> f32[8], s32[]."""
    end = _outside(line[1:], ")")[0]
    text = re.sub(r"/\*.*?\*/", "", line[1 : end + 1])
    return [text[start + 1 : stop].strip() for start, stop in pairwise([-1, *_outside(text, ","), len(text)])]


def _outside(text: str, wanted: str) -> list[int]:
    """Return the indices of a character outside of brackets: `("a,(b,c),d", ",") -> [1, 7]`.

    The search ends at the first closing bracket that was not opened.
    """
    depth, found = 0, []
    for one in re.finditer(r"[()\[\]{},]", text):
        if depth == 0 and one[0] == wanted:
            found.append(one.start())
        depth += (one[0] in "([{") - (one[0] in ")]}")
        if depth < 0:
            break
    return found


def arrays(type_text: str) -> tuple[Array, ...]:
    """Return dtype and shape of every array in a type, tuples flattened; tokens are left out.

    >>> arrays("(bf16[4,8]{1,0:T(8,128)}, (pred[], token[]))")
    (('bf16', (4, 8)), ('pred', ()))
    """
    found = ((dtype, dims) for dtype, dims in _ARRAY.findall(type_text) if dtype not in _NOT_DATA)
    # A dimension whose size is only bounded is written "<=8".
    return tuple((dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)) for dtype, dims in found)


def nbytes(array: Array) -> int:
    """Return the bytes of one array without padding; dtypes of less than a byte count as packed."""
    dtype, shape = array
    return -(-math.prod(shape) * bits_of(dtype) // 8)


def bits_of(dtype: str) -> int:
    """Return the bits of an element of a dtype, as HLO writes it.

    >>> bits_of("bf16")
    16
    """
    return 8 if dtype == "pred" else int(_BITS.findall(dtype)[0])


def _parse_stack_frames(lines: list[str]) -> dict[int, tuple[str, ...]]:
    """Return {number of a stack frame: its stack}, each stack `file:line` from the innermost frame outwards.

    The stacks are in three numbered tables at the head of the program, in which each frame refers to its caller:

        FileNames        1 "/home/user/model.py"
        FileLocations    2 {file_name_id=1 function_name_id=1 line=22 end_line=22 column=4 end_column=9}
        StackFrames      3 {file_location_id=2 parent_frame_id=1}
    """
    tables: defaultdict[str, dict[int, str]] = defaultdict(dict)
    title = ""
    for line in lines:
        key, _, entry = line.partition(" ")
        if key.isdigit():
            tables[title][int(key)] = entry
        else:
            title = line.strip() or title

    def fields(title: str) -> dict[int, dict[str, int]]:
        found = {number: re.findall(r"(\w+)=(\d+)", entry) for number, entry in tables[title].items()}
        return {number: {name: int(value) for name, value in entries} for number, entries in sorted(found.items())}

    files = {number: entry.strip('"') for number, entry in tables["FileNames"].items()}
    places = {
        number: f"{files.get(one.get('file_name_id', 0), '?')}:{one.get('line', 0)}"
        for number, one in fields("FileLocations").items()
    }
    frames = fields("StackFrames")
    # XLA prints the parent's number plus one, so that 1 stands for none. A 0 would show that it has stopped doing so.
    shift = 0 if any(one.get("parent_frame_id", 0) == 0 for one in frames.values()) else 1
    stacks: dict[int, tuple[str, ...]] = {}
    for number, one in frames.items():  # parents have lower numbers
        outer = stacks.get(one.get("parent_frame_id", 0) - shift, ())
        stacks[number] = (places.get(one.get("file_location_id", 0), "?"), *outer)
    return stacks
