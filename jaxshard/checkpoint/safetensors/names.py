"""The tensors of a model by name: their paths in the tree of `init_fn`, joined by dots."""

from __future__ import annotations

from typing import Any

import jax

from jaxshard.checkpoint.leaves import Entry, pair_up
from jaxshard.checkpoint.safetensors.header import CODES, METADATA, Tensor
from jaxshard.core.layout import Layout, join_model, split_model
from jaxshard.core.tree import abstract, check_same_tree, path_str, paths, raise_all
from jaxshard.training.base import matrix_layout, merge_stored
from jaxshard.training.state import TrainState, check_not_donated, run_shapes

ModelArray = tuple[Entry, jax.Array]
"""(description of an array of a model, the stored array)."""


def model_entries(layout: Layout) -> tuple[list[Entry], Any]:
    """List the arrays of a model with this layout, under their names as tensors in a safetensors file.

    A name is "blocks.attention.kernel"; for a model with a state, "params.dense.kernel" or "state.mean". For a model of
    `js.lora` the list has the full matrices, into which the low-rank factors are merged, but not the factors.

    Args:
      layout: the layout.

    Returns:
      (an `Entry` for each array, in the order of the leaves; the tree structure of the result of `init_fn`).

    Raises:
      ValueError: two paths have the same name, or safetensors can't represent a name or a dtype; the message names
        every such array.
    """
    layout = matrix_layout(layout)
    shapes, placements = join_model(layout.shapes.params, layout.shapes.state), join_model(layout.params, layout.state)
    made, structure = pair_up(shapes, placements, _dotted_name)
    names = [entry.path for entry in made]
    problems = []
    for name, path, dtype in zip(names, paths(shapes), (tensor_of(entry).dtype for entry in made), strict=True):
        if names.count(name) > 1:
            problems.append(f"{path}: the name {name!r} is that of another one too; rename one of them")
        if name == METADATA or name.encode(errors="replace").decode() != name:
            problems.append(f"{path}: {name!r} can't be the name of a tensor; rename it")
        if dtype not in CODES:
            problems.append(f"{path}: safetensors has no {dtype}; keep it in another dtype")
    raise_all(problems, ValueError, "the model can't be a safetensors file")
    return made, structure


def tensor_of(entry: Entry) -> Tensor:
    """Return the dtype and shape that an array has in a file, as a `Tensor` with start=0."""
    return Tensor(str(entry.words.dtype), entry.words.shape, 0)


def model_arrays(run: Any, layout: Layout) -> list[ModelArray]:
    """Return (entry, array on the devices) of each array of a model, in the order of the leaves.

    For a model of `js.lora` the low-rank factors are merged into the matrices.

    Args:
      run: a TrainState, or only its model: stored parameters, or a `js.Model` of stored parameters and state.
      layout: the layout of the run.

    Raises:
      ValueError: the arrays or their shardings differ from the layout; the message names each.
    """
    if isinstance(run, TrainState):
        check_not_donated(run)
    made, _ = model_entries(layout)
    params, state = (run.params, run.state) if isinstance(run, TrainState) else split_model(run)
    model, shapes, fix = join_model(params, state), run_shapes(layout), "give a run of this layout"
    wanted = join_model(shapes.params, shapes.state)
    check_same_tree(abstract(wanted), abstract(model), "the model does not fit the layout", fix)
    pairs = zip(jax.tree_util.tree_leaves_with_path(model), jax.tree.leaves(wanted), strict=True)
    raise_all(
        (
            f"{path_str(path)}: {getattr(x, 'sharding', type(x).__name__)}, expected {want.sharding}"
            for (path, x), want in pairs
            if not isinstance(x, jax.Array) or not x.sharding.is_equivalent_to(want.sharding, x.ndim)
        ),
        ValueError,
        f"arrays of the model have other shardings than the layout; {fix}",
    )
    matrices, _ = merge_stored(params, layout)
    return list(zip(made, jax.tree.leaves(join_model(matrices, state)), strict=True))


def _dotted_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "(root)"
