"""Combine the states that a loss returns on each device and in each micro-batch to the model's new state.

Each call of the loss receives the state from before the step and sees some of the rows. For every array of the
returned state there is one of these rules, found once when a step is traced:

    "kept"   the loss returned the old array             nothing is done
    "sum"    declared by js.Sum, or a part of a js.Mean  added
    "max"    declared by js.Max                          the maximum
    "once"   proven equal everywhere                     taken once
    "mean"   any other floating array                    the mean over micro-batches and devices

Any other array is refused by its path. `adapt/model_state.py` then makes the new state from the combined arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.adapt.model_state import is_declared, next_state
from jaxshard.core.collectives import NATIVE, Sums, all_max, sum_scalar
from jaxshard.core.jaxpr import Program, results_alone
from jaxshard.core.keys import keys_of, words_of
from jaxshard.core.layout import Layout
from jaxshard.core.loss import Loss, Max, Mean, Sum, lowest_value
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.text_table import first_words
from jaxshard.core.tree import abstract, path_str, raise_all
from jaxshard.core.types import PyTree
from jaxshard.core.unsuited import Unsuited
from jaxshard.engines.engine import Engine, ValueAndGrad
from jaxshard.engines.part import Part
from jaxshard.proofs.alike import made_alike
from jaxshard.proofs.equal import Axes, differing

Rule = Literal["kept", "sum", "max", "once", "mean"]

_DESCRIPTIONS: dict[Rule, str] = {
    "kept": "returned unchanged by the loss",
    "once": "proven equal on all devices and in all micro-batches and taken once",
    "mean": "not proven equal, so the mean over devices and micro-batches",
    "sum": "declared, added over devices and micro-batches",
    "max": "declared, the maximum over devices and micro-batches",
}

_ROWS = "the rows of a part of the batch"
"""A pseudo axis for values that depend on the part of the batch; no collective has this name, so none removes it."""


@dataclass(frozen=True)
class Sharing:
    """The division of a batch's rows over devices and micro-batches, and the arrays that differ between devices.

    Attributes:
      facts: trees for the loss's arguments: parameters, state, batch, and the index of the first row. Each leaf is the
        set of mesh axes over which that array differs between devices.
      mask: True for every array of the batch that has rows.
      manual: the manual axes of the `shard_map` around the loss.
      microbatches: the number of micro-batches of each device.
      who: the engine, for errors: "js.explicit()".
    """

    facts: tuple[PyTree, PyTree, PyTree, Axes]
    mask: PyTree
    manual: Axes
    microbatches: int
    who: str

    @classmethod
    def of(cls, engine: Engine, layout: Layout, mask: PyTree) -> Sharing:
        """Describe how an engine divides the rows of a batch; `mask` is True for the arrays that have rows."""
        manual = frozenset(axis for axis in engine.manual_axes(layout) if layout.mesh.shape[axis] > 1)
        rows = manual.intersection(layout.sum_axes)
        positions = rows.difference(layout.batch_axes)  # of a context, which may split an array without rows
        facts = (
            jax.tree.map(lambda placement: manual.intersection(axes_of(placement.store)), layout.params),
            jax.tree.map(lambda placement: manual.intersection(axes_of(placement.use)), layout.state),
            jax.tree.map(lambda has_rows: rows if has_rows else positions, mask),
            rows,
        )
        return cls(facts, mask, manual, engine.microbatches, f"js.{engine.name}()")

    @property
    def has_parts(self) -> bool:
        """True if the batch is divided at all: over several devices or into several micro-batches."""
        return self.microbatches > 1 or bool(self.facts[3])

    def facts_of_leaves(self) -> list[Axes]:
        """Return for each input of the loss, in order, the set of mesh axes over which it differs between devices.

        Inputs that differ between micro-batches too (arrays with rows, and the index of the first row) also have the
        pseudo axis `_ROWS` in their set.
        """
        params, state, batch, row = self.facts
        batch = jax.tree.map(lambda fact, has_rows: fact | {_ROWS} if has_rows else fact, batch, self.mask)
        return [*jax.tree.leaves((params, state, batch)), row | {_ROWS}]


@dataclass(frozen=True)
class StateRules:
    """Rules to combine, over micro-batches and devices, the arrays of the model state that a loss returns.

    Attributes:
      tree: the structure of the returned state; None if the loss returns no state.
      paths: the path of each array, in the order of leaves.
      rules: the rule of each array: "kept", "sum", "max", "once" or "mean".
      like: the shape and dtype of each array.
      update: the function that the loss passed as `js.Loss(update=)`; None without one.
    """

    tree: Any
    paths: tuple[str, ...]
    rules: tuple[Rule, ...]
    like: tuple[jax.ShapeDtypeStruct, ...]
    update: Callable[[PyTree, PyTree], PyTree] | None

    def parts(self, loss: Loss) -> list[jax.Array]:
        """Return the arrays of the state in `loss` that must be combined: all arrays whose rule is not "kept"."""
        leaves = jax.tree.leaves(loss.state) if self.rules else []
        return [jnp.asarray(x) for rule, x in zip(self.rules, leaves, strict=True) if rule != "kept"]

    def start(self) -> list[jax.Array]:
        """Return the initial totals, before the first micro-batch: zeros, or the lowest value for a maximum.

        Sums and means of floats are in f32 at least.
        """

        def identity(rule: Rule, x: jax.ShapeDtypeStruct) -> jax.Array:
            if rule == "max":
                return jnp.full(x.shape, lowest_value(x.dtype), x.dtype)
            if rule in ("sum", "mean") and jnp.issubdtype(x.dtype, jnp.inexact):
                return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
            words = words_of(x)
            return keys_of(jnp.zeros(words.shape, words.dtype), x.dtype)

        return [identity(rule, x) for rule, x in self._combined()]

    def add(self, total: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
        """Combine the arrays `new` of another micro-batch with the totals, each by its rule; return the new totals."""

        def add(rule: Rule, a: jax.Array, b: jax.Array) -> jax.Array:
            return b if rule == "once" else jnp.maximum(a, b) if rule == "max" else a + b

        return [add(rule, a, b) for (rule, _), a, b in zip(self._combined(), total, new, strict=True)]

    def combine(self, total: Sequence[jax.Array], count: int, axes: tuple[str, ...], sums: Sums = NATIVE) -> PyTree:
        """Combine the totals of all devices, each by its rule, into the arrays of the new state.

        Collectives: an all-reduce for each array with the rule "sum", "max" or "mean".

        Args:
          total: the totals of this device's micro-batches.
          count: the number of this device's micro-batches.
          axes: the mesh axes over whose devices the rows differ.
          sums: the functions that add over these axes.

        Returns:
          A list in the order of the state's leaves; None for an array that the loss returned unchanged.
        """

        def over_all(rule: Rule, like: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
            if rule == "mean":
                x = (x / count if count > 1 else x).astype(like.dtype)
                if not axes:
                    return x
                mean: jax.Array = sums.all_sum(x, axes) / lax.axis_size(axes) if sums.in_order else lax.pmean(x, axes)
                return mean
            if rule == "sum":
                return sum_scalar(x.astype(like.dtype), axes, sums)
            return all_max(x, axes) if rule == "max" else x

        combined = iter([over_all(*one, x) for one, x in zip(self._combined(), total, strict=True)])
        return [None if rule == "kept" else next(combined) for rule in self.rules]

    def new_state(self, old: PyTree, combined: Sequence[jax.Array | None]) -> PyTree:
        """Make the model's new state from its old state and `combined`, the result of the method `combine`."""
        if self.tree is None:
            return old
        before = _by_path(old)
        leaves = [before[path] if x is None else x for path, x in zip(self.paths, combined, strict=True)]
        return next_state(old, Loss(0.0, state=self.tree.unflatten(leaves), update=self.update))

    def reduced(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        """Return the path and shape of each array that is all-reduced over devices."""
        every = zip(self.rules, self.paths, self.like, strict=True)
        return [(path, x) for rule, path, x in every if rule in ("sum", "max", "mean")]

    def describe(self) -> list[str]:
        """Return a line of text for each rule that occurs, with the paths of the state's arrays that have it."""
        return [
            f"state, {text}: {first_words([path for path, one in zip(self.paths, self.rules) if one == rule], 4)}"
            for rule, text in _DESCRIPTIONS.items()
            if rule in self.rules
        ]

    def _combined(self) -> Iterator[tuple[Rule, jax.ShapeDtypeStruct]]:
        return ((rule, x) for rule, x in zip(self.rules, self.like, strict=True) if rule != "kept")


NO_STATE = StateRules(None, (), (), (), None)
"""The rules of a model without a state, or of a loss that returns none."""


def trace_state_rules(
    make_value_and_grad: Callable[[Callable[[StateRules], None]], ValueAndGrad], layout: Layout, batch: PyTree
) -> StateRules:
    """Return the rules that an engine reports while its loss and gradient are traced; nothing is computed.

    Args:
      make_value_and_grad: makes the engine's function from a function that it calls with the `StateRules`.
      layout: the layout. Without a model state nothing is traced, since there is nothing to combine.
      batch: a tree of global arrays or of `jax.ShapeDtypeStruct`.
    """
    if not jax.tree.leaves(layout.shapes.state):
        return NO_STATE

    def stored(x: Any, placement: Placement) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(placement.view.stored, x.dtype)

    params = jax.tree.map(stored, layout.shapes.params, layout.params)
    found: list[StateRules] = []
    value_and_grad = make_value_and_grad(found.append)
    jax.eval_shape(value_and_grad, params, layout.shapes.state, abstract(batch), layout.shapes.key)
    return found[0]


def find_state_rules(part: Part, sharing: Sharing) -> StateRules:
    """Find the rule by which each array of a loss's model state is combined over the parts of a batch.

    If an array does not depend on the data of the rows, the loss is traced once more with twice the rows, to see
    whether the array depends on their number.

    Args:
      part: the traced loss of a part of the batch: one device's rows, or one micro-batch of them.
      sharing: how the rows of the batch are divided into parts.

    Raises:
      Unsuited: an array has no rule: an integer that may differ between the parts of the batch, or an array that
        depends on the number of rows but not on their data; the message names each, with the declaration to use.
    """
    _, old, *_ = part.program.args
    if not jax.tree.leaves(old):
        return NO_STATE
    loss = part.loss
    if loss.state is None:
        next_state(old, loss)  # refuses an update alone
        return NO_STATE
    leaves = jax.tree_util.tree_leaves_with_path(loss.state)
    facts = _facts_of(part.program, [var for _, var in leaves], sharing)
    before = _by_path(old) if loss.update is None else {}
    nodes = _rules_declared(loss.state)
    paths = tuple(path_str(path) for path, _ in leaves)
    rules = [
        declared or ("kept" if var is before.get(path) else _rule_of(var, fact, sharing.microbatches))
        for declared, path, (_, var), fact in zip(nodes, paths, leaves, facts, strict=True)
    ]
    undeclared = [i for i, rule in enumerate(rules) if rule in ("once", "mean") and not nodes[i]]
    counted = [i for i in undeclared if sharing.has_parts and _ROWS not in facts[i]]
    bad = dict.fromkeys(_depend_on_row_count(part, sharing.mask, counted), _COUNTS)
    bad |= {i: _DIFFERS for i, rule in enumerate(rules) if rule is None}
    raise_all(
        (f"{paths[i]} {_describe(leaves[i][1])}: {bad[i]}" for i in sorted(bad)),
        Unsuited,
        f"{sharing.who}: the loss sees some of the rows at a time, and the new state that it returns can't be combined "
        "over all rows. Return a contribution in js.Loss(state=...): js.Sum(x) is added to the old "
        'state, js.Max(x) raises it (of a module: js.linen(..., state={"path": "sum"}), js.nnx likewise), or use '
        "js.auto() without micro-batches, where the loss sees all rows. These arrays have no rule",
    )
    found = tuple(rule for rule in rules if rule is not None)
    like = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for _, var in leaves)
    return StateRules(jax.tree.structure(loss.state), paths, found, like, loss.update)


_COUNTS = (
    "depends on the number of rows at hand and on none of their data, as n + x.shape[0] does; return js.Sum of what "
    "these rows add"
)
_DIFFERS = (
    "is no floating array, of which the mean could be taken, and may differ between parts of the batch; return js.Sum "
    "of what these rows add, js.Max, or make it in js.Loss(update=...)"
)


def _facts_of(program: Program, results: list[Any], sharing: Sharing) -> list[Axes]:
    """Return for each result the mesh axes over which its value may differ between devices.

    They include the pseudo axis `_ROWS` if it may differ between micro-batches.
    """
    alone, used = results_alone(program.closed, results)
    facts = [fact for fact, needed in zip(sharing.facts_of_leaves(), used, strict=True) if needed]
    return differing(alone, facts, sharing.manual)


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _rules_declared(state: PyTree) -> list[Rule | None]:
    """Return for each leaf of a model's state the rule declared by `js.Sum`, `js.Mean` or `js.Max`, or None."""
    found: list[Rule | None] = []
    for node in jax.tree.leaves(state, is_leaf=is_declared):
        rule: Rule | None = "max" if isinstance(node, Max) else "sum" if isinstance(node, (Sum, Mean)) else None
        found += [rule] * len(jax.tree.leaves(node))
    return found


def _rule_of(var: Any, fact: Axes, microbatches: int) -> Rule | None:
    if not (fact - {_ROWS} if microbatches == 1 else fact):
        return "once"
    return "mean" if jnp.issubdtype(var.aval.dtype, jnp.inexact) else None


def _depend_on_row_count(part: Part, mask: PyTree, which: Sequence[int]) -> list[int]:
    """Return those indices in `which` whose state array changes with the number of rows.

    A state array changes if its equations differ between the jaxpr for these rows and the jaxpr for twice as many rows.
    """
    more = part.of_twice_the_rows(mask) if which else None
    if more is None:
        return []  # the loss supports only this number of rows
    first = len(jax.tree.leaves(part.loss.value))  # the results before those of the state
    return [i for i in which if not made_alike(part.program.closed, more.closed, first + i)]


def _describe(var: Any) -> str:
    return f"{var.aval.dtype}{list(var.aval.shape)}"
