"""Find the peak memory of a program, from the results that compilers store, their dtypes and their lifetimes.

    program                   stored
    y = x @ w                 y        a matrix product stores its result
    z = sin(y) * 2                     z is not stored: it is computed inside the operation that reads it
    return (z @ w).sum()      z @ w    the product computes z from y; y is live until here

The graph is walked in program order. Everything here is a general rule of compilers, listed in
docs/concepts/memory_estimate.md; no rule describes how the compiler of one chip schedules operations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxshard.plan.memory.graph import LOOPS, Op, Region, Value, dtype_bits
from jaxshard.plan.memory.shards import COLLECTIVES, is_reduction

CUT = "cut"
"""The name of an operation that slices a device's part out of a parameter at the beginning of a step."""

_ALIASES = frozenset({
    "reshape", "squeeze", "expand_dims", "name", "stop_gradient", "optimization_barrier", "enter", "transpose", "copy",
    "copy_p", "pvary", "random_wrap", "random_unwrap", "sharding_constraint", "enter_moved", "broadcast_in_dim",
    "device_put", "convert_element_type", "reduce_precision",
})  # fmt: skip
"""Operations whose result shares the memory of the operand, if both have the same dtype and number of bytes."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_UPDATES = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})
"""Operations that write a part of their first operand, in place."""

_STORED = COLLECTIVES | _UPDATES | _PRODUCTS | frozenset({
    "pallas_call", "tpu_custom_call", "custom_call", "ffi_call", "sort", "top_k", "gather", "scatter_mul", "cumsum",
    "cumprod", "cummax", "cummin", "cumlogsumexp", "ragged_dot", "ragged_dot_general", "concatenate",
    "reduce_window_sum", "reduce_window_max", "select_and_scatter_add", "sharding_constraint", "enter_moved", "fft",
    "cholesky", "qr", "svd", "eigh", CUT,
})  # fmt: skip
"""Operations whose results are stored; all others can be computed inside the operations that read their results."""

_MANY = 4
"""The number of readers of a result after which no more are counted."""

Size = Callable[..., int]
"""`size(value, dtype=None)` returns the bytes of a value on one device, in its own dtype or in the given one."""


class Live(NamedTuple):
    """A value that is stored in memory.

    Attributes:
      value: the value.
      bytes: the bytes that it takes on one device.
      note: "stacked" for the stacked results of a scan, "converted" for a copy of an argument that is cast to another
        dtype for a loop, "" for all others.
    """

    value: Value
    bytes: int
    note: str = ""


class Moment(NamedTuple):
    """An operation, and the values that are live while it runs; the program's arguments are left out."""

    live: tuple[Live, ...] = ()
    op: Op | None = None

    @property
    def total(self) -> int:
        """The sum of the bytes of all live values on one device."""
        return sum(one.bytes for one in self.live)


class _Copy(NamedTuple):
    """A copy of an argument in a smaller dtype, with the indices of the first and the last loop that read the copy."""

    value: Value
    dtype: Any
    first: int
    last: int


class Storage:
    """Decides which results of a region the compiler stores in memory.

    All other results are computed inside the operations that read them.

    Args:
      region: a program, or the body of a loop or branch.
      size: the function that returns the bytes of a value.
      tpu: True for a TPU, whose compiler fuses elementwise operations into the matrix products before and after them,
        and casts the operands of products to bf16.
    """

    def __init__(self, region: Region, size: Size, *, tpu: bool):
        self.region, self.size, self.tpu = region, size, tpu
        self.root: dict[Value, Value] = {}
        for op in region.ops:
            for source, made in zip(op.ins, op.outs, strict=False) if op.name in _ALIASES else ():
                if made.dtype == source.dtype and size(made) == size(source):
                    self.root[made] = source
        self.ops = [op for op in region.ops if not (op.outs and op.outs[0] in self.root)]
        self.inputs = {self.find(one) for one in region.inputs}
        self.results = {self.find(one) for one in region.outputs}
        self.makers = {one: op for op in self.ops for one in op.outs}
        self.readers: defaultdict[Value, list[Op]] = defaultdict(list)
        for op in self.ops:
            for one in op.reads:
                self.readers[self.find(one)].append(op)
        self.stored, continued = self._written()
        self._store_shared(continued, self._find_sources())
        self.sources = self._find_sources()

    def find(self, value: Value) -> Value:
        """Return the value whose memory `value` reuses, such as the operand of a reshape, or `value` itself."""
        while value in self.root:
            value = self.root[value]
        return value

    def is_fused(self, op: Op) -> bool:
        """Return True if an operation can be computed inside the operations that read its result."""
        if op.name.startswith("scatter") and _is_selection(op):
            return True
        moved = any(one.on_host for one in (*op.ins, *op.outs))  # to the host's memory or back
        return not (moved or op.name in _STORED or op.regions or is_reduction(op.name))

    def _stored_operands(self, op: Op, sources: Mapping[Value, set[Value]]) -> set[Value]:
        """Return the stored arrays that an operation reads, directly or through operands that are not stored."""
        found: set[Value] = set()
        for one in op.reads:
            root = self.find(one)
            found |= {root} if root in self.stored or root in self.inputs else sources.get(root, set())
        return found

    def _find_sources(self) -> dict[Value, set[Value]]:
        """Return for each result the stored arrays that its operation reads, directly or through values not stored."""
        sources: dict[Value, set[Value]] = {}
        for op in self.ops:
            joined = self._stored_operands(op, sources)
            sources.update((one, joined) for one in op.outs)
        return sources

    def _written(self) -> tuple[set[Value], set[Value]]:
        """Return (stored results, results of matrix products that are not stored but fused with their only reader)."""
        stored, continued = set[Value](), set[Value]()
        for op in self.ops:
            if not self.is_fused(op) or any(self.find(one) in continued for one in op.ins):
                joins = op.name in _PRODUCTS or self.is_fused(op)
                for one in op.outs:
                    (continued if joins and self._is_continued(one) else stored).add(one)
        return stored, continued

    def _is_continued(self, value: Value) -> bool:
        """Return True if one elementwise operation alone reads `value`, the result of a product: TPUs fuse the two."""
        readers = set(self.readers[value])
        if len(readers) != 1 or value in self.results or not self.tpu:
            return False
        (reader,) = readers
        return self.is_fused(reader) and [math.prod(one.shard) for one in reader.outs] == [math.prod(value.shard)]

    def _store_shared(self, continued: set[Value], sources: Mapping[Value, set[Value]]) -> None:
        """Add to `stored` elementwise results that are read from memory, or that several readers would recompute."""
        sinks: defaultdict[Value, set[Op]] = defaultdict(set)  # the operations that would each compute a result
        for op in reversed(self.ops):
            for one in op.outs if self.is_fused(op) else ():
                is_open = one not in self.stored and one not in continued
                if is_open and self._must_store(one, len(sinks[one]), sources[one]):
                    self.stored.add(one)
            runs = not self.is_fused(op) or any(one in self.stored for one in op.outs)
            reached = {op} if runs else set[Op]().union(*(sinks[one] for one in op.outs))
            for one in op.reads:
                if len(found := sinks[self.find(one)]) < _MANY:
                    found |= reached

    def _must_store(self, value: Value, times: int, sources: set[Value]) -> bool:
        readers = self.readers[value]
        if not sources:  # made of scalars alone, such as a mask: a loop makes it itself in every iteration
            readers = [one for one in readers if not self._is_constant_of(one, value)]
        if value in self.results or any(self._reads_memory(one, value) for one in readers):
            return True
        return times > 1 and sum(map(self.size, sources)) > 1.25 * self.size(value)

    def _reads_memory(self, reader: Op, value: Value) -> bool:
        """Return True if the operation `reader` needs `value` in memory, because it can't compute `value` itself."""
        if reader.name in _PRODUCTS:
            return not self.tpu
        if self.is_fused(reader) or is_reduction(reader.name):
            return False
        return reader.name not in _UPDATES or self.find(reader.ins[0]) is value

    def _is_constant_of(self, loop: Op, value: Value) -> bool:
        consts = loop.skipped + loop.consts
        return loop.name in LOOPS and all(self.find(one) is not value for one in loop.ins[consts:])


class Liveness(Storage):
    """Finds the dtype and the lifetime of each stored result of a region, and the moment of peak memory.

    Args:
      region, size, tpu: as for `Storage`.
      elsewhere: results that count as 0 bytes here, such as results that are written into donated arguments.
      reusable: inputs whose memory may be overwritten by results, such as the carries of a loop.
      donated: for each result of a step the donated argument whose memory it overwrites.
    """

    def __init__(
        self,
        region: Region,
        size: Size,
        *,
        tpu: bool,
        elsewhere: set[Value],
        reusable: set[Value] | None = None,
        donated: Mapping[Value, Value] | None = None,
    ):
        super().__init__(region, size, tpu=tpu)
        self.elsewhere = {self.find(one) for one in elsewhere}
        self.reusable, self.donated = reusable or set(), donated or {}
        self.inner = {op: [self._body(op, one) for one in op.regions] for op in self.ops if op.regions}
        self.place = {op: i for i, op in enumerate(self.ops)}
        self.runs: dict[Op, int] = {}
        self.last = dict.fromkeys(self.results, len(self.ops))
        self._find_last_reads()
        self.dtypes = {one: dtype for one in self.stored if (dtype := self._stored_as(one)) is not None}
        self.copies = list(self._find_copies()) if tpu else []

    def _body(self, op: Op, region: Region) -> Liveness:
        carried = set(region.inputs[op.consts :][: op.carries])
        return Liveness(region, self.size, tpu=self.tpu, elsewhere=set(region.outputs), reusable=carried)

    # Types.

    def _stored_as(self, value: Value) -> Any:
        """Return the dtype in which a result is stored, such as bf16 for f32; None if it is stored in its own dtype."""
        maker = self.makers[value]
        if value in self.results or (maker.name in LOOPS and value in maker.outs[: maker.carries]):
            return None
        return self.read_as(value)

    def read_as(self, value: Value) -> Any:
        """Return the dtype, of fewer bits, to which all readers first cast a value; None if there is no such dtype."""
        found = {self._reads_as(op, value) for op in self.readers[value]}
        return found.pop() if len(found) == 1 and value not in self.results else None

    def _reads_as(self, op: Op, value: Value) -> Any:
        if op.name == "convert_element_type":
            dtype = op.outs[0].dtype
            return dtype if dtype_bits(dtype) < dtype_bits(value.dtype) else None
        if op.name == "dynamic_slice":
            return self.read_as(self.find(op.outs[0]))
        if self.tpu and op.name == "dot_general" and value.dtype == jnp.float32:
            return None if "HIGHEST" in str(op.params.get("precision")) else jnp.dtype(jnp.bfloat16)
        if self.tpu and op.name == "scan":
            (body,), rows = self.inner[op], op.consts + op.carries
            inputs = [
                None if op.consts <= i < rows else body.read_as(body.find(body.region.inputs[i]))
                for i, one in enumerate(op.ins)
                if i not in op.unread and self.find(one) is value
            ]
            return inputs[0] if len(set(inputs)) == 1 else None
        return None

    def _find_copies(self) -> Iterator[_Copy]:
        """Yield a copy of each argument that all loops cast to one smaller dtype: it is cast before the first loop."""
        for value in self.inputs:
            loops = [op for op in self.readers[value] if op.name == "scan"]
            found = {self._reads_as(op, value) for op in loops}
            if len(found) == 1 and None not in found and value.role != "inner":
                places = [self.place[op] for op in loops]
                yield _Copy(value, found.pop(), min(places), max(places))

    # Lifetimes.

    def _find_last_reads(self) -> None:
        """Set `runs`, the index at which each operation is computed, and `last`, the index of each value's last read.

        An operation whose results are not stored is computed by the operation that reads them, at the reader's index.
        """
        for op in reversed(self.ops):
            at = self.place[op]
            if op.outs and self.stored.isdisjoint(op.outs):
                at = max((self.last[one] for one in op.outs if one in self.last), default=at)
            self.runs[op] = at
            for one in op.reads:
                root = self.find(one)
                self.last[root] = max(self.last.get(root, -1), at)

    # The peak.

    def bytes_of(self, value: Value) -> int:
        """Return the bytes of a stored value on one device; 0 if its memory is counted elsewhere."""
        return 0 if value in self.elsewhere else self.size(value, self.dtypes.get(value))

    def peak(self) -> Moment:
        """Return the moment at which the most bytes are live."""
        live: dict[Any, Live] = {}
        best, most = Moment(), 0
        expiring: defaultdict[int, list[Any]] = defaultdict(list)
        for value, at in self.last.items():
            expiring[at].append(value)
        for copy in self.copies:
            expiring[copy.last].append(copy)
        for i, op in enumerate(self.ops):
            live |= {one: self._live_copy(one) for one in self.copies if one.first == i}
            if op.regions or self.runs[op] == i:
                self._make_results(op, i, live)
                bodies = [body.peak() for body in self.inner.get(op, ())]
                inner = max(bodies, key=lambda one: one.total, default=Moment())
                now = [*live.values(), *inner.live]
                if sum(one.bytes for one in now) > most:
                    now = self._place_in_parameters(now, i)
                    if (total := sum(one.bytes for one in now)) > most:
                        best, most = Moment(tuple(now), inner.op or op), total
            for one in expiring[i]:
                live.pop(one, None)
        return best

    def _live_copy(self, copy: _Copy) -> Live:
        return Live(replace(copy.value, dtype=copy.dtype), self.size(copy.value, copy.dtype), "converted")

    def _make_results(self, op: Op, at: int, live: dict[Any, Live]) -> None:
        """Add the stored results of an operation to `live`; remove each operand whose memory a result overwrites."""
        for number, one in enumerate(op.outs):
            if one not in self.stored or one not in self.last or one in self.inputs:
                continue
            old = self._overwritten(op, number, at, live)
            size = self.bytes_of(one)
            if old is not None:
                size = live.pop(old).bytes if old in live else 0
            shown = replace(one, dtype=self.dtypes[one]) if one in self.dtypes else one
            live[one] = Live(shown, size, "stacked" if op.name == "scan" and number >= op.carries else "")

    def _overwritten(self, op: Op, number: int, at: int, live: Mapping[Any, Live]) -> Value | None:
        """Return an operand that a result can overwrite: of as many bytes, without a later read; None without one."""
        options: list[Value] = []
        if op.name in LOOPS:
            options = [op.ins[op.skipped + op.consts + number]] if number < op.carries else []
        elif op.name in _UPDATES:
            options = op.ins[:1]
        elif op.name == "cond":
            options = op.ins
        elif self.is_fused(op):
            options = list(self.sources[op.outs[number]])
        size = self.bytes_of(op.outs[number])
        free = [
            one
            for one in map(self.find, options)
            if self.last.get(one) == at and (one in live or one in self.reusable) and self.bytes_of(one) == size
        ]
        return min(free, key=lambda one: live[one].bytes if one in live else 0, default=None)

    @cached_property
    def _free_parameters(self) -> list[tuple[int, int, int]]:
        """List the donated parameters whose memory is free for a while: (bytes, start, end), the smallest first.

        The memory is free from the last read of a parameter until its new value is gathered. `start` and `end` are
        indices of these operations.
        """
        cut = {self.find(op.ins[0]) for op in self.ops if op.name == CUT}
        copied = {copy.value: copy.first for copy in self.copies}
        found = []
        for new, old in self.donated.items():
            maker = self.makers.get(self.find(new))
            if old in cut and maker is not None and old not in self.results:
                # Loops read the copy of the parameter that is made right before the first loop.
                reads = [self.runs[op] for op in self.readers[old] if not (op.regions and old in copied)]
                found.append((self.size(old), max([copied.get(old, 0) - 1, *reads]), self.place[maker]))
        return sorted(found, key=lambda one: one[0])

    def _place_in_parameters(self, now: list[Live], at: int) -> list[Live]:
        """Return live arrays, with 0 bytes for each array that is placed in the free memory of a donated parameter.

        The largest array is placed first. It takes the smallest parameter that is large enough.
        """
        free = [size for size, first, last in self._free_parameters if first < at < last]
        placed = list(now)
        for i in sorted(range(len(now)), key=lambda i: -now[i].bytes) if free else ():
            room = next((size for size in free if size >= now[i].bytes > 0), None)
            if room is not None:
                free.remove(room)
                placed[i] = now[i]._replace(bytes=0)
        return placed


def _is_selection(scatter: Op) -> bool:
    """Return True for a scatter of one element per row, such as the gradient of `take_along_axis`."""
    numbers = scatter.params["dimension_numbers"]
    if numbers.update_window_dims:
        return False
    if numbers.operand_batching_dims:
        return True
    made, updates = scatter.outs[0].shape, scatter.ins[-1].shape
    return bool(made) and math.prod(updates) * made[-1] == math.prod(made)
