"""Check that a loss does not change the parameters of an NNX module: only the optimizer may change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.jaxpr import Program
from jaxshard.core.tree import path_str, raise_all
from jaxshard.core.types import PyTree
from jaxshard.proofs.handed_through import handed_through

Values = list[tuple[str, Any]]
"""(path, array) of each parameter after a call of the loss."""


def run_unchanged(run: Callable[[PyTree], tuple[Any, Values]], params: PyTree) -> Any:
    """Call `run(params)`, and raise if it changed parameters: only the optimizer may change them.

    Flax's transforms (nnx.remat, nnx.jit, nnx.scan) replace the array in each variable by a new array with the same
    value, a result of their program. So a replaced array is no proof of a change. If an array was replaced, `run` is
    traced as well, and the jaxpr shows whether the new array is an input that was returned unchanged.

    Args:
      run: returns (output, [(path, value)] of all parameters afterwards).
      params: the parameters.

    Returns:
      The output.

    Raises:
      ValueError: `run` changed or made parameters; names each.
    """
    params = jax.tree.map(jnp.asarray, params)
    output, values = run(params)
    before = {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    if any(before.get(path) is not x for path, x in values):
        program = Program.trace(lambda params: [x for _, x in run(params)[1]], params)
        paths = list(before)
        sources = [None if index is None else paths[index] for index in handed_through(program.closed)]
        refuse_changes(
            f"{path}: " + ("set" if path in before else "was never initialised: made by a call")
            for (path, _), source in zip(values, sources, strict=True)
            if path != source
        )
    return output


def refuse_changes(problems: Any) -> None:
    """Raise a ValueError that lists the parameters that a loss changed, unless `problems` is empty."""
    raise_all(
        problems,
        ValueError,
        "js.nnx: the loss made or changed parameters, which only the optimizer may; make every nnx.Param in the "
        "module's __init__, and what a call changes another nnx.Variable",
    )
