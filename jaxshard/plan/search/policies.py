"""Make the remat policies of a search from the checkpoint names that the model's activations have.

The names are sorted by the recomputation that each saved byte avoids. The policies keep the first name, the first two
and so on: all on the device; the names on the device and the block's input in host memory; all in host memory.

    attention_out=save
    attention_out=save,block_in=offload
    attention_out=offload,block_in=offload
    attention_out=save,qkv=save
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxshard.adapt.remat import BLOCK_IN, Kept, RematPolicy, make_save_policy, names_in
from jaxshard.core.constrain import CONSTRAINED
from jaxshard.core.types import PyTree
from jaxshard.cost.flops import model_flops
from jaxshard.layers.attention.blockwise import NAME as ATTENTION_OUT

_ELEMENTWISE = 0.03
"""The smallest share of a block's work that is recomputed unless everything is kept: norms, gates, rotations."""
_WORTH = 0.01
"""The smallest share of a block's work that keeping a name must save."""


@dataclass(frozen=True)
class Policy:
    """A remat policy with the bytes that a block keeps for one row.

    Attributes:
      text: the policy as `--remat` takes it: "nothing", or "attention_out=save,block_in=offload".
      kept: bytes that are kept on the device.
      moved: bytes that are kept in the host's memory.
      again: the FLOPs that the backward pass recomputes, as a share of the block's FLOPs without recomputation.
    """

    text: str
    kept: int = 0
    moved: int = 0
    again: float = 0.0

    @property
    def is_plain(self) -> bool:
        """True for a policy without checkpoint names, such as "dots"."""
        return "=" not in self.text


PLAIN = (Policy("everything"), Policy("dots", again=_ELEMENTWISE), Policy("nothing", again=1 / 3))
"""The policies without checkpoint names, by decreasing kept bytes; `again` is assumed, not measured."""


def remat_of(text: str) -> RematPolicy:
    """Return the remat policy that engines take, parsed from the text of `--remat`.

    >>> remat_of("attention_out=save,block_in=offload")
    {'attention_out': 'save', 'block_in': 'offload'}
    """
    if "=" not in text:
        return text
    pairs = (part.split("=") for part in text.split(","))
    return {name: cast(Kept, kept) for name, kept in pairs}


def policies_of(block: Callable[[PyTree, PyTree], PyTree], weights: PyTree, x: PyTree) -> tuple[Policy, ...]:
    """Make the remat policies for a block, each with the bytes that it keeps.

    Args:
      block: a function of a block's weights and input; it gives its input the checkpoint name "block_in".
      weights: the shapes of the block's weights.
      x: the shapes of the block's input, for one row.
    """
    of = _Block(block, weights, x)
    into = tree_bytes(x)
    plain = [of.under(one.text, one.again) for one in PLAIN]
    nothing = plain[-1]
    found = [*plain, replace(nothing, text=f"{BLOCK_IN}=offload", kept=nothing.kept - into, moved=into)]
    alone = {name: of.under(f"{name}=save", nothing.again) for name in of.names()}
    worth = [name for name, policy in alone.items() if policy.kept > nothing.kept]
    gains = {name: nothing.again - alone[name].again for name in worth}
    # FLOPs are counted by the plain formula of attention, whose gradient needs the logits again. The gradient of a
    # kernel computes them in any case, so that keeping its result saves both products of the forward pass.
    kernel = gains.get(ATTENTION_OUT, 0.0)
    gains |= {ATTENTION_OUT: 2 * kernel} if kernel else {}
    if any(gains.values()):  # else the work can't be counted
        worth = [name for name in worth if gains[name] > _WORTH]

    def order(name: str) -> tuple[float, int]:
        size = alone[name].kept - nothing.kept
        return -float(f"{gains[name] / size:.1e}"), size  # among equal gains per byte the smaller first

    worth.sort(key=order)
    for count in range(1, len(worth) + 1):
        first = worth[:count]
        save, offload = (dict.fromkeys(first, how) for how in ("save", "offload"))
        kept = of.under(_text(save), nothing.again)
        if ATTENTION_OUT in first:
            kept = replace(kept, again=max(_ELEMENTWISE, kept.again - kernel))
        found += [
            kept,
            Policy(_text(save | {BLOCK_IN: "offload"}), kept.kept - into, into, kept.again),
            Policy(_text(offload | {BLOCK_IN: "offload"}), 0, kept.kept, kept.again),
        ]
    return tuple(found)


@dataclass(frozen=True)
class _Block:
    """Measures a block of the model under remat policies: the FLOPs of its gradient and the bytes that it keeps."""

    run: Callable[[PyTree, PyTree], PyTree]
    weights: PyTree
    x: PyTree

    def names(self) -> list[str]:
        """Return the checkpoint names of the block's activations, without the name of its input."""
        return sorted(names_in(jax.make_jaxpr(self._gradient(self.run))(*self._inputs())) - {CONSTRAINED, BLOCK_IN})

    def under(self, text: str, otherwise: float) -> Policy:
        """Measure the policy `text`; `otherwise` is its recomputed share if a kernel does not state its FLOPs."""
        saved = jax.checkpoint(self.run, policy=make_save_policy(remat_of(text)), prevent_cse=False)
        kept = tree_bytes(jax.eval_shape(lambda w, x: jax.vjp(saved, w, x)[1], self.weights, self.x))
        kept -= tree_bytes(self.weights)  # residuals of the gradient, but stored anyway
        try:
            once, twice = (model_flops(self._gradient(run), *self._inputs()) for run in (self.run, saved))
            again = twice / once - 1 if once else otherwise
        except ValueError:
            again = otherwise
        return Policy(text, max(0, kept), again=0.0 if text == "everything" else max(_ELEMENTWISE, again))

    def _gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x, given: jax.vjp(run, w, x)[1](given)

    def _inputs(self) -> tuple[PyTree, PyTree, PyTree]:
        return self.weights, self.x, jax.eval_shape(self.run, self.weights, self.x)


def _text(policy: Mapping[str, str]) -> str:
    return ",".join(f"{name}={how}" for name, how in policy.items())


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(int(x.size) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
