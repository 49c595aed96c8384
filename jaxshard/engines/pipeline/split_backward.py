"""One block taken apart: forward with what it keeps, backward from it, and the backward split into its two halves.

A pipeline runs a block's forward and backward in different ticks, so what lies between them is data: the residuals of
`jax.vjp`, flattened. Of these the weights and what depends on weights alone are made again, the rest is kept. The
backward program is split by its data flow (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2): what the
gradient of the input needs runs first, what only the gradients of the weights need runs later, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxshard.adapt.stacked import check_block
from jaxshard.core.jaxpr import dependent_variables, inline_calls, needed_equations, open_jaxpr, subprogram
from jaxshard.core.keys import key_impl_of
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree

Arrays = list[jax.Array]
Block = Callable[[PyTree, PyTree, Any], PyTree]


class Halves(NamedTuple):
    """A block as four programs.

    `weights`, `x` and `key` are what the block receives, `dy` and `dx` cotangents: trees like `x`, of which only the
    floating leaves mean something. `kept` and `carried` are lists of arrays. Gradients are lists, one per trained
    weight, None where the other half makes it.
    """

    forward: Callable[[PyTree, PyTree, Any], tuple[PyTree, Arrays]]
    """(weights, x, key) -> (y, kept)."""
    backward: Callable[[PyTree, Any, Arrays, PyTree], tuple[Arrays, PyTree]]
    """(weights, key, kept, dy) -> (gradients, dx)."""
    first: Callable[[PyTree, Any, Arrays, PyTree], tuple[list[Any], PyTree, Arrays]]
    """(weights, key, kept, dy) -> (gradients that the input's needs anyway, dx, carried)."""
    second: Callable[[PyTree, Any, Arrays], list[Any]]
    """(weights, key, carried) -> the other gradients."""


def halves(block: Block, weights: PyTree, x: PyTree, key: Any, trained: Sequence[bool]) -> Halves:
    """The programs of a block for arguments of these shapes; `trained` says which leaves of the weights are.

    What is kept is what `jax.vjp` of the block saves: put a `jax.checkpoint` around it to keep less. To be called
    where the block runs (inside `shard_map`), since the block may name axes.

    Raises:
      ValueError: the block returns another tree, shapes or dtypes than it receives.
    """
    parts = _Parts.of(weights, x, key, trained)
    forward = _Forward(block, parts)
    program = _Program(jax.make_jaxpr(forward)(*parts.flat))
    results, residuals = program.outs[: len(parts.x)], program.outs[len(parts.x) :]
    sources = _sources(program, residuals, parts)
    kept_vars = _unique(var for var, source in sources if source == "kept")
    again_vars = _unique(var for var, source in sources if source == "again")
    given_vars = [*program.ins[: len(parts.weights)], *program.ins[len(parts.weights) + len(parts.x) :]]
    run = program.part([*results, *kept_vars], program.ins)
    remake = program.part(again_vars, given_vars)

    def run_forward(weights: PyTree, x: PyTree, key: Any) -> tuple[PyTree, Arrays]:
        out = run(*jax.tree.leaves(weights), *jax.tree.leaves(x), *jax.tree.leaves(key))
        return parts.like_x(out[: len(parts.x)]), [_plain(value) for value in out[len(parts.x) :]]

    def pull(weights: PyTree, key: Any, kept: Arrays, dy: PyTree) -> tuple[Arrays, PyTree]:
        given = [*jax.tree.leaves(weights), *jax.tree.leaves(key)]
        values = dict(zip(given_vars, given, strict=True))
        values |= dict(zip(again_vars, remake(*given), strict=True))
        values |= {var: _typed(value, var.aval.dtype) for var, value in zip(kept_vars, kept, strict=True)}
        leaves = [var.val if isinstance(var, Literal) else values[var] for var in residuals]
        grads, dx = jax.tree.unflatten(forward.tree, leaves)(parts.floats(dy))
        return grads, parts.cotangents(dx, dy)

    kept = [_plain_shape(var.aval) for var in kept_vars]
    split = _Split.of(pull, parts, kept)
    return Halves(run_forward, pull, split.first, split.second)


def forward_only(block: Block) -> Halves:
    """A block that keeps nothing, and has no backward."""

    def forward(weights: PyTree, x: PyTree, key: Any) -> tuple[PyTree, Arrays]:
        y = block(weights, x, key)
        check_block(x, y)
        return y, []

    def none(*_: Any) -> Any:
        raise AssertionError("a block that only runs forward has no backward")

    return Halves(forward, none, none, none)


class _Parts(NamedTuple):
    """The flat arguments of a block, as shapes, and which of them are differentiated."""

    weights: list[Any]
    x: list[Any]
    key: list[Any]
    weights_tree: Any
    x_tree: Any
    key_tree: Any
    trained: tuple[bool, ...]
    floating: tuple[bool, ...]

    @classmethod
    def of(cls, weights: PyTree, x: PyTree, key: Any, trained: Sequence[bool]) -> _Parts:
        (w, w_tree), (xs, x_tree), (ks, key_tree) = (jax.tree.flatten(abstract(t)) for t in (weights, x, key))
        floating = tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in xs)
        return cls(w, xs, ks, w_tree, x_tree, key_tree, tuple(trained), floating)

    @property
    def flat(self) -> list[Any]:
        return [*self.weights, *self.x, *self.key]

    def like_x(self, leaves: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(self.x_tree, list(leaves))

    def floats(self, x: PyTree) -> list[Any]:
        return [leaf for leaf, floating in zip(jax.tree.leaves(x), self.floating, strict=True) if floating]

    def cotangents(self, floats: Sequence[Any], like: PyTree) -> PyTree:
        """A tree like `x` with the given floating leaves; the others are those of `like`, and mean nothing."""
        given = iter(floats)
        leaves = [next(given) if f else leaf for f, leaf in zip(self.floating, jax.tree.leaves(like), strict=True)]
        return self.like_x(leaves)


class _Forward:
    """The block and the residuals of its `jax.vjp`, on flat arguments; `tree` is what makes the pullback of them."""

    def __init__(self, block: Block, parts: _Parts):
        self.block, self.parts, self.tree = block, parts, None

    def __call__(self, *flat: Any) -> list[Any]:
        parts = self.parts
        count, stop = len(parts.weights), len(parts.weights) + len(parts.x)
        weights, x = list(flat[:count]), list(flat[count:stop])
        key = jax.tree.unflatten(parts.key_tree, flat[stop:])

        def differentiated(trained: list[Any], floats: list[Any]) -> tuple[list[Any], list[Any]]:
            mixed = _mixed(parts.weights_tree, parts.trained, trained, weights)
            given = _mixed(parts.x_tree, parts.floating, floats, x)
            y = self.block(mixed, given, key)
            check_block(given, y)
            leaves = jax.tree.leaves(y)
            return parts.floats(y), [leaf for leaf, f in zip(leaves, parts.floating) if not f]

        trained = [w for w, chosen in zip(weights, parts.trained, strict=True) if chosen]
        floats, pullback, others = jax.vjp(differentiated, trained, parts.floats(parts.like_x(x)), has_aux=True)
        residuals, self.tree = jax.tree.flatten(pullback)
        given, rest = iter(floats), iter(others)
        return [*(next(given) if f else next(rest) for f in parts.floating), *residuals]


def _mixed(tree: Any, chosen: Sequence[bool], some: Sequence[Any], everything: Sequence[Any]) -> PyTree:
    given = iter(some)
    return jax.tree.unflatten(tree, [next(given) if own else x for own, x in zip(chosen, everything, strict=True)])


class _Program:
    """A traced program of which parts can be run."""

    def __init__(self, made: Any):
        jaxpr, _ = open_jaxpr(made)
        self.made, self.eqns = made, list(jaxpr.eqns)
        self.ins, self.outs, self.consts = list(jaxpr.invars), list(jaxpr.outvars), list(jaxpr.constvars)

    def part(self, outs: Sequence[Any], ins: Sequence[Any]) -> Callable[..., Arrays]:
        """`fn(*values of ins)` that computes these variables and no more."""
        return subprogram(self.made, outs, ins, needed_equations(self.eqns, outs, set(ins))[0])


def _sources(program: _Program, residuals: Sequence[Any], parts: _Parts) -> list[tuple[Any, str]]:
    """For every residual where the backward pass has it from: "given", made "again" from weights, or "kept"."""
    count, stop = len(parts.weights), len(parts.weights) + len(parts.x)
    ins = program.ins
    given = {*ins[:count], *ins[stop:]}
    moving = dependent_variables(program.eqns, ins[count:])

    def source(var: Any) -> str:
        if isinstance(var, Literal) or var in given:
            return "given"
        return "kept" if var in moving else "again"

    return [(var, source(var)) for var in residuals]


class _Split(NamedTuple):
    first: Callable[..., Any]
    second: Callable[..., Any]

    @classmethod
    def of(cls, pull: Callable, parts: _Parts, kept: Sequence[Any]) -> _Split:
        sizes = [len(parts.weights), len(parts.key), len(kept), sum(parts.floating)]

        def flat(*args: Any) -> list[Any]:
            weights, key, held, dy = _cut(args, sizes)
            own, keys = jax.tree.unflatten(parts.weights_tree, weights), jax.tree.unflatten(parts.key_tree, key)
            grads, dx = pull(own, keys, held, parts.cotangents(dy, parts.like_x(parts.x)))
            return [*grads, *parts.floats(dx)]

        floats = [leaf for leaf, f in zip(parts.x, parts.floating) if f]
        program = _Program(inline_calls(jax.make_jaxpr(flat)(*parts.weights, *parts.key, *kept, *floats)))
        count = sum(parts.trained)
        grads, dx = program.outs[:count], program.outs[count:]
        before = needed_equations(program.eqns, dx, set())[0]
        made = {var for eqn in before for var in eqn.outvars} | {*program.ins, *program.consts}
        early = [isinstance(var, Literal) or var in made for var in grads]
        late = [var for var, is_early in zip(grads, early) if not is_early]
        # What the second half reads of the first: weights, keys and what depends on weights alone are not carried.
        moving = dependent_variables(program.eqns, program.ins[sizes[0] + sizes[1] :])
        mine = [eqn for eqn in needed_equations(program.eqns, late, set())[0] if not made & set(eqn.outvars)]
        read = {var for eqn in mine for var in eqn.invars if not isinstance(var, Literal)}
        carried = [var for var in _unique(_variables(program)) if var in read & made & moving]
        given = program.ins[: sizes[0] + sizes[1]]
        run_first = program.part([*(v for v, e in zip(grads, early) if e), *dx, *carried], program.ins)
        run_second = program.part(late, [*given, *carried])
        extended = [var.aval.dtype for var in carried]

        def first(weights: PyTree, key: Any, held: Arrays, dy: PyTree) -> tuple[list[Any], PyTree, Arrays]:
            args = [*jax.tree.leaves(weights), *jax.tree.leaves(key), *held, *parts.floats(dy)]
            some, dx, rest = _cut(run_first(*args), [sum(early), sum(parts.floating), len(carried)])
            ready = iter(some)
            return [next(ready) if e else None for e in early], parts.cotangents(dx, dy), [_plain(x) for x in rest]

        def second(weights: PyTree, key: Any, values: Arrays) -> list[Any]:
            typed = [_typed(x, dtype) for x, dtype in zip(values, extended, strict=True)]
            ready = iter(run_second(*jax.tree.leaves(weights), *jax.tree.leaves(key), *typed))
            return [None if e else next(ready) for e in early]

        return cls(first, second)


def _variables(program: _Program) -> Iterable[Any]:
    yield from program.ins
    for eqn in program.eqns:
        yield from eqn.outvars


def _cut(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(values[start : start + size]))
        start += size
    return parts


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(variables))


def _plain(x: jax.Array) -> jax.Array:
    """A random key as its words: buffers hold plain arrays."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _typed(x: jax.Array, dtype: Any) -> jax.Array:
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(x, impl=key_impl_of(dtype))


def _plain_shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_plain, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
