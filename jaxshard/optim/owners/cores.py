"""Find the core of an optimizer's update: the operations that need the full matrix.

The update of each parameter is a chain of operations, most of them elementwise. For example, Muon:

    g, mu -> mu' = b * mu + (1 - b) * g -> nesterov        elementwise: runs on the shards
    nesterov -> Newton-Schulz -> u                         the core: matrix products
    u, w -> -rate * (u + decay * w)                        elementwise again

`find_cores` cuts the jaxpr before and after the core. The inputs of the core are sent to the device that owns the
matrix, and the outputs are sent back. State that only the core reads and writes (the factors of Shampoo) is stored on
the owner. Elementwise operations before or after the core are moved into the core if fewer bytes are sent then. Two
examples from SOAP: its core uses the gradient and the gradient's average; if the average is computed inside the core,
one array is sent instead of two. Mapped over blocks by vmap, SOAP selects between the results of two branches; if the
selection is inside the core, one result is sent back instead of both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from jaxshard.core.compat import replace_equations
from jaxshard.core.jaxpr import all_equations, eliminate_dead_code, inline_calls, needed_equations, open_jaxpr
from jaxshard.core.keys import is_key
from jaxshard.core.primitives import ELEMENTWISE, SAME
from jaxshard.core.tree import abstract, path_str, same_structure
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.facts import Context
from jaxshard.optim.proof.own_array import Outputs, input_reaches, outputs_of
from jaxshard.optim.proof.reach import Flow, Reach, bit, is_whole_sum, leaves_of, multiplies_matrices
from jaxshard.optim.proof.traced import traced_update
from jaxshard.proofs.walk import walk


class Core(NamedTuple):
    """The core of one parameter's update: the operations that need the full matrix, such as the products of Muon.

    The core runs on the device that owns the matrix; all other operations of the update run on the shards of every
    device.

    Attributes:
      leaf: the index of the parameter.
      ins: the jaxpr variables that are sent to the owner: arrays of the parameter's shape, and scalars.
      states: the indices of the arrays of the optimizer state that are stored on the owner.
      shared: other variables that the core reads, which every device has: step counts, learning rates, global norms.
      outs: the variables that the owner sends back, of the parameter's shape.
      program: the core as a jaxpr (ins, states, shared) -> (outs, new states).
    """

    leaf: int
    ins: tuple[Any, ...]
    states: tuple[int, ...]
    shared: tuple[Any, ...]
    outs: tuple[Any, ...]
    program: Any


class TracedUpdate(NamedTuple):
    """The traced update of an optimizer, with the core of each parameter: the operations that need the full matrix.

    Attributes:
      jaxpr: the update with calls inlined, as a jaxpr (consts, gradients, state, parameters) -> (updates, state).
      consts: the values of the constants.
      tree: the tree structure of (updates, state).
      params: the number of parameters.
      outputs: the paths of updates and state arrays, and the parameter to which each belongs.
      cores: {index of a parameter: its core}.
      refused: {index of a parameter whose update multiplies matrices but that has no core: the reason}.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    tree: Any
    params: int
    outputs: Outputs
    cores: dict[int, Core]
    refused: dict[int, str]

    def state_inputs(self) -> list[Any]:
        """Return the jaxpr's input variables that are arrays of the optimizer state."""
        first = len(self.consts) + self.params
        return list(self.jaxpr.invars[first : first + len(self.outputs.owners) - self.params])


def find_cores(tx: Any, params: PyTree, leaves: Collection[int]) -> TracedUpdate | None:
    """Trace an optimizer's update and find the core of each parameter: the operations that need the full matrix.

    Args:
      tx: An optax transform.
      params: The trained parameters, which may be abstract.
      leaves: The indices of the parameters to find cores for; all others count as replicated.

    Returns:
      The traced update. None if the update contains no matrix products, if it combines arrays of several parameters, or
      if `tx` can't be traced with only gradients, state and parameters.
    """
    params = abstract(params)
    try:
        closed, before, (updates, state) = traced_update(tx, params)
    except (AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError):
        # A transform called without its extra arguments may raise anything; the step passes them and reports errors.
        return None
    if not (same_structure(updates, params) and same_structure(before, state)):
        return None
    if not any(map(multiplies_matrices, all_equations(closed))):  # a cheap check: most optimizers multiply none
        return None
    flat, consts = open_jaxpr(inline_calls(closed))
    needed, _ = needed_equations(flat.eqns, flat.outvars, set())
    jaxpr = replace_equations(flat, [*flat.constvars, *flat.invars], flat.outvars, needed).replace(constvars=())
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    outputs = outputs_of(params, before)
    flow = Flow(Context(tuple(map(path_str, paths)), (), (), __file__))
    given = [*[Reach()] * len(consts), *input_reaches(len(paths), outputs)]
    reaches = walk(jaxpr, given, flow)
    if not all(one.within(owner) for one, owner in zip(reaches, outputs.owners, strict=True)):
        return None
    known = dict(zip(jaxpr.invars, given, strict=True)) | flow.known
    made = TracedUpdate(jaxpr, consts, jax.tree.structure((updates, state)), len(paths), outputs, {}, {})
    for leaf in leaves_of(flow.products):
        if leaf not in leaves:
            made.refused[leaf] = "it is replicated"
        else:
            core = _find_core(made, known, leaf)
            if isinstance(core, Core):
                made.cores[leaf] = core
            else:
                made.refused[leaf] = core
    return made if made.cores else None


class _Part(NamedTuple):
    """A set of equations that may become the core of a parameter's update, with the inputs and outputs it would have.

    Attributes:
      numbers: the indices of the equations.
      ins: the variables that would be sent to the owner of the matrix.
      states: the indices of the state arrays that would be stored on the owner.
      outs: the variables that the owner would send back.
      new_states: the variables of the new state arrays.
    """

    numbers: set[int]
    ins: list[Any]
    states: list[int]
    outs: list[Any]
    new_states: list[Any]


def _find_core(made: TracedUpdate, known: Mapping[Any, Reach], leaf: int) -> Core | str:
    """Find the core of a parameter's update (the operations that need the full matrix), or the reason why it has none.

    Args:
      made: the traced update.
      known: the parameters on which each variable of its jaxpr depends.
      leaf: the index of the parameter.
    """
    jaxpr, shape, own = made.jaxpr, made.jaxpr.outvars[leaf].aval.shape, bit(leaf)

    def flows(atom: Any) -> bool:
        """Return True if a value depends only on this parameter's arrays, or on scalars computed from these arrays."""
        if isinstance(atom, Literal):
            return False
        reach = known[atom]
        return reach.arrays == own or (not reach.arrays and reach.numbers == own)

    eqns = jaxpr.eqns
    mine = [number for number, eqn in enumerate(eqns) if any(map(flows, eqn.invars)) and any(map(flows, eqn.outvars))]
    core = {number for number in mine if not _runs_on_parts(eqns[number], shape)}
    # Walk backwards for values that lead to a matrix product or to new state, then forwards for values after a product.
    before, stays = set[Any](), {x for x in _new_states(made, leaf) if flows(x)}
    for number in reversed(mine):
        used = {atom for atom in eqns[number].invars if flows(atom)}
        if number in core or any(var in before for var in eqns[number].outvars):
            before |= used
        if any(var in stays for var in eqns[number].outvars):
            stays |= used
    after: set[Any] = set()
    for number in mine:
        if number in core or any(not isinstance(x, Literal) and x in after for x in eqns[number].invars):
            after |= {var for var in eqns[number].outvars if flows(var)}

    def leads(number: int) -> bool:
        return any(var in before for var in eqns[number].outvars)

    def follows(number: int) -> bool:
        return any(not isinstance(x, Literal) and x in after for x in eqns[number].invars)

    least = core | {number for number in mine if leads(number) and follows(number)}
    front, back = {number for number in mine if leads(number)}, {number for number in mine if follows(number)}
    # The equations that compute new state: mapped over blocks, SOAP updates its average in only one of two branches.
    kept = {number for number in mine if any(var in stays for var in eqns[number].outvars)}
    parts = [
        part
        # Candidate cores, the smallest first; the candidate that sends the fewest bytes is taken.
        for numbers in (least, core | front, core | back | least, core | front | back, core | front | kept)
        if (part := _bound(made, numbers, leaf, shape, flows)) is not None
    ]
    if not parts:
        return "its core uses state that is neither of its shape nor its own"
    return _extract(made, known, leaf, min(parts, key=_bytes_moved))


def _new_states(made: TracedUpdate, leaf: int) -> list[Any]:
    owners = made.outputs.owners[made.params :]
    return [x for x, owner in zip(made.jaxpr.outvars[made.params :], owners, strict=True) if owner == leaf]


def _bytes_moved(part: _Part) -> int:
    return sum(var.aval.size * var.aval.dtype.itemsize for var in (*part.ins, *part.outs))


def _runs_on_parts(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Return True if an equation can run on shards of an array of this shape: elementwise, or a sum of all elements."""
    name = eqn.primitive.name
    shapes = [tuple(x.aval.shape) for x in (*eqn.invars, *eqn.outvars)]
    if not all(one in (shape, ()) for one in shapes):
        return False
    spreads = name == "broadcast_in_dim" and (eqn.invars[0].aval.shape == () or shapes[0] == shapes[-1] == ())
    return name in ELEMENTWISE or name in SAME or is_whole_sum(eqn) or spreads


def _bound(made: TracedUpdate, numbers: set[int], leaf: int, shape: tuple[int, ...], flows: Any) -> _Part | None:
    """Find the inputs, states and outputs that the equations with indices `numbers` would have as a core.

    Return None if the equations can't be a core.

    In a core every output has the shape of the parameter, every input has this shape or is a scalar, and no input is a
    random key.
    """
    jaxpr = made.jaxpr
    inside = {var for number in numbers for var in jaxpr.eqns[number].outvars if flows(var)}
    ins = list(
        dict.fromkeys(
            x for number in sorted(numbers) for x in jaxpr.eqns[number].invars if flows(x) and x not in inside
        )
    )
    outside = {
        x
        for number, eqn in enumerate(jaxpr.eqns)
        if number not in numbers
        for x in eqn.invars
        if not isinstance(x, Literal)
    }
    results, count = jaxpr.outvars, made.params
    states: list[int] = []
    uses: dict[Any, int] = {}
    for atom in results:
        if not isinstance(atom, Literal):
            uses[atom] = uses.get(atom, 0) + 1
    for number, (var, owner) in enumerate(zip(made.state_inputs(), made.outputs.owners[count:], strict=True)):
        new = results[count + number]
        if owner != leaf or isinstance(new, Literal) or not (new in inside or (new is var and var in ins)):
            continue
        # State is stored on the owner if only the core reads the old value, and only the result is the new one.
        kept_inside = var not in outside and uses.get(var, 0) == (new is var)
        if kept_inside and (var in ins or (new not in outside and uses[new] == 1)):
            states.append(number)
    held = [made.state_inputs()[number] for number in states]
    new_states = [results[count + number] for number in states]
    wanted = {
        x
        for place, x in enumerate(results)
        if not isinstance(x, Literal) and not (place >= count and place - count in states)
    }
    outs = [var for var in dict.fromkeys(v for n in sorted(numbers) for v in jaxpr.eqns[n].outvars) if var in inside]
    outs = [var for var in outs if var in outside or var in wanted]
    ins = [var for var in ins if var not in held]
    fits = all(tuple(x.aval.shape) in (shape, ()) for x in ins) and all(tuple(x.aval.shape) == shape for x in outs)
    plain = not any(is_key(x.aval.dtype) for x in (*ins, *outs, *held))
    return _Part(numbers, ins, states, outs, new_states) if fits and plain and outs else None


def _extract(made: TracedUpdate, known: Mapping[Any, Reach], leaf: int, part: _Part) -> Core | str:
    """Build the core of a parameter's update from a set of equations, the candidate `part`.

    If the core would read arrays of other parameters, return a text that says so instead.
    """
    jaxpr, own = made.jaxpr, bit(leaf)
    states = [made.state_inputs()[number] for number in part.states]
    # Scalars that depend on other parameters (a global norm) are computed outside and passed in.
    cut = {var for var, reach in known.items() if not reach.arrays and reach.numbers and reach.numbers != own}
    given = {*part.ins, *states, *cut}
    results = [*part.outs, *part.new_states]
    eqns, named = needed_equations(jaxpr.eqns, results, given)
    made_here = {var for eqn in eqns for var in eqn.outvars} - given
    free = [var for var in known if var in named and var not in made_here]
    rest = [var for var in free if var not in part.ins and var not in states]
    shorter, used = eliminate_dead_code(replace_equations(jaxpr, [*part.ins, *states, *rest], results, eqns))
    kept = iter(shorter.invars)
    every = [next(kept) if use else var for var, use in zip([*part.ins, *states, *rest], used, strict=True)]
    fixed = len(part.ins) + len(states)
    shared = [var for var, use in zip(rest, used[fixed:], strict=True) if use]
    if strangers := [var for var in shared if known[var].arrays]:
        names = [made.outputs.names[one] for one in leaves_of(known[strangers[0]].arrays)]
        return f"its core reads arrays of {', '.join(names)} inside a branch or a loop"
    invars = [*every[:fixed], *(var for var, use in zip(every[fixed:], used[fixed:], strict=True) if use)]
    program = replace_equations(shorter, invars, shorter.outvars, shorter.eqns)
    return Core(leaf, tuple(part.ins), tuple(part.states), tuple(shared), tuple(part.outs), program)
