"""The tensors of a model by name: the paths in what `init_fn` returns, joined by dots."""

from __future__ import annotations

from typing import Any

import jax

from jaxshard.checkpoint.leaves import Entry
from jaxshard.checkpoint.safetensors.header import METADATA, Tensor, has_code
from jaxshard.core.layout import Layout, join_model, split_model
from jaxshard.core.placement import Placement
from jaxshard.core.tree import abstract, check_same_tree, path_str, raise_all
from jaxshard.core.types import PyTree
from jaxshard.training.state import TrainState, run_shapes


def model_entries(layout: Layout) -> tuple[list[Entry], Any]:
    """List the arrays of a layout's models, named as tensors.

    A name is "blocks.attention.kernel"; of a model with a state, "params.dense.kernel" and "state.mean".

    Args:
      layout: the layout.

    Returns:
      (the entries in the order of a model's leaves, the tree structure of what `init_fn` returns).

    Raises:
      ValueError: two paths have one name, a name or a dtype can't stand in a file; every such array is named.
    """
    shapes, placements = join_model(layout.shapes.params, layout.shapes.state), join_model(layout.params, layout.state)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    pairs = zip(leaves, jax.tree.leaves(placements, is_leaf=lambda x: isinstance(x, Placement)), strict=True)
    made = [Entry(_dotted_name(path), tuple(x.shape), x.dtype, placement) for (path, x), placement in pairs]
    names = [entry.path for entry in made]
    problems = []
    for entry, (path, _) in zip(made, leaves):
        if names.count(entry.path) > 1:
            problems.append(f"{path_str(path)}: the name {entry.path!r} is that of another one too; rename one of them")
        if entry.path == METADATA or entry.path.encode(errors="replace").decode() != entry.path:
            problems.append(f"{path_str(path)}: {entry.path!r} can't be the name of a tensor; rename it")
        if not entry.is_key and not has_code(str(entry.dtype)):
            problems.append(f"{path_str(path)}: safetensors has no {entry.dtype}; keep it in another dtype")
    raise_all(problems, ValueError, "the model can't be a safetensors file")
    return made, structure


def tensor_of(entry: Entry) -> Tensor:
    """Return the dtype and shape of an array in a file, as a tensor at its beginning. Random keys are their words."""
    if not entry.is_key:
        return Tensor(str(entry.dtype), entry.shape, 0)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(entry.shape, entry.dtype))
    return Tensor(str(words.dtype), words.shape, 0)


def model_arrays(run: Any, layout: Layout) -> list[jax.Array]:
    """Return the arrays of a model as they are stored, in the order of `model_entries`.

    Args:
      run: a run, or a stored model alone.
      layout: how it is stored.

    Raises:
      ValueError: the arrays are not those of the layout, or do not lie where it stores them; each one is named.
    """
    model: PyTree = join_model(run.params, run.state) if isinstance(run, TrainState) else run
    expected = run_shapes(layout)
    wanted, fix = join_model(expected.params, expected.state), "give a run of this layout"
    check_same_tree(
        abstract(wanted), abstract(join_model(*split_model(model))), "the model does not fit the layout", fix
    )
    pairs = list(zip(jax.tree_util.tree_leaves_with_path(model), jax.tree.leaves(wanted), strict=True))
    raise_all(
        (
            f"{path_str(path)}: {getattr(x, 'sharding', type(x).__name__)}, expected {want.sharding}"
            for (path, x), want in pairs
            if not isinstance(x, jax.Array) or not x.sharding.is_equivalent_to(want.sharding, x.ndim)
        ),
        ValueError,
        f"arrays of the model do not lie where the layout stores them; {fix}",
    )
    return [x for (_, x), _ in pairs]


def _dotted_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "(root)"
