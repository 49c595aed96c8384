"""Trace a transform at two sets of shapes, and find the parameter to which each of its arrays belongs.

The jaxprs of `tx.init` and `tx.update` have flat lists of inputs and outputs. The paths of these arrays in the trees of
parameters and state show what each array is. For example, in the state of `optax.adam`:

    0/count       a scalar
    0/mu/dense/w  has the shape of the parameter dense/w, and a path that ends with the parameter's path: element i of
                  the array belongs to element i of the parameter
    0/nu/dense/w  belongs to dense/w in the same way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxshard.core.tree import abstract, path_str
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.dependence import propagate
from jaxshard.optim.proof.facts import Context, Fact, Kind, Origin, mixed
from jaxshard.optim.proof.report import Reason


class TracedArray(NamedTuple):
    """An update, or an array of the optimizer state, in a transform that was traced for two sets of shapes.

    Attributes:
      name: Its name in a `Reason`, such as "state 0/nu/w".
      shapes: Its shapes in the two traces.
      param: The index of the parameter to which the array belongs, element by element. This parameter has the same
        shapes as the array, and its path is the longest suffix of the array's path ("w" of "0/nu/w"). None if there is
        no such parameter.
      related: The index of a parameter of any shape whose path occurs in the array's path; None if there is none.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    param: int | None
    related: int | None


class Trace(NamedTuple):
    """An optax transform traced at two sets of shapes, to tell real constants from numbers that depend on shapes.

    Attributes:
      update: The two jaxprs of `tx.update`, whose inputs are (gradients, state, parameters, extra arguments).
      updates: The updates that `tx.update` returns, in the order of the parameters.
      state: The arrays of the optimizer state.
      initial: The facts proven about each array of the state that `tx.init` returns.
      extra: The facts about the extra arguments of `tx.update`.
      context: The parameters and axes to which the facts refer.
    """

    update: tuple[Any, Any]
    updates: tuple[TracedArray, ...]
    state: tuple[TracedArray, ...]
    initial: tuple[Fact, ...]
    extra: tuple[Fact, ...]
    context: Context

    def propagate(self, paddings: Sequence[float | None]) -> list[Fact]:
        """Return a fact about each update and then each state array after one step: on which elements it depends.

        Args:
          paddings: The value in the padding of each parameter and then of each state array, before the update; None if
            it is unknown. The padding of gradients is zero.
        """
        count = len(self.updates)
        grads = [fact_of_array(index, 0.0, self.context) for index in range(count)]
        params = [fact_of_array(index, padding, self.context) for index, padding in enumerate(paddings[:count])]
        state = [
            _fact_of_state(array, padding, self.context)
            for array, padding in zip(self.state, paddings[count:], strict=True)
        ]
        return propagate(*self.update, [*grads, *state, *params, *self.extra], self.context)


def trace(
    tx: Any,
    shapes: tuple[PyTree, PyTree],
    axes: tuple[str, ...],
    extra: Mapping[str, Any],
    stop_file: str,
    *,
    totals: bool = False,
) -> Trace | Reason:
    """Trace `tx.init` and `tx.update` at two sets of shapes, to detect what depends on shapes.

    Args:
      tx: The transform.
      shapes: Two trees of ShapeDtypeStructs, like the parameters.
      axes: The mesh axes that the transform may use in collectives.
      extra: The extra arguments of `tx.update`.
      stop_file: The caller's `__file__`, where tracebacks of the transform begin; see `facts.Context`.
      totals: True if a sum over all elements of all parameters counts as equal on all devices; see `facts.Context`.

    Returns:
      A `Trace`; or a `Reason`, if the jaxprs for the two sets of shapes can't be compared.
    """
    if len({jax.tree.structure(tree) for tree in shapes}) > 1:
        raise ValueError("check_elementwise: views must have the same tree as params")
    try:
        # The two traces have different axis sizes, too, to detect values that depend on the size.
        one, two = (_make_programs(tx, params, axes, 2 + which, extra) for which, params in enumerate(shapes))
    except (TypeError, ValueError) as error:  # a missing argument, or Python control flow on traced values
        return Reason("every update", Origin("tx.update", f"could not be traced on these arguments: {error}"))
    except NameError as error:
        raise ValueError(f"check_elementwise: {error} Pass the axis that the transform uses as axis_name=") from error
    if _different_trees(one.before, two.before, one.after, two.after):
        return Reason(
            "the state", Origin("the state", "has a tree that changes, or depends on the shapes of the parameters")
        )
    if _different_trees(one.updates, two.updates, shapes[0]):
        return Reason("every update", Origin("the updates", "have another tree than the parameters"))

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes[0])]
    pairs = tuple(pair for _, pair in _paired_shapes(*shapes))
    context = Context(tuple(map(path_str, paths)), pairs, axes, stop_file, totals)
    initial = [fact_of_array(index, 0.0, context) for index in range(len(paths))]
    arrays = [jax.tree.leaves(abstract(x)) for _, x in sorted(extra.items()) if not callable(x)]
    unknown = mixed((), Origin("an extra argument", "is an array"))
    return Trace(
        update=(one.update, two.update),
        updates=tuple(
            TracedArray(f"update {path_str(path)}", pair, index, index)
            for index, (path, pair) in enumerate(_paired_shapes(one.updates, two.updates))
        ),
        state=tuple(_state_array(path, pair, context, paths) for path, pair in _paired_shapes(one.after, two.after)),
        initial=tuple(propagate(one.init, two.init, initial, context)),
        extra=tuple(unknown if x.shape else Fact(Kind.UNIFORM) for leaves in arrays for x in leaves),
        context=context,
    )


class _Programs(NamedTuple):
    """The jaxprs of a transform at one set of shapes, and the trees of their results.

    Attributes:
      init: the jaxpr of `tx.init`.
      update: the jaxpr of `tx.update`.
      before: the abstract state before the update.
      updates: the abstract updates.
      after: the abstract state after the update.
    """

    init: Any
    update: Any
    before: PyTree
    updates: PyTree
    after: PyTree


def _make_programs(tx: Any, params: PyTree, axes: tuple[str, ...], size: int, extra: Mapping[str, Any]) -> _Programs:
    arrays = {name: abstract(x) for name, x in extra.items() if not callable(x)}
    functions = {name: x for name, x in extra.items() if callable(x)}

    def update(grads: PyTree, state: PyTree, params: PyTree, arrays: Mapping[str, Any]) -> Any:
        return tx.update(grads, state, params, **arrays, **functions)

    env = [(name, size) for name in axes]
    init, state = jax.make_jaxpr(tx.init, axis_env=env, return_shape=True)(params)
    program, (updates, after) = jax.make_jaxpr(update, axis_env=env, return_shape=True)(params, state, params, arrays)
    return _Programs(init, program, state, updates, after)


def _different_trees(*trees: PyTree) -> bool:
    return len({jax.tree.structure(tree) for tree in trees}) > 1


def _paired_shapes(one: PyTree, two: PyTree) -> list[tuple[Any, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return (path, (shape in the first tree, shape in the second)) for every array of two trees of equal structure."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True)
    return [(path, (a.shape, b.shape)) for (path, a), b in leaves]


def _state_array(path: Any, pair: Any, context: Context, paths: list[Any]) -> TracedArray:
    own = param_at_end(path, paths)
    prefixes = (param_at_end(path[:stop], paths) for stop in range(len(path), 0, -1))
    related = next((param for param in prefixes if param is not None), own)
    fits = own is not None and context.shapes[own] == pair
    return TracedArray(f"state {path_str(path)}", pair, own if fits else None, related)


def param_at_end(path: tuple[Any, ...], params: Sequence[tuple[Any, ...]]) -> int | None:
    """Return the index of the parameter whose path is the longest suffix of `path`: "dense/w" for "0/mu/dense/w".

    None if there is no such parameter.
    """
    known = {path: index for index, path in enumerate(params)}
    return next((known[path[start:]] for start in range(len(path) + 1) if path[start:] in known), None)


def fact_of_array(index: int, padding: float | None, context: Context) -> Fact:
    """Return the fact about an array that belongs to parameter `index`, element by element: its gradient, or a moment.

    It is ELEMENTWISE: element i depends only on element i of this parameter's arrays. But inside `shard_map` (the
    context has axes) a scalar is UNIFORM, that is, equal on all devices, since scalars are replicated.

    Args:
      index: The index of the parameter.
      padding: The value in the array's padding; None if unknown.
      context: The parameters and axes to which facts refer.
    """
    influences = frozenset({index})
    if context.axes and context.shapes[index][0] == ():
        return Fact(Kind.UNIFORM, influences=influences)
    return Fact(Kind.ELEMENTWISE, index, influences, padding)


def _fact_of_state(array: TracedArray, padding: float | None, context: Context) -> Fact:
    """Return the fact about a state array before an update: for example ELEMENTWISE if it belongs to a parameter."""
    if array.param is not None:
        return fact_of_array(array.param, padding, context)
    influences = frozenset() if array.related is None else frozenset({array.related})
    if array.shapes == ((), ()):
        return Fact(Kind.UNIFORM, influences=influences, padding=padding)
    why = Origin(array.name, f"has shape {array.shapes[0]}, which is not its parameter's")
    if array.shapes[0] == array.shapes[1]:
        return Fact(Kind.INDEPENDENT, influences=influences, why=why)
    return mixed(influences, why)
