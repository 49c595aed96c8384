"""The proof that a transform is elementwise: that updating the parts of arrays equals updating the arrays.

It reads the programs of `tx.init` and `tx.update`, never names or classes, in three steps:

1. `trace` makes the programs at the shapes of the parameters and at other shapes.
2. `dependence` derives a fact about every output, given facts about the inputs. What the state holds where its arrays
   are padded is such an input, and known only after the update: it is found as an invariant (`_judge`).
3. Every output has a place, which makes a demand (`_verdict`): an array that has a parameter's place must depend on the
   parameter's own elements, everything else must be the same on all devices.
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
    """Prove that element i of updates and state depends on nothing but element i of its parameter's arrays.

    Numbers that are the same for all elements and owe nothing to arrays (counts, schedules, hyperparameters) are
    allowed. Shapes are judged as given, and again with every dimension one larger, so that a transform that looks at
    shapes (a threshold on the size, random bits of an array's shape) is seen. The report is sound: what is not known to
    be elementwise is not. No device is touched; no collectives.

    Args:
      tx: An optax transform.
      params: The parameters, which may be abstract.
      axis_name: The mesh axis, or axes, that split the arrays inside `shard_map`. Scalar parameters then count as the
        same on all devices, and a sum over whole arrays that is followed by `lax.psum` over all of these axes counts
        as one number, provided that the summed elements are zero where parameters and gradients are zero padding.
      extra_args: The extra arguments that `tx.update` requires: functions, and scalars (abstract ones will do), which
        must be the same on all devices.
      views: The parameters as the optimizer will really see them (parts, padded or reshaped views); the transform has
        to be the same program for these.

    Returns:
      A `Report`: true if the transform is elementwise, else with a reason for each output that is not.

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
    """Raise unless a transform is elementwise; the arguments are those of `check_elementwise`.

    Raises:
      ValueError: The transform is not elementwise. The message names transform, line, leaves and the remedy.

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
    """Prove that a transform may update global arrays as they are stored, padded and reshaped.

    Args:
      tx: An optax transform.
      params: The trained parameters in their logical shapes, which may be abstract.
      param_placements: The `Placement` of each of them where the optimizer runs (`Layout.opt_params`).
      state_placements: The `Placement` of each array of the state (`Layout.opt_state`).

    Returns:
      None where every array is stored in its logical shape: there is one view, so that nothing has to be proven, and
      nothing is traced. Otherwise a `Report`, true if the transform is elementwise on the stored view and its state
      is what `tx.init` would make of the stored parameters.
    """
    placements = jax.tree.leaves((param_placements, state_placements))
    if all(placement.view.stored == placement.view.logical for placement in placements):
        return None
    views = stored_shapes(params, param_placements)
    return check_elementwise(tx, params, views=views) and check_state(tx, views, state_placements)


def stored_shapes(params: PyTree, placements: PyTree) -> PyTree:
    """Return the abstract arrays that a tree of `Placement` stores for a tree of logical ones."""
    return jax.tree.map(lambda x, p: jax.ShapeDtypeStruct(p.view.stored, x.dtype), params, placements)


def check_state(tx: Any, views: PyTree, placements: PyTree) -> Report:
    """Report the arrays of the state that are stored in other shapes than `tx.init` gives them for stored parameters.

    An array that is no parameter's, such as the last three losses, is the same for all views of the parameters. If the
    layout pads it, the transform would find other positions in it than it expects (`jnp.roll` would bring in padding).
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
    """Return whether updates are elementwise but for functions of sums over all elements of all parameters.

    The global norm is such a sum: it is the same for arrays that are padded with zeros, reshaped or stacked, though not
    for parts of arrays. The program has to be the same for the shapes of `params` and of `views`.
    """
    tx = as_transform(tx)
    params = abstract(params)
    return all(_judge(trace(tx, (params, other), (), {}, __file__, totals=True)) for other in (_grow(params), views))


def coupled_leaves(tx: Any, params: PyTree) -> tuple[Reason, ...]:
    """Return the outputs that depend on arrays of parameters other than their own, as those of a global norm do.

    The own parameter of an array of the state is the one in its path. Arrays that have none, such as counts, are shared
    by all parameters and must depend on none.
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
    """The same parameters with every dimension one larger, so that no size of an array is as it was."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(size + 1 for size in x.shape), x.dtype), params)


def _judge(traced: Trace | Reason) -> Report:
    """The report on all updates, on the state after an update, and on the initial state."""
    if isinstance(traced, Reason):
        return Report((traced,))
    # What padding holds must be true in every step, not just in the first, where parameters are padded with zeros and
    # the state is what `tx.init` makes of those. So it is an invariant of the update, found from above: start with the
    # claims of the first step, and give up each that one update does not keep. An update that is not zero in the
    # padding moves the parameter there away from zero: nothing is known of it from then on. Claims are only given up,
    # so the loop ends.
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
    """The reason why an output is not what its place demands, or None if it is."""
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
