"""An optimizer whose sums over all parameters are taken in one order, whatever the processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jaxshard.core.jaxpr import inline_calls, open_jaxpr, replay
from jaxshard.core.layout import Layout
from jaxshard.core.ordered_sums import stack_totals
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.elementwise import check_elementwise, is_elementwise_except_totals


def ordered(tx: Any, params: PyTree, views: PyTree, layout: Layout) -> optax.GradientTransformation:
    """`tx` on stored arrays, each sum over all elements of an array made of one number per device, added in order.

    `params` are the shapes of the trained parameters and `views` those of what is stored. One all-gather of one number
    per device for each such sum.

    Raises:
      ValueError: `tx` mixes elements in another way, which the compiler would order as it likes.
    """
    tx = optax.with_extra_args_support(tx)
    if not is_elementwise_except_totals(tx, params, views):
        raise ValueError(
            "reduction='ordered' needs an optimizer that is elementwise but for sums over all parameters (a global "
            f"norm), but this one is {check_elementwise(tx, params, views=views)}; use reduction='native'"
        )

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        program, shapes = jax.make_jaxpr(tx.update, return_shape=True)(grads, state, params)
        flat = inline_calls(program)
        specs = [placement.store for placement in jax.tree.leaves(layout.opt_params)]
        known = _Specs(open_jaxpr(flat)[0], [*specs, *[None] * len(jax.tree.leaves(state)), *specs])

        def rule(equation: Any, values: list[Any]) -> list[Any] | None:
            spec = known.of(equation)
            if spec is None or not _sums_all(equation):
                return None
            return [stack_totals(jnp.sum, values, [spec], layout.mesh)[0].astype(equation.outvars[0].aval.dtype)]

        leaves = replay(flat, jax.tree.leaves((grads, state, params)), rule)
        found: tuple[PyTree, PyTree] = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        return found

    return optax.GradientTransformation(tx.init, update)


class _Specs:
    """How the values of an elementwise program are split: as what they are made of and whose shape they have."""

    def __init__(self, jaxpr: Any, inputs: list[PartitionSpec | None]):
        self._known: dict[Any, PartitionSpec] = {}
        for var, spec in zip(jaxpr.invars, inputs, strict=True):
            if spec is not None:
                self._known[var] = spec

    def of(self, equation: Any) -> PartitionSpec | None:
        """How the operand of an equation is split; to be asked in the order of the program."""
        if any(_sums_all(inner) for inner in _nested(equation)):
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


def _sums_all(equation: Any) -> bool:
    """Whether an equation sums an array to a number; partial sums were refused before."""
    return equation.primitive.name == "reduce_sum" and bool(equation.invars[0].aval.shape)


def _nested(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr, _ = open_jaxpr(one)
            for inner in getattr(jaxpr, "eqns", ()):
                yield inner
                yield from _nested(inner)
