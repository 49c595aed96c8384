"""Gradients summed over devices in the dtype that was promised, in global-view code.

There the sum over devices is no operation of its own. It belongs to the operation that sums over rows, and the compiler
adds up the devices' shares in that operation's dtype. With bf16 weights that is bf16, whatever happens to the gradient
afterwards:

    dw: bf16[16,8] = dot_general x dy            x and dy split by rows: each device has a share, all-reduced in bf16
    g: f32[16,8]   = convert_element_type dw     too late

So the cast is moved to where the sum is, in the traced program of the gradient:

    dw: f32[16,8]  = dot_general[preferred_element_type=f32] x dy      all-reduced in f32

`sum_in(gradient, f32)` marks a gradient, and `widen_sums(fn)` is `fn` with the operations behind each mark widened: a
product, a convolution, a sum or a scatter-add in the wider dtype of the same operands, and whatever lies between them
and the mark (transposed and reshaped gradients, sums of several, those that a loop stacks or adds up). Nothing is
computed twice: a value with other users is not looked behind. Where an operation is none of these the gradient is cast
behind it, as written, and `js.audit` shows the dtype of the sum.

A narrower dtype is moved to the sum in the same way, `sum_in(gradient, bf16)` of a norm's scale that is computed in
f32, but only behind products and sums, and what moves their results: a difference of two large sums would lose its
digits. Each device still adds up its positions in f32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params

from jaxshard.core.compat import cast_primitive, equation_context, scan_counts
from jaxshard.core.jaxpr import CALLS, Program, open_jaxpr

_mark = cast_primitive("sum_in")

_SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add"})
"""Primitives that sum over rows; the compiler adds up what several devices have of their results."""

_LINEAR = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "div", "dynamic_slice",
    "dynamic_update_slice", "mul", "neg", "pad", "reshape", "rev", "select_n", "sharding_constraint",
    "slice", "squeeze", "sub", "transpose",
})  # fmt: skip
"""Primitives that stand between such a sum and a gradient, and compute the same in a wider dtype."""

_MOVES = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "rev", "sharding_constraint", "squeeze", "transpose",
})  # fmt: skip
"""Those of them that round nothing."""

_NARROWED = _MOVES | {"dot_general", "reduce_sum"}
"""Primitives that may give their result in a narrower dtype at once; JAX lets no convolution do so."""

_CALLS = {name: parameter for name, parameter in CALLS.items() if parameter == "jaxpr"} | {"scan": "jaxpr"}
"""Primitives whose inner program is widened too; calls with a derivative of their own are forward code."""

Dtypes = Sequence[Any]
"""For each of several values the dtype in which it is wanted, wider or narrower than its own; None for its own."""


def sum_in(gradient: jax.Array, dtype: Any) -> jax.Array:
    """Cast a gradient; inside `widen_sums` the dtype is also that of the sums over devices that it is made of."""
    marked: jax.Array = _mark.bind(gradient, dtype=jnp.dtype(dtype))
    return marked


def widen_sums(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` in which gradients that are given to `sum_in` are summed in the dtype given there."""

    def run(*args: Any) -> Any:
        program = Program.trace(fn, *args)
        results = _run(program.closed, jax.tree.leaves(args), [None] * len(jax.tree.leaves(program.out)))
        return jax.tree.unflatten(jax.tree.structure(program.out), results)

    return run


def _run(program: Any, args: Sequence[Any], outs: Dtypes) -> list[Any]:
    """Evaluate a program, with results in the wanted dtypes; an argument may have another than its variable, too."""
    jaxpr, consts = open_jaxpr(program)
    wanted = _find_wanted(jaxpr, outs)
    values: dict[Any, Any] = {}  # in the dtypes that they have

    def read(atom: Any, dtype: Any = None) -> Any:
        if isinstance(atom, Literal):
            value, own = atom.val, None
        else:
            value, own = values[atom], getattr(atom.aval, "dtype", None)
        if dtype is not None and _is_float(atom):
            return lax.convert_element_type(value, dtype)
        return value if own is None or value.dtype == own else value.astype(own)

    values.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        with equation_context(eqn):
            results = _evaluate(eqn, [wanted.get(var) for var in eqn.outvars], read)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom, dtype) for atom, dtype in zip(jaxpr.outvars, outs, strict=True)]


def _evaluate(eqn: Any, wanted: Dtypes, read: Callable[..., Any]) -> Sequence[Any]:
    """Return the results of an equation, in the wanted dtypes where it is known how."""
    primitive, params, operands = eqn.primitive, eqn.params, list(map(read, eqn.invars))
    name, dtype = primitive.name, wanted[0] if wanted else None
    if primitive is _mark:
        return [read(eqn.invars[0], params["dtype"])]
    if name in _CALLS and (any(wanted) or _has_mark(eqn)):
        inner, ins = params[_CALLS[name]], _wanted_inputs(eqn, wanted)
        operands = [read(atom, dtype) for atom, dtype in zip(eqn.invars, ins, strict=True)]
        params = params | {_CALLS[name]: _widen_program(inner, ins, wanted)}
    elif name == "cond" and (any(wanted) or _has_mark(eqn)):
        branches = (_widen_program(inner, [None] * len(operands[1:]), wanted) for inner in params["branches"])
        params = params | {"branches": tuple(branches)}
    elif dtype is not None and name == "scatter-add":
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [lax.scatter_add(*(read(atom, dtype) for atom in eqn.invars), **{name: params[name] for name in names})]
    elif dtype is not None and name == "convert_element_type":
        return [lax.convert_element_type(read(eqn.invars[0], dtype), dtype)]
    elif (
        dtype is not None and name == "reduce_sum" and _is_narrower(dtype, eqn.outvars[0]) and not _only_drops_ones(eqn)
    ):
        return [_narrow_sum(operands[0], params["axes"], dtype)]
    elif dtype is not None and "preferred_element_type" in params:
        params = params | {"preferred_element_type": dtype}
    elif dtype is not None and name in _LINEAR | _SUMS:
        operands = [read(atom, dtype) for atom in eqn.invars]
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _narrow_sum(x: jax.Array, dims: Sequence[int], dtype: Any) -> jax.Array:
    """Sum over dimensions, the first of which are rows, split over devices: these alone in the narrower dtype."""
    rows, *rest = sorted(dims)
    zero = np.zeros((), x.dtype)
    partial = lax.convert_element_type(lax.reduce(x, zero, lax.add, rest) if rest else x, dtype)
    total: jax.Array = lax.reduce(partial, zero.astype(dtype), lax.add, [rows])
    return total


def _widen_program(inner: Any, ins: Dtypes, outs: Dtypes) -> Any:
    """Return the program of a call with arguments and results in the wanted dtypes, closed if it is closed."""
    jaxpr, _ = open_jaxpr(inner)
    avals = [x if dtype is None else x.update(dtype=dtype) for x, dtype in zip(jaxpr.in_avals, ins, strict=True)]
    widened = jax.make_jaxpr(lambda *args: _run(inner, args, outs))(*avals)
    return widened if hasattr(inner, "jaxpr") else open_jaxpr(widened)[0]


# From the marks and the wanted results backwards: which values are wanted in which dtype.


def _find_wanted(jaxpr: Any, outs: Dtypes) -> dict[Any, Any]:
    """Find the variables of a program, arguments included, that are wanted in another dtype, and in which."""
    used = [atom for eqn in jaxpr.eqns for atom in eqn.invars] + list(jaxpr.outvars)
    uses = Counter(atom for atom in used if not isinstance(atom, Literal))
    made_by = {var: eqn.primitive.name for eqn in jaxpr.eqns for var in eqn.outvars}
    wanted: dict[Any, Any] = {}

    def want(atoms: Sequence[Any], dtypes: Dtypes) -> None:
        for atom, dtype in zip(atoms, dtypes, strict=True):
            # Behind a value that others use too, more than the gradient would change.
            if dtype is None or isinstance(atom, Literal) or not _is_float(atom) or uses[atom] != 1:
                continue
            if not _is_narrower(dtype, atom) or made_by.get(atom) in _NARROWED:
                wanted[atom] = dtype

    want(jaxpr.outvars, outs)
    for eqn in reversed(jaxpr.eqns):
        dtypes = [wanted.get(var) for var in eqn.outvars]
        if eqn.primitive is _mark:
            want(eqn.invars, [eqn.params["dtype"]])
        elif eqn.primitive.name in _CALLS:
            want(eqn.invars, _wanted_inputs(eqn, dtypes))
        elif eqn.primitive.name in _LINEAR or _only_drops_ones(eqn):
            want(eqn.invars, dtypes * len(eqn.invars))
    return wanted


def _is_narrower(dtype: Any, atom: Any) -> bool:
    """Return True for a dtype that is narrower than that of a floating variable."""
    return bool(jnp.finfo(dtype).bits < jnp.finfo(atom.aval.dtype).bits)


def _wanted_inputs(eqn: Any, outs: Dtypes) -> list[Any]:
    """Return in which dtypes a call or a scan takes its operands, so that its results come out as wanted."""
    jaxpr, _ = open_jaxpr(eqn.params[_CALLS[eqn.primitive.name]])
    wanted = _find_wanted(jaxpr, outs)
    ins = [wanted.get(var) for var in jaxpr.invars]
    if eqn.primitive.name == "scan":  # what is carried has one dtype in all turns
        consts, carries = scan_counts(eqn.params)
        ins[consts : consts + carries] = outs[:carries]
    return ins


def _only_drops_ones(eqn: Any) -> bool:
    """Return True for a sum over dimensions of size one, which is how JAX undoes broadcasting."""
    return eqn.primitive.name == "reduce_sum" and bool(eqn.invars[0].aval.size == eqn.outvars[0].aval.size)


def _has_mark(eqn: Any) -> bool:
    return eqn.primitive is _mark or any(
        _has_mark(inner) for program in jaxprs_in_params(eqn.params) for inner in open_jaxpr(program)[0].eqns
    )


def _is_float(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
