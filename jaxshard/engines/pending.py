"""Pending weights: gather each weight where a function's jaxpr uses it, though the function receives arrays.

The function is traced on the shapes of the weights, so whatever it does with one (a product, a norm over the whole
tree, `nnx.split`) it does with an array of the full shape. Then its jaxpr is evaluated on `Pending`s:

    y = remat[w = dot x w] x w          the gather goes into the jax.checkpoint, whose backward pass gathers again
    p = square w                        gathered once, for all equations outside of a jax.checkpoint
    w' = jit[handed through] w          still pending: a weight that nothing reads is never gathered
    z = scan[...] w x                   gathered before the loop or branch, and again for its backward pass

A unit is a `jax.checkpoint` that a module's adapter puts around the module. No weight is gathered inside a loop or
branch of the function itself, since devices may take different branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxshard.adapt.remat import save_no_weights
from jaxshard.core.jaxpr import CALLS, PLAIN_CALLS, Program, bind, checkpoint_again, evaluate, is_checkpoint
from jaxshard.core.low_rank import WEIGHT
from jaxshard.core.types import PyTree
from jaxshard.proofs.handed_through import operands_handed_through

_CONTROL = ("scan", "while", "cond")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Pending:
    """A weight that is not gathered yet.

    Attributes:
      parts: the arguments of `make`: a stored parameter, and zeros whose gradient becomes the gradient of the parameter
        (its sink). For a matrix with low-rank factors, the base and the factors, which may be `Pending` too.
      make: `make(*parts) -> weight`, which issues the all-gathers.
    """

    parts: tuple[Any, ...]
    make: Callable[..., jax.Array] = field(metadata={"static": True})

    def gather(self) -> jax.Array:
        """Return the weight. Issues the all-gathers."""
        return self.make(*self.parts)

    @property
    def shape(self) -> Any:
        """The shape and dtype of the gathered weight, as a ShapeDtypeStruct."""
        return jax.eval_shape(self.make, *self.parts)


def run_on_pending(fn: Callable[[PyTree], PyTree], weights: PyTree) -> PyTree:
    """Run `fn(weights)`, and gather each `Pending` weight only where the jaxpr of `fn` uses it.

    Args:
      fn: a function of the weights; it is traced with arrays in place of `Pending`s.
      weights: a tree of arrays and `Pending`s (weights that are not gathered yet).
    """
    shapes = jax.tree.map(lambda x: x.shape if _is_pending(x) else x, weights, is_leaf=_is_pending)
    program = Program.trace(fn, shapes)
    return program.results(_run(program.closed, jax.tree.leaves(weights, is_leaf=_is_pending)))


def _is_pending(x: Any) -> bool:
    return isinstance(x, Pending)


def _run(program: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with `Pending` weights among its arguments, and gather each weight where an equation uses it.

    If the jaxpr returns such an argument unchanged, the result is `Pending` too.
    """
    gathered: dict[Pending, jax.Array] = {}

    def weight(x: Any) -> Any:
        if not _is_pending(x):
            return x
        if x not in gathered:
            gathered[x] = x.gather()
        return gathered[x]

    def rule(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if not any(map(_is_pending, operands)):
            return None
        name = eqn.primitive.name
        if eqn.primitive is WEIGHT:
            return [Pending(tuple(operands), lambda *parts: bind(eqn, _gather(parts))[0])]
        if name in PLAIN_CALLS:
            return evaluate(eqn.params[CALLS[name]], operands, rule)
        handed = {
            result: operands[source]
            for result, source in enumerate(operands_handed_through(eqn))
            if source is not None and _is_pending(operands[source])
        }
        computed = [result for result in range(len(eqn.outvars)) if result not in handed]
        if not computed:
            made = []
        elif is_checkpoint(eqn):
            made = _run_checkpoint(eqn, operands, computed)
        elif name in _CONTROL:
            made = _run_control(eqn, operands, computed)
        else:
            made = _chosen(bind(eqn, [weight(x) for x in operands]), computed)
        results = handed | dict(zip(computed, made, strict=True))
        return [results[result] for result in range(len(eqn.outvars))]

    return evaluate(program, args, rule)


def _run_checkpoint(eqn: Any, operands: list[Any], computed: list[int]) -> list[Any]:
    """Evaluate a `jax.checkpoint` equation, with the gathers of its `Pending` operands inside the checkpoint.

    So the backward pass gathers again: gathered weights are never saved, whatever the checkpoint's policy. Return only
    the results with the indices `computed`.
    """

    def body(*operands: Any) -> list[Any]:
        return _gather(_chosen(_run(eqn.params["jaxpr"], operands), computed))

    policy = eqn.params["policy"]
    return checkpoint_again(eqn, body, None if policy is None else save_no_weights(policy))(*operands)


def _run_control(eqn: Any, operands: list[Any], computed: list[int]) -> list[Any]:
    """Evaluate a loop or branch; gather its `Pending` weights before it runs, and again for its backward pass.

    Return only the results with the indices `computed`.
    """

    def body(*operands: Any) -> list[Any]:
        return _chosen(bind(eqn, _gather(operands)), computed)

    save = save_no_weights(jax.checkpoint_policies.everything_saveable)
    results: list[Any] = jax.checkpoint(body, policy=save)(*operands)
    return results


def _gather(values: Sequence[Any]) -> list[Any]:
    return [x.gather() if _is_pending(x) else x for x in values]


def _chosen(results: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [results[index] for index in indices]
