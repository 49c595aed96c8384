"""The shapes of weights, by which arrays of a compiled program are recognised: of a layout, or of its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jax.sharding import NamedSharding

from jaxshard.checks.collectives.expected import normal_shape
from jaxshard.checks.programs.arguments import EITHER, PARAMETER, Argument
from jaxshard.checks.programs.live import Known
from jaxshard.core.layout import Layout

_HEADS = re.compile(r"embed|wte|head|vocab|logits", re.IGNORECASE)


def known_shapes(layout: Layout) -> Known:
    """Return the shapes of a layout's weights, and the sizes of its vocabulary."""
    return Known(_weights(layout), _vocabularies(layout))


def _weights(layout: Layout) -> set[tuple[int, ...]]:
    mesh, shapes = layout.mesh, set[tuple[int, ...]]()
    for one in layout.placed():
        if one.role in ("param", "grad"):
            used = NamedSharding(mesh, one.placement.use).shard_shape(one.leaf.shape)
            for shape in (one.leaf.shape, used, one.placement.shard_shape(mesh)):
                shapes |= {normal_shape(shape), normal_shape(shape[1:])}
    return {dims for dims in shapes if len(dims) > 1}


def _vocabularies(layout: Layout) -> set[int]:
    arrays = [one.leaf for one in layout.placed() if one.role == "param" and _HEADS.search(one.leaf.path)]
    largest = max((size for leaf in arrays if len(leaf.shape) > 1 for size in leaf.shape), default=0)
    axes = {name: size for name, size in layout.mesh.shape.items() if name not in layout.sum_axes}
    return {largest // size for size in (1, *axes.values()) if largest // size > 256}


def shapes_of_arguments(arguments: Iterable[Argument]) -> Known:
    """Return the shapes of the parameters among the arguments, and the sizes of a vocabulary by their names."""
    weights, vocabularies = set[tuple[int, ...]](), set[int]()
    for one in arguments:
        if one.role in (PARAMETER, EITHER):
            shapes = (one.shape, one.global_shape)
            weights |= {normal_shape(dims) for shape in shapes for dims in (shape, shape[1:])}
            if _HEADS.search(one.name):
                vocabularies |= {max(shape) for shape in shapes if len(shape) > 1}
    return Known({dims for dims in weights if len(dims) > 1}, {size for size in vocabularies if size > 256})
