"""Recognise calls of a step like an earlier one, which go to the compiled program without further checks.

Checking and placing the arguments of a step costs more than the call of its program, and training repeats the same call
thousands of times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.core.types import PyTree


class LastCall(NamedTuple):
    """The properties of a run and a batch that a compiled program received as they were.

    Shapes and dtypes, and the shardings of the run, are left to the compiled program: it compares them itself and
    refuses others before it takes any array.

    Attributes:
      structure: the structure of the tree (run, batch).
      keys: the index and class of every random key among the leaves of the tree, last first.
      kind: the class of all other leaves: neither NumPy's arrays nor tracers.
      shardings: the sharding of each array of the batch.
    """

    structure: Any
    keys: list[tuple[int, Any]]
    kind: type[jax.Array]
    shardings: list[Any]

    @classmethod
    def of(cls, run: PyTree, batch: PyTree, shardings: PyTree) -> LastCall | None:
        """Describe a call; return None unless all arrays are JAX's, and the batch's are where the program wants them.

        Args:
          run: the run.
          batch: the batch that the user passed, before it was placed on the devices.
          shardings: the sharding in which the program receives each array of the batch.
        """
        leaves, structure = jax.tree.flatten((run, batch))
        wanted = zip(jax.tree.leaves(batch), jax.tree.leaves(shardings), strict=True)
        if not all(isinstance(x, jax.Array) for x in leaves):
            return None
        if not all(x.sharding.is_equivalent_to(where, x.ndim) for x, where in wanted):
            return None
        keys = [(i, type(x)) for i, x in enumerate(leaves) if _is_key(x)]
        kinds = {type(x) for x in leaves if not _is_key(x)}
        placed = [x.sharding for x in jax.tree.leaves(batch) if not _is_key(x)]
        return cls(structure, keys[::-1], kinds.pop(), placed) if len(kinds) == 1 else None

    def is_like(self, run: PyTree, batch: PyTree) -> bool:
        """Return True if the program may receive `run` and `batch` as they are; never for donated or deleted arrays.

        It runs before every step, so all that it does with the run's arrays is done in C++.
        """
        leaves, structure = jax.tree_util.tree_flatten((run, batch))
        config: Any = jax.config
        # A checked call refuses the first of these settings, and lifts the second.
        is_plain = not config.jax_disable_jit and config.jax_transfer_guard_device_to_device in (None, "allow")
        if structure != self.structure or not is_plain:
            return False
        for index, kind in self.keys:
            key: Any = leaves.pop(index)
            if type(key) is not kind or key.is_deleted():
                return False
        try:
            # JAX 0.10 crashes if a program on several CPU devices receives an array that was donated.
            taken = any(map(self.kind.is_deleted, leaves))
        except TypeError:  # a leaf of another class: the method accepts no NumPy arrays and tracers
            return False
        return not taken and [x.sharding for x in leaves[len(leaves) - len(self.shardings) :]] == self.shardings


def _is_key(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
