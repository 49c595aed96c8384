"""Recognise calls of a step like an earlier one, which go to the compiled program without further checks.

Checking and placing the arguments of a step costs more than the call of its program, and training repeats the same call
thousands of times. A call is like an earlier one if nothing that was checked or converted then can differ now.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxshard.core.types import PyTree


class LastCall(NamedTuple):
    """What a step remembers of a run and a batch that its program received as they were.

    Shapes, dtypes and shardings of the run are left to the compiled program, which compares them itself, and refuses
    others.

    Attributes:
      structure: the structure of the tree (run, batch).
      kind: the class of all leaves except random keys: neither NumPy's arrays nor tracers.
      keys: the index and class of every random key among the leaves of the tree, last first.
      first: the index of the batch's first leaf among the leaves of the tree.
      batch: shape, dtype and sharding of each array of the batch.
    """

    structure: Any
    kind: type[jax.Array]
    keys: list[tuple[int, type]]
    first: int
    batch: list[tuple[Any, ...]]

    @classmethod
    def of(cls, run: PyTree, batch: PyTree, shardings: PyTree) -> LastCall | None:
        """Describe a call; return None unless all arrays are JAX's, and the batch's are where the program wants them.

        Args:
          run: the run.
          batch: the batch that the user passed, before it was placed on the devices.
          shardings: the sharding in which the program receives each array of the batch.
        """
        leaves, structure = jax.tree.flatten((run, batch))
        wanted = jax.tree.leaves(shardings)
        first = len(leaves) - len(wanted)
        placed = zip(leaves[first:], wanted, strict=True)
        if not all(isinstance(x, jax.Array) for x in leaves) or not all(_is_at(x, where) for x, where in placed):
            return None
        keys = [(i, type(x)) for i, x in enumerate(leaves) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
        kinds = {type(x) for i, x in enumerate(leaves) if (i, type(x)) not in keys}
        signatures = [_signature(x) for x in leaves[first:]]
        return cls(structure, kinds.pop(), keys[::-1], first, signatures) if len(kinds) == 1 else None

    def is_like(self, run: PyTree, batch: PyTree) -> bool:
        """Return True if the program can receive `run` and `batch` as they are; never for donated or deleted arrays.

        It runs before every step, so all that it does with the run's arrays is done in C++.
        """
        leaves, structure = jax.tree.flatten((run, batch))
        if structure != self.structure or [_signature(x) for x in leaves[self.first :]] != self.batch:
            return False
        for index, kind in self.keys:
            key = leaves.pop(index)
            if type(key) is not kind or key.is_deleted():
                return False
        # JAX 0.10 crashes if a program on several CPU devices receives an array that was donated.
        return set(map(type, leaves)) == {self.kind} and not any(map(self.kind.is_deleted, leaves))


def _is_at(x: jax.Array, sharding: jax.sharding.Sharding) -> bool:
    return x.sharding.is_equivalent_to(sharding, x.ndim)


def _signature(x: Any) -> tuple[Any, ...]:
    """Return shape, dtype and sharding of an array; () for other leaves."""
    return (x.shape, x.dtype, x.sharding) if isinstance(x, jax.Array) else ()
