"""The named schedules, in a form for a single program for all devices: a tick has an F slot and a B slot.

A tick costs the time of every slot that any device uses, so a device without an operation in a slot waits for the
others. Every device runs its forwards without gaps, one tick after the device before. So only p - 1 slots of a kind are
idle per device:

    bubble = (p - 1) / v / (m + (p - 1) / v)                      for gpipe and one_f_one_b (v = 1) and interleaved
    bubble = (p - 1) / v / (m (F + B) / (F + dX) + (p - 1) / v)   for zero_bubble, whose W slots never wait

with m micro-batches over p devices with v chunks each, whatever F and B cost. Sources: Huang et al. 2019 (GPipe);
Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxshard.core.near_words import did_you_mean
from jaxshard.schedules.schedule import Schedule
from jaxshard.schedules.table import Op, check_sizes


class _Group(NamedTuple):
    """Consecutive micro-batches that go through all chunks of the model before the next group begins."""

    start: int
    size: int


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Make GPipe: all forwards, then all backwards in the same order of micro-batches.

    It takes any number of micro-batches; every device stores the residuals of all m at its peak. Source: Huang et al.
    2019.

    Args:
      stages: the devices of the pipeline, p.
      microbatches: m.

    Example:
        schedule = js.schedules.gpipe(4, 8)
        print(schedule.chart())
        schedule.stats().bubble
    """
    check_sizes(stages, microbatches, 1)
    forwards = _forwards(stages, [_Group(0, microbatches)], 1)
    # One tick after the last device's last forward: no tick has both kinds, and a tick costs one slot.
    backwards = _backwards(stages, [_Group(0, microbatches)], 1, first=stages + microbatches - 1)
    return Schedule("gpipe", stages, microbatches, 1, (*forwards, *backwards))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Make 1F1B: between warm-up and cool-down every tick has a forward and a backward.

    Device s stores the residuals of min(m, D + p - 2 s) micro-batches at its peak. D, the tick of the first backward,
    is p - 2 + ceil(m / ceil(m / p)), so at most 2 (p - 1) for any m. Source: Narayanan et al. 2021, section 2.2.

    Args:
      stages: the devices of the pipeline, p.
      microbatches: m, at least p.

    Raises:
      ValueError: fewer micro-batches than stages.

    Example:
        schedule = js.schedules.one_f_one_b(4, 8)
        schedule.stats().peak_stash     # of each device, in activations of a micro-batch
    """
    return Schedule("one_f_one_b", stages, microbatches, 1, _fused(stages, microbatches, 1, split=False))


def interleaved(stages: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Make interleaved 1F1B: each device has v chunks of the model, which makes the bubble about v times smaller.

    Micro-batches form floor(m / p) groups whose sizes differ by at most one. Each group goes through all chunks before
    the next begins. At its peak device s stores the residuals of min(m v, D + p - 2 s) pairs of chunk and micro-batch;
    a chunk is 1 / v of a device's blocks. D, the tick of the first backward, is p - 2 + max((v - 1) g + ceil(g /
    ceil(g / p))) over the sizes g of the groups: p (v + 1) - 2 if p divides m. Source: Narayanan et al. 2021, section
    2.2.

    Args:
      stages: the devices of the pipeline, p.
      microbatches: m, at least p.
      chunks: parts of the model on each device, v.

    Raises:
      ValueError: fewer micro-batches than stages.

    Example:
        schedule = js.schedules.interleaved(4, 8, chunks=2)
        schedule.stats().bubble < js.schedules.one_f_one_b(4, 8).stats().bubble     # True
    """
    return Schedule("interleaved", stages, microbatches, chunks, _fused(stages, microbatches, chunks, split=False))


def zero_bubble(stages: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Make a zero-bubble schedule: `interleaved`, with the gradients of weights as separate operations (W).

    No device waits for another device's W. So all devices run their n-th W in the same tick: the tick in which device
    0, the last of all devices, runs its n-th B. Between the first and the last W there are no idle slots of W. At its
    peak device s stores the residuals of min(m v, D + p - s) pairs of chunk and micro-batch, with D as in
    `interleaved`. Source: Qi et al. 2024.

    Args:
      stages: the devices of the pipeline, p.
      microbatches: m, at least p.
      chunks: parts of the model on each device, v.

    Raises:
      ValueError: fewer micro-batches than stages.

    Example:
        schedule = js.schedules.zero_bubble(4, 8, chunks=2)
        step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=8, schedule="zero_bubble"))
    """
    return Schedule("zero_bubble", stages, microbatches, chunks, _fused(stages, microbatches, chunks, split=True))


def _fused(stages: int, microbatches: int, chunks: int, *, split: bool) -> tuple[Op, ...]:
    check_sizes(stages, microbatches, chunks)
    if microbatches < stages:
        raise ValueError(
            f"{microbatches} micro-batches over {stages} stages are too few to keep every device busy; use at least "
            f"{stages} micro-batches, at most {microbatches} stages, or gpipe"
        )
    # With a single chunk per device no micro-batch returns to the first device, so one group is enough.
    groups = _groups(microbatches, stages) if chunks > 1 else [_Group(0, microbatches)]
    first = _first_backward(stages, groups, chunks)
    forwards, backwards = _forwards(stages, groups, chunks), list(_backwards(stages, groups, chunks, first=first))
    # On all devices in the tick of device 0, which is the last.
    weights = (op._replace(kind="W", tick=op.tick + op.device) for op in backwards) if split else ()
    return (*forwards, *backwards, *weights)


def _groups(microbatches: int, stages: int) -> list[_Group]:
    """Split m micro-batches into floor(m / p) groups of nearly equal size, the larger first.

    A group has at least p micro-batches, because with fewer a chunk would have to wait for the chunk before it.
    """
    size, larger = divmod(microbatches, microbatches // stages)
    sizes = [size + (i < larger) for i in range(microbatches // stages)]
    return [_Group(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _first_backward(stages: int, groups: list[_Group], chunks: int) -> int:
    """Return the earliest tick in which the last device can run its first backward.

    The losses of up to p micro-batches of a group (a run of the head, see `runs.py`) are computed together, one per
    device, in the tick of their last forward, and their backwards can't be earlier. A group is split into as few runs
    as possible, of nearly equal length. The first chunk in the backward pass is the last one in the forward pass, which
    a device starts after (v - 1) * size other forwards of the group.
    """
    return max(stages - 1 + (chunks - 1) * size + _longest_run(size, stages) - 1 for _, size in groups)


def _longest_run(size: int, stages: int) -> int:
    runs = -(-size // stages)
    return -(-size // runs)


def _forwards(stages: int, groups: list[_Group], chunks: int) -> Iterator[Op]:
    for device in range(stages):
        for position, chunk, microbatch in _positions(groups, range(chunks)):
            yield Op(device + position, device, "F", chunk, microbatch)


def _backwards(stages: int, groups: list[_Group], chunks: int, *, first: int) -> Iterator[Op]:
    for device in range(stages):
        for position, chunk, microbatch in _positions(groups, range(chunks - 1, -1, -1)):
            yield Op(first + stages - 1 - device + position, device, "B", chunk, microbatch)


def _positions(groups: list[_Group], chunks: range) -> Iterator[tuple[int, int, int]]:
    """Yield (position, chunk, micro-batch) for the operations of one kind, such as F, of a device.

    They are in the order in which the device runs them: group by group, in a group chunk by chunk, in a chunk
    micro-batch by micro-batch. Positions are 0, 1, 2, ...
    """
    position = 0
    for start, size in groups:
        for chunk in chunks:
            for microbatch in range(start, start + size):
                yield position, chunk, microbatch
                position += 1


_NAMED: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
_MOST_FORWARDS = 2**16
"""The most forwards of a table: the table is a constant in the program of a step."""

NAMES = tuple(_NAMED)
"""The names of schedules for `named`, which also accepts 1f1b for one_f_one_b, and - for _.

Example:
    [js.schedules.named(name, 4, 8).stats().bubble for name in js.schedules.NAMES]
"""

ONE_CHUNK = ("gpipe", "one_f_one_b")
"""The names of the schedules with a single chunk per device.

Example:
    chunks = {name: 1 if name in js.schedules.ONE_CHUNK else 2 for name in js.schedules.NAMES}
"""


def full_name(name: str) -> str:
    """Convert another spelling of a name to the name in `NAMES`.

    Raises:
      ValueError: there is no such name.

    Example:
        >>> full_name("1f1b"), full_name("zero-bubble")
        ('one_f_one_b', 'zero_bubble')
    """
    known = "one_f_one_b" if name == "1f1b" else name.replace("-", "_")
    if known not in _NAMED:
        hint = f"; {near}" if (near := did_you_mean(known, NAMES)) else ""
        raise ValueError(f"there is no schedule {name!r}; use one of {', '.join(NAMES)}{hint}")
    return known


def named(name: str, stages: int, microbatches: int, *, chunks: int | None = None) -> Schedule:
    """Make a schedule by its name.

    Args:
      name: one of `NAMES`, or another spelling of it, such as "1f1b".
      stages: the devices of the pipeline, p.
      microbatches: the number of micro-batches, m.
      chunks: chunks per device; by default 1 or 2, as in the function of that name.

    Raises:
      ValueError: there is no such schedule, or it has one chunk per device and `chunks` is another number.

    Example:
        schedule = js.schedules.named("1f1b", 4, 8)
        schedule.stats().bubble
    """
    known = full_name(name)
    forwards = stages * microbatches * (chunks or 1)
    if forwards > _MOST_FORWARDS:
        raise ValueError(
            f"{name}: {stages} stages, {microbatches} micro-batches and {chunks or 1} chunks make a table of "
            f"{forwards} forwards, more than {_MOST_FORWARDS}; take fewer micro-batches"
        )
    if chunks is None:
        return _NAMED[known](stages, microbatches)
    if known in ONE_CHUNK:
        if chunks != 1:
            raise ValueError(f"{known} has 1 chunk per device, got {chunks}; leave chunks out, or use interleaved")
        return _NAMED[known](stages, microbatches)
    return _NAMED[known](stages, microbatches, chunks=chunks)
