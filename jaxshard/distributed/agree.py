"""`Peers`: let processes wait for each other and compare facts (settings, shapes, programs) before a collective.

If a process has another batch shape, program or seed than the others, all hang in the next collective; and a late
process makes gloo's collectives fail after 30 seconds. So before its first collectives every process calls `agree` (or
`meet`, which compares nothing): it returns once all processes have called it with equal facts, or raises in all.

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

- Cost: every process writes two small values and reads two; the first process reads an answer of each process.
- Late processes: a wait has no time limit, since compiling or loading may take minutes on one host. After 10, 20, 40,
  ... seconds the first of the waiting processes prints on standard error which processes are missing.
- Failed processes: a process that ends by an error writes a report first (`failures.report_failure`). The waiting
  processes check every 2 seconds for a report, and raise. For a killed process, process 0 writes the report, which ends
  the others.
- The keys of the previous call may be deleted, since a process that answers this call has read all it needs of them.
- The first process waits for `seen` before it raises, because the store is in process 0 and may end with the error.
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
"""Seconds between two checks for failed processes while a process waits."""
_LARGEST = 2_000_000
"""Texts with more characters after compression are not sent to the coordinator; only their digests are compared."""
_SEEN = 10.0
"""Seconds for which the first process waits, if facts differ, until the others have read the differences."""


class Disagreement(ValueError):
    """Processes have different programs, data or settings; raised in all of them, since they would hang otherwise.

    The message names the point of the program (such as `js.init`) and every process that differs from the first
    process, with both values.

    Attributes:
      exit_status: 2, the exit status of a process that does not catch the error: a restart would not help.

    Example:
        try:
            layout = js.layout(js.fsdp(), js.make_mesh(data=-1), init_fn, tx)
            run = js.init(init_fn, tx, layout, 0)
        except js.distributed.Disagreement as error:
            print(error)    # the settings, shapes or data that differ, by process
    """

    exit_status = WRONG_USAGE


class Peers:
    """The processes that compute together, as seen by this process; made by `peers_of` and `all_peers`.

    Attributes:
      store: the client of JAX's key-value store, which is in process 0, or an object with the client's methods.
      process: the index of this process.
      processes: the indices of all these processes, in order.
      host: the name of this host.
    """

    def __init__(self, store: Any, process: int, processes: Sequence[int], host: str = "", name: str = ""):
        self.store, self.process, self.processes = store, process, tuple(processes)
        self.host = host or socket.gethostname()
        self._first = self.processes[0]
        self._others = self.processes[1:]
        self._folder = f"jaxshard/agree/{hashlib.sha256(f'{name}{self.processes}'.encode()).hexdigest()[:12]}"
        self._calls = itertools.count()
        put_key(store, f"jaxshard/host/{process}", self.host, overwrite=True)

    def name_of(self, process: int) -> str:
        """Return the name of a process for messages, "process 1 (host b)", or "process 1" if its host is unknown."""
        host = self.host if process == self.process else get_key(self.store, f"jaxshard/host/{process}")
        return f"process {process} (host {host})" if host else f"process {process}"

    def meet(self, point: str) -> None:
        """Wait until all processes have called this, without a time limit.

        Use it before a collective, because the collective itself would time out if a process is late.

        Args:
          point: the name of this point of the program, for messages.

        Raises:
          Disagreement, MissingProcess: see `agree`.
        """
        self.agree(point, {})

    def agree(self, point: str, facts: Mapping[str, str]) -> None:
        """Wait until all processes are at this point, without a time limit, and compare facts (settings, shapes, ...).

        Every process must call it for the same points in the same order. It sends a few hundred bytes per process: for
        a text of several lines only a digest is sent, and the text itself only if the digests differ.

        Args:
          point: the name of this point of the program, for messages.
          facts: {name: text}, such as {"mesh": "data=8"}, which must be equal in all processes.

        Raises:
          Disagreement: in every process, if one of them differs from the first.
          MissingProcess: in the waiting processes, if a process failed before it called this.
        """
        call = next(self._calls)
        room = f"{self._folder}/{call}"
        put_key(self.store, f"{room}/here/{self.process}", "")
        # The name of the point is the first fact: if two processes are at different points, nothing else is compared.
        facts = {"call": point} | dict(facts)
        if self.process == self._first:
            found = self._collect(room, facts)
            # All processes that answered have read the call before. Delete it, or the store would grow during the run.
            if call:
                delete_keys(self.store, f"{self._folder}/{call - 1}")
        else:
            found = self._answer(room, facts)
        if found:
            self._wait_until_seen(room)
            raise Disagreement(describe_mismatches(point, found))

    def _collect(self, room: str, facts: Mapping[str, str]) -> list[tuple[str, Mismatch]]:
        """Do what `agree` does in the first process: publish its facts, collect all differences, and publish them.

        Args:
          room: the beginning of the keys of this call in the key-value store.
          facts: {name: text} of the first process.

        Returns:
          (name of a process, a fact in which it differs from the first process) for each difference.
        """
        # Write long texts before the facts: processes that read the facts then find the texts whose digest differs.
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
        """Do what `agree` does in other processes: compare facts with the first process, and send the differences.

        Args:
          room: the beginning of the keys of this call in the key-value store.
          facts: {name: text} of this process.

        Returns:
          (name of a process, a fact in which it differs from the first process) for each difference of any process.
        """
        first = json.loads(self._wait_for(room, "facts", facts["call"]))

        def text_of(item: str) -> str | None:
            packed = get_key(self.store, f"{room}/text/{item}")
            return None if packed is None else zlib.decompress(base64.b64decode(packed)).decode()

        put_key(self.store, f"{room}/answer/{self.process}", json.dumps(find_mismatches(facts, first, text_of)))
        outcome = json.loads(self._wait_for(room, "outcome", facts["call"]))
        return [(process, Mismatch(*mismatch)) for process, mismatch in outcome]

    def _wait_for(self, room: str, key: str, point: str) -> str:
        """Wait until the key `room/key` is in the store, and return its value.

        After 10, 20, 40, ... seconds it prints which processes are missing.

        Raises:
          MissingProcess: a process reported its failure while this process waited.
        """
        waiting = Waiting(point)
        # Wait in slices, since the client can't check for failures while it waits for a key.
        while (value := wait_for_key(self.store, f"{room}/{key}", _LOOK_UP)) is None:
            if failed := list(list_failures(self.store).values()):
                lines = "".join(f"\n  - {failure.name}: {failure.why}" for failure in failed)
                text = f"{point}: waited in vain for a process that failed before it came here{lines}"
                raise MissingProcess(text, common_status(failed))
            if waiting.is_due():
                self._say_missing(room, waiting)
        return value

    def _say_missing(self, room: str, waiting: Waiting) -> None:
        """Print the names of the missing processes; only the waiting process with the lowest index does it."""
        there = {int(process) for process in list_keys(self.store, f"{room}/here/")}
        if self.process == min(there, default=self.process):
            missing = [self.name_of(other) for other in self.processes if other not in there] or ["an answer"]
            waiting.say(list_names(missing))

    def _wait_until_seen(self, room: str) -> None:
        """Report that this process has read the outcome; in the first process, wait for the reports of all others.

        The store is in the first process, so the others could not read the outcome if the first process ended earlier.
        """
        if self.process != self._first:
            put_key(self.store, f"{room}/seen/{self.process}", "")
            return
        end = time.monotonic() + _SEEN  # a time limit, since a process may end before it writes the key
        for other in self._others:
            wait_for_key(self.store, f"{room}/seen/{other}", max(0.01, end - time.monotonic()))


def peers_of(mesh: Mesh) -> Peers | None:
    """Return the processes that have devices in a mesh.

    None if only one process has devices in it, or if this process has none.
    """
    if jax.process_count() == 1:
        return None
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return _peers(tuple(processes)) if jax.process_index() in processes and len(processes) > 1 else None


def all_peers() -> Peers | None:
    """Return all processes, or None if there is only one process."""
    count = jax.process_count()
    return None if count == 1 else _peers(tuple(range(count)))


@functools.cache
def background_peers(name: str) -> Peers | None:
    """Return all processes, for calls from a background thread; None if there is only one process.

    Calls are numbered, and the main thread makes calls at the same time. So a thread needs numbers of its own.

    Args:
      name: the name of the thread's task, the same in all processes.
    """
    count = jax.process_count()
    return None if count == 1 else Peers(coordinator_client(), jax.process_index(), range(count), name=name)


@functools.cache  # one object per set of processes, because it counts its calls
def _peers(processes: tuple[int, ...]) -> Peers:
    return Peers(coordinator_client(), jax.process_index(), processes)
