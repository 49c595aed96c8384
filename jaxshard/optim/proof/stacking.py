"""Check whether a transform computes different updates for stacked blocks than for separate blocks.

A model of identical blocks may store their parameters as separate arrays [...] or stacked in one array [blocks, ...].
Adam computes the same updates for both. LAMB divides by the norm of an array, and the norm of the stack is not the norm
of a block. The check reads jaxprs and compares updates, never names or classes:

1. Elementwise transforms, and functions of sums over all parameters, are not affected by stacking. Most transforms are
   of these kinds, and the check ends here.
2. Any other transform must have the same operations for the stacked parameters, for the parameters of one block, and
   for tiny stacked parameters.
3. Then its updates of two tiny blocks, stacked and separate, are computed and compared. Step 2 extends the result from
   tiny arrays to arrays of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.jaxpr import CALLS, all_equations, equations_inside, open_jaxpr
from jaxshard.core.primitives import ELEMENTWISE, RESHAPES, SAME, draws_random_bits
from jaxshard.core.transform import as_transform
from jaxshard.core.tree import BLOCKS, map_with_path, path_str
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.elementwise import is_elementwise_except_totals
from jaxshard.optim.proof.facts import Context, Origin, origin_of
from jaxshard.optim.proof.marked import Marked, is_marked
from jaxshard.optim.proof.report import Reason, describe
from jaxshard.proofs.walk import Place

_COUNTS = 64
"""The number of step counts, from 0 on, that are tried to detect transforms that act differently every n-th step."""

_QUICK: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}
"""Compiler options that turn optimizations off, for a program that runs once."""

_TRACING = (TypeError, ValueError, AttributeError, KeyError)
"""The errors that a transform raises if its masks or labels are functions that can't handle `Marked` nodes."""

_TOLERANCE = 1e-3
"""The largest allowed difference between two updates, relative to the parameter's largest update.

Sums in another order differ by less, different updates by more."""


def stacking_changes(tx: Any, params: PyTree, stacked: str = BLOCKS) -> tuple[Reason, ...]:
    """Find the updates of stacked parameters that differ from the updates of separate blocks.

    A transform passes if it is elementwise except for sums over all parameters (the global norm), with the same jaxpr
    for stacked parameters and for the parameters of one block. Any other transform must have the same operations for
    both, and for tiny arrays. With tiny arrays, the updates of two blocks, stacked and separate, are then computed and
    compared on the default device: in the first step, and in the second step with all integer scalars of the state,
    such as counts, set to each number from 0 to 63. (What a transform does only every hundredth step is not detected.)
    Transforms inside `per_block` are not checked. No collectives.

    Args:
      tx: An optax transform.
      params: The parameters, which may be abstract; under the top-level key `stacked` arrays have shape [blocks, ...].
      stacked: The top-level key of the stacked parameters.

    Returns:
      One reason per update that stacking changes; empty if there is none.

    Example:
        js.optim.stacking_changes(optax.adam(1e-3), params)     # ()
        js.optim.stacking_changes(optax.lamb(1e-3), params)     # (Reason("update blocks/w", ...scale_by_trust_ratio at
                                                                #  ... gives other updates to blocks that are stacked),)
    """
    tx = as_transform(tx)
    shapes = _Shapes(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params), stacked)
    if not shapes.any:
        return ()
    together, alone = shapes.mark_stacked(shapes.params), shapes.mark_one_block(shapes.params)
    try:
        if is_elementwise_except_totals(tx, together, alone):
            return ()
        if draws_random_bits(_trace_update(tx, together)):
            return _blame(tx, shapes, "draws random numbers for arrays as they are stacked")
        tiny = shapes.shrink()
        trees = (together, alone, shapes.mark_stacked(tiny))
        operations = [_operations(all_equations(_trace_update(tx, tree))) for tree in trees]
        if operations[0] != operations[1]:
            return _blame(tx, shapes, "computes something else for arrays that are stacked than for those of one block")
        if operations[0] != operations[2]:
            return _blame(tx, shapes, "computes something else at other shapes, so that tiny arrays prove nothing")
        wrong = _compare_updates(tx, shapes, tiny)
    except _TRACING as error:
        return _blame(tx, shapes, f"cannot be compared with the unstacked model: {error}")
    if not wrong:
        return ()
    text = f"gives other updates to blocks that are stacked, by {min(max(wrong.values()), 9.99):.0%} on tiny arrays"
    return _blame(tx, shapes, text, [f"update {path}" for path in wrong])


def require_same_stacked(tx: Any, params: PyTree, stacked: str = BLOCKS) -> None:
    """Raise if stacking changes an update; takes the arguments of `stacking_changes`.

    Raises:
      ValueError: Stacking changes an update. The message names the transforms, the leaves and the fix.

    Example:
        js.optim.require_same_stacked(js.optim.per_block(optax.lamb(1e-3)), params)
    """
    reasons = stacking_changes(tx, params, stacked)
    if reasons:
        raise ValueError(
            "the blocks of this model were stacked, and that changes what this optimizer does to them: "
            f"{describe(reasons)}. Wrap it in js.optim.per_block(tx), which updates every block by itself; what looks "
            "at all parameters at once goes in front: "
            "optax.chain(optax.clip_by_global_norm(1.0), js.optim.per_block(tx))"
        )


class _Shapes:
    """The shapes of the parameters, and three ways to replace each stacked array by a `Marked` node.

    A `Marked` node has as leaves either the stacked array, or each block, or a single block.
    """

    def __init__(self, params: PyTree, stacked: str):
        self.params, self.stacked = params, stacked
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self.any = any(self._is_block(path) for path, _ in leaves)
        sizes = {size for path, x in leaves for size in x.shape[self._is_block(path) :]}
        # Tiny sizes keep the order of the sizes, for transforms that ask which dimension is larger. They are at least
        # 3, to differ from dimensions of size 1, which broadcast, and from the dimension of two blocks.
        self._tiny = {size: 3 + i for i, size in enumerate(sorted(sizes - {0, 1}))} | {0: 0, 1: 1}

    def _is_block(self, path: tuple[Any, ...]) -> bool:
        return path_str(path[:1]) == self.stacked

    def shrink(self) -> PyTree:
        """Return the parameters as abstract arrays of a tiny model: two blocks, and very small dimensions."""

        def shrink(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            block = self._is_block(path)
            shape = (2,) * block + tuple(self._tiny[size] for size in x.shape[block:])
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return map_with_path(shrink, self.params)

    def mark_stacked(self, tree: PyTree) -> PyTree:
        """Replace each stacked array [blocks, ...] by a node with one leaf, the array."""
        return self._mark(tree, lambda x: [x])

    def mark_apart(self, tree: PyTree) -> PyTree:
        """Replace each stacked array [blocks, ...] by a node with one leaf [...] for each block."""
        return self._mark(tree, list)

    def mark_one_block(self, tree: PyTree) -> PyTree:
        """Replace each stacked array [blocks, ...] by a node with one abstract leaf [...], for a model of one block."""
        return self._mark(tree, lambda x: [jax.ShapeDtypeStruct(x.shape[1:], x.dtype)])

    def _mark(self, tree: PyTree, slices: Callable[[Any], list[Any]]) -> PyTree:
        return map_with_path(lambda path, x: Marked(slices(x), path[-1]) if self._is_block(path) else x, tree)


# The same operations?


def _trace_update(tx: Any, params: PyTree) -> Any:
    return jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)


def _operations(equations: Iterable[Any]) -> list[str]:
    """Return the names of all operations except reshapes and broadcasts, of which arrays of higher rank need more."""
    return [name for equation in equations if (name := equation.primitive.name) not in RESHAPES | SAME]


# The same numbers?


def _compare_updates(tx: Any, shapes: _Shapes, tiny: PyTree) -> dict[str, float]:
    """Run the optimizer on two tiny blocks, stacked and separate, and compare the updates.

    Returns:
      {path of a parameter: relative difference}, for the parameters whose updates differ.
    """
    params, *grads = (_draw(tiny, seed) for seed in range(3))
    together, apart = (
        _two_updates(tx, mark(params), [mark(one) for one in grads])
        for mark in (shapes.mark_stacked, shapes.mark_apart)
    )
    wrong: dict[str, float] = {}
    for dim, (one, other) in enumerate(zip(together, apart, strict=True)):
        for path, difference in _differences(one, other, dim):
            if not difference <= _TOLERANCE:
                wrong[path] = max(wrong.get(path, 0.0), difference)
    return wrong


def _draw(shapes: PyTree, seed: int) -> PyTree:
    """Draw random arrays of these shapes, whose magnitudes differ between blocks (along the first dimension).

    With equal magnitudes, an update divided by the norm of a block would hardly differ from an update divided by the
    norm of the stack.
    """
    rng = np.random.default_rng(seed)

    def draw(x: Any) -> Any:
        scale = 1 + 2 * np.arange(x.shape[0]).reshape(-1, *(1,) * (len(x.shape) - 1)) if x.shape else 1
        return (scale * rng.normal(size=x.shape)).astype(np.float32)

    return jax.tree.map(draw, shapes)


def _two_updates(tx: Any, params: PyTree, grads: list[PyTree]) -> list[PyTree]:
    """Return [the updates of the first step, the updates of the second step], each like the parameters.

    The second step is computed once for each step count from 0 to 63, which is put into the state. So its updates have
    a new first dimension, of size 64.
    """

    def set_counts(state: PyTree, count: jax.Array) -> PyTree:
        def is_count(x: Any) -> bool:
            return jnp.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.integer)

        return jax.tree.map(lambda x: count.astype(jnp.result_type(x)) if is_count(x) else x, state)

    def run(params: PyTree, grads: list[PyTree]) -> list[PyTree]:
        first, state = tx.update(grads[0], tx.init(params), params)
        second: Callable[[jax.Array], PyTree] = jax.vmap(
            lambda count: tx.update(grads[1], set_counts(state, count), params)[0]
        )
        return [first, second(jnp.arange(_COUNTS))]

    with jax.default_matmul_precision("highest"):
        found: list[PyTree] = jax.device_get(jax.jit(run, compiler_options=_QUICK)(params, grads))
    return found


def _differences(together: PyTree, apart: PyTree, dim: int) -> Iterator[tuple[str, float]]:
    """Yield (path, relative difference of the two updates) for every parameter.

    The difference is the largest of any element, divided by the largest magnitude of the update.

    Args:
      together: the updates with stacked blocks.
      apart: the updates with separate blocks.
      dim: the dimension of the blocks in the arrays of `together`.
    """
    trees = (jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_marked) for tree in (together, apart))
    for (path, one), (_, other) in zip(*trees, strict=True):
        x = one.slices[0] if is_marked(one) else one
        y = np.stack(other.slices, axis=dim) if is_marked(other) else other
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)):
            yield path_str(path), np.inf
            continue
        largest = float(np.max(np.abs(y[finite]), initial=0.0))
        yield path_str(path), float(np.max(np.abs(x[finite] - y[finite]), initial=0.0)) / max(largest, 1e-30)


# Who is to blame?


def _blame(tx: Any, shapes: _Shapes, text: str, outputs: Sequence[str] = ("every update",)) -> tuple[Reason, ...]:
    origin = Origin(_culprits(tx, shapes), text)
    return tuple(Reason(output, origin) for output in outputs)


def _culprits(tx: Any, shapes: _Shapes) -> str:
    """Name the transforms, with lines, whose operations differ for stacked parameters and for one block.

    If there is no such transform, name the transforms that are not elementwise.
    """
    together, alone = (_transforms(tx, mark(shapes.params)) for mark in (shapes.mark_stacked, shapes.mark_one_block))
    found = {**together, **alone}
    known = ELEMENTWISE | CALLS.keys()
    differ = [name for name in found if together.get(name, ("", []))[1] != alone.get(name, ("", []))[1]]
    mixing = [name for name, (_, operations) in found.items() if not known.issuperset(operations)]
    return ", ".join(f"{name} at {found[name][0]}" for name in sorted(differ or mixing)) or "tx.update"


def _transforms(tx: Any, params: PyTree) -> dict[str, tuple[str, list[str]]]:
    """Return {name of each transform in a chain: (file:line, the names of its operations)}.

    The line is that of the first operation that is not elementwise, or of the first operation if all are elementwise.
    """
    try:
        program = _trace_update(tx, params)
    except _TRACING:
        return {}
    context = Context((), (), (), stop_file=__file__)
    found: dict[str, tuple[str, list[str]]] = {}
    for equation in open_jaxpr(program)[0].eqns:
        origin = origin_of(Place((equation,)), context, "")
        names = _operations([equation, *equations_inside(equation)])
        if origin.transform and names:
            where, seen = found.get(origin.transform, ("", []))
            mixes = not ELEMENTWISE.issuperset(names) and ELEMENTWISE.issuperset(seen)
            found[origin.transform] = (origin.where if mixes or not where else where, seen + names)
    return found
