"""The graph of a traced step.

Calls are opened, `shard_map`s entered, and every value has the shape that one device holds. Loops and branches stay
operations, with regions of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxshard.core.compat import newly_manual_axes, scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.plan.memory.graph import Op, Region, Value, contracted_axes, eliminate, every_op
from jaxshard.plan.memory.shards import Split, merge, propagate, shard_shape, spec_split, whole

_KEEP_SPLIT = frozenset({
    "scatter", "scatter-add", "scatter_add", "convert_element_type", "add_any", "add", "mul", "div", "select_n", "neg",
    "copy", "reduce_precision", "optimization_barrier",
})  # fmt: skip
"""Operations through which a split goes backward, from a result to the operands of its shape."""

_CUT = frozenset({"pad", "slice", "concatenate", "dynamic_update_slice"})
"""Operations through which the split of a dimension goes backward that has the same size in operand and result."""

_ALIKE = frozenset({"add", "add_any", "mul", "sub", "div", "select_n", "max", "min"})
"""Operations whose operands are split alike: of a sum over micro-batches a gradient is split as the sum so far."""


class Builder:
    """Makes the graph of a jaxpr; `sizes` are those of the mesh's axes, `folded` as for `build`."""

    def __init__(self, sizes: Mapping[str, int], folded: frozenset[str] = frozenset()):
        self.sizes, self.folded = dict(sizes), folded
        self.axes = frozenset(axis for axis, size in sizes.items() if size > 1)
        self.maker: dict[Value, Op] = {}

    def value(self, aval: Any, split: Split, role: str = "", path: str = "") -> Value:
        """Make a value of an aval that is split so."""
        shape = tuple(getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        if hasattr(aval, "inner_aval"):  # a reference: memory that is counted where it is made
            shape, dtype = tuple(aval.inner_aval.shape), aval.inner_aval.dtype
        on_host = getattr(aval, "memory_space", None) is jax.memory.Space.Host
        return Value(shape, dtype, split, shard_shape(shape, split, self.sizes), role, path, on_host)

    def region(self, program: Any, inputs: Sequence[Value | None], automatic: frozenset[str], path: str = "") -> Region:
        """Make the region of a jaxpr on these inputs (None: a number); names of operations begin with `path`."""
        region = Region([one for one in inputs if one is not None])
        outs = self._inline(region, program, inputs, automatic, path)
        region.outputs = [one for one in outs if one is not None]
        return region

    def _inline(
        self,
        region: Region,
        program: Any,
        inputs: Sequence[Value | None],
        automatic: frozenset[str],
        path: str,
        numbers: Sequence[Any] = (),
    ) -> list[Value | None]:
        jaxpr, _ = open_jaxpr(program)
        known = dict(zip(jaxpr.invars, numbers, strict=False))
        env: dict[Any, Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {var: self.value(var.aval, whole(getattr(var.aval, "shape", ())), "constant") for var in jaxpr.constvars}

        def read(atom: Any) -> Value | None:
            return None if isinstance(atom, Literal) else env[atom]

        def number(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known.get(atom)

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            where = f"{path}/{eqn.source_info.name_stack}"
            outs = self._equation(region, eqn, operands, automatic, where, [number(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._literal(atom) if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]

    def _literal(self, atom: Any) -> Value:
        return self.value(atom.aval, whole(getattr(atom.aval, "shape", ())), "constant")

    def _equation(
        self,
        region: Region,
        eqn: Any,
        operands: list[Value | None],
        automatic: frozenset[str],
        path: str,
        numbers: Sequence[Any],
    ) -> list[Value | None]:
        name, params = eqn.primitive.name, eqn.params
        inner = params.get(CALLS.get(name, ""))
        if inner is not None:
            return self._inline(region, inner, operands, automatic, path, numbers)
        if name == "shard_map":
            return self._shard_map(region, eqn, operands, automatic, path)
        over, ins = _axes_of(params), [one for one in operands if one is not None]
        alone = bool(over and ins) and self.axes.isdisjoint(over)  # a collective over one device: the same memory
        op = Op("enter" if alone else name, ins, [], path, params=params)
        op.number = numbers[0] if len(numbers) == 1 else None
        op.folded, op.everywhere = not self.folded.isdisjoint(over), self.axes.issubset(over)
        region.ops.append(op)
        if name == "scan":
            self._scan(op, eqn, operands, automatic)
        elif name == "while":
            self._while(op, eqn, operands, automatic)
        elif name == "cond":
            self._cond(op, eqn, operands, automatic)
        elif name == "sharding_constraint":
            var = eqn.outvars[0]
            split = spec_split(params["sharding"].spec, len(var.aval.shape), automatic)
            self._refine(op.ins, [split])
            op.outs = [self.value(var.aval, split, path=path)]
        else:
            op.outs = [self.value(var.aval, self._split(name, params, operands, var), path=path) for var in eqn.outvars]
            if name in _ALIKE:
                self._refine_alike(op.ins, op.outs[0])
        self.maker.update((one, op) for one in op.outs)
        return list(op.outs)

    def _refine(self, values: Sequence[Value], splits: Sequence[Split]) -> None:
        """Split values as their reader wants them, where nothing said how: zeros, and what is added to them."""
        for value, wanted in zip(values, splits, strict=True):
            if value.role not in ("", "inner") or len(wanted) != len(value.shape):
                continue
            split = merge([value.split, wanted])
            if split == value.split:
                continue
            op = self.maker.get(value)
            if op is None and value.role == "inner":
                self._set_split(value, split)
            elif op is not None and op.name in ("scan", "while", "cond"):
                self._refine_inside(op, value, split)
            elif op is not None and (
                op.name in _KEEP_SPLIT or _is_constant(op) or _repeats(op, split) or self._holds_constant(op)
            ):
                self._set_split(value, split)
                self._refine_alike(op.ins, value)
            elif op is not None and op.name in _CUT:
                self._set_split(value, split)
                alike = [one for one in op.ins if len(one.shape) == len(value.shape)]
                self._refine(alike, [_of_same_size(split, value.shape, one.shape) for one in alike])
            elif op is not None and op.name == "reshape" and _plain(op.ins[0].shape) == _plain(value.shape):
                entries = iter([entry for entry, size in zip(split, value.shape, strict=True) if size > 1])
                before = tuple(next(entries) if size > 1 else () for size in op.ins[0].shape)
                self._refine(op.ins, [before])
                if op.ins[0].split == before:  # the same memory in another shape
                    self._set_split(value, split)
            elif (
                op is not None
                and op.name == "dot_general"
                and contracted_axes(op).isdisjoint(axis for entry in split for axis in entry)
            ):
                self._set_split(value, split)  # each device computes its part of what it has whole

    def _refine_alike(self, values: Sequence[Value], result: Value) -> None:
        """Split operands as a result of their shape is split: whichever comes first, the compiler joins the two."""
        alike = [one for one in values if one.shape == result.shape]
        self._refine(alike, [result.split] * len(alike))

    def _holds_constant(self, op: Op) -> bool:
        """True for a constraint of zeros and the like, whatever it says: each device makes those that it needs."""
        maker = self.maker.get(op.ins[0]) if op.name == "sharding_constraint" else None
        return maker is not None and _is_constant(maker)

    def _set_split(self, value: Value, split: Split) -> None:
        value.split, value.shard = split, shard_shape(value.shape, split, self.sizes)

    def _refine_inside(self, op: Op, value: Value, split: Split) -> None:
        """Split a result of a loop or branch: sums that are split after a loop are scattered in it."""
        number = op.outs.index(value)
        self._set_split(value, split)
        if op.name == "scan" and number >= op.counts[1]:
            self._refine([op.regions[0].outputs[number]], [split[1:]])
            return
        for body in op.regions:
            self._refine([body.outputs[number]], [split])
        if op.name != "cond":
            (body,) = op.regions
            consts = op.counts[0] if op.name == "scan" else op.counts[1]
            skipped = 0 if op.name == "scan" else op.counts[0]
            self._refine([body.inputs[consts + number], op.ins[skipped + consts + number]], [split, split])

    def _split(self, name: str, params: Any, operands: list[Value | None], var: Any) -> Split:
        shape = tuple(getattr(var.aval, "shape", ()))
        known = [(one.split, one.shape) for one in operands if one is not None and one.shape != ()]
        return propagate(name, params, known, shape) if known else whole(shape)

    def _shard_map(
        self, region: Region, eqn: Any, operands: list[Value | None], automatic: frozenset[str], path: str
    ) -> list[Value | None]:
        """Enter a shard_map: what goes in and out is the same memory, unless it has to be cut or is gathered."""
        manual = newly_manual_axes(eqn.params)
        inside = automatic - manual
        jaxpr, _ = open_jaxpr(eqn.params["jaxpr"])
        inputs: list[Value | None] = []
        for var, operand, spec in zip(jaxpr.invars, operands, eqn.params["in_specs"], strict=True):
            if operand is None:
                inputs.append(None)
                continue
            entries = tuple(tuple(axis for axis in entry if axis in inside) for entry in operand.split)
            inner = self.value(var.aval, entries, operand.role, operand.path)
            wanted = spec_split(spec, len(inner.shape), manual & self.axes)
            if wanted != tuple(tuple(x for x in entry if x in manual) for entry in operand.split):
                self._refine([operand], [tuple((*a, *b) for a, b in zip(entries, wanted, strict=True))])
            moved = any(set(a) & manual != set(b) for a, b in zip(operand.split, wanted, strict=True))
            region.ops.append(Op("enter_moved" if moved else "enter", [operand], [inner], path))
            inputs.append(inner)
        made = self._inline(region, eqn.params["jaxpr"], inputs, inside, path)
        outs: list[Value | None] = []
        for var, one, spec in zip(eqn.outvars, made, eqn.params["out_specs"], strict=True):
            entries = spec_split(spec, len(var.aval.shape), manual & self.axes)
            if one is not None:
                entries = tuple((*a, *(x for x in b if x not in a)) for a, b in zip(entries, one.split, strict=True))
            outer = self.value(var.aval, entries, path=path)
            region.ops.append(Op("enter", [] if one is None else [one], [outer], path))
            outs.append(outer)
        return outs

    def _scan(self, op: Op, eqn: Any, operands: list[Value | None], automatic: frozenset[str]) -> None:
        consts, carries = scan_counts(dict(eqn.params))
        values = [self._literal(a) if o is None else o for a, o in zip(eqn.invars, operands, strict=True)]
        op.ins, op.counts = values, (consts, carries)
        body = eqn.params["jaxpr"]
        avals = [var.aval for var in open_jaxpr(body)[0].invars]

        def slices(carried: Sequence[Split]) -> list[Value | None]:
            splits = [one.split for one in values[:consts]] + list(carried)
            splits += [one.split[1:] for one in values[consts + carries :]]
            return [self.value(aval, split, "inner", "") for aval, split in zip(avals, splits, strict=True)]

        region, carried = self._loop_body(
            body, slices, [v.split for v in values[consts:][:carries]], automatic, op.path
        )
        op.regions = [region]
        self._refine(values[consts:][:carries], carried)
        splits = [*carried, *(((), *one.split) for one in region.outputs[carries:])]
        op.outs = [self.value(var.aval, s, path=op.path) for var, s in zip(eqn.outvars, splits, strict=True)]

    def _while(self, op: Op, eqn: Any, operands: list[Value | None], automatic: frozenset[str]) -> None:
        values = [self._literal(a) if o is None else o for a, o in zip(eqn.invars, operands, strict=True)]
        skipped, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        op.ins, op.counts = values, (skipped, consts)
        avals = [var.aval for var in open_jaxpr(eqn.params["body_jaxpr"])[0].invars]

        def inputs(carried: Sequence[Split]) -> list[Value | None]:
            splits = [one.split for one in values[skipped : skipped + consts]] + list(carried)
            return [self.value(aval, split, "inner") for aval, split in zip(avals, splits, strict=True)]

        start = [one.split for one in values[skipped + consts :]]
        region, carried = self._loop_body(eqn.params["body_jaxpr"], inputs, start, automatic, op.path)
        op.regions = [region]
        self._refine(values[skipped + consts :], carried)
        op.outs = [self.value(var.aval, s, path=op.path) for var, s in zip(eqn.outvars, carried, strict=True)]

    def _loop_body(
        self,
        body: Any,
        inputs: Callable[[Sequence[Split]], Any],
        start: list[Split],
        automatic: frozenset[str],
        path: str,
    ) -> tuple[Region, list[Split]]:
        """Make the body of a loop whose carries are split as it returns them, where they began whole."""
        region = self.region(body, inputs(start), automatic, path)
        found = [one.split for one in region.outputs[: len(start)]]
        carried = [merge([b, a]) for a, b in zip(start, found, strict=True)]
        if carried != start:
            region = self.region(body, inputs(carried), automatic, path)
        return region, carried

    def _cond(self, op: Op, eqn: Any, operands: list[Value | None], automatic: frozenset[str]) -> None:
        values = [self._literal(a) if o is None else o for a, o in zip(eqn.invars, operands, strict=True)]
        op.ins = values
        for branch in eqn.params["branches"]:
            avals = [var.aval for var in open_jaxpr(branch)[0].invars]
            copies = [self.value(a, one.split, "inner") for a, one in zip(avals, values[1:], strict=True)]
            op.regions.append(self.region(branch, copies, automatic, op.path))
        for place, var in enumerate(eqn.outvars):
            made = [region.outputs[place].split for region in op.regions]
            op.outs.append(self.value(var.aval, merge(made), path=op.path))


def _is_constant(op: Op) -> bool:
    """True for an operation that makes an array of numbers alone."""
    return not any(one.shape for one in op.ins)


def _plain(shape: Sequence[int]) -> list[int]:
    """A shape without its dimensions of size one."""
    return [size for size in shape if size > 1]


def _of_same_size(split: Split, shape: Sequence[int], other: Sequence[int]) -> Split:
    return tuple(entry if size == its else () for entry, size, its in zip(split, shape, other, strict=True))


def _repeats(op: Op, split: Split) -> bool:
    """True for a broadcast that is split along the dimensions that it adds: each device makes its copies alone."""
    kept = op.params.get("broadcast_dimensions", ()) if op.name == "broadcast_in_dim" else range(len(split))
    return all(not split[dim] for dim in kept)


def _axes_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes of a mesh over which a collective inside a `shard_map` runs."""
    named = params.get("axis_name", params.get("axes", ()))
    return tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if isinstance(axis, str))


def build(
    closed: Any,
    arguments: Sequence[tuple[Split, str, str]],
    sizes: Mapping[str, int],
    folded: frozenset[str] = frozenset(),
) -> Region:
    """Make the graph of a traced step.

    Args:
      closed: the closed jaxpr.
      arguments: split, role and path of each argument.
      sizes: of the mesh's axes.
      folded: the axes that cover several dimensions of a TPU's torus.
    """
    builder = Builder(sizes, folded)
    inputs = [
        builder.value(var.aval, split, role, path)
        for var, (split, role, path) in zip(open_jaxpr(closed)[0].invars, arguments, strict=True)
    ]
    region = builder.region(closed, inputs, builder.axes)
    eliminate(region, set(region.outputs))
    rows = {axis for one in inputs if one.role == "batch" for entry in one.split for axis in entry}
    for op in every_op(region):
        op.summed = op.name == "dot_general" and not rows.issuperset(contracted_axes(op))
    return region
