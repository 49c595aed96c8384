"""What blocks may keep for their backward pass: policies of the names that the activations of the model really have.

A name is worth what need not be computed again once it is kept, for each byte. The names are put in that order, and
the policies keep the first, the first two and so on: on the device; on the device, with what goes into a block in the
host's memory; all of it there.

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
"""Of a step what is computed again at least, unless everything is kept: norms, gates, rotations."""
_WORTH = 0.01
"""A name is kept for so much of a block's products at least."""


@dataclass(frozen=True)
class Policy:
    """A remat policy with the bytes that a block keeps for one row.

    Attributes:
      text: as `--remat` takes it: "nothing", or "attention_out=save,block_in=offload".
      kept: bytes on the device.
      moved: bytes in the host's memory.
      again: what the backward pass computes again, as a share of the block's work without that.
    """

    text: str
    kept: int = 0
    moved: int = 0
    again: float = 0.0

    @property
    def is_plain(self) -> bool:
        """True for a policy without names."""
        return "=" not in self.text


PLAIN = (Policy("everything"), Policy("dots", again=_ELEMENTWISE), Policy("nothing", again=1 / 3))
"""The policies without names, what keeps most first, before anything is known of a block."""


def remat_of(text: str) -> RematPolicy:
    """Return the policy that engines take.

    >>> remat_of("attention_out=save,block_in=offload")
    {'attention_out': 'save', 'block_in': 'offload'}
    """
    if "=" not in text:
        return text
    pairs = (part.split("=") for part in text.split(","))
    return {name: cast(Kept, kept) for name, kept in pairs}


def policies_of(block: Callable[[PyTree, PyTree], PyTree], weights: PyTree, x: PyTree) -> tuple[Policy, ...]:
    """Make the policies for a block.

    Args:
      block: a function of a block's weights and of what goes into it, which it names.
      weights: shapes.
      x: shapes of what goes into it, of one row.
    """
    of = _Block(block, weights, x)
    into = tree_bytes(x)
    plain = [of.under(one.text, one.again) for one in PLAIN]
    nothing = plain[-1]
    found = [*plain, replace(nothing, text=f"{BLOCK_IN}=offload", kept=nothing.kept - into, moved=into)]
    alone = {name: of.under(f"{name}=save", nothing.again) for name in of.names()}
    worth = [name for name, policy in alone.items() if policy.kept > nothing.kept]
    gains = {name: nothing.again - alone[name].again for name in worth}
    # Of attention the formula is counted, whose gradient needs the logits again. Those of kernels make them anyway, so
    # that with the result both products of the forward pass are saved.
    kernel = gains.get(ATTENTION_OUT, 0.0)
    gains |= {ATTENTION_OUT: 2 * kernel} if kernel else {}
    if any(gains.values()):  # else the work can't be counted
        worth = [name for name in worth if gains[name] > _WORTH]

    def order(name: str) -> tuple[float, int]:
        size = alone[name].kept - nothing.kept
        return -float(f"{gains[name] / size:.1e}"), size  # of those worth as much the smaller

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
    """A block, and what its gradient computes and keeps under a policy."""

    run: Callable[[PyTree, PyTree], PyTree]
    weights: PyTree
    x: PyTree

    def names(self) -> list[str]:
        """The names of its activations, but for what goes into it."""
        return sorted(names_in(jax.make_jaxpr(self._gradient(self.run))(*self._inputs())) - {CONSTRAINED, BLOCK_IN})

    def under(self, text: str, otherwise: float) -> Policy:
        """Measure a policy; `otherwise` is the share that it computes again where a kernel does not say its work."""
        saved = jax.checkpoint(self.run, policy=make_save_policy(remat_of(text)), prevent_cse=False)
        kept = tree_bytes(jax.eval_shape(lambda w, x: jax.vjp(saved, w, x)[1], self.weights, self.x))
        kept -= tree_bytes(self.weights)  # which are kept as they are stored
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
