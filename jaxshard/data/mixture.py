"""A mixture of sources: every row comes from one of them, in exact proportion to the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

import jax
import numpy as np

from jaxshard.core.tree import check_same_tree
from jaxshard.core.types import PyTree
from jaxshard.data.order import permute
from jaxshard.data.source import Source, places

_LARGEST = 2**31
"""Whole weights stay below this in sum, so that products of two fit into 64 bits."""


@dataclass(frozen=True)
class Mixture:
    """The indexed source that `mixture` makes: `counts` rows of each of its sources in every sum(counts) rows."""

    names: tuple[str, ...]
    sources: tuple[Source, ...]
    counts: tuple[int, ...]
    batch: int
    seed: int

    def rows(self, step: int, rows: np.ndarray) -> PyTree:
        """The given global rows of the batch of a step, each from one of the sources."""
        rows = places(step, rows, self.batch) - np.int64(step) * self.batch
        slots = np.int64(step) * self.batch + permute(rows, size=self.batch, seed=self.seed, epoch=step)
        which, number = draws(self.counts, slots)
        at, parts = [], []
        for i, source in enumerate(self.sources):
            steps, row = np.divmod(number, self.batch)
            for each in np.unique(steps[which == i]):
                chosen = np.flatnonzero((which == i) & (steps == each))
                at.append(chosen)
                parts.append(source.rows(int(each), row[chosen]))
        if not parts:
            return self.sources[0].rows(step, rows)
        back = np.argsort(np.concatenate(at))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *parts)

    def rows_before(self, step: int) -> dict[str, int]:
        """How many rows of each source come before a step."""
        return dict(zip(self.names, _before(self.counts, step * self.batch), strict=True))


def mixture(sources: Mapping[str, tuple[Source, float]], *, seed: int) -> Mixture:
    """A source that mixes others by weight, {"name": (source, weight)}: each row of a batch comes from one of them.

    With weights that add up to W as whole numbers in lowest terms (0.3 and 0.7 are 3 and 7), every W rows from the
    start hold exactly so many of each source; any rows that follow one another, such as a batch, hold less than
    log2(number of sources), rounded up, more or fewer than the share. Weights with W of 2**31 or more are rounded, by
    less than 1e-8 of the whole.
    Each source is read in its own sequence, no row left out, so that none comes twice in its epoch; the seed draws the
    places within a batch. Every step is computed from its number alone, and a mixture may be mixed again.

        source = js.data.mixture({"code": (code, 0.3), "prose": (prose, 0.7)}, seed=0)

    Raises:
      ValueError: no sources, a weight that is not above 0 or not finite, sources whose batches or rows differ.
      TypeError: a weight that is no number, an entry that is no pair of a source and its weight.
    """
    if not sources:
        raise ValueError('mixture: no sources; give {"name": (source, weight)}')
    for name, entry in sources.items():
        if not (isinstance(entry, tuple) and len(entry) == 2 and hasattr(entry[0], "rows")):
            raise TypeError(f"mixture: {name!r} must be a pair (source, weight), got {_described(entry)}")
    members = {name: source for name, (source, _) in sources.items()}
    counts = _whole({name: weight for name, (_, weight) in sources.items()})
    sizes = {name: source.batch for name, source in members.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"mixture: all sources need the batch of the mixture, got {sizes}; make them with one batch=")
    _check_alike(members)
    return Mixture(tuple(members), tuple(members.values()), counts, next(iter(sizes.values())), seed)


def draws(counts: tuple[int, ...], slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which source, the number of its row) for every slot of an endless sequence; both int64[len(slots)].

    The sources are halved until one is left; of two halves with weights a and b, the first takes slot n when
    floor(n a / (a + b)) goes up there. So a source's rows are numbered without gaps in the order of the slots.
    """
    if len(counts) == 1:
        return np.zeros_like(slots), slots
    half = len(counts) // 2
    part, total = sum(counts[:half]), sum(counts)
    taken = _share(slots, part, total)
    first = _share(slots + 1, part, total) > taken
    which, number = np.empty_like(slots), np.empty_like(slots)
    which[first], number[first] = draws(counts[:half], taken[first])
    which[~first], number[~first] = draws(counts[half:], (slots - taken)[~first])
    which[~first] += half
    return which, number


def _before(counts: tuple[int, ...], slot: int) -> list[int]:
    """How many slots before this one each source takes."""
    if len(counts) == 1:
        return [slot]
    half = len(counts) // 2
    taken = slot * sum(counts[:half]) // sum(counts)
    return _before(counts[:half], taken) + _before(counts[half:], slot - taken)


def _share(n: np.ndarray, part: int, total: int) -> np.ndarray:
    """floor(n * part / total) without overflow."""
    return n // total * part + n % total * part // total


def _whole(weights: Mapping[str, float]) -> tuple[int, ...]:
    """The weights as whole numbers in lowest terms, decimals as they are written."""
    for name, weight in weights.items():
        if not isinstance(weight, Real) or isinstance(weight, bool):
            raise TypeError(f"mixture: the weight of {name!r} must be a number, got {_described(weight)}")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"mixture: the weight of {name!r} must be above 0 and finite, got {weight}; leave out a 0")
    exact = [Fraction(w) if isinstance(w, Rational) else Fraction(repr(float(w))) for w in weights.values()]
    unit = math.lcm(*(w.denominator for w in exact))
    whole = [int(w * unit) for w in exact]
    whole = [w // math.gcd(*whole) for w in whole]
    if sum(whole) < _LARGEST:
        return tuple(whole)
    return tuple(max(1, w * (_LARGEST // 2) // sum(whole)) for w in whole)


def _check_alike(members: Mapping[str, Source]) -> None:
    """An error unless rows of all sources have one structure, and leaves of one shape and dtype."""
    (name, first), *others = ((name, source.rows(0, np.zeros(1, np.int64))) for name, source in members.items())
    for other, row in others:
        what = f"mixture: rows of {other!r} differ from those of {name!r}"
        check_same_tree(first, row, what, "make the sources with one seq and one dtype")


def _described(x: object) -> str:
    return f"{type(x).__name__} {x!r}"[:80]
