"""What is in memory at the fullest moment of a program: a model of what compilers fuse, reuse and stack.

The graph is walked in program order. An elementwise result is not stored where it can be computed in the operation that
reads it; a product or collective is (`storage`). A value lives from the operation that makes it to the last that reads
it, fused readers counted where they run. Loops write what they carry in place and what they stack into one array of all
turns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxshard.plan.memory.converted import Converted
from jaxshard.plan.memory.donated import gathered_apart, is_put_in_order
from jaxshard.plan.memory.gathered import joined_bytes
from jaxshard.plan.memory.graph import Op, Region, Value
from jaxshard.plan.memory.moved import COMPUTED_IN_F32
from jaxshard.plan.memory.scattered import (
    FUSES_UPDATE,
    is_gather_from_one_row,
    is_linear,
    is_selection,
    is_summed_gather,
)
from jaxshard.plan.memory.shards import GATHERS, SCATTERS, is_reduction
from jaxshard.plan.memory.stacks import slices_of_stacks
from jaxshard.plan.memory.storage import Size
from jaxshard.plan.memory.tiles import LANES, SUBLANES
from jaxshard.plan.memory.turned import added_in_turned_layouts, by_rows, looked_up_by_rows, updated_by_rows
from jaxshard.plan.memory.zeros import zeros_before


class Live(NamedTuple):
    """A value in memory, its bytes, and a note: "stacked", "carried", "copy" or "" for the value itself."""

    value: Value
    bytes: int
    note: str = ""


@dataclass
class Moment:
    """The fullest moment of a region: what is live beside its inputs, the operation that runs, and its place."""

    live: list[Live] = field(default_factory=list)
    op: Op | None = None
    at: int = 0

    @property
    def total(self) -> int:
        """Bytes of all that is live."""
        return sum(one.bytes for one in self.live)


class Liveness(Converted):
    """When the stored values of a region live.

    Args:
      region, size, in_place, narrow_products: as for `Storage`.
      reusable: inputs that results may be written over.
      stacks_first: what loops stack or write is allocated long before, while gathers of weights run.
      turned: additions for which a table is copied to another layout, with the bytes of what they copy.
    """

    def __init__(
        self,
        region: Region,
        size: Size,
        in_place: set[Value],
        *,
        reusable: set[Value] | None = None,
        narrow_products: bool = False,
        stacks_first: bool = False,
        turned: Mapping[Op, tuple[int, ...]] | None = None,
    ):
        super().__init__(region, size, in_place, narrow_products=narrow_products)
        self.reusable, self.stacks_first = reusable or set(), stacks_first
        self.turned = added_in_turned_layouts(region) if turned is None else turned
        self.inner: dict[Op, list[Liveness]] = {op: self._bodies(op) for op in region.ops if op.regions}
        self.runs: dict[Op, int] = {}
        self.last: dict[Value, int] = {}
        self._place_reads()
        self.moments: dict[Op, Moment] = {}
        self.stored_as: dict[Value, Any] = {}
        self.copies: defaultdict[int, list[Value]] = defaultdict(list)
        self.copied: dict[Value, tuple[int, Value]] = {}
        self.away: defaultdict[Value, list[tuple[int, int]]] = defaultdict(list)
        self.on_chip: set[Value] = set()
        self.compared = gathered_apart(region) if narrow_products else set()
        self._find_narrow()
        self._copy_by_rows()
        for loop, bodies in self.inner.items():
            for body in bodies if self.narrow_products else ():
                body.take_slices(slices_of_stacks(loop, self.makers, self.find))

    # Where everything runs, and is read last.

    def _place_reads(self) -> None:
        need: dict[Value, int] = {}
        end = len(self.ops)
        for one in self.results:
            need[one] = end
        for op in reversed(self.ops):
            if self.is_alias(op):
                continue
            here = self.place[op]
            if any(one in self.stored for one in op.outs) or not op.outs:
                at = here
            else:
                at = max((need.get(one, -1) for one in op.outs), default=here)
                at = here if at < 0 else at
            self.runs[op] = at
            at = end - 1 if self._waits_for_sum(op) else at
            for one in op.reads:
                root = self.find(one)
                need[root] = max(need.get(root, -1), at)
        self.last = need

    def _is_step(self) -> bool:
        """True for a whole step, False for the body of a loop or a branch."""
        return not any(one.role == "inner" for one in self.region.inputs)

    def _waits_for_sum(self, op: Op) -> bool:
        """True for a gather of elements, the labels' logits, that frees nothing.

        Where it is along a split dimension its result is summed over the axis, for the loss alone: compilers leave it
        to the end, if the logits are read later anyway, and are no copy in a wider type. So they do where they split
        rows until each device has one.
        """
        if not (is_summed_gather(op) or is_gather_from_one_row(op)) or not self.narrow_products:
            return False
        return self._is_step() and self.widened(self.find(op.ins[0])) is None

    def _copy_by_rows(self) -> None:
        """Copy tables whose rows are looked up, if their layout is another one, from where they are read first.

        Where loops read a converted copy of the table, that is what is copied, for the lookup alone.
        """
        if not self.narrow_products or not self._is_step():
            return
        start = min((at for op, at in self.runs.items() if at == self.place[op]), default=0)
        for one, scatter in updated_by_rows(self.region) if self.stacks_first else ():
            at, copy = start if scatter is None else self.place[scatter], by_rows(one)
            self.copies[at].append(copy)
            self.last[copy] = max((self.runs[op] for op in self.readers[one]), default=at)
        for table, lookup in looked_up_by_rows(self.region).items():
            read, (_, converted) = self.find(lookup.gather.ins[0]), self.copied.get(table, (0, table))
            in_loops = read.dtype == converted.dtype or any(op.regions for op in self.readers[read])
            if read is not table and in_loops:
                copy, at = by_rows(read), self.runs[lookup.gather]
                self.copies[at].append(copy)
                self.last[copy] = at
                continue
            for group in ([table], lookup.state):
                readers = [op for one in group for op in self.readers[one]]
                for one in group if readers else ():
                    copy = by_rows(one)
                    self.copies[min(self.runs[op] for op in readers)].append(copy)
                    self.last[copy] = max(self.runs[op] for op in readers)

    def take_slices(self, numbers: Iterable[int]) -> None:
        """Store the inputs of a body, by number, that several of its operations read, from the first to the last.

        They are slices of what another loop stacked. One that a single operation reads is taken where it is read.
        """
        for number in numbers:
            one = self.find(self.region.inputs[number])
            places = [
                self.place[op] for op, at in self.runs.items() if at == self.place[op] and one in self.roots_of(op)
            ]
            if len(places) > 1:
                taken = replace(one, role="")
                self.copies[min(places)].append(taken)
                self.last[taken] = max(places)

    def keep_on_chip(self, values: set[Value]) -> None:
        """Let values lie in the chip's own memory, here and in the bodies of loops: they take none of the device's."""
        self.on_chip = values
        self.moments = {}
        for bodies in self.inner.values():
            for body in bodies:
                body.keep_on_chip(values)

    # The fullest moment.

    def peak(self) -> Moment:
        """Return the fullest moment."""
        live, begun = dict[Value, Live](), self._begun()
        best = Moment()
        waiting: list[Live] = []
        expiring: defaultdict[int, list[Value]] = defaultdict(list)
        for value, at in self.last.items():
            expiring[at].append(value)
        for i, op in enumerate(self.ops):
            live |= begun.get(i, {})
            if not self.is_alias(op) and (op.regions or self.runs[op] == i):
                taken: set[Value | None] = set()
                for number, one in enumerate(op.outs):
                    if one in self.stored and one not in self.inputs and one in self.last:
                        dying = self._overwritten(op, number, i, taken)
                        if dying is not None and (dying in self.on_chip or one in self.on_chip):
                            dying = None
                        old = None if dying is None else live.pop(dying, Live(dying, 0))
                        new = self._new(op, number, one)
                        live[one] = new if old is None else new._replace(bytes=old.bytes)
                        taken.add(dying)
                for one in [copy for copy in self.copies[i] if copy not in self.on_chip]:
                    live[one] = Live(one, self.size(one), "converted")
                inner = self._inside(op)
                there = (
                    live.values() if not self.away else (one for one in live.values() if self._is_there(one.value, i))
                )
                now = [*there, *inner.live, *self._extra(op), *(waiting if "transpose" in op.path else ())]
                if sum(one.bytes for one in now) > best.total:
                    best = Moment(now, inner.op or op, i)
                waiting = waiting or self._left_whole(op)
            for value in expiring[i]:
                live.pop(value, None)
        return best

    def _is_there(self, value: Value, at: int) -> bool:
        """Return False between the places over which a value is dropped, to be computed again (`recompute`)."""
        return not any(before < at < after for before, after in self.away.get(value, ()))

    def _begun(self) -> dict[int, dict[Value, Live]]:
        """What is in memory before the loop that stacks it, by the place from which on.

        On TPUs what the first loop stacks is allocated while gathers of weights run beside, on GPUs where `zeros` says.
        """
        loops = [(self.place[op], op) for op in self.ops if op.name == "scan"]
        if self.narrow_products:
            return {0: self._stacks(loops[0][1])} if self.stacks_first and loops else {}
        found: dict[int, dict[Value, Live]] = {}
        for at, op in loops:
            start = zeros_before(self.ops, at)
            found[start] = found.get(start, {}) | self._stacks(op)
        return found

    def _stacks(self, loop: Op) -> dict[Value, Live]:
        stacks = [one for one in loop.outs[loop.counts[1] :] if one in self.last and one not in self.in_place]
        return {one: self._new(loop, loop.outs.index(one), one) for one in stacks}

    def _new(self, op: Op, number: int, value: Value) -> Live:
        if value in self.in_place or value in self.on_chip:
            return Live(value, 0)
        stacked = op.name == "scan" and number >= op.counts[1]
        carried = op.name in ("scan", "while") and not stacked
        return Live(value, self.stored_bytes(value), "stacked" if stacked else "carried" if carried else "")

    def stored_bytes(self, value: Value) -> int:
        """The bytes of a value as it is stored."""
        again = self._mixed(value, self.sources) if value in self.sources else None
        copy = 0 if again is None else self.size(replace(value, dtype=again))
        return copy + self.size(replace(value, dtype=self.stored_as[value]) if value in self.stored_as else value)

    def _extra(self, op: Op) -> list[Live]:
        """What an operation needs beside operands and results.

        Collectives make arrays whose slowest dimension is the gathered one; where shards do not fill tiles along it, or
        it lies along the lanes, the result is copied. What a scatter makes is there twice when it is summed over all
        devices at once, which an all-reduce does; a sum over some of the axes is scattered in place.
        """
        out = op.outs[0] if op.outs else None
        if out is None or not self.narrow_products:
            return []
        if op in self.turned:
            return [Live(out, size, "copy") for size in self.turned[op]]
        if op.name == "scan":
            return self._gathered_stacks(op)
        if op.summed:  # an all-reduce beside other operations, from one array into another
            return [Live(out, self.stored_bytes(out), "copy")]
        if out in self.apart and op.name in COMPUTED_IN_F32:  # its operand in both shapes, before it is there itself
            wide = replace(out, dtype=jnp.dtype(jnp.float32))
            return [Live(wide, size, "copy") for size in (self.size(wide), self.size(wide) - self.size(out))]
        if op.name == "sharding_constraint" and self.find(out) in self.in_place:
            return self._gathered_result(op)
        # A gather of counts adds a dimension.
        gathers = op.name == "all_gather" or (op.name == "sharding_constraint" and self.find(out) not in self.results)
        if gathers and len(out.shard) == len(op.ins[0].shard) == 2:
            parts = zip(op.ins[0].shard, out.shard, (SUBLANES, LANES), strict=True)
            odd = any(part < whole and part % tile for part, whole, tile in parts)
            return [Live(out, max(self.size(out), joined_bytes(op)), "copy")] if odd else []
        if op.folded and op.name in SCATTERS and len(op.ins[0].shard) == 2 and self.size(op.ins[0]) > 2**20:
            return [Live(op.ins[0], self.size(op.ins[0]), "copy")]  # an all-reduce that runs beside other operations
        if is_linear(op):  # what it adds to once more, with rows in order, and then in one dimension
            whole = self.size(op.ins[0])
            return [Live(op.ins[0], 2 * whole if self.stacks_first else max(0, whole - self.stored_bytes(out)), "copy")]
        fresh = op.name in ("scatter-add", "scatter_add") and not self.sources.get(self.find(op.ins[0]))
        if fresh and self.find(op.ins[0]) not in self.inputs and not is_selection(op) and len(out.shard) == 2:
            return [] if self._is_scattered_in_parts(out) else [Live(out, self.size(out), "copy")]
        return []

    def _gathered_result(self, gather: Op) -> list[Live]:
        """What a gather needs that makes a result of the step, which is written over an argument in the end.

        Parts along another dimension than the first are gathered into an array of their own, whose slowest dimension is
        the gathered one; so are all whose update is compared with the argument, which is read behind the gather. Those
        of a matrix that do not fill tiles along it are joined to that from padded ones.
        """
        (part, *_), (made,) = gather.ins, gather.outs
        if not is_put_in_order(gather) and made not in self.compared:
            return []
        found = [Live(made, self.size(made), "copy")]
        if len(made.shard) == 2 and part.shard[0 if part.shard[0] < made.shard[0] else 1] % SUBLANES:
            found.append(Live(made, max(self.size(made), joined_bytes(gather)), "copy"))
        return found

    def _gathered_stacks(self, op: Op) -> list[Live]:
        """What a loop over arrays gathers that are split over its turns: each of them whole, to take one slice."""
        found = []
        for number in range(sum(op.counts), len(op.ins)):
            one = op.ins[number]
            if number not in op.unread and one.split and one.split[0]:
                whole = replace(one, split=((), *one.split[1:]), shard=(one.shape[0], *one.shard[1:]))
                found.append(Live(whole, self.size(whole), "copy"))
        return sorted(found, key=lambda one: one.bytes)[-1:]  # they are free again behind their slices

    def _left_whole(self, op: Op) -> list[Live]:
        """The whole gradients of a block that wait behind a loop over offloaded activations.

        Compilers take the last turn of such a loop out of it. Its gradients are summed beside the rest of the backward
        pass, the table's, and written into what the loop stacked at the end.
        """
        if op.name != "scan" or not self.narrow_products or not any(one.on_host for one in op.ins):
            return []
        (body,) = op.regions
        return [Live(one, self.size(one), "copy") for inner in body.ops if inner.name in SCATTERS for one in inner.ins]

    def _is_scattered_in_parts(self, value: Value) -> bool:
        """True where a value is scattered over some axes of the mesh only, or over one after the other."""
        scatters, found = [], self.readers[self.find(value)]
        while len(found) == 1 and len(found[0].outs) == 1:
            scatters += [found[0]] if found[0].name in SCATTERS else []
            found = self.readers[self.find(found[0].outs[0])]
        return len(scatters) > 1 or any(not one.everywhere for one in scatters)

    def _overwritten(self, op: Op, number: int, i: int, taken: set[Value | None]) -> Value | None:
        """Return the operand over which a result is written, because nothing reads it later."""
        if op.name in ("scan", "while"):
            consts = op.counts[0] if op.name == "scan" else sum(op.counts)
            stacks = op.name == "scan" and number >= op.counts[1]
            operands = [] if stacks else [op.ins[consts + number]]
        elif op.name in FUSES_UPDATE:
            operands = op.ins[:1]
        elif op.name == "cond":
            operands = op.ins
        else:
            found = self.sources[op.outs[number]] if self.is_elementwise(op) else ()
            if op.outs[number] in self.in_place and self._is_step():
                # What is chosen from a gathered array is written over an argument, and leaves that array behind.
                found = {one for one in found if not self._is_gathered(one)}
            if not self.narrow_products:
                found = set(found) - self._reduced_beside(set(found))
            operands = sorted(found, key=self._made_at, reverse=True)  # the latest: what was made just before it
        for one in operands:
            root = self.find(one)
            ours = root in self.reusable or (root in self.stored and root not in self.inputs)
            if ours and root not in taken and self.last[root] == i and self._same_bytes(root, op.outs[number]):
                return root
        return None

    def _reduced_beside(self, values: set[Value]) -> set[Value]:
        """Those of the arrays that an operation reads of which it reads sums over rows, too, as a softmax does.

        On GPUs the sums are a part of the operation, which reads its operands again behind them.
        """
        makers = [maker for one in values if (maker := self.makers.get(one)) is not None and is_reduction(maker.name)]
        return set().union(*map(self.roots_of, makers)) & values

    def _is_gathered(self, value: Value) -> bool:
        maker = self.makers.get(value)
        if maker is None or maker.name not in GATHERS:
            return False
        return math.prod(maker.ins[0].shard) < math.prod(value.shard)

    def _made_at(self, value: Value) -> int:
        maker = self.makers.get(value)
        return -1 if maker is None else self.place[maker]

    def _same_bytes(self, one: Value, other: Value) -> bool:
        # A GPU's product writes the type in which all read its result: their conversions change nothing then.
        stored_as = {} if self.narrow_products else self.stored_as
        types = [stored_as.get(value, value.dtype) for value in (one, other)]
        return self.stored_bytes(one) == self.stored_bytes(other) and types[0] == types[1]

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
                    body, self.size, set(body.outputs),
                    reusable=reusable, narrow_products=self.narrow_products, stacks_first=self.stacks_first,
                    turned=self.turned,
                )
            )  # fmt: skip
        return bodies

    def _inside(self, op: Op) -> Moment:
        if op not in self.moments:
            moments = [body.peak() for body in self.inner.get(op, ())]
            self.moments[op] = max(moments, key=lambda one: one.total, default=Moment())
        return self.moments[op]
