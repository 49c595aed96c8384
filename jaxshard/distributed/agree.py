"""What processes tell each other through JAX's coordinator, before anything that hangs if they are not the same."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxshard.core.compat import coordinator
from jaxshard.distributed.key_value import FAILED, look, put, wait

_SLICE = 5.0
"""Seconds of one look: while a process waits in it, it hears nothing else."""
_TELL = 10.0
"""Seconds after which a process says for whom it waits, and between two such lines, which double up to a minute."""
_LONG, _LARGEST = 1000, 2_000_000
"""Characters from which on a text goes by its digest, and those that go to the coordinator at all, compressed."""
_SEEN = 10.0
"""Seconds that the first process stays after a difference, so that the others can read it: they end with it."""


_NAMES = re.compile(r"%\w+")


class Disagreement(ValueError):
    """Processes that should run one program have different ones; raised in all of them, before they would hang."""


class Difference(NamedTuple):
    """One thing that a process has otherwise than the first one."""

    item: str
    here: str
    first: str


class Company:
    """The processes of a mesh as seen from one of them; made by `company`.

    All that they tell each other goes through `store`, JAX's key-value store on process 0, or one with its methods.
    """

    def __init__(self, store: Any, process: int, processes: Sequence[int], host: str = ""):
        self.store, self.process, self.processes = store, process, tuple(processes)
        self.host = host or socket.gethostname()
        self.name = hashlib.sha256(repr(self.processes).encode()).hexdigest()[:12]
        self._numbers = itertools.count()
        put(store, f"jaxshard/host/{process}", self.host, overwrite=True)

    @property
    def _first(self) -> int:
        return self.processes[0]

    def meet(self, point: str) -> None:
        """Returns once all processes are here, however late: before a collective that would not wait for them."""
        self.agree(point, {})

    def agree(self, point: str, facts: Mapping[str, str]) -> None:
        """Returns once all processes are at this point with the same facts, however late one of them comes.

        Every process calls it for the same points in the same order. For whom one waits is said on standard error.
        Moves a few hundred bytes per process; of a text of many lines its digest, and the text only if it differs.

        Raises:
          Disagreement: a process failed before it came here. Or, in every process, they differ: each that differs
            from the first one is named, what it has, and what the first one has; of long texts the first line that
            differs.
        """
        room = f"jaxshard/agree/{self.name}/{next(self._numbers)}"
        put(self.store, f"{room}/here/{self.process}", self.host)
        facts = {"call": point} | dict(facts)
        found = self._collected(room, facts) if self.process == self._first else self._answered(room, facts)
        if found:
            self._wait_until_seen(room)
            raise Disagreement(message(point, found))

    def host_of(self, process: int) -> str:
        """The name of a process, such as process 1 (host b); without its host as long as it has not said it."""
        host = self.host if process == self.process else look(self.store, f"jaxshard/host/{process}")
        return f"process {process} (host {host})" if host else f"process {process}"

    def _collected(self, room: str, facts: Mapping[str, str]) -> list[tuple[str, Difference]]:
        """What the first process hears from all others, and tells them."""
        short, texts = _digested(facts)
        for item, text in texts.items():
            packed = base64.b64encode(zlib.compress(text.encode())).decode()
            if len(packed) <= _LARGEST:
                put(self.store, f"{room}/text/{item}", packed)
        put(self.store, f"{room}/facts", json.dumps([self.host, short]))
        found = []
        for other in self.processes[1:]:
            host, differences = json.loads(self._wait(room, f"answer/{other}", facts["call"]))
            found += [(f"process {other} (host {host})", Difference(*difference)) for difference in differences]
        named = [(who, difference._replace(first=f"{self._named()}: {difference.first}")) for who, difference in found]
        put(self.store, f"{room}/outcome", json.dumps(named))
        self._drop_before(room)
        return named

    def _answered(self, room: str, facts: Mapping[str, str]) -> list[tuple[str, Difference]]:
        """What the others hear from the first process, after they have told it how they differ."""
        _, theirs = json.loads(self._wait(room, "facts", facts["call"]))

        def text_of(item: str) -> str | None:
            packed = look(self.store, f"{room}/text/{item}")
            return None if packed is None else zlib.decompress(base64.b64decode(packed)).decode()

        answer = json.dumps([self.host, differences(facts, theirs, text_of)])
        put(self.store, f"{room}/answer/{self.process}", answer)
        outcome = json.loads(self._wait(room, "outcome", facts["call"]))
        return [(who, Difference(*difference)) for who, difference in outcome]

    def _named(self) -> str:
        return f"process {self.process} (host {self.host})"

    def _wait(self, room: str, key: str, point: str) -> str:
        start, tell = time.monotonic(), _TELL
        while True:
            value = wait(self.store, f"{room}/{key}", _SLICE)
            if value is not None:
                return value
            self._check_alive(point)
            waited = time.monotonic() - start
            if waited >= tell:
                tell = waited + min(60.0, tell)
                self._say(room, point, waited)

    def _check_alive(self, point: str) -> None:
        """Raises if a process has said that it failed: it will not come."""
        failed = [json.loads(text) for _, text in self.store.key_value_dir_get(FAILED)]
        if failed:
            lines = "".join(f"\n  - {who}: {why}" for who, why in failed)
            raise Disagreement(f"{point}: waited in vain for a process that failed before it came here{lines}")

    def _say(self, room: str, point: str, waited: float) -> None:
        """Says for whom all wait, in the first process that is there."""
        there = {int(key.rsplit("/", 1)[1]) for key, _ in self.store.key_value_dir_get(f"{room}/here/")}
        if self.process == min(there, default=self.process):
            missing = [self.host_of(other) for other in self.processes if other not in there] or ["an answer"]
            print(
                f"jaxshard: {point}: waiting for {_listed(missing)} since {waited:.0f} s", file=sys.stderr, flush=True
            )

    def _drop_before(self, room: str) -> None:
        """Forgets the point before: all have read it, or they would not have come here."""
        head, number = room.rsplit("/", 1)
        if int(number):
            self.store.key_value_delete(f"{head}/{int(number) - 1}")

    def _wait_until_seen(self, room: str) -> None:
        """Lets every process read the outcome before the first one ends, and the coordinator with it."""
        if self.process != self._first:
            put(self.store, f"{room}/seen/{self.process}", "")
            return
        end = time.monotonic() + _SEEN
        for other in self.processes[1:]:
            wait(self.store, f"{room}/seen/{other}", max(0.01, end - time.monotonic()))


def company(mesh: Mesh) -> Company | None:
    """The processes whose devices are in a mesh; None where this process is the only one."""
    if jax.process_count() == 1:
        return None
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return _company(tuple(processes)) if jax.process_index() in processes and len(processes) > 1 else None


def everyone() -> Company | None:
    """All processes; None where there is one."""
    count = jax.process_count()
    return None if count == 1 else _company(tuple(range(count)))


@functools.cache  # one for the life of the process: it counts the points at which it has agreed
def _company(processes: tuple[int, ...]) -> Company:
    return Company(coordinator(), jax.process_index(), processes)


def differences(facts: Mapping[str, str], theirs: Mapping[str, Any], text_of: Any) -> list[Difference]:
    """How these facts differ from the first process's, whose long texts are digests that `text_of(item)` opens.

    Where another point of the program was reached nothing else is compared, and long texts only where all short facts
    are the same: they follow from those.
    """
    short, texts = _digested(facts)
    items = [*theirs, *(item for item in short if item not in theirs)]
    differing = [item for item in items if short.get(item) != theirs.get(item)]
    if "call" in differing:
        return [Difference("call", short["call"], theirs["call"])]
    is_long = {item: isinstance(short.get(item), list) or isinstance(theirs.get(item), list) for item in differing}
    plain = [Difference(item, *_both(short, theirs, item)) for item in differing if not is_long[item]]
    if plain:
        return plain
    found = []
    for item in differing:
        mine = texts.get(item, facts.get(item, ""))
        other = text_of(item) if isinstance(theirs.get(item), list) else theirs.get(item, "")
        found.append(Difference(item, *first_difference(mine, other)))
    return found


def first_difference(here: str, first: str | None) -> tuple[str, str]:
    """(the first line that differs here, the same line of the first process), each with its number, and cut.

    Names of values (%12) don't count, unless nothing else differs: in a program they follow from lines elsewhere.
    """
    if first is None:
        return "another", "one too long to be shown"
    pairs = list(itertools.zip_longest(here.splitlines(), first.splitlines(), fillvalue="(ends)"))
    for same in (lambda mine, other: _NAMES.sub("%", mine) == _NAMES.sub("%", other), str.__eq__):
        for number, (mine, other) in enumerate(pairs, 1):
            if not same(mine, other):
                start = next((i for i, (a, b) in enumerate(zip(mine, other)) if a != b), min(len(mine), len(other)))
                return f"line {number}: {_cut(mine, start)}", f"line {number}: {_cut(other, start)}"
    return "another", "the same lines with other ends"


def message(point: str, found: Iterable[tuple[str, Difference]]) -> str:
    """One line per difference, with the processes that share it."""
    groups: dict[Difference, list[str]] = {}
    for who, difference in found:
        groups.setdefault(difference, []).append(who)
    lines = []
    for (item, here, first), names in groups.items():
        lines.append(f"\n  - {_listed(names)}: {item} {here}, {first}")
    return (
        f"{point}: the processes differ and would hang in their first collective; start all of them from the same "
        f"code, data and flags{''.join(lines)}"
    )


def digest(*arrays: np.ndarray) -> str:
    """A short name for the bytes of arrays."""
    sha = hashlib.sha256()
    for x in arrays:
        sha.update(np.ascontiguousarray(x).tobytes())
    return sha.hexdigest()[:16]


def _digested(facts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(short facts, with [digest] for the long ones; the long ones)."""
    texts = {item: text for item, text in facts.items() if len(text) > _LONG or "\n" in text}
    short = {
        item: [hashlib.sha256(text.encode()).hexdigest()] if item in texts else text for item, text in facts.items()
    }
    return short, texts


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _both(mine: Mapping[str, str], theirs: Mapping[str, str], item: str) -> tuple[str, str]:
    return mine.get(item, "(none)"), theirs.get(item, "(none)")


def _cut(line: str, start: int, width: int = 160) -> str:
    """The part of a line around a place."""
    line, start = line.strip(), max(0, start - (len(line) - len(line.lstrip())))
    if len(line) <= width:
        return line
    begin = max(0, min(start - width // 2, len(line) - width))
    return ("..." if begin else "") + line[begin : begin + width] + ("..." if begin + width < len(line) else "")
