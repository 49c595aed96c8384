"""Split a traced loss at its scan over stacked parameters into an embedding, a block and a head.

For example, the jaxpr of a loss with three scanned layers, dropout in each, and noise that the head adds:

    arguments   params {embed [13, 8], layers [3, 8, 8], head [8, 7]}, batch {x [16, 13], mask [16]}, key

    before      h     = x @ embed                [16, 8]
                gains = 1 / [1, 2, 3]            [3]
                keys  = split(fold_in(key, 1), 3)
                noise = normal(fold_in(key, 2))  [16, 7]

    scan        consts   mask                    -> "shared": equal in every iteration
                carry    h                       -> "carry": updated by every iteration
                slices   layers                  -> "weight": the parameters of one block
                         keys                    -> "key": random keys, replaced by keys made from the block's own key
                         gains                   -> "layered": each iteration reads its slice ("fixed" as a const)
                results  h'

    after       loss  = mean(h' @ head + noise)

It is split into

    embedding   the equations of `before` that h, the layered and shared values and `noise` need
    block       one iteration of the scan's body, on one slice of `layers`
    head        the equations of `before` and `after` that the result needs, with h' and `noise` given

A `ScanCarry` is passed from the embedding through the blocks to the head. It includes `noise`, since the head has
another random key than the embedding and would draw other values. Other values of `before` that the head needs, which
are not random, are computed again in the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.extend import core

from jaxshard.core.compat import scan_counts
from jaxshard.core.jaxpr import (
    Program,
    assign,
    dependent_variables,
    needed_equations,
    open_jaxpr,
    subprogram,
    variables,
)
from jaxshard.core.keys import is_key, typed_key
from jaxshard.core.tree import raise_all
from jaxshard.core.types import PyTree

Path = tuple[str, ...]
"""The keys from the root of a tree of parameters to a parameter."""

Kind = Literal["carry", "weight", "key", "fixed", "shared", "layered"]
"""The kinds of inputs of the scan's body; see the top of this file."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScanCarry:
    """The activations of a scanned model: the values that are passed from the embedding through the blocks to the head.

    Attributes:
      carry: the carry of the scan, which each block replaces.
      shared: values that every block reads.
      layered: values [num_blocks, ...], of which each block reads one slice.
      drawn: random values that the embedding drew and the head reads.
      count: the number of blocks that have run, a scalar; None if there are no layered values.
      form: static: (tree structure of parameters and batch, their shapes and dtypes, True if there is a random key),
        with which a block can trace the loss again.
    """

    carry: list[jax.Array]
    shared: list[jax.Array]
    layered: list[jax.Array]
    drawn: list[jax.Array]
    count: jax.Array | None
    form: Any = field(metadata={"static": True})


class MovingVariables(NamedTuple):
    """The variables of the loss's jaxpr whose values are passed from the embedding to the blocks and the head.

    At run time the values of each field become the field of `ScanCarry` with the same name.
    """

    carry: list[Any]
    shared: list[Any]
    layered: list[Any]
    drawn: list[Any]


class BodyInput(NamedTuple):
    """The place where a block finds the value of one input of the scan's body.

    Attributes:
      kind: "carry", "shared" or "layered" for a value in the field of `ScanCarry` with this name; "weight" for a
        parameter of the block; "key" for a random key that is made from the block's own key; "fixed" for a value that
        is computed from literals alone.
      which: the index in that field of `ScanCarry`; for "weight" the path of the parameter; for "key" a number that
        differs for every key; for "fixed" the variable or literal.
    """

    kind: Kind
    which: Any


class SplitLoss(NamedTuple):
    """A traced loss, split at its scan over blocks into embedding, block and head.

    Attributes:
      program: the loss; its arguments are (parameters, batch, key or None).
      scan: the equation of the scan.
      before: the equations before the scan.
      after: the equations after the scan.
      moving: the variables whose values are passed from the embedding to blocks and head.
      inputs: where a block finds each input of the scan's body.
    """

    program: Program
    scan: Any
    before: list[Any]
    after: list[Any]
    moving: MovingVariables
    inputs: list[BodyInput]

    def run_embed(self, rest: PyTree, batch: PyTree, key: jax.Array | None) -> MovingVariables:
        """Run the equations before the scan; return the values to pass on to the blocks and the head.

        `rest` has the parameters outside of the blocks.
        """
        values: MovingVariables = self.program.run(self.moving, self._arguments(rest, batch, key), self.before)
        return values

    def run_block(self, weights: Mapping[Path, jax.Array], x: ScanCarry, key: jax.Array | None) -> list[jax.Array]:
        """Run one iteration of the scan with the parameters of one block; return the new carry of the scan.

        Args:
          weights: {path of a parameter in the module: its value for this block}.
          x: the activations that the block receives.
          key: the random key of this block; None in evaluation.
        """
        fixed = [one.which for one in self.inputs if one.kind == "fixed"]
        # Keys are ids, since a Literal is not hashable.
        numbers = dict(zip(map(id, fixed), self.program.run(fixed, {}, self.before), strict=True))
        body = self.scan.params["jaxpr"]
        jaxpr, _ = open_jaxpr(body)

        def value(one: BodyInput, aval: Any) -> Any:
            if one.kind == "weight":
                return weights[one.which]
            if one.kind == "fixed":
                return numbers[id(one.which)]
            if one.kind == "key":
                assert key is not None, "without a key nothing depends on it"
                own = jax.random.fold_in(key, one.which)
                return jax.random.split(own, aval.shape) if aval.shape else own
            if one.kind == "layered":
                return jax.lax.dynamic_index_in_dim(x.layered[one.which], x.count, keepdims=False)
            return getattr(x, one.kind)[one.which]

        values = [value(one, var.aval) for one, var in zip(self.inputs, jaxpr.invars, strict=True)]
        # The body returns the carry first. Its per-layer results are unused (`split_at_scan` refuses other models).
        results = jaxpr.outvars[: len(self.moving.carry)]
        carry: list[jax.Array] = subprogram(body, results, jaxpr.invars, jaxpr.eqns)(*values)
        return carry

    def run_head(self, rest: PyTree, x: ScanCarry, batch: PyTree, key: jax.Array | None) -> Any:
        """Run the equations after the scan; return the result of the loss.

        Args:
          rest: the parameters outside of the blocks.
          x: the activations after the last block.
          batch: the batch.
          key: the random key of the head; None in evaluation.
        """
        given = self._arguments(rest, batch, key)
        given |= assign(list(self.scan.outvars[: len(x.carry)]), x.carry) | assign(self.moving.drawn, x.drawn)
        # Pass the equations before the scan, too: values that the head needs and that were not passed are recomputed.
        return self.program.run(self.program.out, given, [*self.before, *self.after])

    def _arguments(self, rest: PyTree, batch: PyTree, key: jax.Array | None) -> dict[Any, Any]:
        """Return {variable of the loss's jaxpr: value} for its arguments, except the parameters of blocks.

        `rest` has the parameters outside of the blocks.
        """
        params, batch_vars, key_var = self.program.args
        of_path = flatten_dict(params)
        values = {of_path[path]: x for path, x in flatten_dict(rest).items()} | assign(batch_vars, batch)
        return values if key is None else values | {key_var: typed_key(key)}


def split_at_scan(program: Program) -> SplitLoss:
    """Split a traced loss at its scan over stacked parameters into an embedding, a block and a head.

    Raises:
      ValueError: there is no such scan or several, or the blocks can't be separated: they share a random key, their
        per-layer results are used, or stacked parameters are used outside of the scan. Names every problem.
    """
    scan, stacked = find_scan(program)
    where = program.eqns.index(scan)
    before, after = program.eqns[:where], program.eqns[where + 1 :]
    weights = {var: path for path, var in flatten_dict(program.args[0]).items() if path in stacked}
    arguments = variables(jax.tree.leaves(program.args))
    random = dependent_variables(before, set(jax.tree.leaves(program.args[2])))
    moving, inputs, problems = _sort_inputs(scan, weights, random, dependent_variables(before, arguments))
    _, carries = scan_counts(scan.params)
    # The variables that the head reads, if the arguments and the carry are given.
    _, used = needed_equations(after, jax.tree.leaves(program.out), arguments | set(scan.outvars[:carries]))
    if not used.isdisjoint(scan.outvars[carries:]):
        problems.append("what the blocks return beside the carry (or sow) is used after the scan")
    made = [var for eqn in before for var in eqn.outvars]
    moving.drawn.extend(var for var in made if var in used and var in random and not is_key(var.aval.dtype))
    # An embedding or a head has no stacked parameters, so only the scan may read them.
    used_outside = variables(var for eqn in (*before, *after) for var in eqn.invars)
    problems += [f"{'/'.join(path)}: used outside of the scan" for var, path in weights.items() if var in used_outside]
    raise_all(problems, ValueError, "js.scanned: the blocks can't be taken out of this model")
    return SplitLoss(program, scan, before, after, moving, inputs)


def _sort_inputs(
    scan: Any, weights: dict[Any, Path], random: set[Any], dependent: set[Any]
) -> tuple[MovingVariables, list[BodyInput], list[str]]:
    """Decide for each input of the scan's body where a block that runs outside of the scan finds its value.

    Args:
      scan: the equation. Its inputs are the consts, then the initial carry, then the arrays that it slices.
      weights: {variable of a stacked parameter: its path}.
      random: the variables that depend on the key of the loss.
      dependent: the variables that depend on any argument of the loss.

    Returns:
      (the variables to pass from the embedding to the blocks, where a block finds each input, error messages).
    """
    consts, carries = scan_counts(scan.params)
    moving, inputs, problems, keys = MovingVariables([], [], [], []), [], [], 0

    def travels(kind: Literal["carry", "shared", "layered"], var: Any) -> BodyInput:
        group: list[Any] = getattr(moving, kind)
        group.append(var)
        return BodyInput(kind, len(group) - 1)

    for place, var in enumerate(scan.invars):
        is_const, is_variable = place < consts, not isinstance(var, core.Literal)
        if consts <= place < consts + carries:
            inputs.append(travels("carry", var))
        elif is_variable and var in weights:
            inputs.append(BodyInput("weight", weights[var]))
        elif is_variable and var in random and is_key(var.aval.dtype):
            if is_const:
                problems.append("blocks share one random key: pass split_rngs={'params': True, 'dropout': True}")
            inputs.append(BodyInput("key", keys))
            keys += 1
        elif is_const and (not is_variable or var not in dependent):
            # Computed from literals alone: recomputing it is cheaper than sending it from stage to stage.
            inputs.append(BodyInput("fixed", var))
        else:
            inputs.append(travels("shared" if is_const else "layered", var))
    return moving, inputs, problems


def find_scan(program: Program) -> tuple[Any, frozenset[Path]]:
    """Find the scan over stacked parameters, as `nn.scan(variable_axes={"params": 0})` makes, among a loss's equations.

    A scan over stacked parameters slices the parameters themselves. Other scans, as in a recurrent layer, slice
    activations or values computed from parameters, and are ignored.

    Returns:
      (the equation of the scan, the paths of the parameters that it slices).

    Raises:
      ValueError: there is none, there are several, or it runs backwards.
    """
    params = {var: path for path, var in flatten_dict(program.args[0]).items()}
    found = []
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            sliced = variables(eqn.invars[sum(scan_counts(eqn.params)) :])
            if stacked := frozenset(params[var] for var in sliced if var in params):
                found.append((eqn, stacked))
    runs = [f"one over {', '.join('/'.join(path) for path in sorted(stacked))}" for _, stacked in found]
    backwards = [f"{run}, backwards" for run, (eqn, _) in zip(runs, found, strict=True) if eqn.params["reverse"]]
    if len(found) != 1 or backwards:
        raise ValueError(
            "js.scanned: the loss must run one nn.scan, forward, over parameters that are stacked along axis 0 "
            '(variable_axes={"params": 0}), outside of jax.jit and nn.remat, but this runs '
            f"{'; '.join(backwards or runs) or 'none'}; blocks in a Python loop are for js.stack"
        )
    return found[0]
