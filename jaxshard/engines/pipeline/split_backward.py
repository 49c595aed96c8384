"""One block as four programs: forward, backward, and the backward cut in two.

A pipeline runs a block's forward and its backward in different ticks, so what lies between them has to be plain data
in a buffer. And the zero-bubble schedules cut the backward itself in two: B makes the gradient of the input, for which
the device before waits, and W makes the gradients of the weights later, when the device has nothing better to do
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). Both cuts are made here, in the traced program of the
block's derivative. For the block y = x + tanh(x @ w + b):

    F  forward            t = tanh(x @ w + b);  y = x + t          keeps    x, 1 - t²
    B  input_backward     dh = dy (1 - t²);  dx = dy + dh @ wᵀ     carries  x, dh
    W  weight_backward    dw = xᵀ @ dh;  db = sum(dh)

    F ──── kept ────> B ──── carried ────> W            w, b and the random key are at hand in every tick;
    └──── kept ─────> backward = B and W at once        nothing that depends on weights alone is ever stored

The cut between forward and backward: `jax.vjp` returns the pullback as a pytree, whose leaves are the residuals. Each
is either given again (a weight, the key), made again (a function of weights alone, such as wᵀ or a cast of w), or kept.

The cut between B and W: of the equations of the backward program, those that dx depends on belong to B, the others to
W, so that nothing is computed twice. Carried is what W reads of B's values. A weight's gradient that is finished when
dx is (in a `scan` over layers both come out of one equation) belongs to B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from jaxshard.adapt.stacked import check_block
from jaxshard.core.jaxpr import Program, assign, dependent_variables, needed_equations, open_jaxpr
from jaxshard.core.keys import keys_of, words_of
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree
from jaxshard.engines.pipeline.floats import fill, floats_of

Arrays = list[jax.Array]
Block = Callable[[PyTree, PyTree, Any], PyTree]


class SplitBlock(NamedTuple):
    """A block as four programs.

    `weights`, `x` and `key` are what the block receives; `dy` and `dx` are cotangents, trees like `x` of which only the
    floating leaves mean something. `kept` and `carried` are lists of plain arrays (random keys as their words).
    Gradients are lists with one entry per trained weight, None where the other half of the backward makes it.
    """

    forward: Callable[[PyTree, PyTree, Any], tuple[PyTree, Arrays]]
    """(weights, x, key) -> (y, kept)."""
    backward: Callable[[PyTree, Any, Arrays, PyTree], tuple[Arrays, PyTree]]
    """(weights, key, kept, dy) -> (gradients, dx)."""
    input_backward: Callable[[PyTree, Any, Arrays, PyTree], tuple[list[Any], PyTree, Arrays]]
    """(weights, key, kept, dy) -> (the gradients that come with dx, dx, carried)."""
    weight_backward: Callable[[PyTree, Any, Arrays], list[Any]]
    """(weights, key, carried) -> the other gradients."""


def split_block(block: Block, weights: PyTree, x: PyTree, key: Any, trained: Sequence[bool]) -> SplitBlock:
    """Trace a block and cut its derivative into programs.

    Kept is what `jax.vjp` of the block saves: put a `jax.checkpoint` around the block to keep less. Call this where
    the block runs (inside `shard_map`), since the block may name axes.

    Args:
      block: `block(weights, x, key) -> y`, a tree like `x`.
      weights, x, key: the arguments, or their shapes.
      trained: for each leaf of the weights whether it has a gradient.

    Raises:
      ValueError: the block returns another tree, shapes or dtypes than it receives.
    """
    weights, x, key = abstract((weights, x, key))
    mask = jax.tree.unflatten(jax.tree.structure(weights), list(trained))

    def run(weights: PyTree, x: PyTree, key: Any) -> tuple[PyTree, Any]:
        def differentiated(own: PyTree, floats: PyTree) -> tuple[PyTree, PyTree]:
            given = fill(floats, x)
            y = block(fill(own, weights), given, key)
            check_block(given, y)
            return floats_of(y), y

        own = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, weights)
        floats, pullback, y = jax.vjp(differentiated, own, floats_of(x), has_aux=True)
        return fill(floats, y), pullback

    program = Program.trace(run, weights, x, key)
    (weight_vars, x_vars, key_vars), (y_vars, pullback_vars) = program.args, program.out
    residuals, pullback_tree = jax.tree.flatten(pullback_vars)
    # What changes from micro-batch to micro-batch is kept; the key does, too, but is given again.
    changing = dependent_variables(program.eqns, jax.tree.leaves((x_vars, key_vars)))
    changing -= set(jax.tree.leaves((weight_vars, key_vars)))
    kept_vars = list(dict.fromkeys(v for v in residuals if not isinstance(v, Literal) and v in changing))

    def forward(weights: PyTree, x: PyTree, key: Any) -> tuple[PyTree, Arrays]:
        y, kept = program.run((y_vars, kept_vars), assign(program.args, (weights, x, key)))
        return y, [words_of(value) for value in kept]

    def backward(weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[Arrays, PyTree]:
        known = assign((weight_vars, key_vars), (weights, key)) | _with_keys(kept_vars, kept)
        pullback = jax.tree.unflatten(pullback_tree, program.run(residuals, known))
        grads, dx = pullback(floats_of(dy))
        return jax.tree.leaves(grads), fill(dx, dy)

    kept = [words_of(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)) for v in kept_vars]
    return SplitBlock(forward, backward, *_cut_backward(backward, weights, key, kept, x))


def _cut_backward(
    backward: Callable[..., tuple[Arrays, PyTree]], weights: PyTree, key: Any, kept: Sequence[Any], dy: PyTree
) -> tuple[Callable[..., tuple[list[Any], PyTree, Arrays]], Callable[..., list[Any]]]:
    """(`input_backward`, `weight_backward`) of a block, from its whole backward and the shapes of its arguments."""

    def whole(weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[Arrays, PyTree]:
        grads, dx = backward(weights, key, kept, dy)
        return grads, floats_of(dx)

    # Without calls: an equation that is a jitted function would belong to one half as a whole.
    program = Program.trace(whole, weights, key, kept, dy).inline_calls()
    (weight_vars, key_vars, kept_vars, dy_vars), (grad_vars, dx_vars) = program.args, program.out
    # B's variables: the inputs and what dx needs. They contain, with a variable, all that it is made of.
    inputs = jax.tree.leaves(program.args)
    of_input, _ = needed_equations(program.eqns, jax.tree.leaves(dx_vars), set())
    known = {*inputs, *open_jaxpr(program.closed)[0].constvars, *(var for eqn in of_input for var in eqn.outvars)}
    is_early = [isinstance(var, Literal) or var in known for var in grad_vars]
    early = [var for var, ready in zip(grad_vars, is_early) if ready]
    late = [var for var, ready in zip(grad_vars, is_early) if not ready]
    # W's equations start from B's variables; of those that it reads, carried are the ones that W can't make again from
    # the weights and the key, in the order in which they are made.
    _, read = needed_equations(program.eqns, late, known)
    changing = dependent_variables(program.eqns, jax.tree.leaves((kept_vars, dy_vars)))
    in_order = dict.fromkeys([*inputs, *(var for eqn in program.eqns for var in eqn.outvars)])
    carried_vars = [var for var in in_order if var in read & known & changing]

    def input_backward(weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[list[Any], PyTree, Arrays]:
        values = assign(program.args, (weights, key, kept, dy))
        grads, dx, carried = program.run((early, dx_vars, carried_vars), values)
        ready = iter(grads)
        return [next(ready) if e else None for e in is_early], fill(dx, dy), [words_of(x) for x in carried]

    def weight_backward(weights: PyTree, key: Any, carried: Arrays) -> list[Any]:
        values = assign((weight_vars, key_vars), (weights, key)) | _with_keys(carried_vars, carried)
        ready = iter(program.run(late, values))
        return [None if e else next(ready) for e in is_early]

    return input_backward, weight_backward


def forward_only(block: Block) -> SplitBlock:
    """Return a block that keeps nothing and has no backward, for evaluation."""

    def forward(weights: PyTree, x: PyTree, key: Any) -> tuple[PyTree, Arrays]:
        y = block(weights, x, key)
        check_block(x, y)
        return y, []

    def missing(*_: Any) -> Any:
        raise AssertionError("a block that only runs forward has no backward")

    return SplitBlock(forward, missing, missing, missing)


# Buffers hold plain arrays: random keys go through them as their words.


def _with_keys(names: Sequence[Any], values: Arrays) -> dict[Any, jax.Array]:
    """The values by variable, words as the keys that they were."""

    return {var: keys_of(x, var.aval.dtype) for var, x in zip(names, values, strict=True)}
