"""Prove that a transform is elementwise: updating shards of arrays gives the shards of the updated arrays.

The proof reads the jaxprs of `tx.init` and `tx.update`, never names or classes, in three steps:

1. `trace.py` makes the jaxprs at the shapes of the parameters and at other shapes.
2. `dependence.py` derives a fact about every output from facts about the inputs. For a state array such a fact includes
   the value in its padding, which is found as an invariant of the update (`_judge`).
3. `_verdict` checks every output: element i of an array that belongs to a parameter must depend only on elements i of
   the parameter's arrays, and all other outputs must be the same on all devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxshard.core.mesh import axis_names
from jaxshard.core.transform import as_transform
from jaxshard.core.tree import abstract, path_str
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.proof.facts import Context, Fact, Kind, Origin
from jaxshard.optim.proof.report import Reason, Report
from jaxshard.optim.proof.trace import Trace, TracedArray, trace


def check_elementwise(
    tx: Any,
    params: PyTree,
    *,
    axis_name: AxisName | None = None,
    extra_args: Mapping[str, Any] | None = None,
    views: PyTree | None = None,
) -> Report:
    """Prove that element i of updates and state depends only on element i of its parameter's arrays.

    Scalars that are the same for all elements and depend on no array (counts, schedules, hyperparameters) are allowed.
    The proof runs for the given shapes, and again with every dimension one larger, to detect transforms that depend on
    shapes (a threshold on the size, random bits of an array's shape). The report is sound: it is true only if the
    transform is proven to be elementwise. No device is touched, and there are no collectives.

    Args:
      tx: An optax transform.
      params: The parameters, which may be abstract.
      axis_name: The mesh axis, or axes, that split the arrays inside `shard_map`. Scalar parameters then count as
        replicated. A sum over all elements of an array, followed by `lax.psum` over all of these axes, then counts as a
        scalar, if the summed elements are zero in the padding.
      extra_args: The extra arguments that `tx.update` requires: functions, and scalars (possibly abstract), which must
        be the same on all devices.
      views: The parameters in the shapes that the optimizer really receives: shards, padded or reshaped arrays. The
        transform must have the same jaxpr for these shapes as for `params`.

    Returns:
      A `Report`: true if the transform is elementwise, else with a reason for each output that is not elementwise.

    Raises:
      ValueError: `views` is another tree than `params`, or the transform uses an axis that `axis_name` does not name.

    Example:
      >>> import optax
      >>> params = {"w": jax.ShapeDtypeStruct((4, 6), "float32")}
      >>> bool(check_elementwise(optax.adam(1e-3), params))
      True
      >>> bool(check_elementwise(optax.lamb(1e-3), params))
      False
    """
    tx = as_transform(tx)
    params = abstract(params)
    report = Report()
    for other in (_grow(params),) if views is None else (_grow(params), abstract(views)):
        report = report and _judge(trace(tx, (params, other), axis_names(axis_name), extra_args or {}, __file__))
    return report


def require_elementwise(
    tx: Any,
    params: PyTree,
    *,
    axis_name: AxisName | None = None,
    extra_args: Mapping[str, Any] | None = None,
    views: PyTree | None = None,
) -> None:
    """Raise a ValueError unless a transform is elementwise; the arguments are those of `check_elementwise`.

    Raises:
      ValueError: The transform is not elementwise. The message names transform, line, leaves and the fix.

    Example:
        js.optim.require_elementwise(optax.adamw(3e-4), params, axis_name="data")
    """
    report = check_elementwise(tx, params, axis_name=axis_name, extra_args=extra_args, views=views)
    if not report:
        raise ValueError(
            f"this optimizer cannot run on parts of arrays, it is {report}. Use js.make_step, where the update runs on "
            "global arrays in the logical view; to clip by the global norm on parts use "
            'js.optim.clip_by_global_norm(max_norm, axis_name="...")'
        )


def check_stored(tx: Any, params: PyTree, param_placements: PyTree, state_placements: PyTree) -> Report | None:
    """Prove that a transform may update arrays in the shapes in which they are stored, padded or reshaped.

    Args:
      tx: An optax transform.
      params: The trained parameters in their logical shapes, which may be abstract.
      param_placements: The `Placement` of each parameter in the optimizer (`Layout.opt_params`).
      state_placements: The `Placement` of each array of the state (`Layout.opt_state`).

    Returns:
      None if every array is stored in its logical shape: then there is nothing to prove, and nothing is traced.
      Otherwise a `Report`: true if the transform is elementwise for the stored arrays, and the stored state has the
      shapes that `tx.init` returns for the stored parameters.
    """
    placements = jax.tree.leaves((param_placements, state_placements))
    if all(placement.view.stored == placement.view.logical for placement in placements):
        return None
    views = stored_shapes(params, param_placements)
    return check_elementwise(tx, params, views=views) and check_state(tx, views, state_placements)


def stored_shapes(params: PyTree, placements: PyTree) -> PyTree:
    """Return the parameters as abstract arrays in their stored shapes, which may be padded or reshaped."""
    return jax.tree.map(lambda x, p: jax.ShapeDtypeStruct(p.view.stored, x.dtype), params, placements)


def check_state(tx: Any, views: PyTree, placements: PyTree) -> Report:
    """Report the state arrays that are stored in another shape than `tx.init` returns for the stored parameters.

    The transform can't update such arrays as they are stored. For example, a state array with the last three losses has
    the same shape however the parameters are stored. If the layout padded this array, the transform would mistake the
    padding for losses.

    Args:
      tx: An optax transform.
      views: The parameters as abstract arrays, in the shapes in which they are stored.
      placements: The `Placement` of each array of the state.
    """
    state = jax.eval_shape(tx.init, views)
    arrays = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(placements), strict=True)
    return Report(
        tuple(
            Reason(name := f"state {path_str(path)}", Origin(name, f"{list(x.shape)} is stored as {list(stored)}"))
            for (path, x), placement in arrays
            if x.shape != (stored := placement.view.stored)
        )
    )


def is_elementwise_except_totals(tx: Any, params: PyTree, views: PyTree) -> bool:
    """Return True if updates are elementwise except for sums over all elements of all parameters (a global norm).

    Such a sum does not change if the arrays are padded with zeros, reshaped or stacked, but it would change for shards.

    Args:
      tx: An optax transform.
      params: The parameters, which may be abstract.
      views: The same parameters padded or reshaped. The update must have the same jaxpr
        for them, apart from shapes.
    """
    tx = as_transform(tx)
    params = abstract(params)
    return all(_judge(trace(tx, (params, other), (), {}, __file__, totals=True)) for other in (_grow(params), views))


def coupled_leaves(tx: Any, params: PyTree) -> tuple[Reason, ...]:
    """Find the updates and state arrays that depend on arrays of other parameters, for example by a global norm.

    A state array belongs to the parameter whose path is in the array's path. State arrays that belong to no parameter,
    such as counts, are shared by all parameters and must depend on none.

    Returns:
      A reason for each such update or state array, empty if there is none; a single reason if `tx` can't be traced.
    """
    traced = trace(as_transform(tx), (abstract(params),) * 2, (), {}, __file__)
    if isinstance(traced, Reason):
        return (traced,)
    arrays = (*traced.updates, *traced.state)
    facts = traced.propagate([None] * len(arrays))
    return tuple(
        _reason(array, fact)
        for array, fact in zip(arrays, facts, strict=True)
        if not fact.influences <= {array.related}
    )


def _grow(params: PyTree) -> PyTree:
    """Return the parameters as abstract arrays with every dimension one larger."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(size + 1 for size in x.shape), x.dtype), params)


def _judge(traced: Trace | Reason) -> Report:
    """Report which updates and state arrays of a traced transform, from `init` and `update`, are not elementwise."""
    if isinstance(traced, Reason):
        return Report((traced,))
    # The value of the padding must hold in every step, not only in the first, where parameters are padded with zeros
    # and the state comes from `tx.init`. So find an invariant of the update: start with the values of the first step,
    # and drop each that an update changes. If an update is not zero in the padding, the parameter's padding becomes
    # unknown. Values are only ever dropped, so the loop ends.
    count = len(traced.updates)
    paddings = [*[0.0] * count, *(fact.padding for fact in traced.initial)]
    while True:
        facts = traced.propagate(paddings)
        after = [0.0 if fact.padding == 0 else None for fact in facts[:count]]
        after += [fact.padding for fact in facts[count:]]
        kept = [padding if padding == new else None for padding, new in zip(paddings, after, strict=True)]
        if kept == paddings:
            break
        paddings = kept
    arrays = (*traced.updates, *traced.state, *traced.state)
    verdicts = (_verdict(*each, traced.context) for each in zip(arrays, (*facts, *traced.initial), strict=True))
    return Report(tuple(reason for reason in verdicts if reason is not None))


def _verdict(array: TracedArray, fact: Fact, context: Context) -> Reason | None:
    """Return why an output of a transform breaks the rule for elementwise transforms; None if it does not.

    The rule: an output with the shape of its parameter is elementwise, and any other output is equal on all devices.
    """
    has_place = array.param is not None and array.shapes == context.shapes[array.param]
    grows = array.shapes[0] != array.shapes[1]
    if not has_place and (array.param is not None or grows):
        text = f"has shape {array.shapes[0]}, which is not its parameter's" + (" but depends on it" if grows else "")
        return Reason(array.name, Origin(array.name, text))
    if has_place:
        ok = fact.kind is Kind.UNIFORM or (fact.kind is Kind.ELEMENTWISE and fact.param == array.param)
    else:
        ok = fact.kind in (Kind.UNIFORM, Kind.INDEPENDENT)
    return None if ok else _reason(array, fact)


def _reason(array: TracedArray, fact: Fact) -> Reason:
    return Reason(array.name, fact.why or Origin(array.name, "depends on the arrays of another parameter"))
