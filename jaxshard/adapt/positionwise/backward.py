"""Check `jax.custom_vjp` functions: a hand-written backward pass may mix positions even if the forward pass does not.

Facts about gradients are the reverse of facts about values: the gradient with respect to a sum over positions is the
same for all positions, and the gradient with respect to a value that all positions use is a sum over positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.adapt.positionwise.facts import SAME, Fact, Kind
from jaxshard.adapt.positionwise.shares import is_share


def is_custom_vjp(eqn: Any) -> bool:
    """Return True if an equation calls a `jax.custom_vjp` function."""
    return bool(eqn.primitive.name.startswith("custom_vjp_call"))


def is_float(dtype: Any) -> bool:
    """Return True for a floating or complex dtype, whose values have gradients."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def trace_backward(eqn: Any) -> Any:
    """Trace the backward pass of a `jax.custom_vjp` call.

    Returns:
      A jaxpr (operands, cotangents of the floating-point results) -> gradients of the floating-point operands.
    """
    operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    results = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.outvars]

    def backward(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        def call(floats: list[Any]) -> list[Any]:
            given = iter(floats)
            inputs = [next(given) if is_float(x.dtype) else x for x in operands]
            made = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            return [x for x in made if is_float(x.dtype)]

        _, pull = jax.vjp(call, [x for x in operands if is_float(x.dtype)])
        (gradients,) = pull(cotangents)
        return list(gradients)

    return jax.make_jaxpr(backward)(operands, [x for x in results if is_float(x.dtype)])


def fact_of_cotangent(fact: Fact) -> Fact:
    """Return the fact that must hold for the gradient with respect to a value, given the fact about the value.

    A fact says how a value depends on the sequence positions. If the value is a sum or maximum over positions, its
    gradient is the same on all devices. If the value is the same on all devices, its gradient is a sum over positions.
    If the value has an entry for each position, so has its gradient.
    """
    return SAME if is_share(fact) else Fact(Kind.SUM) if fact.kind is Kind.SAME else fact


def fits(fact: Fact, gradient: Fact) -> bool:
    """Return True if a gradient depends on the sequence positions as it must for a value with this fact.

    Args:
      fact: how the value depends on the positions.
      gradient: how the gradient with respect to the value depends on the positions, in a hand-written backward pass.
    """
    if gradient.zero or gradient.kind is Kind.LOST:
        return True
    expected = fact_of_cotangent(fact)
    if expected.kind is Kind.ALONG and gradient.kind is Kind.ALONG:
        return expected.dim == gradient.dim and (
            gradient.is_constant or (gradient.outer, gradient.inner) == (expected.outer, expected.inner)
        )
    return gradient.kind is expected.kind and gradient.degree == expected.degree
