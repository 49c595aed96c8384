"""The rules of `jax.custom_vjp`: a backward pass that its author wrote may mix what the forward pass keeps apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxshard.adapt.positionwise.facts import SAME, Fact, Kind, Mixes
from jaxshard.adapt.positionwise.pair import Pair
from jaxshard.adapt.positionwise.shares import is_share

if TYPE_CHECKING:
    from jaxshard.adapt.positionwise.walk import Walk


def is_custom_vjp(pair: Pair) -> bool:
    """Return whether an equation calls a function with a backward pass of its own."""
    return pair.name.startswith("custom_vjp_call")


def check_backward(walk: Walk, pair: Pair, facts: list[Fact]) -> None:
    """Note what mixes positions in the backward pass of a call.

    Gradients are the other way round: that of a sum is the same for all positions, and that of a value that all
    positions use is a sum over them.

    Raises:
      Mixes: a gradient is not that of a value such as the operand.
    """
    if all(fact.kind is Kind.SAME for fact in facts) or any(fact.kind is Kind.LOST for fact in facts):
        return
    parameter = "call_jaxpr" if "call_jaxpr" in pair.params else "fun_jaxpr"
    walk.silent += 1
    results = walk.program(pair.params[parameter], pair.two.params[parameter], facts)
    walk.silent -= 1
    if any(fact.kind is Kind.LOST for fact in results):
        return
    one, two = (_trace_backward(eqn) for eqn in (pair.one, pair.two))
    cotangents = [
        _of_cotangent(fact) for fact, x in zip(results, pair.one.outvars, strict=True) if _is_float(x.aval.dtype)
    ]
    before = len(walk.findings)
    found = walk.closed(one, two, [*facts, *cotangents])
    walk.findings[before:] = [
        finding._replace(what=f"in the backward pass of a jax.custom_vjp {finding.what}")
        for finding in walk.findings[before:]
    ]
    floats = [fact for fact, x in zip(facts, pair.one.invars, strict=True) if _is_float(x.aval.dtype)]
    if len(walk.findings) > before:
        return
    for fact, gradient in zip(floats, found, strict=True):
        if gradient.kind is not Kind.LOST and not gradient.zero and not _fits(fact, gradient):
            raise Mixes("has a backward pass that is not right on a part of the positions")


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _trace_backward(eqn: Any) -> Any:
    """Trace `fn(operands, cotangents of floating results) -> gradients of floating operands` of a call."""
    operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    results = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.outvars]

    def backward(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def call(floats: list[Any]) -> list[Any]:
            given = iter(floats)
            inputs = [next(given) if _is_float(x.dtype) else x for x in operands]
            made = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            return [x for x in made if _is_float(x.dtype)]

        _, pull = jax.vjp(call, [x for x in operands if _is_float(x.dtype)])
        (gradients,) = pull(cotangents)
        return list(gradients)

    return jax.make_jaxpr(backward)(operands, [x for x in results if _is_float(x.dtype)])


def _of_cotangent(fact: Fact) -> Fact:
    return SAME if is_share(fact) else Fact(Kind.SUM) if fact.kind is Kind.SAME else fact


def _fits(fact: Fact, gradient: Fact) -> bool:
    expected = _of_cotangent(fact)
    if expected.kind is Kind.ALONG and gradient.kind is Kind.ALONG:
        return expected.dim == gradient.dim and (
            gradient.is_constant or (gradient.outer, gradient.inner) == (expected.outer, expected.inner)
        )
    return gradient.kind is expected.kind and gradient.degree == expected.degree
