"""Prove that a transform updates every parameter only from its own arrays: parameter, gradient and state.

Muon, Shampoo, LAMB and Adafactor mix the elements of a parameter, but not elements of different parameters. So a single
device that has all arrays of a parameter can update it. The proof reads the jaxprs of `tx.init` and `tx.update`
(`reach.py` walks through them), never names or classes. Scalars may come from other parameters, if they are sums over
arrays: a global norm that clips the gradients before Muon is a scalar that all devices know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from jaxshard.core.text_table import first_words
from jaxshard.core.transform import as_transform
from jaxshard.core.tree import abstract, path_str, same_structure
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.elementwise import check_elementwise
from jaxshard.optim.proof.facts import Context, Origin
from jaxshard.optim.proof.reach import Flow, Reach, bit, leaves_of
from jaxshard.optim.proof.report import Reason, describe
from jaxshard.optim.proof.trace import param_at_end
from jaxshard.proofs.walk import walk

Kind = Literal["elementwise", "own array", "global"]


@dataclass(frozen=True)
class Dependence:
    """The result of `check_own_array`: on which arrays the update of a parameter depends. It is true unless "global".

    Attributes:
      kind: "elementwise" if element i of an update depends only on elements i of its parameter's arrays, "own array" if
        it depends on any elements of its parameter's arrays, "global" if arrays of several parameters are combined.
      reasons: for a global transform, the outputs that depend on arrays of other parameters, and the equations to
        blame.
      totals: the parameters whose update depends on a sum over other parameters, such as a global norm.
      products: the parameters that are multiplied or factorized as matrices; `js.layout` assigns each to one device.

    Example:
        >>> import optax
        >>> params = {"w": jax.ShapeDtypeStruct((64, 32), "float32"), "v": jax.ShapeDtypeStruct((64, 64), "float32")}
        >>> print(check_own_array(optax.contrib.muon(1e-3), params))
        own array; matrix products on v, w
    """

    kind: Kind
    reasons: tuple[Reason, ...] = ()
    totals: tuple[str, ...] = ()
    products: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.kind != "global"

    def __str__(self) -> str:
        if self.kind == "global":
            return f"global: {describe(self.reasons)}"
        numbers = f"; sums over several parameters reach {first_words(self.totals)}" if self.totals else ""
        return self.kind + (f"; matrix products on {first_words(self.products)}" if self.products else "") + numbers


class Outputs(NamedTuple):
    """The arrays that `tx.update` returns, first all updates, then the state, and the parameter to which each belongs.

    Attributes:
      names: the name of each array, such as "update w" and "state 0/mu/w".
      owners: for each array the index of its parameter; None for arrays that belong to no parameter, such as counts.
    """

    names: tuple[str, ...]
    owners: tuple[int | None, ...]


def check_own_array(tx: Any, params: PyTree, *, extra_args: Mapping[str, Any] | None = None) -> Dependence:
    """Prove that update and state of every parameter depend only on this parameter's arrays, and on scalars.

    The arrays of a parameter are the parameter, its gradient, and the state arrays whose path contains the parameter's
    path. Scalars may be counts, schedules, hyperparameters, and sums over arrays of any parameters (global norms). The
    result is sound: an unknown operation makes the transform count as global. No device is touched; no collectives.

    Args:
      tx: An optax transform.
      params: The parameters, which may be abstract.
      extra_args: The extra arguments that `tx.update` requires: functions, and scalars (possibly abstract).

    Returns:
      A `Dependence`: the kind of the transform, and the reasons.

    Example:
      >>> import optax
      >>> params = {"w": jax.ShapeDtypeStruct((4, 6), "float32"), "v": jax.ShapeDtypeStruct((4, 6), "float32")}
      >>> transforms = optax.adam(1e-3), optax.lamb(1e-3), optax.flatten(optax.sgd(1e-3))
      >>> [check_own_array(tx, params).kind for tx in transforms]
      ['elementwise', 'own array', 'global']
    """
    tx, params, extra = as_transform(tx), abstract(params), extra_args or {}
    names = tuple(path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
    arrays = {name: abstract(x) for name, x in extra.items() if not callable(x)}
    functions = {name: x for name, x in extra.items() if callable(x)}

    def update(grads: PyTree, state: PyTree, params: PyTree, arrays: Mapping[str, Any]) -> Any:
        return tx.update(grads, state, params, **arrays, **functions)

    try:
        init, before = jax.make_jaxpr(tx.init, return_shape=True)(params)
        program, (updates, state) = jax.make_jaxpr(update, return_shape=True)(params, before, params, arrays)
    except (NameError, TypeError, ValueError) as error:  # a missing argument, or an axis that the transform names
        return _untraced(f"could not be traced on these arguments: {error}")
    if not (same_structure(updates, params) and same_structure(before, state)):
        return _untraced("returns updates or a state of another structure than it was given")
    context = Context(names, (), (), __file__)
    outputs = outputs_of(params, before)
    given = input_reaches(len(names), outputs, len(jax.tree.leaves(arrays)))
    flow = Flow(context)
    reaches = _walk_steps(program, given, outputs, len(names), flow)
    first = walk(init, [Reach(bit(leaf)) for leaf in range(len(names))], Flow(context))
    after = list(zip(outputs.names, outputs.owners, reaches, strict=True))
    initial = zip(outputs.names[len(names) :], outputs.owners[len(names) :], first, strict=True)
    reasons = tuple(
        Reason(name, reach.why or Origin(name, "depends on arrays of another parameter"))
        for name, owner, reach in (*after, *initial)
        if not reach.within(owner)
    )
    products = tuple(names[leaf] for leaf in leaves_of(flow.products))
    if reasons:
        return Dependence("global", reasons, products=products)
    kind: Kind = "elementwise" if check_elementwise(tx, params, extra_args=extra) else "own array"
    totals = tuple(name for leaf, name in enumerate(names) if reaches[leaf].numbers & ~bit(leaf))
    return Dependence(kind, totals=totals, products=products)


def _walk_steps(program: Any, given: list[Reach], outputs: Outputs, count: int, flow: Flow) -> list[Reach]:
    """Return for each output of `tx.update` the parameters on which the output depends after any number of steps.

    `given` has the parameters on which each input depends; the first `count` inputs are gradients.

    A scalar such as a global norm may be stored in the state, and reach all parameters in a later step. So the jaxpr of
    the update is evaluated again and again, until the dependences of the state no longer change.
    """
    while True:
        reaches = walk(program, given, flow)
        after = list(given)
        for place, (owner, reach) in enumerate(zip(outputs.owners[count:], reaches[count:], strict=True), count):
            numbers = after[place].numbers | (reach.numbers if owner is None else 0)
            after[place] = after[place]._replace(numbers=numbers)
        if after == given:
            return reaches
        given = after


def outputs_of(params: PyTree, state: PyTree) -> Outputs:
    """Name the arrays that `tx.update` returns, updates and state, and find by its path the parameter of each."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    held = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]

    def owner(path: tuple[Any, ...]) -> int | None:
        found = (param_at_end(path[:stop], paths) for stop in range(len(path), 0, -1))
        # If the parameters are a single array, its path () ends every path, which means nothing.
        return next((one for one in found if one is not None and paths[one]), 0 if paths == [()] and path else None)

    names = [f"update {path_str(path)}" for path in paths] + [f"state {path_str(path)}" for path in held]
    return Outputs(tuple(names), (*range(len(paths)), *map(owner, held)))


def input_reaches(count: int, outputs: Outputs, extra: int = 0) -> list[Reach]:
    """Return for each input of `tx.update` a `Reach` with the parameter that it belongs to, or with no parameter.

    The inputs are `count` gradients, the arrays of the state, the parameters, and `extra` other arguments.
    """
    leaves = [Reach(bit(leaf)) for leaf in range(count)]
    state = [Reach(bit(owner)) for owner in outputs.owners[count:]]
    return [*leaves, *state, *leaves, *[Reach()] * extra]


def _untraced(text: str) -> Dependence:
    return Dependence("global", (Reason("every update", Origin("tx.update", text)),))
