"""Whether stacking the blocks of a model changes what a transform does to them.

Decided from programs and from numbers, never from names or classes: first whether the transform is elementwise, then
whether it gives the same updates for tiny arrays, stacked or each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params

from jaxshard.core.jaxpr import CALLS, open_jaxpr
from jaxshard.core.tree import BLOCKS, map_with_path, path_str
from jaxshard.core.types import PyTree
from jaxshard.optim.per_block import draws_random_bits
from jaxshard.optim.proof.dependence import Scope, Source, source_of
from jaxshard.optim.proof.elementwise import Reason, describe, elementwise_but_for_totals
from jaxshard.optim.proof.marked import Slices
from jaxshard.optim.proof.primitives import ELEMENTWISE, RESHAPES, SAME

_COUNTS = 64
"""Counters up to here are tried, so that what a transform does every n-th step is seen."""

_QUICK: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}
"""What runs once is not worth optimising."""

_TRACING = (TypeError, ValueError, AttributeError, KeyError)
"""What a transform raises where its own functions of the parameters (masks, labels) can't read marked ones."""

_TOLERANCE = 1e-3
"""Of the largest update of a parameter: sums in another order differ by less, other updates by more."""


def stacking_changes(tx: Any, params: PyTree, stacked: str = BLOCKS) -> tuple[Reason, ...]:
    """Why the updates of stacked parameters differ from those of the same blocks one by one; empty if they don't.

    `params` may be abstract; those under the top-level key `stacked` have shape [blocks, ...]. A transform that is
    elementwise but for sums over all parameters (the global norm), by the same program for stacked parameters and for
    those of one block, passes. Any other one has to be the same program for both, too, and for tiny arrays, and there
    the updates of two blocks, stacked or apart, are compared on the default device: in the first step, and in the
    second with all integer scalars of the state, such as counts, set to 0 to 63; what such a transform does every
    hundredth step only is not seen. What is inside `per_block` is not looked at. No collectives.
    """
    tx = optax.with_extra_args_support(tx)
    shapes = _Shapes(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params), stacked)
    if not shapes.any:
        return ()
    together, alone = shapes.together(shapes.params), shapes.alone(shapes.params)
    try:
        if elementwise_but_for_totals(tx, together, alone):
            return ()
        if draws_random_bits(tx, together):
            return _blame(tx, shapes, "draws random numbers for arrays as they are stacked")
        tiny = shapes.tiny()
        programs = [list(_primitives(_program(tx, tree))) for tree in (together, alone, shapes.together(tiny))]
        if programs[0] != programs[1]:
            return _blame(tx, shapes, "computes something else for arrays that are stacked than for those of one block")
        if programs[0] != programs[2]:
            return _blame(tx, shapes, "computes something else at other shapes, so that tiny arrays prove nothing")
        wrong = _compared(tx, shapes, tiny)
    except _TRACING as error:
        return _blame(tx, shapes, f"cannot be compared with the unstacked model: {error}")
    if not wrong:
        return ()
    text = f"gives other updates to blocks that are stacked, by {min(max(wrong.values()), 9.99):.0%} on tiny arrays"
    return _blame(tx, shapes, text, [f"update {path}" for path in wrong])


def require_same_stacked(tx: Any, params: PyTree, stacked: str = BLOCKS) -> None:
    """Nothing if stacking changes no update, otherwise a ValueError with the transforms, the leaves and the remedy."""
    reasons = stacking_changes(tx, params, stacked)
    if reasons:
        raise ValueError(
            "the blocks of this model were stacked, and that changes what this optimizer does to them: "
            f"{describe(reasons)}. Wrap it in js.optim.per_block(tx), which updates every block by itself; what looks "
            "at all parameters at once goes in front: "
            "optax.chain(optax.clip_by_global_norm(1.0), js.optim.per_block(tx))"
        )


class _Shapes:
    """The parameters, stacked or taken apart, as they are or tiny."""

    def __init__(self, params: PyTree, stacked: str):
        self.params, self.stacked = params, stacked
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self.any = any(map(self._is_block, leaves))
        sizes = {size for path, x in leaves for size in x.shape[self._is_block((path, x)) :]}
        # In the same order, so that what asks which dimension is larger gets the same answer.
        self._tiny = {size: 3 + i for i, size in enumerate(sorted(sizes - {0, 1}))} | {0: 0, 1: 1}

    def _is_block(self, leaf: tuple[Any, Any]) -> bool:
        return path_str(leaf[0][:1]) == self.stacked

    def tiny(self) -> PyTree:
        """Two blocks of a few elements."""

        def shrink(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            block = self._is_block((path, x))
            shape = (2,) * block + tuple(self._tiny[size] for size in x.shape[block:])
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return map_with_path(shrink, self.params)

    def together(self, tree: PyTree) -> PyTree:
        """Stacked arrays, marked as such."""
        return self._mark(tree, lambda x: [x])

    def apart(self, tree: PyTree) -> PyTree:
        """The slices of stacked arrays."""
        return self._mark(tree, list)

    def alone(self, tree: PyTree) -> PyTree:
        """The shapes of one slice."""
        return self._mark(tree, lambda x: [jax.ShapeDtypeStruct(x.shape[1:], x.dtype)])

    def _mark(self, tree: PyTree, slices: Callable[[Any], list[Any]]) -> PyTree:
        return map_with_path(lambda path, x: Slices(slices(x), path[-1]) if self._is_block((path, x)) else x, tree)


def _compared(tx: Any, shapes: _Shapes, tiny: PyTree) -> dict[str, float]:
    """Path -> how much its updates differ, for those that do."""
    params, *grads = (_draw(tiny, seed) for seed in range(3))
    together, apart = (
        _updates(tx, mark(params), [mark(one) for one in grads]) for mark in (shapes.together, shapes.apart)
    )
    wrong: dict[str, float] = {}
    for dim, (one, other) in enumerate(zip(together, apart, strict=True)):
        for path, difference in _differences(one, other, dim):
            if not difference <= _TOLERANCE:
                wrong[path] = max(wrong.get(path, 0.0), difference)
    return wrong


def _blame(tx: Any, shapes: _Shapes, text: str, outputs: Sequence[str] = ("every update",)) -> tuple[Reason, ...]:
    source = Source(_culprits(tx, shapes), text)
    return tuple(Reason(output, source) for output in outputs)


def _program(tx: Any, params: PyTree) -> Any:
    return jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)


def _primitives(program: Any) -> Iterator[str]:
    for equation in open_jaxpr(program)[0].eqns:
        yield from _names(equation)


def _names(equation: Any) -> Iterator[str]:
    """The primitives of an equation, inside included, but for those of which there are more or less by rank."""
    if equation.primitive.name not in RESHAPES | SAME:
        yield equation.primitive.name
    for inner in jaxprs_in_params(equation.params):
        yield from _primitives(inner)


def _draw(shapes: PyTree, seed: int) -> PyTree:
    """Random arrays; blocks differ in size, or norms of one and of all would be alike."""
    rng = np.random.default_rng(seed)

    def draw(x: Any) -> np.ndarray:
        scale = 1 + 2 * np.arange(x.shape[0]).reshape(-1, *(1,) * (len(x.shape) - 1)) if x.shape else 1
        return (scale * rng.normal(size=x.shape)).astype(np.float32)

    return jax.tree.map(draw, shapes)


def _updates(tx: Any, params: PyTree, grads: list[PyTree]) -> list[PyTree]:
    """The updates of a step, and those of the next one for every count, [counts, ...]."""

    def set_counts(state: PyTree, count: jax.Array) -> PyTree:
        def is_count(x: Any) -> bool:
            return jnp.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.integer)

        return jax.tree.map(lambda x: count.astype(jnp.result_type(x)) if is_count(x) else x, state)

    def run(params: PyTree, grads: list[PyTree]) -> list[PyTree]:
        first, state = tx.update(grads[0], tx.init(params), params)
        second = jax.vmap(lambda count: tx.update(grads[1], set_counts(state, count), params)[0])
        return [first, second(jnp.arange(_COUNTS))]

    with jax.default_matmul_precision("highest"):
        found: list[PyTree] = jax.device_get(jax.jit(run, compiler_options=_QUICK)(params, grads))
    return found


def _differences(together: PyTree, apart: PyTree, dim: int) -> Iterator[tuple[str, float]]:
    """(path, largest difference over the largest magnitude) for every parameter; blocks are stacked along `dim`."""
    pairs = zip(_leaves(together), _leaves(apart), strict=True)
    for (path, one), (_, other) in pairs:
        x = one.slices[0] if isinstance(one, Slices) else one
        y = np.stack(other.slices, axis=dim) if isinstance(other, Slices) else other
        finite = np.isfinite(x) & np.isfinite(y)
        largest = float(np.abs(y[finite]).max(initial=0.0))
        difference = float(np.abs(x[finite] - y[finite]).max(initial=0.0))
        same = np.array_equal(np.isfinite(x), np.isfinite(y))
        yield path_str(path), difference / max(largest, 1e-30) if same else np.inf


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Slices))


def _culprits(tx: Any, shapes: _Shapes) -> str:
    """The transforms, with their lines, that differ between both forms; else those that look at whole arrays."""
    together, alone = (_made_by(tx, mark(shapes.params)) for mark in (shapes.together, shapes.alone))
    found = {**together, **alone}
    known = ELEMENTWISE | CALLS.keys()
    differ = [name for name in found if together.get(name, ("", []))[1] != alone.get(name, ("", []))[1]]
    mixing = [name for name, (_, primitives) in found.items() if not known.issuperset(primitives)]
    return ", ".join(f"{name} at {found[name][0]}" for name in sorted(differ or mixing)) or "tx.update"


def _made_by(tx: Any, params: PyTree) -> dict[str, tuple[str, list[str]]]:
    """Transform -> (line of its first equation in an update that is not elementwise or else at all, primitives)."""
    try:
        program = _program(tx, params)
    except _TRACING:
        return {}
    scope = Scope((), (), (), __file__)
    found: dict[str, tuple[str, list[str]]] = {}
    for equation in open_jaxpr(program)[0].eqns:
        source = source_of(equation, scope, "")
        names = [*_names(equation)]
        if source.transform and names:
            where, seen = found.get(source.transform, ("", []))
            mixes = not ELEMENTWISE.issuperset(names) and ELEMENTWISE.issuperset(seen)
            found[source.transform] = (source.where if mixes or not where else where, seen + names)
    return found
