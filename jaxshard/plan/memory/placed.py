"""The places of products: compilers run them where their operands are there, or where their results are needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from jaxshard.plan.memory.graph import Op, Region, Value, contracted_axes
from jaxshard.plan.memory.hybrid import ends_within_a_tile, sums_products_twice, sums_stacks_twice
from jaxshard.plan.memory.moved import PRODUCTS
from jaxshard.plan.memory.order import SUMS
from jaxshard.plan.memory.scattered import FUSES_UPDATE
from jaxshard.plan.memory.shards import SCATTERS
from jaxshard.plan.memory.storage import Size, Storage


class Placed(Storage):
    """The operations of a region in the order in which they run, products where compilers move them.

    Args:
      region, size, in_place, narrow_products: as for `Storage`.
    """

    def __init__(self, region: Region, size: Size, in_place: set[Value], *, narrow_products: bool):
        super().__init__(region, size, in_place, narrow_products=narrow_products)
        if not self.narrow_products or sums_stacks_twice(self.region):
            self._delay_products()
        else:
            self._hoist_products()
            self._leave_to_readers()
        if not self.narrow_products:
            self._run_first(self._is_summed)
        elif not sums_stacks_twice(self.region):
            self._run_first(self._frees())
        self.place = {op: i for i, op in enumerate(self.ops)}

    def _hoist_products(self) -> None:
        """Move products to the place where their operands are there, if they are the last to read more than they make.

        A gradient of a matrix stands in a traced program where the matrix was used first; compilers that save memory
        compute it before a loop through which its operands would live.
        """
        made = {one: i for i, op in enumerate(self.ops) for one in op.outs}
        read: defaultdict[Value, int] = defaultdict(int)
        for i, op in enumerate(self.ops):
            for value in self.roots_of(op):
                read[value] = max(read[value], i)
        places: dict[Op, float] = {}
        for i, op in enumerate(self.ops):
            at: float = i
            if op.name in PRODUCTS and (roots := self.roots_of(op)):
                earliest = max(made.get(one, -1) for one in roots)
                freed = sum(self.size(one) for one in roots if read[one] == i and one not in self.inputs)
                if any(earliest < loop < i for loop in self.loops) and freed > self.size(op.outs[0]):
                    at = earliest + 0.5
            elif self.is_part_of_product(op):
                at = max(places[maker] for one in op.ins if (maker := self.makers.get(self.find(one))) is not None)
            places[op] = at
        self.ops = sorted(self.ops, key=places.__getitem__)

    def _leave_to_readers(self) -> None:
        """Move products to the end that make more than they free, if what reads their results is only there.

        So is the gradient of a table that is looked up and, as output matrix, multiplied: a later operation scatters
        into it. It is left to that place, but where a loop over blocks comes first, which stacks the gradients of all
        of them. So are gradients that are summed over two axes, one sum after the other, behind the backward pass.
        One that the program sums over devices behind such a loop runs beside those sums, whatever it frees.
        """
        first: dict[Value, int] = {}
        uses: defaultdict[Value, set[int]] = defaultdict(set)
        for i, op in enumerate(self.ops):
            if not self.is_alias(op):
                for one in op.reads:
                    first.setdefault(self.find(one), i)
                for one in self.roots_of(op):
                    uses[one].add(i)
        read = {op: first.get(self.find(op.outs[0]), i) for i, op in enumerate(self.ops) if op.name in PRODUCTS}
        twice = sums_products_twice(self.region)
        summed = self._summed_later(first) if twice else self._sums_behind_loops(first)
        behind = min(summed.values(), default=0)
        places: dict[Op, float] = {}
        moved: set[Op] = set()
        for i, op in enumerate(self.ops):
            places[op] = i
            at = behind if op in summed else read.get(op, i)
            maker = self.makers.get(self.find(op.ins[0])) if op.name == "convert_element_type" and op.ins else None
            if maker is not None and maker in moved:
                places[op] = max(i, places[maker])
                moved.add(op)
            if op not in summed and (self.ops[at].name not in FUSES_UPDATE or any(x.regions for x in self.ops[i:at])):
                continue
            roots = [one for one in self.roots_of(op) if one not in self.inputs]
            freed = [one for one in roots if max(uses[one] - {i}, default=0) < at]
            frees_more = sum(self.read_bytes(one) for one in freed) >= self.read_bytes(op.outs[0])
            if i < at and not (frees_more and (twice or op not in summed)):
                places[op] = at - 0.5
                moved.add(op)
        self.ops = sorted(self.ops, key=places.__getitem__)

    def _sums_behind_loops(self, first: dict[Value, int]) -> dict[Op, int]:
        """The places where results of products are summed over devices, behind a loop that follows the product."""
        found = {}
        for i, op in enumerate(self.ops):
            at = first.get(self.find(op.outs[0])) if op.name in PRODUCTS and not any(op.outs[0].split) else None
            while at is not None and self.ops[at].name in ("convert_element_type", "enter", "pvary"):
                at = first.get(self.find(self.ops[at].outs[0]))
            if at is not None and self.ops[at].name in SUMS and any(one.regions for one in self.ops[i:at]):
                found[op] = at
        return found

    def _summed_later(self, first: dict[Value, int]) -> dict[Op, int]:
        """The places where results of products are scattered in full tiles, also of those that are converted first."""
        found = {}
        for op in self.ops:
            at = first.get(self.find(op.outs[0])) if op.name in PRODUCTS else None
            if at is not None and self.ops[at].name == "convert_element_type":
                at = first.get(self.find(self.ops[at].outs[0]))
            if at is not None and self.ops[at].name in SCATTERS and not ends_within_a_tile(self.ops[at]):
                found[op] = at
        return found

    def _frees(self) -> Callable[[Op, set[Value]], bool]:
        """Tell of a product that it frees more than it makes, beside what it shares with another one.

        So does one with a gathered matrix, whose last reader it is, and the other one makes the matrix's gradient.
        """
        last = self._last_readers()

        def frees(product: Op, shared: set[Value]) -> bool:
            freed = [one for one in self.roots_of(product) - self.inputs - shared if last[one] is product]
            return sum(map(self.size, freed)) > self.size(product.outs[0])

        return frees

    def _is_summed(self, product: Op, _: set[Value]) -> bool:
        """True for a product that is summed over devices: XLA for GPUs begins that early, beside the rest."""
        if contracted_axes(product):
            return True
        found = self.readers[product.outs[0]]
        while len(found) == 1 and len(found[0].outs) == 1 and self.is_elementwise(found[0]):
            found = self.readers[self.find(found[0].outs[0])]
        return bool(found) and all(op.name in SUMS for op in found)

    def _run_first(self, is_better: Callable[[Op, set[Value]], bool]) -> None:
        """Let of two products that read the same array the better one run first."""
        for first, other in pairwise([op for op in self.ops if op.name in PRODUCTS]):
            shared = self.roots_of(first) & self.roots_of(other)
            if not shared or is_better(first, shared) or not is_better(other, shared):
                continue
            start, end = self.ops.index(first), self.ops.index(other)
            between, needed = self.ops[start + 1 : end], [other]
            wanted = set(other.ins)
            for op in reversed(between):
                if wanted.intersection(op.outs):
                    wanted.update(op.ins)
                    needed.append(op)
            computed = all(self.is_alias(op) or self.is_elementwise(op) for op in needed[1:])
            if computed and wanted.isdisjoint(first.outs) and not any(op.regions for op in between):
                rest = [op for op in between if op not in needed]
                self.ops[start : end + 1] = [*needed[::-1], first, *rest]

    def _last_readers(self) -> dict[Value, Op]:
        """The last operation that reads each stored array, products with what is computed in one with them."""
        last: dict[Value, Op] = {}
        part: dict[Op, Op] = {}
        for op in self.ops:
            if self.is_alias(op):
                continue
            makers = [self.makers.get(self.find(one)) for one in op.ins] if self.is_part_of_product(op) else []
            found = [part[maker] for maker in makers if maker in part]
            part[op] = found[0] if op.name not in PRODUCTS and len(found) == 1 else op
            last.update((one, part[op]) for one in self.roots_of(op))
        return last

    def _delay_products(self) -> None:
        """Move products behind a loop where their results are first read after it: XLA schedules them late.

        They then run beside the collectives behind the backward pass. On GPUs a result that is added to what the loop
        makes is no such; one inside a block is none anywhere.
        """
        if all(one.role == "inner" for one in self.region.inputs):
            return
        read: dict[Value, Op] = {}
        for op in reversed(self.ops):
            if not self.is_alias(op):
                read.update((self.find(one), op) for one in op.reads)
        places: dict[Op, float] = {}
        for i, op in enumerate(self.ops):
            places[op] = i
            reader = read.get(self.find(op.outs[0])) if op.name in PRODUCTS else None
            if reader is not None and (self.narrow_products or not self.waits(reader, op.outs[0])):
                at = self.traced[reader]
                places[op] = at - 0.5 if any(i < loop < at for loop in self.loops) else i
        self.ops = sorted(self.ops, key=places.__getitem__)
