"""Sum gradients over devices in a chosen dtype, in global-view code.

In global-view code the sum over devices is no separate operation. It belongs to the operation that sums over rows, and
the compiler adds the devices' shares in that operation's dtype. With bf16 weights that is bf16, even if the gradient is
cast afterwards:

    dw: bf16[16,8] = dot_general x dy            x and dy are split by rows: all-reduced in bf16
    g: f32[16,8]   = convert_element_type dw     too late

So the cast is moved into the operation with the sum, in the jaxpr of the gradient:

    dw: f32[16,8]  = dot_general[preferred_element_type=f32] x dy      all-reduced in f32

`sum_in(gradient, f32)` marks a gradient, and `widen_sums(fn)` is `fn` with f32 results in the operations that compute
a marked gradient: a product, a convolution, a sum or a scatter-add of the same operands, and all operations between it
and the mark (transposes and reshapes, sums of several gradients, gradients that a loop stacks or adds). Nothing is
computed twice: the search stops at a value that has other users. If an operation is none of these, the gradient is cast
after it, as written, and `js.audit` shows the dtype of the sum.

A transpose of a marked product is moved into the product too, whose operands are swapped: the compiler adds the shares
right after the product, and a transpose after that is a pass over the gradient of its own.

    t: f32[8,16]   = dot_general dy x                 JAX's derivative of x @ w by w
    dw: f32[16,8]  = transpose t                      becomes dot_general x dy

A smaller dtype is moved to the sum in the same way, as in `sum_in(gradient, bf16)` of a norm's scale that is computed
in f32, but only through products, sums and operations that only move elements: a difference of two large sums would
lose its digits. Each device still adds its positions in f32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxshard.core.compat import cast_primitive, scan_counts
from jaxshard.core.jaxpr import CALLS, Program, bind, equations_inside, evaluate, open_jaxpr

_mark = cast_primitive("sum_in")

_SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add"})
"""Primitives that sum over rows; the compiler adds the shares of their results over devices."""

_LINEAR = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "div", "dynamic_slice",
    "dynamic_update_slice", "mul", "neg", "pad", "reshape", "rev", "select_n", "sharding_constraint",
    "slice", "squeeze", "sub", "transpose",
})  # fmt: skip
"""Primitives that may be between a sum over rows and the marked gradient, and that can compute in f32 too."""

_MOVES = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "rev", "sharding_constraint", "squeeze", "transpose",
})  # fmt: skip
"""The primitives of `_LINEAR` that do not round."""

_NARROWED = _MOVES | {"dot_general", "reduce_sum"}
"""Primitives that can return a smaller dtype directly; JAX does not allow it for convolutions."""

_CALLS = {name: parameter for name, parameter in CALLS.items() if parameter == "jaxpr"} | {"scan": "jaxpr"}
"""Primitives whose inner jaxpr is rewritten too; calls with custom derivatives are forward code."""

Dtypes = Sequence[Any]
"""For each of several values the dtype to compute it in; None for its own dtype."""


def sum_in(gradient: jax.Array, dtype: Any) -> jax.Array:
    """Cast a gradient to a dtype. Inside `widen_sums`, also sum the gradient over devices in that dtype."""
    marked: jax.Array = _mark.bind(gradient, dtype=jnp.dtype(dtype))
    return marked


def widen_sums(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` so that each gradient that it passes to `sum_in(gradient, dtype)` is summed over devices in that dtype.

    The jaxpr of `fn` is rewritten: the product or sum that makes the gradient gets results of that dtype.
    """

    def run(*args: Any) -> Any:
        program = Program.trace(fn, *args)
        results = _run(program.closed, jax.tree.leaves(args), [None] * len(jax.tree.leaves(program.out)))
        return jax.tree.unflatten(jax.tree.structure(program.out), results)

    return run


def _run(program: Any, args: Sequence[Any], outs: Dtypes) -> list[Any]:
    """Evaluate a jaxpr, with its results in the dtypes `outs`; None keeps a result's dtype.

    The arguments may have other dtypes than the jaxpr's variables.
    """
    jaxpr, _ = open_jaxpr(program)
    wanted = _find_wanted(jaxpr, outs)
    swapped = _find_swapped(jaxpr, wanted)
    made_already = set(swapped.values())

    def rule(eqn: Any, values: list[Any]) -> list[Any]:
        dtypes = [wanted.get(var) for var in eqn.outvars]
        if any(var in swapped for var in eqn.outvars):
            eqn, values = _swap_operands(eqn), values[::-1]
        elif any(var in made_already for var in eqn.outvars):
            return _cast(eqn.outvars, values, dtypes)
        return _evaluate(eqn, values, dtypes)

    return _cast(jaxpr.outvars, evaluate(program, args, rule), outs)


def _cast(atoms: Sequence[Any], values: Sequence[Any], dtypes: Dtypes) -> list[Any]:
    """Cast each value to its dtype in `dtypes`, or, if this is None, to the dtype of its variable in `atoms`."""

    def cast(atom: Any, value: Any, dtype: Any) -> Any:
        if dtype is not None and _is_float(atom):
            return lax.convert_element_type(value, dtype)
        own = None if isinstance(atom, Literal) else getattr(atom.aval, "dtype", None)
        return value if own is None or value.dtype == own else value.astype(own)

    return [cast(*one) for one in zip(atoms, values, dtypes, strict=True)]


def _evaluate(eqn: Any, values: Sequence[Any], wanted: Dtypes) -> list[Any]:
    """Evaluate one equation, with results in the dtypes `wanted` if its primitive allows it (None: unchanged)."""
    primitive, params = eqn.primitive, eqn.params

    def read(dtypes: Dtypes) -> list[Any]:
        return _cast(eqn.invars, values, dtypes)

    operands = read([None] * len(values))
    name, dtype = primitive.name, wanted[0] if wanted else None
    wide = [dtype] * len(values)
    if primitive is _mark:
        return read([params["dtype"]])
    if name in _CALLS and (any(wanted) or _has_mark(eqn)):
        inner, ins = params[_CALLS[name]], _wanted_inputs(eqn, wanted)
        operands = read(ins)
        params = params | {_CALLS[name]: _widen_program(inner, ins, wanted)}
    elif name == "cond" and (any(wanted) or _has_mark(eqn)):
        branches = (_widen_program(inner, [None] * len(operands[1:]), wanted) for inner in params["branches"])
        params = params | {"branches": tuple(branches)}
    elif dtype is not None and name == "scatter-add":
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [lax.scatter_add(*read(wide), **{name: params[name] for name in names})]
    elif dtype is not None and name == "convert_element_type":
        return [lax.convert_element_type(read(wide)[0], dtype)]
    elif (
        dtype is not None and name == "reduce_sum" and _is_narrower(dtype, eqn.outvars[0]) and not _only_drops_ones(eqn)
    ):
        return [_narrow_sum(operands[0], params["axes"], dtype)]
    elif dtype is not None and "preferred_element_type" in params:
        params = params | {"preferred_element_type": dtype}
    elif dtype is not None and name in _LINEAR | _SUMS:
        operands = read(wide)
    return bind(eqn.replace(params=params), operands)


def _find_swapped(jaxpr: Any, wanted: dict[Any, Any]) -> dict[Any, Any]:
    """Find marked products that are only transposed, to the product of their operands in the other order.

    Returns:
      {variable of the product: variable of the transpose}.
    """
    products = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"}
    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "transpose" or isinstance(eqn.invars[0], Literal):
            continue
        (var,) = eqn.invars
        if var in wanted and var in products and eqn.params["permutation"] == _other_order(products[var]):
            found[var] = eqn.outvars[0]
    return found


def _other_order(product: Any) -> tuple[int, ...] | None:
    """Return the permutation that turns lhs x rhs into rhs x lhs.

    None for a product that can't be swapped: with batch dimensions, an output sharding, or an algorithm, which may take
    both operands differently.
    """
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    kept = product.invars[0].aval.ndim - len(contracted)
    dims = tuple(range(product.outvars[0].aval.ndim))
    algorithm = isinstance(product.params["precision"], jax.lax.DotAlgorithm)
    out = product.params.get("out_sharding")
    can_swap = not batch and not algorithm and (out is None or not any(out.spec))
    return dims[kept:] + dims[:kept] if can_swap else None


def _swap_operands(eqn: Any) -> Any:
    """Write a product without batch dimensions with its operands in the other order."""
    contracted, batch = eqn.params["dimension_numbers"]
    precision = eqn.params["precision"]
    swapped = {
        "dimension_numbers": (contracted[::-1], batch),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return eqn.replace(invars=eqn.invars[::-1], params=eqn.params | swapped)


def _narrow_sum(x: jax.Array, dims: Sequence[int], dtype: Any) -> jax.Array:
    """Sum over `dims`: in the dtype of `x` over all but the first dimension, then in `dtype`, which has fewer bits.

    The first dimension is the rows, which devices split, so that only the sum over devices is in `dtype`.
    """
    rows, *rest = sorted(dims)
    zero = np.zeros((), x.dtype)
    partial = lax.convert_element_type(lax.reduce(x, zero, lax.add, rest) if rest else x, dtype)
    total: jax.Array = lax.reduce(partial, zero.astype(dtype), lax.add, [rows])
    return total


def _widen_program(inner: Any, ins: Dtypes, outs: Dtypes) -> Any:
    """Trace the jaxpr `inner` again with arguments in the dtypes `ins` and results in `outs`; None keeps a dtype."""
    jaxpr, _ = open_jaxpr(inner)
    avals = [x if dtype is None else x.update(dtype=dtype) for x, dtype in zip(jaxpr.in_avals, ins, strict=True)]
    widened = jax.make_jaxpr(lambda *args: _run(inner, args, outs))(*avals)
    return widened if hasattr(inner, "jaxpr") else open_jaxpr(widened)[0]


# Find the wanted dtype of each value, backwards from the marks and the wanted results.


def _find_wanted(jaxpr: Any, outs: Dtypes) -> dict[Any, Any]:
    """Return {variable: dtype} for the variables of a jaxpr that should be computed in another dtype.

    `outs` are the dtypes in which the results are wanted (None: unchanged). Arguments of the jaxpr may be included.
    """
    used = [atom for eqn in jaxpr.eqns for atom in eqn.invars] + list(jaxpr.outvars)
    uses = Counter(atom for atom in used if not isinstance(atom, Literal))
    made_by = {var: eqn.primitive.name for eqn in jaxpr.eqns for var in eqn.outvars}
    wanted: dict[Any, Any] = {}

    def want(atoms: Sequence[Any], dtypes: Dtypes) -> None:
        for atom, dtype in zip(atoms, dtypes, strict=True):
            # Changing a value that has other users would change more than the gradient.
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
    """Return True if `dtype` has fewer bits than the dtype of the floating variable `atom`."""
    return bool(jnp.finfo(dtype).bits < jnp.finfo(atom.aval.dtype).bits)


def _wanted_inputs(eqn: Any, outs: Dtypes) -> list[Any]:
    """Return the dtype that each operand of a call or scan should have, given the dtypes `outs` of its results."""
    jaxpr, _ = open_jaxpr(eqn.params[_CALLS[eqn.primitive.name]])
    wanted = _find_wanted(jaxpr, outs)
    ins = [wanted.get(var) for var in jaxpr.invars]
    if eqn.primitive.name == "scan":  # a carry has the same dtype in all iterations
        consts, carries = scan_counts(eqn.params)
        ins[consts : consts + carries] = outs[:carries]
    return ins


def _only_drops_ones(eqn: Any) -> bool:
    """Return True for a `reduce_sum` over dimensions of size 1 only; JAX uses it to undo broadcasting."""
    return eqn.primitive.name == "reduce_sum" and bool(eqn.invars[0].aval.size == eqn.outvars[0].aval.size)


def _has_mark(eqn: Any) -> bool:
    return any(inner.primitive is _mark for inner in equations_inside(eqn))


def _is_float(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
