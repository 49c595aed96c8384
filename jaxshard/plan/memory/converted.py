"""Arrays that loops and products convert: what compilers store in the type in which it is read, and where.

What a loop converts before all else is converted before the loop on TPUs, to the array of all turns, also for the
loops, branches and slices inside it. On GPUs each turn converts what it reads. What a product makes is stored in the
type that its readers want.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxshard.plan.memory.graph import Op, Value, dtype_bits
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.placed import Placed
from jaxshard.plan.memory.shards import is_reduction
from jaxshard.plan.memory.storage import narrower

_FORMS = frozenset({"dynamic_slice", "reshape", "transpose"})
"""Operations that make a slice or another form of what they read."""

_PASSES_ON = frozenset({"dynamic_update_slice", "select_n"})
"""Operations that write elements as they are into others of the same type."""


class Converted(Placed):
    """The types in which a region's values are stored, and its converted copies of arguments.

    Attributes:
      inner: the bodies of loops and branches.
      last: where each value is read last.
      stored_as: the types of values that are not stored in their own.
      copies: converted copies of arguments, by the place where they are made.
      copied: the place and the copy, by the argument.
    """

    inner: Mapping[Op, Sequence[Converted]]
    last: dict[Value, int]
    stored_as: dict[Value, Any]
    copies: defaultdict[int, list[Value]]
    copied: dict[Value, tuple[int, Value]]

    def _narrow(self, op: Op, number: int) -> Any:
        """Return the narrower dtype to which the body of a scan converts an operand before all else; None if not."""
        consts, carries = op.counts
        if consts <= number < consts + carries:
            return None
        found = self.inner[op][0].taken_as(op.regions[0].inputs[number])
        return found.pop() if len(found) == 1 else None

    def taken_as(self, value: Value, carried: Value | None = None) -> set[Any]:
        """The narrower dtypes to which all that reads a value converts it first; None among them where one does not.

        Loops and branches inside read it as their bodies do, and what takes a slice of it as those that read the slice.

        Args:
          value: of this region.
          carried: the result that is the value of the next turn: what passes the value on to it converts nothing.
        """
        if value in self.results and value is not carried:
            return {None}
        found: set[Any] = set()
        for op in self.readers[value]:
            made = self.find(op.outs[0]) if op.outs else value
            if op.name in _FORMS and self.find(op.ins[0]) is value:
                found |= self.taken_as(made, carried)
            elif carried is not None and op.name in _PASSES_ON:
                found |= set() if made is carried else self.taken_as(made, carried)
            elif op.name == "cond":
                found |= {dtype for body, one in self._given(op, value) for dtype in body.taken_as(one)}
            elif op.name == "scan":
                numbers = [i for i, one in enumerate(op.ins) if self.find(one) is value and i not in op.unread]
                found |= {self._narrow(op, number) for number in numbers}
            else:
                found.add(narrower(op, value, self.narrow_products))
        return found

    def _given(self, op: Op, value: Value) -> Iterator[tuple[Converted, Value]]:
        """Yield the bodies of a loop or branch, and what a value is in them."""
        operands = op.ins[1:] if op.name == "cond" else op.ins
        for body in self.inner[op]:
            for one, inside in zip(operands, body.region.inputs, strict=False):
                if self.find(one) is value:
                    yield body, inside

    def _find_narrow(self) -> None:
        """Find what loops convert: XLA for TPUs does it before the loop, to the stacked array of all turns.

        What a loop stacks is then stacked in the narrower type; of an argument a narrower copy is made, which lives
        from the first loop that reads it to the last.
        """
        wanted: defaultdict[Value, list[tuple[Op, Any]]] = defaultdict(list)
        for op in self.ops if self.narrow_products else ():
            for number, one in enumerate(op.ins):
                if op.name == "scan" and number not in op.unread and not _updates_on_host(op):
                    wanted[self.find(one)].append((op, self._narrow(op, number)))
        self._find_narrow_carries()
        carried = {one for op in self.inner for one in (op.outs[: op.counts[1]] if op.name == "scan" else op.outs)}
        for value, found in wanted.items():
            narrowed = {dtype for _, dtype in found}
            if len(narrowed) != 1 or None in narrowed:
                continue
            (dtype,) = narrowed
            if value in self.inputs:
                copy = Value(value.shape, dtype, value.split, value.shard, path=value.path)
                self.copied[value] = self.place[found[0][0]], copy
                self.copies[self.place[found[0][0]]].append(copy)
                self.last[copy] = max(self.place[op] for op, _ in found)
                for op, _ in found:
                    self._convert_before(op, value, dtype)
            elif value not in self.results:
                others = {
                    narrower(one, value, self.narrow_products) for one in self.readers[value] if one.name != "scan"
                }
                if others <= {dtype}:
                    self.stored_as[value] = dtype
        again = self._read_again() if self.narrow_products else {}
        for value in self.stored:
            if value in wanted or value in carried:
                continue
            if (dtype := self.read_as(value)) is not None:
                self.stored_as[value] = dtype
            elif (dtypes := self.widened(value)) is not None:
                self._store_widened(value, *dtypes, again.get(value))
            elif (dtype := self._widened_weight(value)) is not None:
                self.stored_as[value] = dtype

    def _widened_weight(self, value: Value) -> Any:
        """Return the type of what was widened for products alone: on GPUs they read it so, and widen it themselves."""
        maker = self.makers.get(value)
        if self.narrow_products or maker is None or maker.name != "convert_element_type" or not maker.ins:
            return None
        source = maker.ins[0].dtype
        alone = all(one.name in PRODUCTS for one in self.readers[value]) and value not in self.results
        return source if alone and dtype_bits(source) < dtype_bits(value.dtype) else None

    def _find_narrow_carries(self) -> None:
        """Find the arrays that a loop carries, and writes slices of, of which nothing reads more than a narrower type.

        So are the activations that the stages of a pipeline keep for their backward passes. XLA for TPUs carries them
        in that type from the beginning (`BFloat16Propagation`).
        """
        for op in self.ops if self.narrow_products else ():
            if op.name != "scan":
                continue
            (consts, carries), (body,) = op.counts, self.inner[op]
            for begin, end, inside, out in zip(
                op.ins[consts:][:carries], op.outs, op.regions[0].inputs[consts:], op.regions[0].outputs, strict=False
            ):
                start, behind = self.find(begin), self.find(end)
                dtype = body.carried_as(inside, out)
                alone = start not in self.inputs | self.results and set(self.readers[start]) == {op}
                if dtype is not None and alone and self.taken_as(behind) <= {dtype}:
                    self.stored_as[start] = self.stored_as[behind] = dtype
                    body.take_converted(body.find(inside), dtype)

    def carried_as(self, inside: Value, out: Value) -> Any:
        """Return the narrower dtype to which all turns convert what is carried, None if there is none.

        Args:
          inside: the carried input of this region.
          out: the result that is its value of the next turn.
        """
        value, carried = self.find(inside), self.find(out)
        if value is carried or sum(self.find(one) is carried for one in self.region.outputs) > 1:
            return None
        found = self.taken_as(value, carried) | self.taken_as(carried, carried)
        return found.pop() if len(found) == 1 else None

    def _convert_before(self, op: Op, value: Value, dtype: Any) -> None:
        """Drop the copies that the bodies of a loop or branch make of what was converted before it."""
        for body, one in self._given(op, value):
            body.take_converted(one, dtype)

    def take_converted(self, value: Value, dtype: Any) -> None:
        """Let an input of a region come in the type in which all read it: it makes no copy, nor do bodies inside."""
        if value in self.copied:
            place, copy = self.copied.pop(value)
            self.copies[place].remove(copy)
            del self.last[copy]
        for op in self.readers[value]:
            made = op.outs[0] if op.name == "convert_element_type" else None
            if op in self.inner:
                self._convert_before(op, value, dtype)
            elif op.name == "dynamic_update_slice" and self.find(op.ins[0]) is value:
                self.take_converted(self.find(op.outs[0]), dtype)
            elif made is not None and self.stored_as.get(made, made.dtype) == dtype:
                self.inputs.add(made)  # the converted copy itself, also where the program widens it again
                self.take_converted(made, dtype)

    def _store_widened(self, value: Value, narrow: Any, wide: Any, again: int | None) -> None:
        """Store a product's result that all its readers convert to a wider type.

        On a TPU the product writes its own type. Where a second reduction follows that reads it together with the
        first one's result, as in a softmax, it writes the wider one too: that lives till then, the other one longer.
        """
        if not self.narrow_products or self.last.get(value) == again:
            self.stored_as[value] = wide
            return
        self.stored_as[value] = narrow
        if again is not None:
            copy = replace(value, dtype=wide)
            self.copies[self.place[self.makers[value]]].append(copy)
            self.last[copy] = again

    def _read_again(self) -> dict[Value, int]:
        """Find what is reduced twice, the second time together with the first result, and where that is."""
        first: defaultdict[Value, set[Value]] = defaultdict(set)
        again: dict[Value, int] = {}
        for op in self.ops:
            if is_reduction(op.name) and not self.is_alias(op):
                roots = self.roots_of(op)
                for value in roots:
                    if first[value] & roots:
                        again[value] = self.place[op]
                    first[value] |= {self.find(one) for one in op.outs}
        return again


def _updates_on_host(op: Op) -> bool:
    """True for a loop that carries arrays of the host's memory: it updates optimizer state, and reads weights wide.

    The loops of the model have converted copies of those weights all the same.
    """
    consts, carries = op.counts
    return any(one.on_host for one in op.ins[consts : consts + carries])
