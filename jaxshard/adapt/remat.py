"""Rematerialization: choose the residuals that a block or unit saves for its backward pass, by `jax.checkpoint`.

A model names activations by `jax.ad_checkpoint.checkpoint_name(x, "attention_out")`. The policy

    {"attention_out": "save", "mlp_hidden": "offload"}

saves "attention_out" on the device, offloads "mlp_hidden" to the host's memory, and recomputes all other activations.
No policy saves gathered parameters: the backward pass gathers them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Literal, cast

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jaxshard.core.constrain import CONSTRAINED
from jaxshard.core.encoding import STEPS
from jaxshard.core.jaxpr import all_equations
from jaxshard.core.low_rank import WEIGHT
from jaxshard.core.types import PyTree

Kept = Literal["save", "offload", "remat"]
RematPolicy = str | Callable[..., bool] | Mapping[str, Kept]

BLOCK_IN = "block_in"
"""The name, for remat policies, of the input of every block of a `js.Stacked` model."""

HOST = "pinned_host"
"""The memory kind to which activations are offloaded."""

_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}

# The primitives between a stored shard and a gathered weight. Policies know primitives by name only, so if JAX renames
# one, its results would be saved without an error: tests/core/test_compat.py traces each and checks its name.
_MOVES = frozenset({
    "all_gather", "shard_map", "sharding_constraint", "slice", "reshape", "transpose", "convert_element_type", "pad",
    WEIGHT.name, *STEPS,
})  # fmt: skip


def checkpoint_body(policy: RematPolicy, body: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the body of a scan over blocks in a `jax.checkpoint` that saves the activations that `policy` chooses."""
    # Inside a scan the compiler can't merge the recomputation with the forward pass (CSE), so no barriers are needed.
    wrapped: Callable[..., Any] = jax.checkpoint(body, policy=make_save_policy(policy), prevent_cse=False)
    return wrapped


def make_save_policy(policy: RematPolicy) -> Callable[..., Any]:
    """Make the `jax.checkpoint` policy for a user's remat policy, changed so that it saves no gathered parameter.

    The outputs of all-gathers, and of reshapes and casts, which turn a stored shard into a gathered parameter, are not
    saved. The backward pass gathers again, so that only one block's parameters are gathered at a time.

    Args:
      policy: the user's policy, such as "dots" or {"attention_out": "save"}; see `policy_function`.
    """
    return save_no_weights(policy_function(policy))


def save_no_weights(allows: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `jax.checkpoint` policy `allows`, changed so that it saves no gathered parameter.

    The changed policy refuses the results of the primitives that make gathered parameters: all-gathers, reshapes, casts
    and the like.
    """

    def save(prim: Any, *args: Any, **params: Any) -> Any:
        return prim.name not in _MOVES and allows(prim, *args, **params)

    return save


def policy_function(policy: RematPolicy) -> Callable[..., Any]:
    """Convert a user's remat policy to a policy function as in `jax.checkpoint_policies`.

    Args:
      policy: "nothing", "dots", "everything", a function of `jax.checkpoint_policies`, or
        {name of an activation: "save" | "offload" | "remat"}; all other activations are recomputed.

    Raises:
      ValueError: an unknown policy, or an unknown choice for an activation.
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
    """Return the names of the activations that a policy offloads to the host's memory."""
    return [name for name, kept in policy.items() if kept == "offload"] if isinstance(policy, Mapping) else []


def check_host_memory(policy: RematPolicy, mesh: Mesh) -> None:
    """Raise ValueError if a policy offloads activations but the devices can't reach host memory; warn once on CPUs.

    On a CPU all arrays are in the host's memory already, so offloading saves nothing.
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
    """Raise ValueError if a policy names an activation that does not exist; the message lists all that exist.

    Args:
      policy: the policy; only a dict from names is checked.
      run: the model, a function of its parameters and other arguments, which is traced.
      params, others: the arguments of `run`, or their shapes. `run` is also differentiated with respect to `params`.
    """
    if not isinstance(policy, Mapping):
        return
    found = names_in(jax.make_jaxpr(run)(params, *others))
    if set(policy) <= found:
        return
    # A custom_vjp function may name residuals in its forward rule, which is traced only when it is differentiated.
    found |= names_in(
        jax.make_jaxpr(lambda params, *others: jax.vjp(lambda p: run(p, *others), params)[0])(params, *others)
    )
    if unknown := [name for name in policy if name not in found]:
        raise ValueError(_no_such_names(unknown, found - {CONSTRAINED}))


def _no_such_names(unknown: Collection[str], found: Collection[str]) -> str:
    there = f"there are {', '.join(map(repr, sorted(found)))}" if found else "none is named"
    return (
        f"remat: no activation is named {', '.join(map(repr, unknown))}; {there}. Name one in the model by "
        'jax.ad_checkpoint.checkpoint_name(x, "name")'
    )


def names_in(program: Any) -> set[str]:
    """Return the names that `checkpoint_name` gave to activations in a jaxpr and in the jaxprs inside it.

    Names that the forward rule of a custom_vjp function gives to its residuals are only in the jaxpr of the gradient.
    """
    return {eqn.params["name"] for eqn in all_equations(program) if eqn.primitive.name == "name"}


def name_tree(tree: PyTree, name: str) -> PyTree:
    """Give all arrays of a tree this name for `jax.checkpoint` policies."""
    return cast(PyTree, jax.tree.map(lambda x: checkpoint_name(x, name), tree))
