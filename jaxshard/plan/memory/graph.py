"""Convert a traced step to a graph of operations on one device's shard of every array.

Calls and bodies of `shard_map`s are inlined, and every value has the shape of one device's shard. Loops and branches
stay operations, whose bodies are graphs of their own (`Region`). The estimates of memory and time walk this graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxshard.core.compat import newly_manual_axes, scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.plan.memory.shards import Split, merge, propagate, replicated, shard_shape, spec_split

LOOPS = ("scan", "while")
_WITH_REGIONS = (*LOOPS, "cond")

_LINEAR = frozenset({
    "scatter", "scatter-add", "scatter_add", "convert_element_type", "add_any", "add", "mul", "div", "select_n", "neg",
    "copy", "reduce_precision", "optimization_barrier",
})  # fmt: skip
"""Operations that pass the split of a result backward, to their operands of the same shape."""

_COPIES = frozenset(
    {"sharding_constraint", "all_gather", "convert_element_type", "reshape", "squeeze", "copy", "enter"}
)
"""Operations whose result has the elements of their operand."""

_CUT = frozenset({"pad", "slice", "concatenate", "dynamic_update_slice"})
"""Operations that pass the split of a result backward along dimensions of equal size in operand and result."""

_ALIKE = frozenset({"add", "add_any", "mul", "sub", "div", "select_n", "max", "min"})
"""Operations whose operands take the split of the result, as a gradient does that is added to an accumulator."""


@dataclass(eq=False)
class Value:
    """An array of the program.

    Attributes:
      shape: the shape in the jaxpr: one device's part along manual mesh axes, global along automatic mesh axes.
      dtype: the dtype of its elements.
      split: for each dimension the automatic mesh axes that split it.
      shard: the shape of one device's part.
      role: the role of an argument of the step, such as "parameters"; "inner" for an input of a loop or branch;
        "constant" for a constant; "" for a computed value.
      path: the path of an argument, or JAX's name stack of the operation that computes the value.
      on_host: True if it is stored in host memory, as activations are that a remat policy offloads.
      equations: the equation that computes it, and the calls that contain this equation, the innermost first; () for
        an argument, a constant, or an input of a loop or branch.
      parameter: the path of the parameter that it is or whose elements it copies, as a gathered weight does; or "".
    """

    shape: tuple[int, ...]
    dtype: Any
    split: Split
    shard: tuple[int, ...]
    role: str = ""
    path: str = ""
    on_host: bool = False
    equations: tuple[Any, ...] = field(default=(), repr=False)
    parameter: str = ""


@dataclass(eq=False)
class Region:
    """The body of a program, loop or branch.

    Attributes:
      inputs: its arguments; for the body of a scan the constants, the carries, and one slice of each scanned array.
      ops: the operations in program order.
      outputs: its results; for the body of a scan the carries, and one slice of each stacked result.
    """

    inputs: list[Value]
    ops: list[Op] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """An operation: an equation of the jaxpr that is not a call.

    Attributes:
      name: the name of its primitive.
      ins, outs: its operands, without scalar literals, and its results.
      path: JAX's name stack, which names the functions around the operation and has "transpose" in backward passes.
      regions: the body of a loop, or the branches of a conditional; () for other operations.
      skipped, consts, carries: the numbers of a loop's operands of three kinds: read only by the condition of a
        `while`; constants of the body; and values carried from one iteration to the next.
      params: the parameters of the equation.
      unread: the indices of operands that the body of a loop does not use.
    """

    name: str
    ins: list[Value]
    outs: list[Value]
    path: str = ""
    regions: list[Region] = field(default_factory=list)
    skipped: int = 0
    consts: int = 0
    carries: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)

    @property
    def reads(self) -> list[Value]:
        """The operands that the operation uses: the body of a loop may leave some of the loop's operands unread."""
        return [one for i, one in enumerate(self.ins) if i not in self.unread]


def build(closed: Any, arguments: Sequence[tuple[Split, str, str]], sizes: Mapping[str, int]) -> Region:
    """Make the graph of a traced step; operations that contribute to no result are left out.

    Args:
      closed: the closed jaxpr of the step.
      arguments: for each argument of the step the axes that split its dimensions, its role and its path.
      sizes: the size of each mesh axis.
    """
    builder = _Builder(sizes)
    inputs = [
        builder.value(var.aval, split, role, path)
        for var, (split, role, path) in zip(open_jaxpr(closed)[0].invars, arguments, strict=True)
    ]
    region = builder.region(closed, inputs, builder.axes)
    skip_round_trips(region)
    eliminate(region, set(region.outputs))
    return region


class _Builder:
    """Builds the graph of a jaxpr on one device of a mesh; `sizes` has the size of each mesh axis."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self.axes = frozenset(axis for axis, size in sizes.items() if size > 1)
        self.maker: dict[Value, Op] = {}
        self.calls: tuple[Any, ...] = ()
        """The equations of the calls that are being inlined, the innermost first."""

    def value(self, aval: Any, split: Split, role: str = "", path: str = "") -> Value:
        """Make a `Value` from the abstract value of a jaxpr's variable; `split` has the mesh axes of each dimension."""
        aval_of_array = getattr(aval, "inner_aval", aval)  # of a reference the array that it refers to
        shape, dtype = tuple(getattr(aval_of_array, "shape", ())), getattr(aval_of_array, "dtype", None)
        on_host = getattr(aval, "memory_space", None) is jax.memory.Space.Host
        parameter = path if role == "parameters" else ""
        shard = shard_shape(shape, split, self.sizes)
        return Value(shape, dtype, split, shard, role, path, on_host, parameter=parameter)

    def region(self, program: Any, inputs: Sequence[Value | None], automatic: frozenset[str], path: str = "") -> Region:
        """Make the `Region` of a jaxpr. A literal input is None; name stacks of operations are prefixed with `path`."""
        region = Region([one for one in inputs if one is not None])
        outs = self._inline(region, program, inputs, automatic, path)
        region.outputs = [one for one in outs if one is not None]
        return region

    def _inline(
        self, region: Region, program: Any, inputs: Sequence[Value | None], automatic: frozenset[str], path: str
    ) -> list[Value | None]:
        jaxpr, _ = open_jaxpr(program)
        env: dict[Any, Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {var: self._constant(var) for var in jaxpr.constvars}
        for eqn in jaxpr.eqns:
            operands = [None if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            outs = self._equation(region, eqn, operands, automatic, f"{path}/{eqn.source_info.name_stack}")
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._constant(atom) if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]

    def _constant(self, atom: Any) -> Value:
        return self.value(atom.aval, replicated(getattr(atom.aval, "shape", ())), "constant")

    def _equation(
        self, region: Region, eqn: Any, operands: list[Value | None], automatic: frozenset[str], path: str
    ) -> list[Value | None]:
        name, params = eqn.primitive.name, eqn.params
        inner = params.get(CALLS.get(name, ""))
        if inner is not None:
            outside, self.calls = self.calls, (eqn, *self.calls)
            results = self._inline(region, inner, operands, automatic, path)
            self.calls = outside
            return results
        if name == "shard_map":
            return self._shard_map(region, eqn, operands, automatic, path)
        over, ins = _axes_of(params), [one for one in operands if one is not None]
        alone = bool(over and ins) and self.axes.isdisjoint(over)  # a collective over one device: the same memory
        op = Op("enter" if alone else name, ins, [], path, params=params)
        region.ops.append(op)
        if name in _WITH_REGIONS:
            op.ins = [
                self._constant(atom) if one is None else one for atom, one in zip(eqn.invars, operands, strict=True)
            ]
            (self._cond if name == "cond" else self._loop)(op, eqn, automatic)
        elif name == "sharding_constraint":
            split = spec_split(params["sharding"].spec, len(eqn.outvars[0].aval.shape), automatic)
            self._refine(op.ins, [split])
            op.outs = [self.value(eqn.outvars[0].aval, split, path=path)]
        else:
            known = [(one.split, one.shape) for one in ins if one.shape != ()]
            for var in eqn.outvars:
                shape = tuple(getattr(var.aval, "shape", ()))
                split = propagate(name, params, known, shape) if known else replicated(shape)
                op.outs.append(self.value(var.aval, split, path=path))
            if name in _ALIKE:
                self._refine_alike(op.ins, op.outs[0])
        for one in op.outs:
            self.maker[one], one.equations = op, (eqn, *self.calls)
            one.parameter = ins[0].parameter if name in _COPIES and len(ins) == 1 else ""
        return list(op.outs)

    def _shard_map(
        self, region: Region, eqn: Any, operands: list[Value | None], automatic: frozenset[str], path: str
    ) -> list[Value | None]:
        """Inline the body of a shard_map, with operations between its operands and inputs, and its outputs and results.

        The operation "enter" has a result that shares the memory of its operand: each device has the same shard inside
        and outside. The operation "enter_moved" slices or gathers an operand whose sharding differs inside.
        """
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
            inner.equations, inner.parameter = operand.equations, operand.parameter
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
            outer.equations = (eqn, *self.calls) if one is None else one.equations
            region.ops.append(Op("enter", [] if one is None else [one], [outer], path))
            outs.append(outer)
        return outs

    def _loop(self, op: Op, eqn: Any, automatic: frozenset[str]) -> None:
        """Make the region of a loop's body. A carry that the body returns split is split from the start."""
        params = eqn.params
        if op.name == "scan":
            body, (op.consts, op.carries) = params["jaxpr"], scan_counts(dict(params))
        else:
            body, op.skipped, op.consts = params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]
            op.carries = len(op.ins) - op.skipped - op.consts
        first = op.skipped + op.consts
        consts, start, rows = op.ins[op.skipped : first], op.ins[first:][: op.carries], op.ins[first + op.carries :]
        avals = [var.aval for var in open_jaxpr(body)[0].invars]

        def region(carried: Sequence[Split]) -> Region:
            splits = [*(one.split for one in consts), *carried, *(one.split[1:] for one in rows)]
            inputs = [self.value(aval, split, "inner") for aval, split in zip(avals, splits, strict=True)]
            for one, operand in zip(inputs, op.ins[op.skipped :], strict=True):
                one.parameter = operand.parameter
            return self.region(body, inputs, automatic, op.path)

        carried, inner = [one.split for one in start], region([one.split for one in start])
        returned = [merge([one.split, old]) for one, old in zip(inner.outputs, carried, strict=False)]
        if returned != carried:
            carried, inner = returned, region(returned)
        op.regions = [inner]
        self._refine(start, carried)
        splits = [*carried, *(((), *one.split) for one in inner.outputs[op.carries :])]
        op.outs = [self.value(var.aval, split, path=op.path) for var, split in zip(eqn.outvars, splits, strict=True)]

    def _cond(self, op: Op, eqn: Any, automatic: frozenset[str]) -> None:
        for branch in eqn.params["branches"]:
            avals = [var.aval for var in open_jaxpr(branch)[0].invars]
            copies = [self.value(aval, one.split, "inner") for aval, one in zip(avals, op.ins[1:], strict=True)]
            op.regions.append(self.region(branch, copies, automatic, op.path))
        for place, var in enumerate(eqn.outvars):
            made = [region.outputs[place].split for region in op.regions]
            op.outs.append(self.value(var.aval, merge(made), path=op.path))

    # Backward: from a reader to values that nothing else splits.

    def _refine(self, values: Sequence[Value], splits: Sequence[Split]) -> None:
        """Split values as their reader requires, if nothing else determines the sharding of these values.

        Arrays of zeros are an example, and gradient accumulators that start as zeros. `splits` has the split of each
        value that the reader requires.
        """
        for value, wanted in zip(values, splits, strict=True):
            if value.role not in ("", "inner") or len(wanted) != len(value.shape):
                continue
            split = merge([value.split, wanted])
            op = self.maker.get(value)
            if split == value.split:
                continue
            if op is None:
                if value.role == "inner":
                    self._set_split(value, split)
            elif op.name in _WITH_REGIONS:
                self._refine_inside(op, value, split)
            else:
                self._refine_through(op, value, split)

    def _refine_through(self, op: Op, value: Value, split: Split) -> None:
        """Split the result `value` of an operation, and the operands along the dimensions that become split ones."""
        if op.name in _LINEAR or _is_constant(op) or _repeats(op, split) or self._holds_constant(op):
            self._set_split(value, split)
            self._refine_alike(op.ins, value)
        elif op.name in _CUT:
            self._set_split(value, split)
            alike = [one for one in op.ins if len(one.shape) == len(value.shape)]
            self._refine(alike, [_of_same_size(split, value.shape, one.shape) for one in alike])
        elif op.name == "reshape" and _without_ones(op.ins[0].shape) == _without_ones(value.shape):
            entries = iter([entry for entry, size in zip(split, value.shape, strict=True) if size > 1])
            before = tuple(next(entries) if size > 1 else () for size in op.ins[0].shape)
            self._refine(op.ins, [before])
            if op.ins[0].split == before:
                self._set_split(value, split)
        elif op.name == "dot_general" and _contracted_axes(op).isdisjoint(axis for entry in split for axis in entry):
            self._set_split(value, split)  # each device computes its part from operands that it has in full

    def _refine_alike(self, values: Sequence[Value], result: Value) -> None:
        """Give the split of a result to the operands that have the same shape as the result."""
        alike = [one for one in values if one.shape == result.shape]
        self._refine(alike, [result.split] * len(alike))

    def _refine_inside(self, op: Op, value: Value, split: Split) -> None:
        """Split a result of a loop or branch, and the output of its body that becomes this result.

        If a gradient accumulator is sharded after a loop, the gradients are then reduce-scattered inside the loop.
        """
        number = op.outs.index(value)
        self._set_split(value, split)
        if op.name == "scan" and number >= op.carries:
            self._refine([op.regions[0].outputs[number]], [split[1:]])
            return
        for body in op.regions:
            self._refine([body.outputs[number]], [split])
        if op.name in LOOPS:
            at = op.consts + number
            self._refine([op.regions[0].inputs[at], op.ins[op.skipped + at]], [split, split])

    def _holds_constant(self, op: Op) -> bool:
        """Return True for a sharding constraint on an array made of scalars, such as zeros."""
        maker = self.maker.get(op.ins[0]) if op.name == "sharding_constraint" else None
        return maker is not None and _is_constant(maker)

    def _set_split(self, value: Value, split: Split) -> None:
        value.split, value.shard = split, shard_shape(value.shape, split, self.sizes)


def _is_constant(op: Op) -> bool:
    """Return True if all operands of an operation are scalars, such as the zero of a broadcast."""
    return not any(one.shape for one in op.ins)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size > 1]


def _of_same_size(split: Split, shape: Sequence[int], other: Sequence[int]) -> Split:
    return tuple(entry if size == its else () for entry, size, its in zip(split, shape, other, strict=True))


def _repeats(op: Op, split: Split) -> bool:
    """Return True if a broadcast's result is split only along dimensions that the broadcast adds."""
    kept = op.params.get("broadcast_dimensions", ()) if op.name == "broadcast_in_dim" else range(len(split))
    return all(not split[dim] for dim in kept)


def _contracted_axes(product: Op) -> set[str]:
    """Return the mesh axes that split the dimensions over which a matrix product sums."""
    contracted = product.params["dimension_numbers"][0]
    return {axis for one, dims in zip(product.ins, contracted, strict=False) for dim in dims for axis in one.split[dim]}


def _axes_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes over which a collective inside a `shard_map` runs."""
    named = params.get("axis_name", params.get("axes", ()))
    return tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if isinstance(axis, str))


# Operations that compilers leave out.


def skip_round_trips(region: Region) -> None:
    """Remove casts from bf16 to f32 and back (or other dtypes): the operations that follow read the original array."""
    source: dict[Value, Value] = {}
    same: dict[Value, Value] = {}
    for op in region.ops:
        op.ins = [same.get(one, one) for one in op.ins]
        for inner in op.regions:
            skip_round_trips(inner)
        if op.name != "convert_element_type" or len(op.ins) != 1:
            continue
        (narrow,), (made,) = op.ins, op.outs
        if narrow in source and source[narrow].dtype == made.dtype and source[narrow].shard == made.shard:
            same[made] = source[narrow]
        elif _holds(made.dtype, narrow.dtype):
            source[made] = narrow
    region.outputs = [same.get(one, one) for one in region.outputs]


def _holds(wide: Any, narrow: Any) -> bool:
    """Return True if the floating dtype `wide` represents every number of the different floating dtype `narrow`."""
    if wide == narrow or not all(jnp.issubdtype(one, jnp.floating) for one in (wide, narrow)):
        return False
    return all(getattr(jnp.finfo(wide), part) >= getattr(jnp.finfo(narrow), part) for part in ("nmant", "nexp"))


def eliminate(region: Region, wanted: set[Value]) -> None:
    """Remove operations whose results are not needed, inside loops and branches too, as compilers do.

    Args:
      region: the graph, which is changed in place.
      wanted: the values that are needed.
    """
    needed, kept = set(wanted), []
    for op in reversed(region.ops):
        if op.outs and needed.isdisjoint(op.outs):
            continue
        _eliminate_inside(op, needed)
        needed.update(op.reads)
        kept.append(op)
    region.ops = kept[::-1]


def _eliminate_inside(op: Op, needed: set[Value]) -> None:
    if op.name == "scan":
        (body,) = op.regions
        wanted = set(body.outputs[: op.carries])
        wanted |= {inner for inner, outer in zip(body.outputs, op.outs, strict=True) if outer in needed}
        eliminate(body, wanted)
        read = {one for inner in body.ops for one in inner.ins} | wanted
        rows = op.consts + op.carries
        op.unread = {i for i, one in enumerate(body.inputs) if one not in read and not op.consts <= i < rows}
    elif op.name == "cond":
        for branch in op.regions:
            made = zip(branch.outputs, op.outs, strict=True)
            eliminate(branch, {inner for inner, outer in made if outer in needed})
    else:
        for inner in op.regions:
            eliminate(inner, set(inner.outputs))


def every_op(region: Region) -> Iterator[Op]:
    """Yield all operations of a region, each followed by the operations in its loop body or branches."""
    for op in region.ops:
        yield op
        for inner in op.regions:
            yield from every_op(inner)


def dtype_bits(dtype: Any) -> int:
    """Return the number of bits of an element; 64 for a typed random key, which is two uint32 words."""
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 64
    return 0 if str(dtype) == "float0" else int(jax.dtypes.itemsize_bits(dtype))
