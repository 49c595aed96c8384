"""What is in memory at the fullest moment of a program: a model of what compilers fuse, reuse and stack.

The graph is walked in program order. An elementwise result is not stored where it can be computed in the operation that
reads it; a product or collective is. A value lives from the operation that makes it to the last that reads it, fused
readers counted where they run. Loops write what they carry in place and what they stack into one array of all turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxshard.plan.memory.graph import Op, Region, Value, dtype_bits
from jaxshard.plan.memory.shards import is_reduction

_SAME_MEMORY = frozenset({
    "reshape", "squeeze", "expand_dims", "name", "stop_gradient", "optimization_barrier", "enter", "transpose", "copy",
    "copy_p", "pvary", "random_wrap", "random_unwrap", "sharding_constraint", "enter_moved", "broadcast_in_dim",
    "device_put", "convert_element_type", "reduce_precision",
})  # fmt: skip
"""Results that are their operand in another shape, if they have as many bytes."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Operations into which compilers fuse the elementwise operations that make their operands."""

_COLLECTIVES = frozenset({
    "all_gather", "psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "pmax",
    "pmin", "ragged_all_to_all", "all_gather_invariant",
})  # fmt: skip

_STORED = _PRODUCTS | _COLLECTIVES | frozenset({
    "pallas_call", "scan", "while", "cond", "sort", "gather", "scatter", "scatter-add", "scatter_add", "scatter_mul",
    "dynamic_update_slice", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "custom_call", "ffi_call", "top_k",
    "ragged_dot", "ragged_dot_general", "concatenate", "tpu_custom_call", "reduce_window_sum", "reduce_window_max",
    "select_and_scatter_add", "sharding_constraint", "enter_moved", "fft", "cholesky", "qr", "svd", "eigh",
})  # fmt: skip
"""Operations whose results are stored, and which read operands from memory."""

_FUSES_UPDATE = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})
"""Operations that write into their first operand where nothing else needs it."""

_SUBLANES, _LANES = 8, 128

_MANY = 4
"""As many readers of a value are told apart."""


class Live(NamedTuple):
    """A value in memory, its bytes, and a note: "stacked", "carried", "copy" or "" for the value itself."""

    value: Value
    bytes: int
    note: str = ""


@dataclass
class Moment:
    """The fullest moment of a region: what is live beside its inputs, and the operation that runs."""

    live: list[Live] = field(default_factory=list)
    op: Op | None = None

    @property
    def total(self) -> int:
        """Bytes of all that is live."""
        return sum(one.bytes for one in self.live)


Size = Callable[[Value], int]


class Liveness:
    """The liveness of one region; `size` gives bytes of a value, `fast` the bytes of on-chip memory for temporaries."""

    def __init__(
        self,
        region: Region,
        size: Size,
        fast: int = 0,
        in_place: set[Value] | None = None,
        *,
        reusable: set[Value] | None = None,
        narrow_products: bool = False,
    ):
        self.reusable = reusable or set()
        self.region, self.size, self.fast, self.narrow_products = region, size, fast, narrow_products
        self.ops = list(region.ops)
        self.place = {op: i for i, op in enumerate(self.ops)}
        self.root: dict[Value, Value] = {}
        self._join()
        self.in_place = {self.find(one) for one in in_place or ()}
        self.readers: defaultdict[Value, list[Op]] = defaultdict(list)
        for op in region.ops:
            if not self._is_alias(op):
                for one in op.reads:
                    self.readers[self.find(one)].append(op)
        self.results = {self.find(one) for one in region.outputs}
        self.inputs = {self.find(one) for one in region.inputs}
        self.stored: set[Value] = set()
        self.inner = {op: self._bodies(op) for op in region.ops if op.regions}
        self.products = {one for op in region.ops if op.name in _PRODUCTS for one in op.outs}
        self._choose_stored()
        self.sources = self._find_sources([op for op in region.ops if not self._is_alias(op)], set())
        self._hoist_products()
        self.runs: dict[Op, int] = {}
        self.last: dict[Value, int] = {}
        self._place_reads()
        self.moments: dict[Op, Moment] = {}
        self.stored_as: dict[Value, Any] = {}
        self.copies: defaultdict[int, list[Value]] = defaultdict(list)
        self._find_narrow()

    def find(self, value: Value) -> Value:
        """Return the value whose memory this one is."""
        while value in self.root:
            value = self.root[value]
        return value

    # What is the same memory.

    def _is_alias(self, op: Op) -> bool:
        return bool(op.outs) and op.outs[0] in self.root

    def _join(self) -> None:
        for op in self.region.ops:
            if op.name in _SAME_MEMORY and op.ins:
                for source, made in zip(op.ins, op.outs, strict=False):
                    near = self.size(made) <= self.size(source) * 1.05 and self.size(source) <= self.size(made) * 1.05
                    if near and made.dtype == source.dtype:
                        self.root[made] = source

    # What is stored, and what is computed where it is read.

    def _choose_stored(self) -> None:
        """Decide which results are stored.

        An elementwise result is computed where it is read, but for three cases: something reads it from memory; it is
        the last of a chain that began in a product, which writes it; or several operations read it that would else each
        read more bytes of what it is made from. Of a chain over one large array nothing else is stored: reading that
        array again costs as much as reading the result.
        """
        ops = [op for op in self.region.ops if not self._is_alias(op)]
        pending = self._store_products(ops)
        sources = self.sources = self._find_sources(ops, pending)
        sinks: defaultdict[Value, set[Op]] = defaultdict(set)
        for op in reversed(ops):
            elementwise = self._is_elementwise(op)
            for one in op.outs:
                open_to_choice = elementwise and one not in self.stored and one not in pending
                if open_to_choice and self._must_store(one, sinks[one], sources):
                    self.stored.add(one)
            runs = not elementwise or any(one in self.stored for one in op.outs)
            reached = {op} if runs else set().union(*(sinks[one] for one in op.outs))
            for one in op.reads:
                if len(found := sinks[self.find(one)]) < _MANY:
                    found |= reached

    def _is_elementwise(self, op: Op) -> bool:
        if op.name in _FUSES_UPDATE and _is_selection(op):
            return True
        return not (op.name in _STORED or op.regions or is_reduction(op.name))

    def _store_products(self, ops: list[Op]) -> set[Value]:
        """Store what products, collectives and the like make; return products that an elementwise chain continues."""
        pending: set[Value] = set()
        for op in ops:
            if not self._is_elementwise(op):
                for one in op.outs:
                    if op.name in _PRODUCTS and self._continues(one):
                        pending.add(one)
                    else:
                        self.stored.add(one)
            elif any(self.find(one) in pending for one in op.ins):
                for one in op.outs:
                    (pending if self._continues(one) else self.stored).add(one)
        return pending

    def _extra(self, op: Op) -> list[Live]:
        """What an operation needs beside operands and results.

        Collectives make arrays whose slowest dimension is the gathered one; where shards do not fill tiles along it, or
        it lies along the lanes, the result is copied. A scatter into a large array holds it twice.
        """
        out = op.outs[0] if op.outs else None
        if out is None or not self.narrow_products:
            return []
        if op.name == "all_gather" and len(out.shard) == 2:
            dim = op.params["all_gather_dimension"]
            rows = op.ins[0].shard[dim]
            return [Live(out, self.size(out), "copy")] if rows % (_SUBLANES, _LANES)[dim] else []
        fresh = op.name in ("scatter-add", "scatter_add") and not self.sources.get(self.find(op.ins[0]))
        if fresh and self.find(op.ins[0]) not in self.inputs and not _is_selection(op) and len(out.shard) == 2:
            return [Live(out, self.size(out), "copy")]
        return []

    def _find_sources(self, ops: list[Op], pending: set[Value]) -> dict[Value, set[Value]]:
        """Find the stored arrays from which each result is computed."""
        sources: dict[Value, set[Value]] = {}
        for op in ops:
            joined: set[Value] = set()
            for one in op.ins:
                root = self.find(one)
                joined |= {root} if root in self.stored or root in self.inputs else sources.get(root, set())
            for one in op.outs:
                sources[one] = joined
        return sources

    def _must_store(self, value: Value, sinks: set[Op], sources: dict[Value, set[Value]]) -> bool:
        readers = set(self.readers[value])
        if not sources[value]:  # made of numbers alone, such as a mask: loops make it themselves
            readers -= {one for one in readers if self._only_constant_of(one, value)}
        if value in self.results or any(self._reads_memory(reader, value) for reader in readers):
            return True
        if len(sinks) < 2:
            return False
        dtype = self.read_as(value) if "transpose" in value.path else None
        size = self.size(value if dtype is None else replace(value, dtype=dtype))
        return sum(large for one in sources[value] if (large := self.size(one)) > size / 8) > 1.25 * size

    def _only_constant_of(self, loop: Op, value: Value) -> bool:
        consts = loop.counts[0] if loop.name == "scan" else sum(loop.counts) if loop.name == "while" else 0
        return all(self.find(one) is not value for one in loop.ins[consts:])

    def _continues(self, value: Value) -> bool:
        """True if one elementwise operation alone reads a product: it then becomes a part of it."""
        readers = set(self.readers[value])
        if len(readers) != 1 or value in self.results:
            return False
        (reader,) = readers
        if not self._is_elementwise(reader):
            return False
        return len(reader.outs) == 1 and _count(reader.outs[0]) == _count(value)

    def _reads_memory(self, reader: Op, value: Value) -> bool:
        if reader.name in _PRODUCTS or self._is_elementwise(reader):
            return False
        if reader.name in _FUSES_UPDATE:
            return self.find(reader.ins[0]) is value
        return reader.name in _STORED or bool(reader.regions)

    def _hoist_products(self) -> None:
        """Move products to the place where their operands are there, if they are the last to read more than they make.

        A gradient of a matrix stands in a traced program where the matrix was used first; compilers that save memory
        compute it before a loop through which its operands would live.
        """
        made = {one: i for i, op in enumerate(self.ops) for one in op.outs}
        read: defaultdict[Value, int] = defaultdict(int)
        for i, op in enumerate(self.ops):
            for value in self._roots_of(op):
                read[value] = max(read[value], i)
        moved: list[tuple[float, Op]] = []
        loops = [i for i, op in enumerate(self.ops) if op.regions]
        for i, op in enumerate(self.ops):
            at: float = i
            if op.name in _PRODUCTS and (roots := self._roots_of(op)):
                earliest = max(made.get(one, -1) for one in roots)
                freed = sum(self.size(one) for one in roots if read[one] == i and one not in self.inputs)
                if any(earliest < loop < i for loop in loops) and freed > self.size(op.outs[0]):
                    at = earliest + 0.5
            moved.append((at, op))
        self.ops = [op for _, op in sorted(moved, key=lambda one: one[0])]
        self.place = {op: i for i, op in enumerate(self.ops)}

    def _roots_of(self, op: Op) -> set[Value]:
        """The stored arrays that an operation reads, also through what is computed where it is read."""
        found: set[Value] = set()
        for one in op.reads:
            root = self.find(one)
            found |= {root} if root in self.stored or root in self.inputs else self.sources.get(root, set())
        return found

    # Where everything runs, and is read last.

    def _place_reads(self) -> None:
        need: dict[Value, int] = {}
        end = len(self.ops)
        for one in self.results:
            need[one] = end
        for op in reversed(self.ops):
            if self._is_alias(op):
                continue
            here = self.place[op]
            if any(one in self.stored for one in op.outs) or not op.outs:
                at = here
            else:
                at = max((need.get(one, -1) for one in op.outs), default=here)
                at = here if at < 0 else at
            self.runs[op] = at
            for one in op.reads:
                root = self.find(one)
                need[root] = max(need.get(root, -1), at)
        self.last = need

    # The fullest moment.

    def peak(self) -> Moment:
        """Return the fullest moment."""
        live = self._early()
        best = Moment()
        expiring: defaultdict[int, list[Value]] = defaultdict(list)
        for value, at in self.last.items():
            expiring[at].append(value)
        for i, op in enumerate(self.region.ops):
            if not self._is_alias(op) and (op.regions or self.runs[op] == i):
                taken: set[Value | None] = set()
                for number, one in enumerate(op.outs):
                    if one in self.stored and one not in self.inputs and one in self.last:
                        dying = self._overwritten(op, number, i, taken)
                        old = None if dying is None else live.pop(dying, Live(dying, 0))
                        live[one] = self._new(op, number, one)._replace(**({} if old is None else {"bytes": old.bytes}))
                        taken.add(dying)
                for one in self.copies[i]:
                    live[one] = Live(one, self.size(one), "converted")
                inner = self._inside(op)
                now = self._in_slow_memory([*live.values(), *inner.live, *self._extra(op)])
                if sum(one.bytes for one in now) > best.total:
                    best = Moment(now, inner.op or op)
            for value in expiring[i]:
                live.pop(value, None)
        return best

    def _early(self) -> dict[Value, Live]:
        """What is there from the start: TPU compilers allocate what the first loop stacks before weights are gathered."""
        first = next((op for op in self.ops if op.name == "scan"), None)
        if first is None or not self.narrow_products:
            return {}
        stacks = [one for one in first.outs[first.counts[1] :] if one in self.last and one not in self.in_place]
        return {one: self._new(first, first.outs.index(one), one) for one in stacks}

    def _new(self, op: Op, number: int, value: Value) -> Live:
        if value in self.in_place:
            return Live(value, 0)
        stacked = op.name == "scan" and number >= op.counts[1]
        carried = op.name in ("scan", "while") and not stacked
        return Live(value, self._bytes(value), "stacked" if stacked else "carried" if carried else "")

    def _bytes(self, value: Value) -> int:
        """The bytes of a value as it is stored."""
        return self.size(replace(value, dtype=self.stored_as[value]) if value in self.stored_as else value)

    def _overwritten(self, op: Op, number: int, i: int, taken: set[Value | None]) -> Value | None:
        """Return the operand over which a result is written, because nothing reads it later."""
        if op.name in ("scan", "while"):
            consts = op.counts[0] if op.name == "scan" else sum(op.counts)
            stacks = op.name == "scan" and number >= op.counts[1]
            operands = [] if stacks else [op.ins[consts + number]]
        elif op.name in _FUSES_UPDATE:
            operands = op.ins[:1]
        elif op.name == "cond":
            operands = op.ins
        else:
            operands = list(self.sources[op.outs[number]]) if self._is_elementwise(op) else []
        for one in operands:
            root = self.find(one)
            ours = root in self.reusable or (root in self.stored and root not in self.inputs)
            if ours and root not in taken and self.last[root] == i and self._same_bytes(root, op.outs[number]):
                return root
        return None

    def _same_bytes(self, one: Value, other: Value) -> bool:
        return self._bytes(one) == self._bytes(other) and one.dtype == other.dtype

    def _bodies(self, op: Op) -> list[Liveness]:
        # Results of a body are written into the arrays that the loop or branch makes, and may be written over what the
        # body was given to carry on.
        consts = {"scan": op.counts[0], "while": op.counts[1], "cond": 0}.get(op.name)
        carries = {"scan": op.counts[1]}.get(op.name, len(op.outs))
        bodies = []
        for body in op.regions:
            reusable = set() if consts is None else set(body.inputs[consts:][: carries if op.name != "cond" else None])
            bodies.append(
                Liveness(
                    body, self.size, self.fast, set(body.outputs),
                    reusable=reusable, narrow_products=self.narrow_products,
                )
            )  # fmt: skip
        return bodies

    def _inside(self, op: Op) -> Moment:
        if op not in self.moments:
            moments = [body.peak() for body in self.inner.get(op, ())]
            self.moments[op] = max(moments, key=lambda one: one.total, default=Moment())
        return self.moments[op]

    def _in_slow_memory(self, live: list[Live]) -> list[Live]:
        """Leave out what fits into the chip's fast memory, the smallest first, of values that no loop carries."""
        room = self.fast
        kept = []
        for one in sorted(live, key=lambda one: one.bytes):
            if one.note == "" and one.bytes <= room:
                room -= one.bytes
            else:
                kept.append(one)
        return kept

    # What loops convert.

    def _narrow(self, op: Op, number: int) -> Any:
        """Return the narrower dtype to which the body of a scan converts an operand before all else; None if not."""
        consts, carries = op.counts
        if op.name != "scan" or consts <= number < consts + carries or number in op.unread:
            return None
        return self.inner[op][0].read_as(op.regions[0].inputs[number])

    def read_as(self, value: Value) -> Any:
        """Return the narrower dtype to which all that reads a value converts it at once; None if there is none."""
        found = {_narrower(reader, value, self.narrow_products) for reader in self.readers[value]}
        if value in self.results or len(found) != 1:
            return None
        return found.pop()

    def _find_narrow(self) -> None:
        """Find what loops convert: compilers do it before the loop, to the stacked array of all turns.

        What a loop stacks is then stacked in the narrower type; of an argument a narrower copy is made, which lives
        from the first loop that reads it to the last.
        """
        wanted: defaultdict[Value, list[tuple[Op, Any]]] = defaultdict(list)
        for op in self.ops:
            for number, one in enumerate(op.ins):
                if op in self.inner and op.name == "scan":
                    wanted[self.find(one)].append((op, self._narrow(op, number)))
        carried = {one for op in self.inner for one in (op.outs[: op.counts[1]] if op.name == "scan" else op.outs)}
        for value, found in wanted.items():
            dtypes = {dtype for _, dtype in found}
            if len(dtypes) != 1 or None in dtypes:
                continue
            (dtype,) = dtypes
            if value in self.inputs:
                copy = Value(value.shape, dtype, value.split, value.shard, path=value.path)
                self.copies[self.place[found[0][0]]].append(copy)
                self.last[copy] = max(self.place[op] for op, _ in found)
            elif value not in self.results:
                others = {
                    _narrower(one, value, self.narrow_products) for one in self.readers[value] if one.name != "scan"
                }
                if others <= {dtype}:
                    self.stored_as[value] = dtype
        for value in self.stored:
            if (
                value not in wanted
                and value not in carried
                and (dtype := self.read_as(value) or self._widened(value)) is not None
            ):
                self.stored_as[value] = dtype

    def _widened(self, value: Value) -> Any:
        """Return the wider dtype to which all that reads a product's result converts it: it is made in that at once."""
        readers = self.readers[value]
        found = {one.outs[0].dtype if one.name == "convert_element_type" else None for one in readers}
        if value not in self.products or value in self.results or len(found) != 1 or None in found:
            return None
        dtype = found.pop()
        return dtype if dtype_bits(dtype) > dtype_bits(value.dtype) else None


def _narrower(reader: Op, value: Value, products: bool) -> Any:
    """The narrower dtype to which an operation converts what it reads first; None if it does not."""
    if reader.name == "convert_element_type":
        dtype = reader.outs[0].dtype
        return dtype if dtype_bits(dtype) < dtype_bits(value.dtype) else None
    if products and reader.name == "dot_general" and str(value.dtype) == "float32":
        return jnp.dtype(jnp.bfloat16) if _is_default(reader.params.get("precision")) else None
    return None


def _is_default(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(one is None or "DEFAULT" in str(one) for one in parts)


def _is_selection(op: Op) -> bool:
    """True for a scatter of one element per row, the gradient of `take_along_axis`: compilers make it a selection."""
    numbers: Any = op.params.get("dimension_numbers")
    return bool(getattr(numbers, "operand_batching_dims", ())) and not numbers.update_window_dims


def _count(value: Value) -> int:
    total = 1
    for size in value.shard:
        total *= size
    return total
