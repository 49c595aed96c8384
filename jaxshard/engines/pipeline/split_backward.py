"""Split one block into four programs: forward, backward, and the two halves of the backward.

A pipeline runs a block's forward and its backward in different ticks, so the residuals between them must be plain
arrays in a buffer. Zero-bubble schedules also split the backward: B computes the gradient of the input, for which the
previous stage waits, and W computes the gradients of the weights later, when the device would be idle (Qi et al. 2024,
"Zero Bubble Pipeline Parallelism", section 2). Both cuts are made here, in the jaxpr of the block's derivative. For the
block y = x + tanh(x @ w + b):

    F  forward            t = tanh(x @ w + b);  y = x + t          keeps    x, 1 - t²
    B  input_backward     dh = dy (1 - t²);  dx = dy + dh @ wᵀ     carries  x, dh
    W  weight_backward    dw = xᵀ @ dh;  db = sum(dh)

    F ──── kept ────> B ──── carried ────> W            w, b and the random key are available in every tick;
    └──── kept ─────> backward = B and W at once        values that depend only on weights are never stored

The cut between forward and backward: `jax.vjp` returns the pullback as a pytree, whose leaves are the residuals. Each
residual is passed again (a weight, the key), computed again (a function of weights only, such as wᵀ or a cast of w), or
kept.

The cut between B and W: the equations of the backward jaxpr that dx depends on belong to B, the others to W, so that
nothing is computed twice. The values of B that W reads are carried. A weight's gradient that is computed together with
dx (in a `scan` over layers both are outputs of one equation) belongs to B.
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
    """A block as four programs, for zero-bubble schedules: forward, backward, and the two halves of the backward.

    Attributes:
      forward: computes the output `y`, a tree like `x`, and `kept`: the residuals for the backward.
      backward: computes from `kept` and the output's cotangent `dy` all gradients of weights, and the input's cotangent
        `dx`.
      input_backward: computes `dx`, the gradients of weights that are computed together with `dx`, and `carried`: the
        arrays that `weight_backward` needs.
      weight_backward: computes the other gradients of weights.

    `kept` and `carried` are lists of plain arrays (random keys as integers), so that they can wait in buffers. `dy` and
    `dx` are trees like `x`, of which only floating leaves are used. Gradients are lists with one entry per trained
    weight; each half has None for a gradient that the other half computes.
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
    """Trace a block, and split it into the programs of a `SplitBlock`: its forward and the parts of its backward.

    The forward keeps the residuals that `jax.vjp` of the block saves. To keep fewer, wrap the block in a
    `jax.checkpoint`. Call this where the block runs (inside `shard_map`), since the block may use axis names.

    Args:
      block: `block(weights, x, key) -> y`, a tree like `x`.
      weights, x, key: the arguments, or their shapes.
      trained: for each leaf of the weights True if it has a gradient.

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
    # Residuals that differ between micro-batches are kept, except the key, which is passed again.
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
    """Split a block's `backward` into the functions `input_backward` and `weight_backward` of a `SplitBlock`.

    `weights`, `key`, `kept` and `dy` are arguments of `backward`, or their shapes.
    """

    def whole(weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[Arrays, PyTree]:
        grads, dx = backward(weights, key, kept, dy)
        return grads, floats_of(dx)

    # Inline calls, so that the equations of a jitted function can be divided between both halves.
    program = Program.trace(whole, weights, key, kept, dy).inline_calls()
    (weight_vars, key_vars, kept_vars, dy_vars), (grad_vars, dx_vars) = program.args, program.out
    # B's variables: the inputs, and all variables that dx depends on.
    inputs = jax.tree.leaves(program.args)
    of_input, _ = needed_equations(program.eqns, jax.tree.leaves(dx_vars), set())
    known = {*inputs, *open_jaxpr(program.closed)[0].constvars, *(var for eqn in of_input for var in eqn.outvars)}
    is_early = [isinstance(var, Literal) or var in known for var in grad_vars]
    early = [var for var, ready in zip(grad_vars, is_early) if ready]
    late = [var for var, ready in zip(grad_vars, is_early) if not ready]
    # W's equations start from B's variables. Carry those that W reads and can't compute again from the weights and the
    # key, in the order in which they are computed.
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
    """Make a `SplitBlock` for evaluation: its forward keeps nothing, and its backward programs raise."""

    def forward(weights: PyTree, x: PyTree, key: Any) -> tuple[PyTree, Arrays]:
        y = block(weights, x, key)
        check_block(x, y)
        return y, []

    def missing(*_: Any) -> Any:
        raise AssertionError("a block that only runs forward has no backward")

    return SplitBlock(forward, missing, missing, missing)


# Buffers have plain arrays: random keys are stored as their words.


def _with_keys(names: Sequence[Any], values: Arrays) -> dict[Any, jax.Array]:
    """Return {variable of a jaxpr: its value}, with integers converted back to random keys where the variable is a key.

    `names` are the variables, `values` their values.
    """

    return {var: keys_of(x, var.aval.dtype) for var, x in zip(names, values, strict=True)}
