"""Run an optimizer's update with owners: elementwise operations on shards, each core on the owner of its matrix.

The traced update is split once into three programs: the operations before the cores, the cores (see `cores.py`), and
the operations after the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.core.compat import fresh_variable, replace_equations
from jaxshard.core.jaxpr import eliminate_dead_code, needed_equations, replay
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import shares_threads
from jaxshard.core.placement import Placement, spec_entry, splits_per_dim
from jaxshard.core.types import PyTree
from jaxshard.optim.factorizations import one_matrix_at_a_time
from jaxshard.optim.owners.cores import TracedUpdate
from jaxshard.optim.owners.exchange import Split, from_owners, to_owners
from jaxshard.optim.owners.owners import OwnedStack
from jaxshard.optim.owners.stacks import Group

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Stages(NamedTuple):
    """The two parts of an optimizer's update that run on shards: before and after the matrix products on the owners.

    The matrix products of a parameter are its core, which runs on the device that owns the matrix.

    Attributes:
      before: a jaxpr that takes the inputs of the update, except those in `absent`, and returns the first variables in
        `moved`.
      moved: the variables that the cores read: first the results of `before`, then inputs of the update itself.
      after: a jaxpr that takes the inputs of `before` and then the variables in `made`. It returns the updates, and the
        state that is not stored on owners.
      made: the variables that the cores return.
      absent: the indices of those inputs of the update that are stored on owners.
    """

    before: Any
    moved: tuple[Any, ...]
    after: Any
    made: tuple[Any, ...]
    absent: frozenset[int]


def stage(made: TracedUpdate, groups: Sequence[Group]) -> Stages | None:
    """Split an update into the programs before and after its cores (the matrix products, which run on the owners).

    Return None if a core needs the results of another core.
    """
    jaxpr, cores = made.jaxpr, [one.core for members in groups for one in members.matrices]
    first = len(made.consts) + made.params
    owned = {number for core in cores for number in core.states}
    absent = frozenset(first + number for number in owned)
    back = tuple(var for core in cores for var in core.outs)
    moved = tuple(dict.fromkeys(var for core in cores for var in (*core.ins, *core.shared)))
    inputs = [var for place, var in enumerate(jaxpr.invars) if place not in absent]
    given = [var for var in moved if var in set(inputs)]
    wanted = [var for var in moved if var not in set(inputs)]
    before, used = _program(jaxpr, inputs, wanted, set(inputs))
    results = [atom for place, atom in enumerate(jaxpr.outvars) if place - made.params not in owned]
    after, fits = _program(jaxpr, [*inputs, *back], results, {*inputs, *back})
    if not (used and fits):
        return None
    return Stages(before, (*wanted, *given), after, back, absent)


def _program(jaxpr: Any, inputs: Sequence[Any], results: Sequence[Any], given: set[Any]) -> tuple[Any, bool]:
    """Return (the jaxpr that computes `results` from `inputs`, True if `inputs` suffice).

    Values in `given` are taken from the inputs, also if an equation of `jaxpr` could compute them.
    """
    eqns, _ = needed_equations(jaxpr.eqns, results, given)
    # An equation may compute a needed value together with a given one. Replace the latter by a fresh variable, so that
    # the equation does not define an input of the program again.
    twins = {var for eqn in eqns for var in eqn.outvars if var in given}
    eqns = [_drop(eqn, twins) for eqn in eqns]
    free = {x for eqn in eqns for x in eqn.invars if not isinstance(x, Literal) and x not in given} - {
        var for eqn in eqns for var in eqn.outvars
    }
    rest = list(free)
    program, used = eliminate_dead_code(replace_equations(jaxpr, [*inputs, *rest], results, eqns))
    kept = iter(program.invars)
    invars = [next(kept) if use else var for var, use in zip([*inputs, *rest], used, strict=True)]
    enough = not any(used[len(inputs) :])
    return replace_equations(program, invars[: len(inputs)], program.outvars, program.eqns), enough


def _drop(eqn: Any, twins: set[Any]) -> Any:
    if not any(var in twins for var in eqn.outvars):
        return eqn
    return eqn.replace(outvars=[fresh_variable(var.aval) if var in twins else var for var in eqn.outvars])


def make_owned_update(made: TracedUpdate, groups: Sequence[Group], stages: Stages, layout: Layout) -> Update:
    """Make the function `update(grads, state, params) -> (updates, new state)` for a layout with owners.

    The matrix products of each matrix run on its owner, all other operations on the shards of every device. Pass
    gradients and parameters in their logical shapes, sharded like the optimizer state, and the state as it is stored.
    """
    placements = jax.tree.leaves(layout.opt_state)
    programs = [one.matrices[0].program for one in groups]
    if shares_threads(layout.mesh):
        stages = stages._replace(before=one_matrix_at_a_time(stages.before), after=one_matrix_at_a_time(stages.after))
        programs = [one_matrix_at_a_time(program) for program in programs]
    of_stack = {one.matrices[0].core.leaf: (one, program) for one, program in zip(groups, programs, strict=True)}
    members = [_Member(stack, *of_stack[stack.leaves[0]]) for stack in layout.owners.stacks]

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        stored = jax.tree.leaves(state)
        held = [x if one.owned else one.view.invert(x) for x, one in zip(stored, placements, strict=True)]
        inputs = [*made.consts, *jax.tree.leaves(grads), *held, *jax.tree.leaves(params)]
        present = [x for place, x in enumerate(inputs) if place not in stages.absent]
        names = [var for place, var in enumerate(made.jaxpr.invars) if place not in stages.absent]
        known = dict(zip(names, present, strict=True))
        known |= dict(zip(stages.moved, replay(stages.before, present)))
        new_state: dict[int, jax.Array] = {}
        for axes in dict.fromkeys(one.stack.axes for one in members):
            together = [one for one in members if one.stack.axes == axes]
            known |= _run(together, axes, known, held, new_state, layout.mesh)
        rest = iter(replay(stages.after, [*present, *(known[var] for var in stages.made)]))
        new = {made.params + number: x for number, x in new_state.items()}
        results = [new[place] if place in new else next(rest) for place in range(made.tree.num_leaves)]
        for place, one in enumerate(placements, made.params):
            results[place] = results[place] if one.owned else one.view.apply(results[place])
        done: tuple[PyTree, PyTree] = made.tree.unflatten(results)
        return done

    return update


class _Member(NamedTuple):
    """A stack (matrices of equal shape), and the program that its owners run for a single matrix."""

    stack: OwnedStack
    group: Group
    program: Any

    @property
    def placement(self) -> Placement:
        return self.group.matrices[0].placement

    @property
    def sliced(self) -> tuple[bool, ...]:
        return self.group.matrices[0].sliced

    def ins(self, *, arrays: bool) -> list[int]:
        """Return the indices of the inputs of a matrix's core that are matrices (arrays=True) or scalars (False)."""
        return [number for number, var in enumerate(self.group.matrices[0].core.ins) if bool(var.aval.shape) == arrays]

    def split(self, mesh: Mesh) -> Split:
        """Return how the matrices of this stack are sharded over devices, and which device owns each."""
        dims = 1 if self.stack.slices else 0
        part = self.placement.shard_shape(mesh)[dims:]
        cuts = splits_per_dim(mesh, self.placement.store)[dims:]
        return Split(self.stack.places, self.stack.counts, self.stack.slots, part, cuts)

    def given(self, known: dict[Any, jax.Array], held: Sequence[jax.Array], mesh: Mesh) -> _Given:
        """Collect the inputs of the program that the owners run for this stack.

        Args:
          known: {jaxpr variable of the update: its value}.
          held: the arrays of the optimizer state.
          mesh: the mesh.
        """
        members, stack = self.group.matrices, self.stack
        common, own = [], []
        for number, same in enumerate(self.group.common):
            values = [known[one.core.shared[number]] for one in members]
            if same and not self.sliced[number]:
                common.append(values[0])
            else:
                own.append(_each(stack, values, self.sliced[number]))
        split = [[_hold(known[m.core.ins[n]], self.placement, mesh) for m in members] for n in self.ins(arrays=True)]
        each = [_each(stack, [known[m.core.ins[n]] for m in members], False) for n in self.ins(arrays=False)]
        return _Given(split, each, own, [held[numbers[0]] for numbers in stack.states], common)

    def specs(self) -> _Given:
        """Return the PartitionSpecs of the arrays that `given` returns, as `in_specs` of a `shard_map`."""
        some = PartitionSpec()
        return _Given(self.placement.store, some, some, PartitionSpec(spec_entry(self.stack.axes)), some)

    def update(self, whole: list[jax.Array], given: _Given) -> list[jax.Array]:
        """Update each matrix that this device owns; return the outputs and the new states, each [slots, ...].

        Args:
          whole: for each matrix-shaped input the full matrices that this device owns, [slots, ...].
          given: the other inputs.
        """
        stack, common = self.stack, self.group.common
        mine = lax.axis_index(stack.axes) * stack.slots + jnp.arange(stack.slots)
        rows = [x[mine] for x in given.each], [x[mine] for x in given.own]
        whole = [x[(slice(None), *(slice(size) for size in stack.shape))] for x in whole]

        def core(whole: Any, rows: Any, states: Any) -> Any:
            ins: dict[int, jax.Array] = dict(zip(self.ins(arrays=True), whole, strict=True))
            ins |= dict(zip(self.ins(arrays=False), rows[0], strict=True))
            alike, others = iter(given.common), iter(rows[1])
            kinds = list(zip(common, self.sliced, strict=True))
            shared = [next(alike) if same and not sliced else next(others) for same, sliced in kinds]
            operands = [ins[number] for number in range(len(ins))]
            if not stack.slices:
                return replay(self.program, [*operands, *states, *shared])
            operands = [x[None] if x.ndim else x for x in operands]
            shared = [x[None] if sliced else x for x, sliced in zip(shared, self.sliced, strict=True)]
            made = replay(self.program, [*operands, *(x[None] for x in states), *shared])
            return [x[0] for x in made]

        return _for_each_slot(stack, core, whole, rows, given.states)


class _Given(NamedTuple):
    """The inputs of the program that the owners of a stack (matrices of equal shape) run for each matrix.

    A place is a slot for a matrix on a device: there are devices * slots places.

    Attributes:
      split: for each matrix-shaped input a list with one array per parameter, sharded like the parameter.
      each: for each scalar input an array with one element per place.
      own: for each other input that differs between matrices, an array with one row per place.
      states: the optimizer state that is stored on the owners, [places, ...].
      common: the inputs that are equal for all matrices.
    """

    split: Any
    each: Any
    own: Any
    states: Any
    common: Any


def _run(
    members: Sequence[_Member],
    axes: tuple[str, ...],
    known: dict[Any, jax.Array],
    held: Sequence[jax.Array],
    new_state: dict[int, jax.Array],
    mesh: Mesh,
) -> dict[Any, jax.Array]:
    """Send the matrices of several stacks to their owners, update them there, and send the results back.

    Args:
      members: the stacks (matrices of equal shape), all with owners along `axes`.
      axes: the mesh axes along which the owners are.
      known: {jaxpr variable of the update: its value}.
      held: the arrays of the optimizer state.
      new_state: {index of a state array: its new value}; this function adds the state that is stored on owners.
      mesh: the mesh.

    Returns:
      {jaxpr variable that the owners computed: its value}.
    """
    splits = [one.split(mesh) for one in members]

    def run(given: list[_Given]) -> list[tuple[list[list[jax.Array]], list[jax.Array]]]:
        ready = [one.stack.units(parts) for one, g in zip(members, given) for parts in g.split]
        whole = iter(to_owners(ready, [split for split, g in zip(splits, given) for _ in g.split], axes))
        made = [one.update([next(whole) for _ in g.split], g) for one, g in zip(members, given)]
        counts = [len(one.group.matrices[0].core.outs) for one in members]
        padded = [_pad(one, x) for one, xs, count in zip(members, made, counts) for x in xs[:count]]
        parts = iter(from_owners(padded, [split for split, count in zip(splits, counts) for _ in range(count)], axes))
        return [
            ([one.stack.arrays(next(parts)) for _ in range(count)], xs[count:])
            for one, xs, count in zip(members, made, counts)
        ]

    results = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=([one.specs() for one in members],),
        out_specs=[(one.placement.store, one.specs().states) for one in members],
        check_vma=False,
    )([one.given(known, held, mesh) for one in members])
    back: dict[Any, jax.Array] = {}
    for one, (outs, after) in zip(members, results, strict=True):
        for numbers, x in zip(one.stack.states, after, strict=True):
            # The first array of a stack holds the state of all members; the others are empty and stay as they are.
            new_state |= {number: held[number] for number in numbers} | {numbers[0]: x}
        for number, arrays in enumerate(outs):
            for matrix, x in zip(one.group.matrices, arrays, strict=True):
                back[matrix.core.outs[number]] = one.placement.view.invert(x)
    return back


def _pad(one: _Member, whole: jax.Array) -> jax.Array:
    """Pad full matrices [slots, ...] with zeros to the shape in which their parameter is stored."""
    stored = one.placement.view.stored[1 if one.stack.slices else 0 :]
    widths = [(0, 0), *((0, after - size) for size, after in zip(one.stack.shape, stored, strict=True))]
    padded: jax.Array = jnp.pad(whole, widths) if stored != one.stack.shape else whole
    return padded


def _hold(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    held: jax.Array = lax.with_sharding_constraint(placement.view.apply(x), NamedSharding(mesh, placement.store))
    return held


def _each(stack: OwnedStack, values: list[jax.Array], sliced: bool) -> jax.Array:
    """Arrange one scalar or small array per matrix by owner and slot: return [devices * slots, ...].

    `values` has one array per parameter. With `sliced` this array has an entry for each matrix that the parameter
    stacks; otherwise all matrices of the parameter use the same value.
    """
    if not stack.slices:
        return stack.place(jnp.stack(values))
    rows = values if sliced else [jnp.broadcast_to(x, (stack.slices, *x.shape)) for x in values]
    return stack.place(jnp.concatenate(rows))


def _for_each_slot(stack: OwnedStack, core: Callable[..., Any], whole: Any, rows: Any, states: Any) -> list[jax.Array]:
    """Run `core` for each matrix that this device owns, one after another; return its results, each [slots, ...].

    Every device has as many slots as the device that owns the most matrices. For empty slots `core` does not run.

    Args:
      stack: the matrices of equal shape, and the device that owns each.
      core: `core(matrices, rows, states)` computes the update of one matrix.
      whole, rows, states: its arguments for all slots of this device, trees of arrays [slots, ...].
    """
    given = whole, rows, states
    if stack.slots == 1 and min(stack.counts) == 1:
        results = core(*jax.tree.map(lambda x: x[0], given))
        return [x[None] for x in results]
    if min(stack.counts) == stack.slots:
        mapped: list[jax.Array] = lax.map(lambda one: core(*one), given)
        return mapped
    # A loop with as many iterations as this device has matrices, not a `cond`: a compiler may move the all-to-all that
    # follows into a branch, which devices without a matrix never enter.
    mine = jnp.asarray(np.asarray(stack.counts, np.int32))[lax.axis_index(stack.axes)]
    shapes = jax.eval_shape(core, *jax.tree.map(lambda x: x[0], given))

    def body(slot: jax.Array, made: list[jax.Array]) -> list[jax.Array]:
        # With a single slot every iteration reads the same values: without the barrier a compiler hoists the core out
        # of the loop, and devices without a matrix run it too.
        slot, held = lax.optimization_barrier((slot, given))
        results = core(*jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), held))
        return [lax.dynamic_update_index_in_dim(x, new, slot, 0) for x, new in zip(made, results, strict=True)]

    empty = [jnp.zeros((stack.slots, *x.shape), x.dtype) for x in shapes]
    made: list[jax.Array] = lax.fori_loop(0, mine, body, empty)
    return made
