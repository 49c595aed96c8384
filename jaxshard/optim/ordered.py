"""Make an optimizer's sums over arrays use a fixed order, so that results do not depend on the number of processes.

The compiler adds the devices' shares of a sum in any order, and floating-point addition is not associative. Most
optimizers take no sums over arrays; a global norm does. These sums are found in the jaxpr of the update and replaced by
`stack_totals`, which adds one scalar per device in a fixed order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jaxshard.core.jaxpr import equations_inside, inline_calls, open_jaxpr, replay
from jaxshard.core.layout import Layout
from jaxshard.core.ordered_sums import stack_totals
from jaxshard.core.transform import as_transform
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.elementwise import check_elementwise, check_state, is_elementwise_except_totals, stored_shapes


def with_ordered_sums(tx: Any, params: PyTree, layout: Layout) -> optax.GradientTransformation:
    """Return `tx` with sums over all elements of an array computed in a fixed order, one device after another.

    The results then do not depend on the order in which a compiler adds the devices' shares. The new transform updates
    arrays as they are stored. Collectives: one all-gather of a scalar per device for each such sum.

    Args:
      tx: A transform that is elementwise except for functions of sums over all parameters, such as the global norm.
      params: The logical shapes of the trained parameters.
      layout: The layout, which says how the arrays are stored.

    Raises:
      ValueError: `tx` combines elements otherwise than by such sums, so the order is not fixed; or, raised by `update`,
        it sums inside a branch or a loop.
    """
    tx = as_transform(tx)
    views = stored_shapes(params, layout.opt_params)
    proven = is_elementwise_except_totals(tx, params, views)
    report = check_state(tx, views, layout.opt_state) if proven else check_elementwise(tx, params, views=views)
    if not (proven and report):
        raise ValueError(
            "reduction='ordered' needs an optimizer that is elementwise but for sums over all parameters "
            f"(a global norm), but this one is {report}; use reduction='native'"
        )

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        program, shapes = jax.make_jaxpr(tx.update, return_shape=True)(grads, state, params)
        flat = inline_calls(program)
        inputs = layout.opt_params, layout.opt_state, layout.opt_params  # as the arguments of tx.update
        known = _Specs(open_jaxpr(flat)[0], [placement.store for placement in jax.tree.leaves(inputs)])

        def rule(equation: Any, values: list[Any]) -> list[Any] | None:
            spec = known.follow(equation)
            if spec is None or not _sums_an_array(equation):
                return None
            return [stack_totals(jnp.sum, values, [spec], layout.mesh)[0].astype(equation.outvars[0].aval.dtype)]

        leaves = replay(flat, jax.tree.leaves((grads, state, params)), rule)
        found: tuple[PyTree, PyTree] = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        return found

    return optax.GradientTransformation(tx.init, update)


class _Specs:
    """Find the PartitionSpec of every value in an elementwise jaxpr, one equation after another.

    An elementwise equation keeps every element in its place, so a result has the spec of an operand of the same shape.
    """

    def __init__(self, jaxpr: Any, inputs: list[PartitionSpec]):
        self._known = dict(zip(jaxpr.invars, inputs, strict=True))

    def follow(self, equation: Any) -> PartitionSpec | None:
        """Record the specs of an equation's results; return the spec of its first operand that has one, else None.

        Call it for every equation, in the order of the jaxpr.

        Raises:
          ValueError: the equation is a branch or loop that sums an array.
        """
        if any(map(_sums_an_array, equations_inside(equation))):
            raise ValueError(
                "reduction='ordered': the optimizer sums over parameters inside a branch or a loop "
                f"({equation.primitive.name}), where it can't be ordered; use reduction='native'"
            )
        given = [
            (x.aval.shape, self._known[x]) for x in equation.invars if not isinstance(x, Literal) and x in self._known
        ]
        for out in equation.outvars:
            for shape, spec in given:
                if out.aval.shape == shape:
                    self._known[out] = spec
        return given[0][1] if given else None


def _sums_an_array(equation: Any) -> bool:
    """Return True if an equation sums all elements of an array; optimizers with other sums were refused before."""
    return equation.primitive.name == "reduce_sum" and bool(equation.invars[0].aval.shape)
