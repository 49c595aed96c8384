"""Compute the model's new state from a loss: declared contributions, averages, and the loss's own `update`.

A loss that sees the global batch may replace the state. Instead it may declare contributions, which can be combined
over micro-batches and devices before they enter the state:

    js.Sum(x)     new = old + the sum of x
    js.Max(x)     new = the larger of old and the maximum of x
    js.Mean(t, w) new = the mean, t / w, each summed

`engines/state_rules.py` combines states if the loss sees only a part of the batch at a time.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.core.average import Average, is_average
from jaxshard.core.loss import Loss, Max, Mean, Sum
from jaxshard.core.tree import abstract, check_same_tree, path_str, raise_all, same_structure
from jaxshard.core.types import PyTree


def is_declared(x: Any) -> bool:
    """Return True for a `js.Sum`, `js.Max` or `js.Mean` in a returned state: a contribution to the new state.

    Contributions are combined over devices and micro-batches. Any other entry of the state replaces the old value.
    """
    return isinstance(x, (Sum, Max, Mean))


def next_state(old: PyTree, loss: Loss) -> PyTree:
    """Compute the model's new state from the old state and the loss of the global batch.

    Args:
      old: the state that the loss received.
      loss: the loss; with `state` None the old state stays.

    Raises:
      ValueError: the loss, or its `update`, returned a state of other structure, shapes or dtypes; the message
        names every leaf that differs.
    """
    if loss.state is None:
        _refuse_update_alone(loss)
        return old
    if loss.update is None:
        new, who = _merge(old, loss.state), "the loss returned"
    else:
        _check_update(loss.update)
        values = jax.tree.map(_value_of, loss.state, is_leaf=is_declared)
        new, who = loss.update(old, values), "the update of js.Loss returned"
    check_same_tree(abstract(old), abstract(new), f"{who} another state than the model has", "keep its tree")
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), new)


def check_averages(old: PyTree, loss: Loss) -> None:
    """Raise ValueError unless a loss returns every `js.Average` in its state unchanged.

    A `js.Average` is updated by the step itself, so that the loss must not change it.

    Args:
      old: the state that the loss received, in the same trace.
      loss: the loss that was returned.
    """
    if loss.state is None or loss.update is not None:
        return
    averages = [(p, x) for p, x in jax.tree_util.tree_leaves_with_path(old, is_leaf=is_average) if is_average(x)]
    returned = dict(jax.tree_util.tree_leaves_with_path(loss.state, is_leaf=is_average))
    raise_all(
        (path_str(path) for path, x in averages if not _is_handed_on(x, returned.get(path))),
        ValueError,
        "the step itself updates a js.Average; return it in the state as the loss received it. Missing or changed",
    )


def _is_handed_on(average: Average, returned: Any) -> bool:
    if not isinstance(returned, Average):
        return False
    mine, given = jax.tree.leaves(average), jax.tree.leaves(returned)
    return len(mine) == len(given) and all(a is b for a, b in zip(mine, given))


def _refuse_update_alone(loss: Loss) -> None:
    if loss.update is not None:
        raise ValueError(
            "js.Loss(update=...) needs state=..., what update(old, combined) receives combined; return js.Loss(value, "
            "state=contributions, update=update)"
        )


def _check_update(update: Callable[..., PyTree]) -> None:
    """Raise ValueError if an `update` closes over traced values.

    A traced value belongs to a single micro-batch, whose trace has ended when `update` runs.
    """
    names = [name for name, value in _variables_of(update, set()) if _is_traced(value)]
    if names:
        raise ValueError(
            f"the update of js.Loss reads values of the loss that it is made in ({', '.join(dict.fromkeys(names))}), "
            "but it runs later, once per step. Hand them over in js.Loss(state=...): update receives them combined as "
            "its second argument"
        )


def _variables_of(fn: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each closure variable and bound argument of a function.

    A closure variable that is a function itself is searched in the same way. `seen` has the ids of the functions that
    were searched already.
    """
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        yield from zip(itertools.repeat("partial"), (*fn.args, *fn.keywords.values()))
        yield from _variables_of(fn.func, seen)
    elif inspect.isfunction(fn):
        for name, value in inspect.getclosurevars(fn).nonlocals.items():
            yield name, value
            yield from _variables_of(value, seen)


def _is_traced(value: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value))


def _merge(old: PyTree, new: PyTree) -> PyTree:
    """Return the model's new state, from the old state and the state that a loss returned.

    A `js.Sum` is added to the old value, a `js.Max` is compared with it, and a `js.Mean` (as total / weight) or any
    other entry replaces it.
    """
    values = jax.tree.map(_value_of, new, is_leaf=is_declared)
    if not same_structure(old, values):
        return values  # refused by its leaves

    def enter(x: Any, node: Any) -> Any:
        if isinstance(node, Sum):
            return x + node.value
        return jnp.maximum(x, node.value) if isinstance(node, Max) else _value_of(node)

    return jax.tree.map(enter, old, new)


def _value_of(node: Any) -> Any:
    return node.value if is_declared(node) else node
