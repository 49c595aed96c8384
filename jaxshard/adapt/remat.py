"""What the forward pass of a block or unit keeps for its backward pass: policies by name, and per named activation.

A model names activations by `jax.ad_checkpoint.checkpoint_name(x, "attention_out")`; the policy

    {"attention_out": "save", "mlp_hidden": "offload"}

keeps the one on the device, moves the other to the host's memory and back, and computes all others again. Under every
policy gathered weights are gathered again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Literal, cast

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from jaxshard.core.constrain import CONSTRAINED
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.low_rank import WEIGHT
from jaxshard.core.scaled import STEPS
from jaxshard.core.types import PyTree

Kept = Literal["save", "offload", "remat"]
RematPolicy = str | Callable[..., bool] | Mapping[str, Kept]

BLOCK_IN = "block_in"
"""The name of what goes into every block of a `js.Stacked` model."""

HOST = "pinned_host"
"""The kind of memory that is offloaded to."""

_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}

# The primitives on the way from what is stored to a weight. JAX knows a primitive by name only, and a name that it
# changes would be saved without an error: tests/core/test_compat.py makes each of them and looks at its name.
_MOVES = frozenset({
    "all_gather", "shard_map", "sharding_constraint", "slice", "reshape", "transpose", "convert_element_type", "pad",
    WEIGHT.name, *STEPS,
})  # fmt: skip


def checkpoint_body(policy: RematPolicy, body: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the body of a scan over blocks in `jax.checkpoint`, with the policy of `make_save_policy`."""
    # Inside a scan nothing merges the second computation with the first, so the barriers of prevent_cse only cost.
    wrapped: Callable[..., Any] = jax.checkpoint(body, policy=make_save_policy(policy), prevent_cse=False)
    return wrapped


def make_save_policy(policy: RematPolicy) -> Callable[..., Any]:
    """Make the policy for `jax.checkpoint` that saves what `policy` allows, but never a gathered weight.

    The outputs of gathers, and of the moves and casts that turn what is stored into a weight, are not saved: the
    backward pass gathers again, so that only one block's weights are whole at a time.

    Args:
      policy: see `policy_function`.
    """
    return save_no_weights(policy_function(policy))


def save_no_weights(allows: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `jax.checkpoint` policy that saves what `allows` does, except gathered weights."""

    def save(prim: Any, *args: Any, **params: Any) -> Any:
        return prim.name not in _MOVES and allows(prim, *args, **params)

    return save


def policy_function(policy: RematPolicy) -> Callable[..., Any]:
    """Return the function of `jax.checkpoint_policies` that a policy stands for.

    Args:
      policy: "nothing", "dots", "everything", a function of `jax.checkpoint_policies`, or what is done with each named
        activation, {name: "save" | "offload" | "remat"}; the others are computed again.

    Raises:
      ValueError: an unknown policy, or something else to do with an activation.
    """
    if isinstance(policy, Mapping):
        return _policy_of_names(policy)
    if callable(policy):
        return policy
    if policy not in _POLICIES:
        raise ValueError(
            f"remat must be one of {', '.join(map(repr, _POLICIES))}, a function of jax.checkpoint_policies or what to "
            f'do with named activations, such as {{"attention_out": "save"}}, got {policy!r}'
        )
    named: Callable[..., Any] = _POLICIES[policy]
    return named


def _policy_of_names(policy: Mapping[str, Kept]) -> Callable[..., Any]:
    wrong = {name: kept for name, kept in policy.items() if kept not in ("save", "offload", "remat")}
    if wrong or not all(isinstance(name, str) for name in policy):
        raise ValueError(
            "remat takes names of activations, each with 'save' (keep it on the device), 'offload' (move it to the "
            f"host's memory) or 'remat' (compute it again), got {wrong or dict(policy)}"
        )
    if policy.get(BLOCK_IN) == "remat":
        raise ValueError(
            f"remat: {BLOCK_IN!r} is what a block is computed again from, so it can't be 'remat'; leave it out, which "
            "keeps it, or take 'offload'"
        )
    names_of: Callable[..., Any] = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, kept in policy.items() if kept == "save"],
        names_which_can_be_offloaded=offloaded(policy),
        offload_src="device",
        offload_dst=HOST,
    )
    return names_of


def offloaded(policy: RematPolicy | None) -> list[str]:
    """Return the names of the activations that a policy offloads."""
    return [name for name, kept in policy.items() if kept == "offload"] if isinstance(policy, Mapping) else []


def check_host_memory(policy: RematPolicy, mesh: Mesh) -> None:
    """Raise ValueError for an offload to a memory that the devices don't have; warn once where it is no other memory.

    On a CPU arrays live in the host's memory already.
    """
    if not (names := offloaded(policy)):
        return
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"remat: {', '.join(map(repr, names))} can't be offloaded: {device.device_kind} has no memory {HOST!r} "
            f"(it has {', '.join(map(repr, kinds)) or 'none'}); take 'save' or 'remat'"
        )
    if device.platform == "cpu":
        _warn_that_nothing_is_saved()


@cache
def _warn_that_nothing_is_saved() -> None:
    warnings.warn("remat: on a CPU an offload saves nothing: its arrays are in the host's memory anyway", stacklevel=2)


def check_names(policy: RematPolicy, run: Callable[..., Any], params: PyTree, *others: PyTree) -> None:
    """Raise ValueError if a policy names an activation that does not exist; lists those that do.

    Args:
      policy: any; only one of names is looked at.
      run: the model, a function of its parameters and other arguments, which is traced.
      params, others: the arguments, or their shapes; `run` is differentiated with respect to the first.
    """
    if not isinstance(policy, Mapping):
        return
    found = names_in(jax.make_jaxpr(run)(params, *others))
    if set(policy) <= found:
        return
    # Functions with a derivative of their own may name what they keep, and do so only when they are differentiated.
    found |= names_in(
        jax.make_jaxpr(lambda params, *others: jax.vjp(lambda p: run(p, *others), params)[0])(params, *others)
    )
    if unknown := [name for name in policy if name not in found]:
        raise ValueError(_no_such_names(unknown, found - {CONSTRAINED}))


def _no_such_names(unknown: Collection[str], found: Collection[str]) -> str:
    """Return the message about names that no activation has."""
    there = f"there are {', '.join(map(repr, sorted(found)))}" if found else "none is named"
    return (
        f"remat: no activation is named {', '.join(map(repr, unknown))}; {there}. Name one in the model by "
        'jax.ad_checkpoint.checkpoint_name(x, "name")'
    )


def names_in(program: Any) -> set[str]:
    """Return the names of activations in a traced program, and in the programs inside it.

    Those that a function with a derivative of its own gives stand in the program of its gradient alone.
    """
    names: set[str] = set()
    for eqn in open_jaxpr(program)[0].eqns:
        if eqn.primitive.name == "name":
            names.add(eqn.params["name"])
        for inner in jaxprs_in_params(eqn.params):
            names |= names_in(inner)
    return names


def name_tree(tree: PyTree, name: str) -> PyTree:
    """Name all arrays of a tree of activations."""
    return cast(PyTree, jax.tree.map(lambda x: checkpoint_name(x, name), tree))
