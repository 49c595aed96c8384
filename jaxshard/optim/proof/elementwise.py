"""Whether a transform is elementwise: whether updating the parts of arrays equals updating the arrays.

Decided from the programs of `tx.init` and `tx.update`, never from names or classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax

from jaxshard.core.mesh import axis_names
from jaxshard.core.tree import abstract
from jaxshard.core.types import AxisName, PyTree
from jaxshard.optim.proof.dependence import Kind, Scope, Source, Value
from jaxshard.optim.proof.trace import Role, Traced, trace


class Reason(NamedTuple):
    """Why one output is not elementwise: its name, such as "update w" or "state 0/nu/w", and the equation to blame."""

    output: str
    source: Source

    def __str__(self) -> str:
        return describe([self])


@dataclass(frozen=True)
class Report:
    """What `check_elementwise` found: true if the transform is elementwise, otherwise with a reason per bad output."""

    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "elementwise" if self else f"not elementwise: {describe(self.reasons)}"


def check_elementwise(
    tx: Any,
    params: PyTree,
    *,
    axis_name: AxisName | None = None,
    extra_args: Mapping[str, Any] | None = None,
    views: PyTree | None = None,
) -> Report:
    """A true `Report` if element i of updates and state depends on nothing but element i of its parameter's arrays.

    Numbers that are the same for all elements and owe nothing to arrays (counts, schedules, hyperparameters) are
    allowed. `params` may be abstract. Shapes are judged as given, and again with every dimension one larger, so that a
    transform that looks at shapes (a threshold on the size, random bits of an array's shape) is seen. The report is
    sound: what is not known to be elementwise is not. No device is touched; no collectives.

    Arguments:
      axis_name: the mesh axis, or axes, that split the arrays inside `shard_map`. Scalar parameters then count as the
        same on all devices, and a sum over whole arrays that is followed by `lax.psum` over all of these axes counts
        as one number, provided that the summed elements are zero where parameters and gradients are zero padding.
      extra_args: the extra arguments that `tx.update` requires: functions, and scalars (abstract ones will do), which
        must be the same on all devices.
      views: the parameters as the optimizer will really see them (parts, padded or reshaped views); the transform has
        to be the same program for these.
    """
    tx = optax.with_extra_args_support(tx)
    params = abstract(params)
    grown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(size + 1 for size in x.shape), x.dtype), params)
    report = _judge(trace(tx, (params, grown), axis_names(axis_name), extra_args or {}, __file__))
    if report and views is not None:
        report = _judge(trace(tx, (params, abstract(views)), axis_names(axis_name), extra_args or {}, __file__))
    return report


def elementwise_but_for_totals(tx: Any, params: PyTree, views: PyTree) -> bool:
    """Whether updates are elementwise, for these shapes and by the same program for those of `views`, but for numbers
    that are functions of sums over all elements of all parameters, such as the global norm."""
    tx = optax.with_extra_args_support(tx)
    params = abstract(params)
    others = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(size + 1 for size in x.shape), x.dtype), params), views
    return all(_judge(trace(tx, (params, other), (), {}, __file__, total=True)) for other in others)


def require_elementwise(
    tx: Any,
    params: PyTree,
    *,
    axis_name: AxisName | None = None,
    extra_args: Mapping[str, Any] | None = None,
    views: PyTree | None = None,
) -> None:
    """Nothing if `check_elementwise` gives a true report; otherwise a ValueError with transform, leaf and remedy."""
    report = check_elementwise(tx, params, axis_name=axis_name, extra_args=extra_args, views=views)
    if not report:
        raise ValueError(
            f"this optimizer cannot run on parts of arrays, it is {report}. Use js.make_step, where the update runs on "
            "global arrays in the logical view; to clip by the global norm on parts use "
            'js.optim.clip_by_global_norm(max_norm, axis_name="...")'
        )


def coupled_leaves(tx: Any, params: PyTree) -> tuple[Reason, ...]:
    """The outputs that depend on the arrays of a parameter other than their own; on any, for a state that all share."""
    traced = trace(optax.with_extra_args_support(tx), (abstract(params),) * 2, (), {}, __file__)
    if not isinstance(traced, Traced):
        return (Reason(*traced),)
    values = traced.run([None] * len((*traced.updates, *traced.state)))
    return tuple(
        Reason(role.name, value.why or Source(role.name, "depends on the arrays of another parameter"))
        for role, value in zip((*traced.updates, *traced.state), values, strict=True)
        if not value.leaves <= {role.near}
    )


def describe(reasons: Sequence[Reason]) -> str:
    """The reasons in one line, each equation once with the outputs that it spoils."""
    outputs: dict[tuple[str, ...], list[Reason]] = {}
    for reason in reasons:
        blamed = reason.source._replace(text="") if reason.source.where else reason.source
        outputs.setdefault(blamed, []).append(reason)
    lines = [f"{found[0].source} ({_some([*dict.fromkeys(r.output for r in found)])})" for found in outputs.values()]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def _judge(traced: Traced | tuple[str, Source]) -> Report:
    if not isinstance(traced, Traced):
        return Report((Reason(*traced),))
    count = len(traced.updates)
    pads = [*[0.0] * count, *(value.pad for value in traced.initial)]
    while True:  # what padding holds is an invariant of the update, found by giving up what does not last
        values = traced.run(pads)
        after = [*(0.0 if value.pad == 0 else None for value in values[:count]), *(v.pad for v in values[count:])]
        kept = [pad if pad == new else None for pad, new in zip(pads, after, strict=True)]
        if kept == pads:
            break
        pads = kept
    roles = (*traced.updates, *traced.state, *traced.state)
    found = (_verdict(*pair, traced.scope) for pair in zip(roles, (*values, *traced.initial), strict=True))
    return Report(tuple(reason for reason in found if reason is not None))


def _verdict(role: Role, value: Value, scope: Scope) -> Reason | None:
    """The reason why an output is not what its place demands, if it is not."""
    own = role.param is not None and role.shapes == scope.shapes[role.param]
    if not own and (role.param is not None or role.shapes[0] != role.shapes[1]):
        text = f"has shape {role.shapes[0]}, which is not its parameter's" + (
            "" if role.shapes[0] == role.shapes[1] else " but depends on it"
        )
        return Reason(role.name, Source(role.name, text))
    if value.kind is Kind.FILL or (not own and value.kind is Kind.FREE):
        return None
    if own and value.kind is Kind.LEAF and value.leaf == role.param:
        return None
    return Reason(role.name, value.why or Source(role.name, "depends on the arrays of another parameter"))
