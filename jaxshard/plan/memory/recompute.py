"""Values that a TPU's compiler computes again by its own choice, because a step would not fit otherwise."""

from __future__ import annotations

from collections import defaultdict

from jaxshard.plan.memory.graph import Value
from jaxshard.plan.memory.liveness import Live, Liveness, Moment
from jaxshard.plan.memory.moved import PRODUCTS

_ROUNDS = 16
"""After so many lowered moments a step is taken not to fit."""


class Recomputing(Liveness):
    """When the stored values of a step live, if some are dropped and computed again before they are next read.

    XLA does that where more would be live than the limit: the value that frees most goes first, whatever it costs to
    compute it again, and then the next, until the rest is below (`RematerializationCost` in XLA's
    hlo_rematerialization.cc). A value can go over a moment between two operations that use it, if what it is computed
    from is there: results of products and of elementwise operations, not those of loops, kernels and collectives.
    """

    def peak_within(self, room: int) -> Moment:
        """Return the fullest moment with what is dropped for it; as it is without, if that does not bring it below.

        Args:
          room: bytes that a moment may have.
        """
        first = moment = self.peak()
        for _ in range(_ROUNDS):
            if moment.total <= room:
                return moment
            if not (dropped := self._dropped(moment, moment.total - room)):
                break
            for value, gap in dropped.items():
                self.away[value].append(gap)
            moment = self.peak()
        self.away = defaultdict(list)
        return first if moment.total > room else moment

    def _dropped(self, moment: Moment, excess: int) -> dict[Value, tuple[int, int]]:
        """Choose values that go over a moment, the largest first, with the places between which they are away.

        Nothing is chosen if all of them together are less than the excess.
        """
        there = {one.value for one in moment.live}
        found: dict[Value, tuple[int, int]] = {}
        for one in sorted(moment.live, key=lambda one: one.bytes, reverse=True):
            gap = self._gap(one, moment.at)
            if gap is None or not self._is_computable(one.value, there - set(found)):
                continue
            found[one.value] = gap
            excess -= one.bytes
            if excess <= 0:
                return found
        return {}

    def _gap(self, one: Live, at: int) -> tuple[int, int] | None:
        """Return the last use of a value before a place and the first one after it; None if it is used there."""
        maker = self.makers.get(one.value)
        if one.note or maker is None or one.value in self.in_place or one.value in self.results:
            return None
        uses = {self.place[maker], *(self.runs[op] for op in self.readers[one.value] if op in self.runs)}
        before, after = [use for use in uses if use < at], [use for use in uses if use > at]
        return None if at in uses or not before or not after else (max(before), min(after))

    def _is_computable(self, value: Value, there: set[Value]) -> bool:
        maker = self.makers[value]
        if not (maker.name in PRODUCTS or self.is_elementwise(maker)):
            return False
        return all(root in self.inputs or root in there for root in self.roots_of(maker))
