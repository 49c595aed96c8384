"""Name the dimensions of parameters, from the known models of a training run and from the rules of `js.tensor`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxshard.core.kinds import group_by_kind
from jaxshard.core.known_model import ModelRun
from jaxshard.core.layout import split_model
from jaxshard.core.low_rank import matrix_shapes, name_factors
from jaxshard.core.mesh import axis_size, check_axis
from jaxshard.core.rules import pad_names
from jaxshard.core.strategy_parts import INDIVISIBLE, Expert, Strategy, Tensor, part_of, parts_of
from jaxshard.core.tree import BY_LAYER, Leaf, find_by_suffix, leaf_of, map_with_path
from jaxshard.core.types import PyTree


def is_leaf(node: Any) -> bool:
    """Return whether a node of a tree is a `Leaf`; JAX must be told, for it would flatten a `Leaf` as a tuple."""
    return isinstance(node, Leaf)


def name_dims(strategy: Strategy, mesh: Mesh, runs: Sequence[ModelRun], params: PyTree) -> PyTree:
    """Return the parameters as a tree of `Leaf`, with the names that models and rules give to their dimensions.

    Warn of large parameters that `js.tensor` leaves replicated although no rule asks for it.

    Args:
      strategy: the strategy of the layout.
      mesh: the mesh of the layout.
      runs: the known models (models whose structure the library knows) whose `init` made the parameters.
      params: the parameters' shapes.
    """
    matrices = matrix_shapes(params)
    leaves = map_with_path(leaf_of, matrices, names_by_models(runs, matrices))
    given, tree = jax.tree.flatten(leaves, is_leaf=is_leaf)
    records = given
    for part in parts_of(strategy):
        if isinstance(part, Tensor):
            check_axis(mesh, part.axis, "tensor")
            records = part.name_dims(records, mesh)
            _warn_of_rules(part, records, mesh)
    if (expert := part_of(strategy, Expert)) is not None:
        records = expert.name_dims(records, given, mesh)
    return name_factors(params, jax.tree.unflatten(tree, map(pad_names, records)))


def names_by_models(runs: Sequence[ModelRun], params: PyTree) -> PyTree:
    """Return a tuple of dimension names for every parameter, as the model that made it names them.

    A parameter is recognised by its path and shape, even if `init_fn` puts the result of a model's `init` into a larger
    tree. Parameters that no known model made have the names (None, ...).

    Args:
      runs: the known models (models whose structure the library knows) whose `init` ran.
      params: the parameters' shapes.
    """
    known: dict[tuple[Any, ...], tuple[tuple[int, ...], Any]] = {}
    for run in runs:
        made = matrix_shapes(split_model(run.tree)[0])
        names = jax.tree.leaves(run.model.dim_names(made), is_leaf=lambda x: isinstance(x, tuple))
        for (path, x), found in zip(jax.tree_util.tree_leaves_with_path(made), names, strict=True):
            known[path] = (x.shape, found)
    return map_with_path(lambda path, x: find_by_suffix(known, path, x.shape) or (None,) * x.ndim, params)


def _warn_of_rules(part: Tensor, leaves: list[Leaf], mesh: Mesh) -> None:
    for reason, missed in part.find_whole(leaves, mesh).items():
        first, _ = next(iter(group_by_kind(missed, lambda leaf: leaf.path)))
        names = ("embed", "heads", "head_dim") if len(missed[0].shape) == 3 else ("embed", "mlp")
        fix = f"name the dimensions with a rule such as ({first!r}, {names})"
        if reason == INDIVISIBLE:
            fix = f"make its size a multiple of {axis_size(mesh, part.axis)}"
        warnings.warn(
            f"tensor: {reason} {', '.join(_describe_kinds(missed))}: replicated over {part.axis!r}; {fix}, or say "
            f"('*/{first}', 'whole')",
            stacklevel=5,
        )
    if unused := part.rules.find_unused(leaves):
        warnings.warn(
            f"tensor: rules without effect: {'; '.join(unused)}; take them out or correct them (layout.explain() shows "
            "every path)",
            stacklevel=5,
        )


def _describe_kinds(leaves: list[Leaf]) -> list[str]:
    """Describe parameters for a warning, with one text for a parameter that occurs in many blocks.

    An example is "layers/*/fuse/kernel [512, 2048] (24 of them)".
    """
    groups = group_by_kind(leaves, lambda leaf: leaf.path, lambda leaf: (leaf.shape, leaf.names)).items()
    return [
        f"{kind} {list(same[0].shape)}{_describe_names(same[0])}{f' ({len(same)} of them)' if len(same) > 1 else ''}"
        for (kind, _), same in groups
    ]


def _describe_names(leaf: Leaf) -> str:
    return f" {leaf.names}" if any(name not in (None, *BY_LAYER) for name in leaf.names) else ""
