"""Which elements a result depends on: a forward analysis of a program that was traced twice, for two sets of shapes.

Every value of the program gets a `Value` out of five kinds, from "the same number everywhere" to "mixes elements".
The two traces run side by side, so that a number or a program that depends on a shape is seen as well. Whatever is
not known to be harmless counts as mixing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from jaxshard.core.compat import equation_frames, scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.optim.proof.primitives import ELEMENTWISE, RESHAPES, SAME, evaluate


class Kind(IntEnum):
    """What is known of a value."""

    FILL = 0  # one number, the same in all elements and on all devices, whatever the arrays of the parameters hold
    FREE = 1  # independent of the arrays of the parameters, but not the same in all elements
    LEAF = 2  # element i depends on element i of the arrays of one parameter, whose shape it has, and on fills
    PART = 3  # this device's share of a sum over whole arrays, not yet summed over the axes
    MIXED = 4  # anything else


class Source(NamedTuple):
    """What is to blame: an equation with the transform and the line that made it, or an array without them."""

    primitive: str
    text: str
    transform: str = ""
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.transform}: {self.primitive} at {self.where}" if self.where else self.primitive
        return f"{place} {self.text}"


class Value(NamedTuple):
    """What is known of one value.

    `leaf` is the parameter of a LEAF; `leaves` are all parameters whose arrays have any influence; `pad` is the
    value, where it is known, of a FILL or of the elements of a LEAF where its parameter and gradient are zero
    padding.
    """

    kind: Kind
    leaf: int | None = None
    leaves: frozenset[int] = frozenset()
    pad: float | None = None
    why: Source | None = None


class Scope(NamedTuple):
    """What the analysis of one program knows of its surroundings."""

    names: tuple[str, ...]  # the path of each parameter
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # its shapes in the two traces
    axes: tuple[str, ...]  # mesh axes that split the arrays; a sum over them is the same number everywhere
    root: str  # the file whose frames end the part of a traceback that belongs to the transform
    total: bool = False  # whether a sum over all elements of all parameters counts as one number
    call: Any = None  # the outermost call around the program: traces of jitted functions are cached with old tracebacks


def flow(first: Any, second: Any, args: Sequence[Value], scope: Scope) -> list[Value]:
    """The `Value` of every output of a program, from its two traces and the values of its inputs."""
    (one, one_consts), (two, two_consts) = open_jaxpr(first), open_jaxpr(second)
    known: dict[Any, Value] = {}
    twin: dict[Any, Any] = {}

    def write(variables: Sequence[Any], twins: Sequence[Any], values: Sequence[Value]) -> None:
        for variable, other, value in zip(variables, twins, values, strict=True):
            fill = value.kind is Kind.FREE and variable.aval.shape == ()
            known[variable] = value._replace(kind=Kind.FILL) if fill else value
            twin[variable] = other

    def differ(equation: Any) -> list[Value]:
        leaves = frozenset(range(len(scope.names)))
        why = source_of(equation, scope, "belongs to a program that depends on the shape of the parameters")
        return [Value(Kind.MIXED, leaves=leaves, why=why)] * len(one.outvars)

    if len(one_consts) != len(two_consts):
        return differ(None)
    write(one.constvars, two.constvars, [_constant(a, b) for a, b in zip(one_consts, two_consts, strict=True)])
    write(one.invars, two.invars, args)
    for a, b in zip(one.eqns, two.eqns):
        if not _same_equation(a, b, twin):
            return differ(a)
        values = [_literal(x, y, a, scope) if isinstance(x, Literal) else known[x] for x, y in zip(a.invars, b.invars)]
        write(a.outvars, b.outvars, _equation(a, b, values, scope))
    if len(one.eqns) != len(two.eqns):
        longer = max(one, two, key=lambda jaxpr: len(jaxpr.eqns))
        return differ(longer.eqns[min(len(one.eqns), len(two.eqns))])
    return [
        _literal(x, y, None, scope) if isinstance(x, Literal) else known[x] for x, y in zip(one.outvars, two.outvars)
    ]


def source_of(equation: Any, scope: Scope, text: str) -> Source:
    """Names the transform and the line behind an equation: the innermost update or init function that is not JAX's."""
    for candidate in (scope.call, equation):
        frames = [] if candidate is None else equation_frames(candidate)
        end = next((i for i, (file, _, _) in enumerate(frames) if file == scope.root), len(frames))
        frames = [frame for frame in frames[:end] if "/jax/" not in frame[0].replace("\\", "/")]
        for file, line, function in frames:
            parts = function.replace(".<locals>", "").split(".")
            if len(parts) > 1 and parts[-1].lstrip("_").startswith(("update", "init")):
                return Source(_name(equation), text, parts[-2], f"{_short(file)}:{line}")
        if frames:
            file, line, function = frames[0]
            return Source(_name(equation), text, function.replace(".<locals>", ""), f"{_short(file)}:{line}")
    return Source(_name(equation), text)


def _name(equation: Any) -> str:
    return "a constant" if equation is None else equation.primitive.name


def _short(file: str) -> str:
    path = file.replace("\\", "/")
    return path.split("site-packages/")[-1] if "site-packages/" in path else "/".join(path.split("/")[-2:])


# Values that enter a program by themselves.


def _constant(a: Any, b: Any) -> Value:
    if np.shape(a) == () and a is b:
        return Value(Kind.FILL, pad=_number(a))
    if not isinstance(a, jax.core.Tracer) and not isinstance(b, jax.core.Tracer):
        x, y = (jax.random.key_data(c) if jax.dtypes.issubdtype(c.dtype, jax.dtypes.prng_key) else c for c in (a, b))
        x, y = np.asarray(x), np.asarray(y)
        if x.size and y.size and (x == x.flat[0]).all() and (y == x.flat[0]).all():
            return Value(Kind.FILL, pad=_number(x.flat[0]))
        if np.array_equal(x, y):
            return Value(Kind.FREE, why=Source("a constant of the transform", f"has shape {x.shape}"))
    return Value(Kind.MIXED, why=Source("a constant of the transform", "depends on the shape of the parameters"))


def _literal(a: Any, b: Any, equation: Any, scope: Scope) -> Value:
    if isinstance(b, Literal) and (a.val == b.val or (a.val != a.val and b.val != b.val)):
        return Value(Kind.FILL, pad=_number(a.val))
    numbers = f"{a.val} and {getattr(b, 'val', b)}"
    text = f"uses a number that depends on the shape of the parameters or the size of the axis: {numbers}"
    return Value(Kind.MIXED, why=source_of(equation, scope, text))


def _number(x: Any) -> float | None:
    dtype = jax.dtypes.result_type(x)
    real = any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))
    return float(x) if real and not isinstance(x, jax.core.Tracer) and math.isfinite(x) else None


def _same_equation(a: Any, b: Any, twin: dict[Any, Any]) -> bool:
    """Whether two equations are the same but for shapes and numbers (which are compared as values)."""
    if a.primitive is not b.primitive or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
        return False
    for x, y in zip(a.invars, b.invars):
        if isinstance(x, Literal) != isinstance(y, Literal) or (not isinstance(x, Literal) and twin[x] is not y):
            return False
    if a.primitive.name == "cond":
        return len(a.params["branches"]) == len(b.params["branches"])
    if a.primitive.name in CALLS or a.primitive.name == "while":
        return True  # the programs inside are compared when they are entered
    if a.primitive.name == "scan":
        return all(a.params[key] == b.params[key] for key in ("length", "reverse"))
    keys = a.params.keys() - {"shape", "new_sizes", "sharding", "out_sharding"}
    if _reduces_all(a) and _reduces_all(b):  # of arrays that may differ in rank
        keys -= {"axes"}
    return a.params.keys() == b.params.keys() and all(repr(a.params[key]) == repr(b.params[key]) for key in keys)


def _reduces_all(equation: Any) -> bool:
    axes = equation.params.get("axes", ())
    return equation.primitive.name.startswith("reduce_") and len(axes) == len(equation.invars[0].aval.shape)


# One equation.


def _equation(a: Any, b: Any, values: list[Value], scope: Scope) -> list[Value]:
    name = a.primitive.name
    if name in CALLS:
        inner = scope if scope.call is not None else scope._replace(call=a)
        return flow(a.params[CALLS[name]], b.params[CALLS[name]], values, inner)
    if name in LOOPS:
        return LOOPS[name](a, b, values, scope)
    if name in SAME:
        return values
    if name in ("psum", "psum_invariant"):
        return [_psum(a, value, scope) for value in values]
    if name in ELEMENTWISE:
        share = _share(a, values) or _share(a, _scalars_as_shares(a, b, values, scope))
        return [share or _elementwise(a, b, [_total(value, scope) for value in values], scope)]
    if len(values) == 1 and (moved := _moved(a, b, values[0], scope)):
        return [moved]
    return [_opaque(a, b, values, scope)] * len(a.outvars)


def _opaque(a: Any, b: Any, values: list[Value], scope: Scope) -> Value:
    """A primitive of which nothing is known: it may mix all of its inputs, and it sees their shapes."""
    leaves = frozenset().union(*(value.leaves for value in values))
    worst = max(values, key=lambda value: value.kind, default=Value(Kind.FILL))
    if worst.kind is Kind.MIXED:
        return worst._replace(leaves=leaves)
    if a.effects or a.primitive.name in ("rng_uniform", "infeed"):
        return Value(Kind.MIXED, leaves=leaves, why=source_of(a, scope, "has side effects or depends on the device"))
    arrays = [*a.invars, *a.outvars]
    if all(array.aval.shape == () for array in arrays) and worst.kind is Kind.LEAF:
        return _elementwise(a, b, values, scope)._replace(pad=None)
    if worst.kind in (Kind.FILL, Kind.FREE):
        if [x.aval.shape for x in arrays] == [x.aval.shape for x in (*b.invars, *b.outvars)]:
            return Value(Kind.FREE, leaves=leaves, why=worst.why or source_of(a, scope, "gives an array of its own"))
        return Value(Kind.MIXED, leaves=leaves, why=source_of(a, scope, "depends on the shape of the parameters"))
    if worst.kind is Kind.PART:
        return Value(Kind.MIXED, leaves=leaves, why=worst.why)
    return Value(Kind.MIXED, leaves=leaves, why=source_of(a, scope, f"mixes elements of {_names(leaves, scope)}"))


def _elementwise(a: Any, b: Any, values: list[Value], scope: Scope, out: int = 0) -> Value:
    leaves = frozenset().union(*(value.leaves for value in values))
    worst = max(values, key=lambda value: value.kind)
    if worst.kind is Kind.MIXED:
        return worst._replace(leaves=leaves)
    if worst.kind is Kind.PART:
        return Value(Kind.MIXED, leaves=leaves, why=worst.why)
    if worst.kind is not Kind.LEAF:
        pad = _pad(a, values) if worst.kind is Kind.FILL else None
        return Value(worst.kind, leaves=leaves, pad=pad, why=worst.why)
    owners = {value.leaf for value in values if value.kind is Kind.LEAF}
    if len(owners) > 1:
        return Value(Kind.MIXED, leaves=leaves, why=source_of(a, scope, f"mixes {_names(owners, scope)}"))
    free = next((value for value in values if value.kind is Kind.FREE), None)
    if free is not None:
        return Value(Kind.MIXED, leaves=leaves, why=free.why)
    if (a.outvars[out].aval.shape, b.outvars[out].aval.shape) != scope.shapes[worst.leaf or 0]:
        text = f"changes the shape of {_names(owners, scope)}"
        return Value(Kind.MIXED, leaves=leaves, why=source_of(a, scope, text))
    return Value(Kind.LEAF, worst.leaf, leaves, _pad(a, values))


def _pad(a: Any, values: list[Value]) -> float | None:
    """The result where all arrays are padding, if it is known; a fill whose number is unknown counts as finite."""
    name, pads = a.primitive.name, [value.pad for value in values]
    if name == "mul" and 0.0 in pads and all(v.pad == 0 or v.kind is Kind.FILL for v in values):
        return 0.0
    if name == "div" and pads[0] == 0 and pads[1] is None and values[1].kind is Kind.FILL:
        return 0.0
    if name == "select_n" and len(set(pads[1:])) == 1:
        return pads[1]
    return None if None in pads else evaluate(name, a.params, pads, a.outvars[0].aval.dtype)


def _moved(a: Any, b: Any, value: Value, scope: Scope) -> Value | None:
    """The value after a reshape or a reduction that does no harm; None where it does."""
    name, (x,) = a.primitive.name, a.invars
    same_shape = x.aval.shape == a.outvars[0].aval.shape and b.invars[0].aval.shape == b.outvars[0].aval.shape
    order = a.params.get("permutation", a.params.get("broadcast_dimensions", a.params.get("dimensions") or ()))
    if name in RESHAPES and (value.kind in (Kind.FILL, Kind.FREE) or (same_shape and list(order) == sorted(order))):
        return value
    if not name.startswith("reduce_") or value.kind in (Kind.FREE, Kind.MIXED):
        return None
    axes = sorted(a.params.get("axes", (-1,)))
    if not axes:
        return value
    if (
        name == "reduce_sum"
        and (scope.axes or scope.total)
        and value.kind is Kind.LEAF
        and axes == list(range(len(x.aval.shape)))
    ):
        if value.pad == 0:
            text = f"sums a part of {_names(value.leaves, scope)}, and uses that before lax.psum over {scope.axes}"
            return Value(Kind.PART, leaves=value.leaves, why=source_of(a, scope, text))
        text = f"sums {_names(value.leaves, scope)} with padding that may not be zero: sum before changing gradients"
        return Value(Kind.MIXED, leaves=value.leaves, why=source_of(a, scope, text))
    return None


def _share(a: Any, values: list[Value]) -> Value | None:
    """A linear function of shares of sums is a share of a sum."""
    kinds, name = [value.kind for value in values], a.primitive.name
    leaves = frozenset().union(*(value.leaves for value in values))
    linear = (
        (name in ("add", "sub", "add_any") and all(v.kind is Kind.PART or _is_zero(v) for v in values))
        or (name == "mul" and set(kinds) == {Kind.PART, Kind.FILL})
        or (name == "div" and kinds == [Kind.PART, Kind.FILL])
        or name in ("neg", "real")
        or (name == "convert_element_type" and np.issubdtype(a.params["new_dtype"], np.inexact))
    )
    part = next((value for value in values if value.kind is Kind.PART), None)
    return part._replace(leaves=leaves) if part and linear and Kind.MIXED not in kinds else None


def _scalars_as_shares(a: Any, b: Any, values: list[Value], scope: Scope) -> list[Value]:
    """The arguments of a sum in which numbers that are whole arrays are shares like the sums of other arrays."""
    leaves = {value.leaf for value in values if value.kind is Kind.LEAF}
    alone = len(leaves) == 1 and not any(value.kind is Kind.PART for value in values)  # one array's, as any other
    if not scope.total or a.primitive.name not in ("add", "add_any") or alone:
        return values

    def share(value: Value, x: Any, y: Any) -> Value:
        scalar = value.kind is Kind.LEAF and value.pad == 0 and x.aval.shape == y.aval.shape == ()
        return Value(Kind.PART, leaves=value.leaves) if scalar else value

    return [share(*each) for each in zip(values, a.invars, b.invars, strict=True)]


def _total(value: Value, scope: Scope) -> Value:
    """A share that every parameter contributed to, where that counts as one number."""
    complete = scope.total and value.kind is Kind.PART and len(value.leaves) == len(scope.names) > 1
    return Value(Kind.FILL, leaves=value.leaves) if complete else value


def _is_zero(value: Value) -> bool:
    return value.kind is Kind.FILL and value.pad == 0


def _psum(a: Any, value: Value, scope: Scope) -> Value:
    axes = a.params["axes"]
    if value.kind is Kind.MIXED:
        return value
    if value.kind is Kind.PART and set(axes) >= set(scope.axes) and a.params.get("axis_index_groups") is None:
        return Value(Kind.FILL, leaves=value.leaves)
    text = f"sums over {axes} what is no share of a sum over {scope.axes}"
    return Value(Kind.MIXED, leaves=value.leaves, why=source_of(a, scope, text))


def _names(leaves: Any, scope: Scope) -> str:
    names = [scope.names[leaf] for leaf in sorted(leaves)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Branches and loops.


def _join(a: Any, x: Value, y: Value, scope: Scope) -> Value:
    """What is known of a value that is either of two."""
    leaves = x.leaves | y.leaves
    low, high = sorted((x, y), key=lambda value: value.kind)
    if x.kind is y.kind and x.leaf == y.leaf:
        return x._replace(leaves=leaves, pad=x.pad if x.pad == y.pad else None)
    if high.kind is Kind.MIXED or (low.kind is Kind.FILL and high.kind is Kind.FREE):
        return high._replace(leaves=leaves)
    if low.kind is Kind.FILL and high.kind is Kind.LEAF:
        return high._replace(leaves=leaves, pad=x.pad if x.pad == y.pad else None)
    if low.kind is Kind.FREE:
        return Value(Kind.MIXED, leaves=leaves, why=low.why)
    return Value(Kind.MIXED, leaves=leaves, why=source_of(a, scope, f"mixes {_names(leaves, scope)}"))


def _gate(a: Any, b: Any, choice: Value, values: list[Value], scope: Scope) -> list[Value]:
    """Values whose computation depends on a scalar choice."""
    if choice.kind is Kind.FILL:
        return [value._replace(leaves=value.leaves | choice.leaves) for value in values]
    return [_elementwise(a, b, [choice, value], scope, i)._replace(pad=None) for i, value in enumerate(values)]


def _cond(a: Any, b: Any, values: list[Value], scope: Scope) -> list[Value]:
    branches = zip(a.params["branches"], b.params["branches"], strict=True)
    results = [flow(one, two, values[1:], scope) for one, two in branches]
    joined = results[0]
    for result in results[1:]:
        joined = [_join(a, x, y, scope) for x, y in zip(joined, result, strict=True)]
    return _gate(a, b, values[0], joined, scope)


def _fixpoint(step: Callable[[list[Value]], list[Value]], start: list[Value], a: Any, scope: Scope) -> list[Value]:
    while True:
        joined = [_join(a, x, y, scope) for x, y in zip(start, step(start), strict=True)]
        if joined == start:
            return joined
        start = joined


def _while(a: Any, b: Any, values: list[Value], scope: Scope) -> list[Value]:
    split = a.params["cond_nconsts"], a.params["cond_nconsts"] + a.params["body_nconsts"]
    cond_consts, body_consts, start = values[: split[0]], values[split[0] : split[1]], values[split[1] :]
    bodies = a.params["body_jaxpr"], b.params["body_jaxpr"]
    carry = _fixpoint(lambda carry: flow(*bodies, [*body_consts, *carry], scope), start, a, scope)
    again = flow(a.params["cond_jaxpr"], b.params["cond_jaxpr"], [*cond_consts, *carry], scope)
    return _gate(a, b, again[0], carry, scope)


def _scan(a: Any, b: Any, values: list[Value], scope: Scope) -> list[Value]:
    consts, carries = scan_counts(a.params)

    def slices(value: Value) -> Value:
        if value.kind is not Kind.LEAF:
            return value
        text = f"scans over the elements of {_names(value.leaves, scope)}"
        return Value(Kind.MIXED, leaves=value.leaves, why=source_of(a, scope, text))

    rows = [slices(value) for value in values[consts + carries :]]
    bodies = a.params["jaxpr"], b.params["jaxpr"]

    def body(carry: list[Value]) -> list[Value]:
        return flow(*bodies, [*values[:consts], *carry, *rows], scope)

    carry = _fixpoint(lambda carry: body(carry)[:carries], values[consts : consts + carries], a, scope)

    def stacked(value: Value) -> Value:
        if value.kind is Kind.FILL:
            why = source_of(a, scope, "stacks one number per iteration")
            return Value(Kind.FREE, leaves=value.leaves, why=why)
        return slices(value) if value.kind is not Kind.PART else value._replace(kind=Kind.MIXED)

    return [*carry, *(stacked(value) for value in body(carry)[carries:])]


LOOPS: dict[str, Callable[..., list[Value]]] = {"cond": _cond, "while": _while, "scan": _scan}
