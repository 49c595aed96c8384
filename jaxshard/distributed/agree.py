"""`Peers`: processes meet and compare what they were given, before a collective in which they would hang.

A process that has another batch shape, program or seed than the others hangs with them in the next collective, and a
process that comes late makes gloo's collectives fail after 30 seconds. So before its first collectives every process
calls `agree` (or `meet`, which compares nothing): it returns once all are there with equal facts, or raises in all.

The protocol of one call, over JAX's key-value store. The keys begin with jaxshard/agree/<peers>/<n>/,
where <peers> names the set of processes and <n> counts its calls, so that no two calls share a key:

    process 0, the first                         processes 1, 2, ...
    ------------------------------------------   ------------------------------------------
    put  here/0                                  put  here/1
    put  text/<item>      each long fact
    put  facts            the short facts   -->  wait facts
                                                 get  text/<item>     where the digest differs
    wait answer/1    <-------------------------  put  answer/1        how it differs from the first
    wait answer/2, ...
    put  outcome          all differences   -->  wait outcome
    delete call <n - 1>
    no difference: return                        no difference: return
    wait seen/1, ...      at most 10 s      <--  put  seen/1
    raise Disagreement                           raise Disagreement

- Cost: every process writes two small values and reads two, the first one reads an answer of each.
- Late: a wait has no end, since compiling or loading may take minutes on one host. Every 2 seconds it looks up; after
  10, 20, 40, ... seconds one process, the first that is there, says on standard error for whom all wait.
- Failed: a process that ends by an error leaves a note first (`failures.report_failure`). Those that wait find it
  within 2 seconds and raise. One that is killed leaves none: JAX's heartbeat then ends the others.
- The call before may be deleted, because whoever answers this one has read all it needed of that.
- The first process waits for `seen` before it raises, because the store lives in process 0 and may end with the error.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxshard.core.compat import coordinator_client, delete_keys, get_key, list_keys, put_key, wait_for_key
from jaxshard.distributed.failures import WRONG_USAGE, MissingProcess, common_status, list_failures
from jaxshard.distributed.mismatch import Mismatch, describe_mismatches, find_mismatches, list_names, shorten_facts
from jaxshard.distributed.waiting import Waiting

_LOOK_UP = 2.0
"""Seconds between two looks for failed processes while a process waits."""
_LARGEST = 2_000_000
"""Characters of a compressed text above which it is not sent to the coordinator; its digest still is."""
_SEEN = 10.0
"""Seconds for which the first process waits, after a difference, for the others to read it."""


class Disagreement(ValueError):
    """Processes that must run one program were given different ones; raised in all of them, before they would hang.

    The message names the point of the program (such as `js.init`), every process that differs from the first one,
    what it has and what the first one has.

    Attributes:
      exit_status: 2, with which a process ends that does not catch the error: a new start would not help.

    Example:
        try:
            layout = js.layout(js.fsdp(), js.make_mesh(data=-1), init_fn, tx)
            run = js.init(init_fn, tx, layout, 0)
        except js.distributed.Disagreement as error:
            print(error)    # what each process was given
    """

    exit_status = WRONG_USAGE


class Peers:
    """The processes that compute together, as seen from one of them; made by `peers_of` and `all_peers`.

    Attributes:
      store: the client of JAX's key-value store on process 0, or an object with its methods.
      process: the number of this process.
      processes: the numbers of all of them, in order. The first collects and compares.
      host: the name of this host.
    """

    def __init__(self, store: Any, process: int, processes: Sequence[int], host: str = ""):
        self.store, self.process, self.processes = store, process, tuple(processes)
        self.host = host or socket.gethostname()
        self._first = self.processes[0]
        self._others = self.processes[1:]
        self._folder = f"jaxshard/agree/{hashlib.sha256(repr(self.processes).encode()).hexdigest()[:12]}"
        self._calls = itertools.count()
        put_key(store, f"jaxshard/host/{process}", self.host, overwrite=True)

    def name_of(self, process: int) -> str:
        """The name of a process in messages, such as "process 1 (host b)"; without a host that is not known yet."""
        host = self.host if process == self.process else get_key(self.store, f"jaxshard/host/{process}")
        return f"process {process} (host {host})" if host else f"process {process}"

    def meet(self, point: str) -> None:
        """Wait until all processes are here, however late; use it before a collective that would not wait for them.

        Args:
          point: the name of this point of the program, for messages.

        Raises:
          Disagreement, MissingProcess: as `agree`.
        """
        self.agree(point, {})

    def agree(self, point: str, facts: Mapping[str, str]) -> None:
        """Wait until all processes are at this point, however late, and compare what they bring.

        Every process calls it for the same points in the same order. Moves a few hundred bytes per process; of a text
        of many lines only a digest, and the text itself only if that differs.

        Args:
          point: the name of this point of the program, for messages.
          facts: texts by name that must be equal in all processes.

        Raises:
          Disagreement: in every process, if one of them differs from the first.
          MissingProcess: in those that wait, if a process failed before it came here.
        """
        call = next(self._calls)
        room = f"{self._folder}/{call}"
        put_key(self.store, f"{room}/here/{self.process}", "")
        # The name of the point is the first fact: a process that came to another one is told so, and nothing else.
        facts = {"call": point} | dict(facts)
        if self.process == self._first:
            found = self._collect(room, facts)
            # Who answered this call has read all of the one before; the store would grow for the life of the run.
            if call:
                delete_keys(self.store, f"{self._folder}/{call - 1}")
        else:
            found = self._answer(room, facts)
        if found:
            self._wait_until_seen(room)
            raise Disagreement(describe_mismatches(point, found))

    def _collect(self, room: str, facts: Mapping[str, str]) -> list[tuple[str, Mismatch]]:
        """The part of the first process: shows its facts, collects the answers and publishes all of them."""
        # Long texts first: whoever reads the facts finds them, and reads only those whose digest differs.
        short, texts = shorten_facts(facts)
        for item, text in texts.items():
            packed = base64.b64encode(zlib.compress(text.encode())).decode()
            if len(packed) <= _LARGEST:
                put_key(self.store, f"{room}/text/{item}", packed)
        put_key(self.store, f"{room}/facts", json.dumps(short))
        found = []
        for other in self._others:
            for item, theirs, mine in json.loads(self._wait_for(room, f"answer/{other}", facts["call"])):
                mismatch = Mismatch(item, theirs, f"{self.name_of(self.process)}: {mine}")
                found.append((self.name_of(other), mismatch))
        put_key(self.store, f"{room}/outcome", json.dumps(found))
        return found

    def _answer(self, room: str, facts: Mapping[str, str]) -> list[tuple[str, Mismatch]]:
        """The part of the other processes: compare with the first one, answer it, and learn of all differences."""
        first = json.loads(self._wait_for(room, "facts", facts["call"]))

        def text_of(item: str) -> str | None:
            packed = get_key(self.store, f"{room}/text/{item}")
            return None if packed is None else zlib.decompress(base64.b64decode(packed)).decode()

        put_key(self.store, f"{room}/answer/{self.process}", json.dumps(find_mismatches(facts, first, text_of)))
        outcome = json.loads(self._wait_for(room, "outcome", facts["call"]))
        return [(process, Mismatch(*mismatch)) for process, mismatch in outcome]

    def _wait_for(self, room: str, key: str, point: str) -> str:
        """Wait for a key without end, unless a process has failed; say on standard error for whom it waits."""
        waiting = Waiting(point)
        # In slices: while the client waits for one key, it notices nothing else.
        while (value := wait_for_key(self.store, f"{room}/{key}", _LOOK_UP)) is None:
            if failed := list(list_failures(self.store).values()):
                lines = "".join(f"\n  - {failure.name}: {failure.why}" for failure in failed)
                text = f"{point}: waited in vain for a process that failed before it came here{lines}"
                raise MissingProcess(text, common_status(failed))
            if waiting.is_due():
                self._say_missing(room, waiting)
        return value

    def _say_missing(self, room: str, waiting: Waiting) -> None:
        """Print for whom all wait, in one process alone: the first of those that are there."""
        # Each process that waits comes here, but those that are there are the same for all: one of them prints.
        there = {int(process) for process in list_keys(self.store, f"{room}/here/")}
        if self.process == min(there, default=self.process):
            missing = [self.name_of(other) for other in self.processes if other not in there] or ["an answer"]
            waiting.say(list_names(missing))

    def _wait_until_seen(self, room: str) -> None:
        """Let every process read the outcome before the first one ends, and the store with it."""
        if self.process != self._first:
            put_key(self.store, f"{room}/seen/{self.process}", "")
            return
        end = time.monotonic() + _SEEN  # not for ever: a process may end before it says so
        for other in self._others:
            wait_for_key(self.store, f"{room}/seen/{other}", max(0.01, end - time.monotonic()))


def peers_of(mesh: Mesh) -> Peers | None:
    """Return the processes whose devices are in a mesh, or None where this process has nobody to wait for."""
    if jax.process_count() == 1:
        return None
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return _peers(tuple(processes)) if jax.process_index() in processes and len(processes) > 1 else None


def all_peers() -> Peers | None:
    """Return all processes, or None where there is only one."""
    count = jax.process_count()
    return None if count == 1 else _peers(tuple(range(count)))


@functools.cache  # one object for the life of the process, because it counts its calls
def _peers(processes: tuple[int, ...]) -> Peers:
    return Peers(coordinator_client(), jax.process_index(), processes)
