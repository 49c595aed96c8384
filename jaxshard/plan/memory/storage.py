"""Results of a program that are stored: a model of what compilers fuse, and of the types in which they store others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxshard.plan.memory.graph import CUT, Op, Region, Value, contracted_axes, dtype_bits
from jaxshard.plan.memory.moved import PRODUCTS, written_apart
from jaxshard.plan.memory.scattered import FUSES_UPDATE, is_selection, keeps_type
from jaxshard.plan.memory.shards import COLLECTIVES, is_reduction
from jaxshard.plan.memory.windowed import RELAYOUT
from jaxshard.plan.memory.zeros import ZEROS

_SAME_MEMORY = frozenset({
    "reshape", "squeeze", "expand_dims", "name", "stop_gradient", "optimization_barrier", "enter", "transpose", "copy",
    "copy_p", "pvary", "random_wrap", "random_unwrap", "sharding_constraint", "enter_moved", "broadcast_in_dim",
    "device_put", "convert_element_type", "reduce_precision",
})  # fmt: skip
"""Results that are their operand in another shape, if they have as many bytes."""

_STORED = PRODUCTS | COLLECTIVES | frozenset({
    "pallas_call", "scan", "while", "cond", "sort", "gather", "scatter", "scatter-add", "scatter_add", "scatter_mul",
    "dynamic_update_slice", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "custom_call", "ffi_call", "top_k",
    "ragged_dot", "ragged_dot_general", "concatenate", "tpu_custom_call", "reduce_window_sum", "reduce_window_max",
    "select_and_scatter_add", "sharding_constraint", "enter_moved", "fft", "cholesky", "qr", "svd", "eigh", RELAYOUT,
    ZEROS, CUT,
})  # fmt: skip
"""Operations whose results are stored, and which read operands from memory."""

_COSTLY = frozenset({"tanh"})
"""Functions that a GPU computes once, if several operations read the result."""

_ON_CHIP = 32 * 2**20
"""Arrays up to so many bytes are still in the chip's own memory when the next operation reads them."""

_MANY = 4
"""As many readers of a value are told apart."""


Size = Callable[[Value], int]


class Storage:
    """The results of a region that are stored.

    Args:
      region: the operations.
      size: gives the bytes of a value.
      in_place: results that are written into arrays of others.
      narrow_products: products of f32 arrays multiply bf16 numbers, as on TPUs.
    """

    def __init__(self, region: Region, size: Size, in_place: set[Value], *, narrow_products: bool):
        self.region, self.size, self.narrow_products = region, size, narrow_products
        self.ops = list(region.ops)
        self.root: dict[Value, Value] = {}
        self._join()
        self.in_place = {self.find(one) for one in in_place}
        self.readers: defaultdict[Value, list[Op]] = defaultdict(list)
        for op in region.ops:
            if not self.is_alias(op):
                for one in op.reads:
                    self.readers[self.find(one)].append(op)
        self.results = {self.find(one) for one in region.outputs}
        self.inputs = {self.find(one) for one in region.inputs}
        self.products = {one for op in region.ops if op.name in PRODUCTS for one in op.outs}
        self.makers = {one: op for op in region.ops if not self.is_alias(op) for one in op.outs}
        self.traced = {op: i for i, op in enumerate(region.ops)}
        self.loops = [i for i, op in enumerate(region.ops) if op.regions]
        self.reduced = self._find_reduced()
        self.stored: set[Value] = set()
        self._choose_stored()
        self.sources = self._find_sources([op for op in region.ops if not self.is_alias(op)], set())

    def find(self, value: Value) -> Value:
        """Return the value whose memory this one is."""
        while value in self.root:
            value = self.root[value]
        return value

    # What is the same memory.

    def is_alias(self, op: Op) -> bool:
        """Return True for an operation whose result is its operand in another shape."""
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
        array again costs as much as reading the result. What is cheap with all that is stored then, GPUs do not store.
        """
        ops = [op for op in self.region.ops if not self.is_alias(op)]
        pending = self.pending = self._store_products(ops)
        self.apart = (
            written_apart(self.ops, self.readers, self.find, self.is_elementwise) if self.narrow_products else set()
        )
        self.stored |= self.apart
        sources = self.sources = self._find_sources(ops, pending)
        sinks: defaultdict[Value, set[Op]] = defaultdict(set)
        chosen: set[Value] = set()
        for op in reversed(ops):
            elementwise = self.is_elementwise(op)
            for one in op.outs:
                open_to_choice = elementwise and one not in self.stored and one not in pending
                if open_to_choice and self._must_store(one, sinks[one], sources):
                    self.stored.add(one)
                    chosen.add(one)
            runs = not elementwise or any(one in self.stored for one in op.outs)
            reached = {op} if runs else set().union(*(sinks[one] for one in op.outs))
            for one in op.reads:
                if len(found := sinks[self.find(one)]) < _MANY:
                    found |= reached
        if not self.narrow_products:
            self._choose_again(ops, chosen, sinks)

    def _choose_again(self, ops: list[Op], chosen: set[Value], sinks: Mapping[Value, set[Op]]) -> None:
        """Take back what little has to be read for, now that more is stored: an array in a wider type, or a difference.

        Args:
          ops: in order.
          chosen: the elementwise results that are stored.
          sinks: the operations that would each compute a result.
        """
        sources: dict[Value, set[Value]] = {}
        for op in ops:
            joined = self._stored_of(op, sources)
            for one in op.outs:
                sources[one] = joined
                if one in chosen and not self._must_store(one, sinks[one], sources):
                    self.stored.discard(one)

    def is_elementwise(self, op: Op) -> bool:
        """Return True for an operation that can be computed where its result is read."""
        if op.name in FUSES_UPDATE and is_selection(op):
            return True
        moves = any(one.on_host for one in (*op.ins, *op.outs))  # to the host's memory or back
        return not (moves or op.name in _STORED or op.regions or is_reduction(op.name))

    def _store_products(self, ops: list[Op]) -> set[Value]:
        """Store what products, collectives and the like make; return products that an elementwise chain continues."""
        pending: set[Value] = set()
        for op in ops:
            if not self.is_elementwise(op):
                for one in op.outs:
                    continues = op.name in PRODUCTS and self._continues(one)
                    if continues:
                        pending.add(one)
                    if op.summed or not continues:
                        self.stored.add(one)
            elif any(self.find(one) in pending for one in op.ins):
                for one in op.outs:
                    (pending if self._continues(one) else self.stored).add(one)
        return pending

    def _find_sources(self, ops: list[Op], pending: set[Value]) -> dict[Value, set[Value]]:
        """Find the stored arrays from which each result is computed."""
        sources: dict[Value, set[Value]] = {}
        for op in ops:
            joined = self._stored_of(op, sources)
            for one in op.outs:
                sources[one] = joined
        return sources

    def _stored_of(self, op: Op, sources: Mapping[Value, set[Value]]) -> set[Value]:
        joined: set[Value] = set()
        for one in op.ins:
            root = self.find(one)
            joined |= {root} if root in self.stored or root in self.inputs else sources.get(root, set())
        return joined

    def _must_store(self, value: Value, sinks: set[Op], sources: dict[Value, set[Value]]) -> bool:
        readers = set(self.readers[value])
        if not sources[value]:  # made of numbers alone, such as a mask: loops make it themselves
            readers -= {one for one in readers if self._only_constant_of(one, value)}
        if value in self.results or any(self._reads_memory(reader, value) for reader in readers):
            return True
        if len(sinks) < 2:
            return False
        if not self.narrow_products and self.makers[value].name in _COSTLY:
            return True
        if len(sinks) > 2 and any(reader.name == RELAYOUT for reader in readers):
            return True  # the pass that writes its copy writes it, too
        if self._mixed(value, sources) is not None:
            return True
        if self._is_cast_of_argument(value):
            return False
        size = self._narrow_size(value, sources)
        read = sum(large for one in sources[value] if (large := self.size(one)) > size / 8)
        if self.needs_pass(value, sources) and read > _ON_CHIP:
            # Read and written once more, then read by each, or computed from what it is made of by each.
            return len(sinks) * read > read + size + len(sinks) * size
        return read > 1.25 * size

    def _is_cast_of_argument(self, value: Value) -> bool:
        """True for a matrix in another type, read by products alone: they convert it, since the argument stays there.

        With more dimensions it is stored once, in the layout that the products want.
        """
        if len(value.shard) != 2 or not self._read_by(value) <= PRODUCTS:
            return False
        maker = self.makers.get(value)
        while maker is not None and maker.name == "convert_element_type" and maker.ins:
            source = self.find(maker.ins[0])
            if source.role == "parameters":
                return True
            maker = self.makers.get(source)
        return False

    def _read_by(self, value: Value) -> set[str]:
        """The names of the operations that read a value, casts aside."""
        casts = [one for one in self.readers[value] if one.name == "convert_element_type"]
        others = {one.name for one in self.readers[value] if one not in casts}
        return others.union(*(self._read_by(self.find(one.outs[0])) for one in casts))

    def _narrow_size(self, value: Value, sources: dict[Value, set[Value]]) -> int:
        """The bytes of a value in the type that its readers take it in, where that can be known before."""
        dtype = self.read_as(value, implied="transpose" in value.path)
        return self.size(value if dtype is None else replace(value, dtype=dtype))

    def _mixed(self, value: Value, sources: dict[Value, set[Value]]) -> Any:
        """Return the narrower dtype of a value that loops read a copy of and a reduction reads as it is; else None.

        One pass writes both, where no product can: a sum over rows that is read beside a product is a part of it.
        """
        readers = self.readers[value]
        copied = any(one.name == RELAYOUT for one in readers)
        if not copied or not self.needs_pass(value, sources) or "transpose" not in value.path:
            return None
        found = {dtype for one in readers if (dtype := narrower(one, value, self.narrow_products)) is not None}
        whole = any(is_reduction(one.name) for one in readers)
        return found.pop() if whole and len(found) == 1 and len(readers) > 2 else None

    def needs_pass(self, value: Value, sources: dict[Value, set[Value]]) -> bool:
        """True for what a product can't write beside its own result, because a reduction of that goes into it."""
        return any(one in self.reduced for one in sources[value])

    def _find_reduced(self) -> set[Value]:
        """Find what reductions make, such as a mean, and what is computed of that alone."""
        found: set[Value] = set()
        for op in self.region.ops:
            whole = [one for one in op.ins if self.find(one) not in found and math.prod(one.shape) > 1]
            if is_reduction(op.name) or (op.ins and not whole):
                found |= {self.find(one) for one in op.outs}
        return found

    def _only_constant_of(self, loop: Op, value: Value) -> bool:
        consts = loop.counts[0] if loop.name == "scan" else sum(loop.counts) if loop.name == "while" else 0
        return all(self.find(one) is not value for one in loop.ins[consts:])

    def _continues(self, value: Value) -> bool:
        """True if one elementwise operation alone reads a product: it then becomes a part of it."""
        readers = set(self.readers[value])
        if len(readers) != 1 or value in self.results or not self.narrow_products:
            return False
        (reader,) = readers
        if not self.is_elementwise(reader) or self.waits(reader, value):
            return False
        return len(reader.outs) == 1 and _count(reader.outs[0]) == _count(value)

    def waits(self, reader: Op, value: Value) -> bool:
        """True for an operation that reads something else too, which is made after a loop that follows the value."""
        made = [self.traced[maker] for one in reader.ins if (maker := self.makers.get(self.find(one))) is not None]
        return any(self.traced[self.makers[value]] < loop < max(made) for loop in self.loops)

    def _reads_memory(self, reader: Op, value: Value) -> bool:
        if reader.name in PRODUCTS:  # those of a GPU's libraries, and loops over parts of them
            return reader.windowed or not self.narrow_products
        if self.is_elementwise(reader) or reader.name == RELAYOUT:
            return False
        if reader.name == "sharding_constraint" and self._is_cut_from_sum(reader, value):
            return False
        if reader.name in FUSES_UPDATE:
            return self.find(reader.ins[0]) is value
        return reader.name in _STORED or bool(reader.regions)

    def _is_cut_from_sum(self, cut: Op, value: Value) -> bool:
        """True for a device's part of a sum in a wider type: it is cut from the sum as that is, and widened."""
        maker = self.makers.get(value)
        if maker is None or maker.name != "convert_element_type" or not maker.ins:
            return False
        summed = self.makers.get(self.find(maker.ins[0]))
        return (
            summed is not None and summed.name in COLLECTIVES and math.prod(cut.outs[0].shard) < math.prod(value.shard)
        )

    def is_part_of_product(self, op: Op) -> bool:
        """True for an operation on a product's result that is a part of that product."""
        found = {self.find(one) for one in op.ins}
        return bool(found & self.pending) and all(one in self.pending or one in self.inputs for one in found)

    def roots_of(self, op: Op) -> set[Value]:
        """The stored arrays that an operation reads, also through what is computed where it is read."""
        found: set[Value] = set()
        for one in op.reads:
            root = self.find(one)
            found |= {root} if root in self.stored or root in self.inputs else self.sources.get(root, set())
        return found

    # The type in which a result is stored.

    def read_as(self, value: Value, *, implied: bool = True) -> Any:
        """Return the narrower dtype to which all that reads a value converts it at once; None if there is none.

        Products on TPUs imply bf16; without `implied` only conversions that the program writes count.
        """
        found = {self._narrowed_by(reader, value, implied) for reader in self.readers[value]}
        maker = self.makers.get(value)
        if value in self.results or len(found) != 1 or (maker is not None and keeps_type(maker)):
            return None
        return found.pop()

    def _narrowed_by(self, reader: Op, value: Value, implied: bool) -> Any:
        """As `narrower`, for slices too that a turn takes of what its loop was given: casts move before them."""
        if reader.name == "dynamic_slice" and value.role == "inner":
            return self.read_as(self.find(reader.outs[0]), implied=implied)
        return narrower(reader, value, self.narrow_products and implied)

    def read_bytes(self, value: Value) -> int:
        """The bytes of a value in the type in which it is read."""
        dtype = self.read_as(value)
        return self.size(value if dtype is None else replace(value, dtype=dtype))

    def widened(self, value: Value) -> tuple[Any, Any] | None:
        """Return the dtype of a product's result and the wider one in which all read it; None if they are the same."""
        maker = self.makers.get(value)
        if value in self.results or maker is None:
            return None
        if maker.name == "convert_element_type" and maker.ins and self.find(maker.ins[0]) in self.pending:
            narrow, wide = maker.ins[0].dtype, value.dtype
        elif not self.narrow_products and maker.name == "dot_general" and contracted_axes(maker):
            return None  # GPUs sum it over devices as it is, and widen the sum
        else:
            readers = self.readers[value]
            found = {one.outs[0].dtype if one.name == "convert_element_type" else None for one in readers}
            if value not in self.products or len(found) != 1 or None in found:
                return None
            narrow, wide = value.dtype, found.pop()
        return (narrow, wide) if dtype_bits(wide) > dtype_bits(narrow) else None


def narrower(reader: Op, value: Value, products: bool) -> Any:
    """Return the narrower dtype to which an operation converts what it reads first; None if it does not."""
    if reader.name in ("convert_element_type", RELAYOUT):
        dtype = reader.outs[0].dtype
        return dtype if dtype_bits(dtype) < dtype_bits(value.dtype) else None
    if products and _is_product(reader) and str(value.dtype) == "float32":
        return jnp.dtype(jnp.bfloat16) if _is_default(reader.params.get("precision")) else None
    return None


def _is_product(op: Op) -> bool:
    """True for a product that a matrix unit does; one of rows with rows is a sum of what is multiplied elementwise."""
    if op.name != "dot_general":
        return False
    contracted, batched = op.params["dimension_numbers"]
    summed = [len(dims) + len(batch) for dims, batch in zip(contracted, batched, strict=True)]
    return any(len(one.shape) > count for one, count in zip(op.ins, summed, strict=False))


def _is_default(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(one is None or "DEFAULT" in str(one) for one in parts)


def _count(value: Value) -> int:
    return math.prod(value.shard)
