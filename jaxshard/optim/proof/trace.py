"""The program of a transform, traced on shapes twice, and what each of its inputs and outputs stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxshard.core.tree import abstract, path_str
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.dependence import Kind, Scope, Source, Value, flow


class Role(NamedTuple):
    """What one array of the updates or of the state stands for.

    `param` is the parameter whose shape it has and whose path ends its path (the longest such path decides): element i
    belongs to element i. `near` is the parameter whose path is any part of its path, whatever the shape.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    param: int | None
    near: int | None


class Traced(NamedTuple):
    """A transform at two sets of shapes."""

    update: tuple[Any, Any]  # the programs of the update, of (gradients, state, parameters, extra arguments)
    updates: tuple[Role, ...]
    state: tuple[Role, ...]
    initial: tuple[Value, ...]  # of the state after init
    extra: tuple[Value, ...]
    scope: Scope

    def run(self, pads: Sequence[float | None]) -> list[Value]:
        """The values of updates and state, given what padding holds in parameters and state; zero in gradients."""
        count = len(self.updates)
        grads = [array_of(index, 0.0, self.scope) for index in range(count)]
        params = [array_of(index, pad, self.scope) for index, pad in enumerate(pads[:count])]
        state = [_stored(role, pad, self.scope) for role, pad in zip(self.state, pads[count:], strict=True)]
        return flow(*self.update, [*grads, *state, *params, *self.extra], self.scope)


def trace(
    tx: Any,
    shapes: tuple[PyTree, PyTree],
    axes: tuple[str, ...],
    extra: Mapping[str, Any],
    root: str,
    *,
    total: bool = False,
) -> Traced | tuple[str, Source]:
    """Both traces, or the output that is bad and why, where there is nothing to compare.

    `root` is the file at which the tracebacks of the transform's own code end.
    """
    if len({jax.tree.structure(tree) for tree in shapes}) > 1:
        raise ValueError("check_elementwise: views must have the same tree as params")
    try:
        # Two sizes of the axes, so that a number that depends on the size is seen.
        one, two = (_programs(tx, params, axes, 2 + which, extra) for which, params in enumerate(shapes))
    except (TypeError, ValueError) as error:  # an argument that is missing, or Python control flow on values
        return "every update", Source("tx.update", f"could not be traced on these arguments: {error}")
    except NameError as error:
        raise ValueError(f"check_elementwise: {error} Pass the axis that the transform uses as axis_name=") from error
    before, updates, after = ([getattr(program, name) for program in (one, two)] for name in _Program._fields[2:])
    if len({jax.tree.structure(tree) for tree in (*before, *after)}) > 1:
        return "the state", Source("the state", "has a tree that changes, or depends on the shapes of the parameters")
    if len({jax.tree.structure(tree) for tree in (*updates, shapes[0])}) > 1:
        return "every update", Source("the updates", "have another tree than the parameters")

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes[0])]
    pairs = list(zip(*([x.shape for x in jax.tree.leaves(tree)] for tree in shapes), strict=True))
    scope = Scope(tuple(map(path_str, paths)), tuple(pairs), axes, root, total)
    arrays = [jax.tree.leaves(abstract(x)) for _, x in sorted(extra.items()) if not callable(x)]
    mixed = Value(Kind.MIXED, why=Source("an extra argument", "is an array"))
    return Traced(
        update=(one.update, two.update),
        updates=tuple(_role("update", index, *x, scope, paths) for index, x in enumerate(_named(*updates))),
        state=tuple(_role("state", None, *x, scope, paths) for x in _named(*after)),
        initial=tuple(flow(one.init, two.init, [array_of(index, 0.0, scope) for index in range(len(paths))], scope)),
        extra=tuple(mixed if x.shape else Value(Kind.FILL) for leaves in arrays for x in leaves),
        scope=scope,
    )


class _Program(NamedTuple):
    init: Any
    update: Any
    before: PyTree
    updates: PyTree
    after: PyTree


def _programs(tx: Any, params: PyTree, axes: tuple[str, ...], size: int, extra: Mapping[str, Any]) -> _Program:
    arrays = {name: abstract(x) for name, x in extra.items() if not callable(x)}
    functions = {name: x for name, x in extra.items() if callable(x)}

    def update(grads: PyTree, state: PyTree, params: PyTree, arrays: Mapping[str, Any]) -> Any:
        return tx.update(grads, state, params, **arrays, **functions)

    env = [(name, size) for name in axes]
    init, state = jax.make_jaxpr(tx.init, axis_env=env, return_shape=True)(params)
    program, (updates, after) = jax.make_jaxpr(update, axis_env=env, return_shape=True)(params, state, params, arrays)
    return _Program(init, program, state, updates, after)


def _named(one: PyTree, two: PyTree) -> list[tuple[Any, Any]]:
    """(path, (shape, shape)) of every array of two trees of the same structure."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True)
    return [(path, (a.shape, b.shape)) for (path, a), b in leaves]


def _role(kind: str, index: int | None, path: Any, pair: Any, scope: Scope, paths: list[Any]) -> Role:
    name = f"{kind} {path_str(path)}"
    if index is not None:
        return Role(name, pair, index, index)
    own = path_ending(path, paths)
    inside = (end for stop in range(len(path), 0, -1) if (end := path_ending(path[:stop], paths)) is not None)
    return Role(name, pair, own if own is not None and scope.shapes[own] == pair else None, next(inside, own))


def path_ending(path: tuple[Any, ...], params: Sequence[tuple[Any, ...]]) -> int | None:
    """The index of the parameter whose path is the longest end of the path."""
    known = {path: index for index, path in enumerate(params)}
    return next((known[path[start:]] for start in range(len(path) + 1) if path[start:] in known), None)


def array_of(index: int, pad: float | None, scope: Scope) -> Value:
    """An array of a parameter's shape; with axes given, a scalar is the same number on all devices."""
    leaves = frozenset({index})
    if scope.axes and scope.shapes[index][0] == ():
        return Value(Kind.FILL, leaves=leaves)
    return Value(Kind.LEAF, index, leaves, pad)


def _stored(role: Role, pad: float | None, scope: Scope) -> Value:
    """An array of the state at the start of an update."""
    if role.param is not None:
        return array_of(role.param, pad, scope)
    leaves = frozenset() if role.near is None else frozenset({role.near})
    if role.shapes == ((), ()):
        return Value(Kind.FILL, leaves=leaves, pad=pad)
    why = Source(role.name, f"has shape {role.shapes[0]}, which is not its parameter's")
    return Value(Kind.FREE if role.shapes[0] == role.shapes[1] else Kind.MIXED, leaves=leaves, why=why)
