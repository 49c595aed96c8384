"""Mix sources: every row of a batch comes from one of the sources, in exact proportion to their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

import jax
import numpy as np
from jaxtyping import Int

from jaxshard.core.tree import check_same_tree
from jaxshard.core.types import PyTree
from jaxshard.data.order import permute
from jaxshard.data.source import Source, global_positions

_LARGEST = 2**31
"""The sum of integer weights stays below this, so that the product of two fits into 64 bits."""


@dataclass(frozen=True)
class Mixture:
    """The source that `mixture` makes: of every sum(counts) rows, counts[i] rows come from sources[i].

    Attributes:
      names: the names of the sources.
      sources: the sources, all with the batch of the mixture.
      counts: the weights of the sources as integers in lowest terms.
      batch: the number of global rows of a step.
      seed: the random seed of the order of sources within a batch.
    """

    names: tuple[str, ...]
    sources: tuple[Source, ...]
    counts: tuple[int, ...]
    batch: int
    seed: int

    def rows(self, step: int, rows: Int[np.ndarray, " rows"]) -> PyTree:
        """Read rows of the global batch of a step, each from one of the sources.

        Args:
          step: the index of the batch, from 0.
          rows: row indices from 0 to batch - 1.

        Returns:
          A tree with leaves [len(rows), ...], like those of the sources.

        Raises:
          ValueError: a row outside the batch, a negative step, or an error of a source.
        """
        # Map a row of the batch to a slot of the endless sequence (shuffled within the batch), the slot to a source and
        # the index of a row of that source, and this index to the source's own (step, row).
        begin = np.int64(step) * self.batch
        place = global_positions(step, rows, self.batch) - begin
        slots = begin + permute(place, size=self.batch, seed=self.seed, epoch=step)
        which, number = assign_slots(self.counts, slots)
        steps, row = np.divmod(number, self.batch)
        at, parts = [], []
        for i, source in enumerate(self.sources):
            # The rows of a source in one batch may belong to several of its own steps.
            for its_step in np.unique(steps[which == i]):
                chosen = np.flatnonzero((which == i) & (steps == its_step))
                at.append(chosen)
                parts.append(source.rows(int(its_step), row[chosen]))
        if not parts:
            return self.sources[0].rows(step, rows)
        # Parts are grouped by source and step; bring their rows back to the requested order.
        back = np.argsort(np.concatenate(at))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *parts)

    def rows_before(self, step: int) -> dict[str, int]:
        """Return {name of a source: number of its rows in all batches before a step}."""
        before = count_rows(self.counts, np.array([int(step) * self.batch]))
        return dict(zip(self.names, before[:, 0].tolist(), strict=True))


def mixture(sources: Mapping[str, tuple[Source, float]], *, seed: int) -> Mixture:
    """Make a source that mixes several sources by weight: each row of a batch comes from one of the sources.

        source = js.data.mixture({"code": (code, 0.3), "prose": (prose, 0.7)}, seed=0)

    The proportions are exact. Write the weights as integers in lowest terms, and let W be their sum (0.3 and 0.7 become
    3 and 7, so W is 10). Then the first W rows, and each W rows after them, contain exactly as many rows of each source
    as its integer weight: 3 and 7. In any other range of rows, such as a batch, the number of rows of a source differs
    from its exact share by less than log2(number of sources), rounded up.

    Each source is read in its own order without gaps, so no row is repeated within an epoch of the source. Every step
    is computed from its index alone, and a mixture can be a source of another mixture.

    Args:
      sources: {name: (source, weight)}. All sources must have the same `batch`, which is also the mixture's, and rows
        of equal structure, shapes and dtypes. Weights are positive numbers, taken as decimals: 0.1 is one tenth. If W
        is 2**31 or more, weights are rounded, by less than 1e-8 of the sum.
      seed: the random seed of the order of sources within a batch.

    Returns:
      A source with the batch and the row structure of its sources.

    Raises:
      ValueError: no sources, a weight that is not above 0 or not finite, sources whose batches or rows differ.
      TypeError: a weight that is not a number, an entry that is not a pair (source, weight).

    Example:
        code = js.data.windows(tokens, batch=8, seq=16, seed=0)
        prose = js.data.windows(tokens[::-1], batch=8, seq=16, seed=0)
        source = js.data.mixture({"code": (code, 0.7), "prose": (prose, 0.3)}, seed=0)
    """
    if not sources:
        raise ValueError('mixture: no sources; give {"name": (source, weight)}')
    for name, entry in sources.items():
        if not (isinstance(entry, tuple) and len(entry) == 2 and hasattr(entry[0], "rows")):
            raise TypeError(f"mixture: {name!r} must be a pair (source, weight), got {_show(entry)}")
    members = {name: source for name, (source, _) in sources.items()}
    counts = _to_whole({name: weight for name, (_, weight) in sources.items()})
    sizes = {name: source.batch for name, source in members.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"mixture: all sources need the batch of the mixture, got {sizes}; make them with one batch=")
    _check_same_rows(members)
    return Mixture(tuple(members), tuple(members.values()), counts, next(iter(sizes.values())), seed)


def assign_slots(
    counts: tuple[int, ...], slots: Int[np.ndarray, " slots"]
) -> tuple[Int[np.ndarray, " slots"], Int[np.ndarray, " slots"]]:
    """Assign every slot (row of an endless sequence) to one of several sources, in proportion to `counts`.

    `count_rows` gives the number of rows of each source before a slot. From one slot to the next, this number grows by
    one for exactly one source: the slot is assigned to this source. The number before the slot is the index of the row
    within the source, so the rows of a source are used in order, without gaps. The result depends only on the slot.
    With counts (2, 1), where the first source has floor(2 n / 3) rows before slot n:

        slot                          0  1  2  3  4  5  6
        rows of source 0 before it    0  0  1  2  2  3  4
        rows of source 1 before it    0  1  1  1  2  2  2
        the slot's source             1  0  0  1  0  0
        the row's index               0  0  1  1  2  3

    Args:
      counts: the integer weight of each source.
      slots: int64 indices from 0.

    Returns:
      (the index of the slot's source, the index of the row within that source) for every slot, both int64.
    """
    before = count_rows(counts, slots)
    which = np.argmax(count_rows(counts, slots + 1) - before, axis=0)
    return which, np.take_along_axis(before, which[None], axis=0)[0]


def count_rows(counts: tuple[int, ...], slots: Int[np.ndarray, " slots"]) -> Int[np.ndarray, "sources slots"]:
    """Return how many rows of each source come before each slot of the endless sequence, int64.

    The list of sources is halved recursively. If the halves have the total weights a and b, the first half gets
    floor(n a / (a + b)) of the first n slots. Every halving adds an error below 1, and there are at most
    log2(number of sources) halvings, rounded up.
    """
    if len(counts) == 1:
        return slots[None]
    half = len(counts) // 2
    part, total = sum(counts[:half]), sum(counts)
    first = slots // total * part + slots % total * part // total  # floor(slots * part / total) in 64 bits
    return np.concatenate([count_rows(counts[:half], first), count_rows(counts[half:], slots - first)])


def _to_whole(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Convert weights to integers in lowest terms, such as (0.3, 0.7) to (3, 7); 0.1 counts as exactly one tenth."""
    for name, weight in weights.items():
        if not isinstance(weight, Real) or isinstance(weight, bool):
            raise TypeError(f"mixture: the weight of {name!r} must be a number, got {_show(weight)}")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"mixture: the weight of {name!r} must be above 0 and finite, got {weight}; leave out a 0")
    exact = [Fraction(w) if isinstance(w, Rational) else Fraction(repr(float(w))) for w in weights.values()]
    unit = math.lcm(*(w.denominator for w in exact))
    whole = [int(w * unit) for w in exact]
    whole = [w // math.gcd(*whole) for w in whole]
    if sum(whole) < _LARGEST:
        return tuple(whole)
    return tuple(max(1, w * (_LARGEST // 2) // sum(whole)) for w in whole)


def _check_same_rows(members: Mapping[str, Source]) -> None:
    """Raise ValueError unless rows of all sources have equal structure, shapes and dtypes."""
    (name, first), *others = ((name, source.rows(0, np.zeros(1, np.int64))) for name, source in members.items())
    for other, row in others:
        what = f"mixture: rows of {other!r} differ from those of {name!r}"
        check_same_tree(first, row, what, "make the sources with one seq and one dtype")


def _show(x: object) -> str:
    return f"{type(x).__name__} {x!r}"[:80]
