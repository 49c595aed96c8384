"""Derive the collectives of weights that are gathered in 8 bits (`engines/rounded_weights.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxshard.checks.collectives.expected import Expected, gather_stages
from jaxshard.checks.collectives.parameters import Parameter
from jaxshard.core.encoding import carrier
from jaxshard.core.placement import Placement
from jaxshard.engines.rounded_weights import contracted_axes, scale_spec

Rounded = tuple[str, tuple[int, ...]]
"""(8-bit dtype, contracted dimensions) of a weight."""


def scale_maxima(mesh: Mesh, parameter: Parameter, rounded: Rounded) -> Iterator[Expected]:
    """Yield the all-reduce that finds the largest magnitudes of a weight whose contracted dimensions are split."""
    contracted = rounded[1]
    if axes := contracted_axes(parameter.param, contracted):
        shape = _scales_of(parameter.param, contracted).shard_shape(mesh)
        yield Expected("all-reduce", tuple(axes), shape, jnp.dtype(jnp.float32), 1, 1, f"scales of {parameter.path}")


def rounded_gathers(
    mesh: Mesh, param: Placement, keep: Sequence[str], one: Expected, rounded: Rounded, *, stack: int
) -> Iterator[Expected]:
    """Yield the all-gathers of one use of a weight: its 8-bit numbers, and scales whose channels are split.

    Args:
      mesh: the mesh.
      param: the placement of the weight, or of one block of a stack.
      keep: the mesh axes over which it stays split.
      one: the all-gather of which each result is a copy, with its own axes, shape and dtype.
      rounded: the 8-bit dtype, and the contracted dimensions of the stacked weight.
      stack: how many dimensions fewer than the stacked weight `param` has.
    """
    dtype, contracted = rounded
    yield from gather_stages(mesh, param, keep, replace(one, dtype=jnp.dtype(carrier(dtype))), at_once=False)
    scales = _scales_of(param, tuple(dim - stack for dim in contracted))
    yield from gather_stages(mesh, scales, keep, replace(one, dtype=jnp.dtype(jnp.float32)), at_once=False)


def _scales_of(param: Placement, contracted: tuple[int, ...]) -> Placement:
    scales = param
    for dim in contracted:
        scales = scales.resize(dim, 1)
    return replace(scales, store=scale_spec(param.store, scales.view.stored))
