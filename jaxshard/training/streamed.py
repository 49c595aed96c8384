"""Update optimizer state that is stored in the host's memory, one block of a stacked array at a time on the device.

For one parameter w [24, 4096, 1024] and the moments mu, nu of its shape on the host, an elementwise update is

    for block in range(24):                                a loop of the compiled program
        old = mu[block], nu[block]                         host -> device
        step[block], new = update(grad[block], old, w[block], count)
        mu[block], nu[block] = new                         device -> host

The update of a block is `tx.update` traced for arrays [1, 4096, 1024] in place of [24, 4096, 1024], of which only the
equations for w are evaluated. The proof that the transform is elementwise says that the result is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxshard.core.jaxpr import Program, needed_equations, variables
from jaxshard.core.placement import Placement
from jaxshard.core.stored import bring_to_device
from jaxshard.core.tree import abstract, is_stacked
from jaxshard.core.types import PyTree
from jaxshard.optim.proof.trace import param_at_end
from jaxshard.training.non_finite import keep_old_unless


class _Streamed(NamedTuple):
    """A parameter whose optimizer state is copied from the host and back block by block.

    Attributes:
      param: the index of the parameter among the leaves of the parameters.
      state: the indices of the parameter's moments among the leaves of the optimizer's state.
    """

    param: int
    state: tuple[int, ...]


def update_streamed(
    tx: optax.GradientTransformation,
    ok: jax.Array,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    placements: PyTree,
) -> tuple[PyTree, PyTree]:
    """Run an elementwise `tx.update` on stored arrays, with part of the state in the host's memory.

    Args:
      tx: an elementwise transform.
      ok: bool[] on the device; if False, the returned state is the old state.
      grads: the stored gradients.
      state: the stored optimizer state.
      params: the stored parameters.
      placements: the placements of the state. Stacked arrays on the host are streamed along their first dimension if no
        axis splits it; all others are copied to the device at once.

    Returns:
      (updates, new state): streamed arrays of the state are on the host, all others on the device.
    """
    streamed = _find_streamed(grads, state, placements)
    of_state = [index for one in streamed for index in one.state]
    of_params = [one.param for one in streamed]
    cut_params, cut_state = _cut(grads, of_params), _cut(state, of_state)
    # Inline calls: a call that updates all arrays, as in JAX 0.12, would need the arrays on the host too.
    block = Program.trace(tx.update, cut_params, cut_state, _cut(params, of_params)).inline_calls()
    whole = Program.trace(tx.update, *map(abstract, (grads, state, params))).inline_calls()  # as on the device
    places = jax.tree.leaves(placements)
    there = [places[i].on_device() if i in of_state else place for i, place in enumerate(places)]
    tree: Any = jax.tree.structure(state)
    old = jax.tree.leaves(bring_to_device(tree.unflatten(there), state))
    rest = [jax.tree.leaves(part) for part in whole.out]
    updates: list[Any] = [None if i in of_params else var for i, var in enumerate(rest[0])]
    new: list[Any] = [None if i in of_state else var for i, var in enumerate(rest[1])]
    given = dict(
        zip(jax.tree.leaves(whole.args), [*jax.tree.leaves(grads), *old, *jax.tree.leaves(params)], strict=True)
    )
    updates, new = whole.run((updates, new), given)
    new = [x if x is None else keep_old_unless(ok, x, before) for x, before in zip(new, old, strict=True)]
    for one in streamed:
        updates[one.param], arrays = _stream(block, one, ok, grads, old, params)
        for index, array in zip(one.state, arrays, strict=True):
            new[index] = array
    return jax.tree.unflatten(jax.tree.structure(grads), updates), jax.tree.unflatten(tree, new)


def _find_streamed(grads: PyTree, state: PyTree, placements: PyTree) -> list[_Streamed]:
    paths = jax.tree_util.tree_leaves_with_path(grads)
    owned: dict[int, list[int]] = {}
    leaves = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(placements), strict=True)
    for index, ((path, x), placement) in enumerate(leaves):
        owner = param_at_end(path, [path for path, _ in paths])
        if owner is None or not is_stacked(paths[owner][0]) or paths[owner][1].shape != x.shape:
            continue
        if _has_blocks(placement):
            owned.setdefault(owner, []).append(index)
    return [_Streamed(param, tuple(indices)) for param, indices in owned.items()]


def _has_blocks(placement: Placement) -> bool:
    """Return True for an unpadded array on the host whose first dimension (the blocks) is not split."""
    sizes = placement.view.stored
    whole = bool(sizes) and sizes[0] > 1 and placement.store[0] is None
    return bool(placement.memory) and not placement.view.is_padded and whole


def _cut(tree: PyTree, chosen: Sequence[int]) -> PyTree:
    """Return the shapes of a tree's arrays; leaves with indices in `chosen` get a first dimension of 1, one block."""
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    shapes = [(1, *x.shape[1:]) if i in chosen else x.shape for i, x in enumerate(leaves)]
    return structure.unflatten([jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, leaves, strict=True)])


def _stream(
    block: Program, one: _Streamed, ok: jax.Array, grads: PyTree, state: list[Any], params: PyTree
) -> tuple[Any, list[Any]]:
    """Compute the update of one parameter and its new state block by block, in a loop of the compiled program.

    Args:
      block: the jaxpr of `tx.update`, traced with a single block of each streamed array.
      one: the parameter, and the arrays of its state.
      ok: bool[]; if False, the returned state is the old state.
      grads: all gradients.
      state: the leaves of the optimizer's state.
      params: all parameters.

    Returns:
      (the update of the parameter, the new arrays of its state on the host).
    """
    grad, param = jax.tree.leaves(grads)[one.param], jax.tree.leaves(params)[one.param]
    of_grads, of_state, of_params = (jax.tree.leaves(tree) for tree in block.args)
    step, after = (jax.tree.leaves(tree) for tree in block.out)
    outs = [step[one.param], *(after[index] for index in one.state)]
    blocks = [of_grads[one.param], *(of_state[index] for index in one.state), of_params[one.param]]
    # The update is elementwise, so it depends on no other arrays but scalars.
    numbers = {var: x for var, x in zip(of_state, state, strict=True) if var not in set(blocks)}
    _, needed = needed_equations(block.eqns, outs, {*blocks, *numbers})
    shared = [var for var in numbers if var in needed | variables(outs)]
    run = block.part(outs, [*blocks, *shared])

    def body(index: jax.Array, carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        steps, arrays = carry

        def take(x: Any) -> Any:
            return lax.dynamic_slice_in_dim(x, index, 1, axis=0)

        before = [jax.device_put(take(x), jax.memory.Space.Device) for x in arrays]
        made, *new = run(take(grad), *before, take(param), *(numbers[var] for var in shared))
        kept = [keep_old_unless(ok, x, old) for x, old in zip(new, before, strict=True)]
        sent = [jax.device_put(x, jax.memory.Space.Host) for x in kept]
        written = [lax.dynamic_update_slice_in_dim(x, y, index, axis=0) for x, y in zip(arrays, sent, strict=True)]
        return lax.dynamic_update_slice_in_dim(steps, made, index, axis=0), written

    start = jnp.zeros_like(grad, dtype=step[one.param].aval.dtype)
    done: tuple[Any, list[Any]] = lax.fori_loop(0, grad.shape[0], body, (start, [state[i] for i in one.state]))
    return done
