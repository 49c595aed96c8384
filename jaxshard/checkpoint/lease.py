"""The lease on a folder of checkpoints in an object store: only one training may save into the folder.

The object `.lock` in the folder names the holder, which writes it again every 15 seconds, only if nobody else has
written it since. Another training that finds it watches for 60 seconds, by its own clock: if the object changes, it is
refused; if not, it takes the lease over. It takes over at once if the holder is known to be dead: its process has ended
on this host, or Slurm has requeued the job.

A holder may sleep for minutes and not know that it has lost the lease. So each holder has a number, the epoch, larger
than those before. It is part of the names of all objects that the holder writes, and of its manifests. Before and after
a manifest is written, and before anything is deleted, the holder writes its lease again, which fails if it was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from jaxshard.checkpoint.manifest import ARRAYS
from jaxshard.distributed.failures import TRY_AGAIN
from jaxshard.storage.paths import ObjectPath, Stored
from jaxshard.storage.strict_json import decode_object

LEASE = ".lock"
"""The name of the object in the folder of checkpoints."""
RENEWAL = 15.0
"""Seconds between two renewals."""
EXPIRY = 60.0
"""Seconds without a renewal after which another training may take the lease."""
_MARGIN = 15.0
"""A holder counts its lease as lost so many seconds before others do."""
_POLL = 3.0
"""Seconds between two looks at another training's lease."""


class LeaseLost(OSError):
    """Raised if another training may have taken the folder of checkpoints over, or the object store does not answer.

    Attributes:
      exit_status: 75, "try again", the exit status of a process that does not catch the error.

    Example:
        try:
            checkpointer.save(run)
        except jaxshard.checkpoint.lease.LeaseLost:
            js.distributed.leave(75)
    """

    exit_status = TRY_AGAIN


@dataclass(frozen=True)
class Holder:
    """The content of the lease.

    Attributes:
      epoch: the number of this holder, larger than those of earlier holders.
      name: the program, process and host, for messages.
      host: identifies the running system on which the holder's process is.
      process: (number of the process, its start time on that system).
      job: the number of the Slurm job, or "".
      requeued: how many times Slurm has requeued the job.
      folder: the address of the folder; a lease that was copied with a folder is none.
      id: a random text, another one for each lease.
      is_held: False once the holder has released it.
      renewal: a random text, another one in every renewal.
    """

    epoch: int
    name: str
    host: str
    process: tuple[int, int]
    job: str
    requeued: int
    folder: str = ""
    id: str = ""
    is_held: bool = True
    renewal: str = ""

    def encode(self) -> bytes:
        """Return the bytes of the object, different in every call."""
        return json.dumps(asdict(replace(self, renewal=uuid.uuid4().hex))).encode()


def this_process(epoch: int, environ: Mapping[str, str] = os.environ) -> Holder:
    """Return the holder that this process is."""
    started, command = datetime.now(UTC).isoformat(timespec="seconds"), Path(sys.argv[0]).name or "python"
    name = f"{command} (process {os.getpid()} on host {socket.gethostname()}, since {started})"
    job, requeued = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    process = (os.getpid(), _start_time(os.getpid()) or 0)
    return Holder(epoch, name, _this_host(), process, job, int(requeued) if requeued.isdecimal() else 0)


def is_dead(holder: Holder, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the process that holds a lease has surely ended, False if that is not known."""
    if holder.host == _this_host():
        return _start_time(holder.process[0]) != holder.process[1]
    mine = this_process(0, environ)
    return bool(mine.job) and holder.job == mine.job and holder.requeued < mine.requeued


class Lease:
    """A lease that this process holds, renewed by a thread until `release`.

    Args:
      folder: the folder of checkpoints.

    Raises:
      BlockingIOError: another training holds the lease.
      OSError: the object store can't be reached or refuses, or the object is no lease.

    Attributes:
      epoch: the number of this holder.
    """

    def __init__(self, folder: ObjectPath):
        self._folder, self._file = folder, folder / LEASE
        self._guard, self._closed = threading.Lock(), threading.Event()
        self._lost = ""
        _check_conditions(folder)
        self._holder, self._generation = self._take()
        self.epoch, self._renewed = self._holder.epoch, _clock()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """Renew the lease.

        Raises:
          LeaseLost: another training has taken it.
          OSError: the object store can't be reached or refuses.
        """
        with self._guard:
            if self._closed.is_set():
                return
            self.check_time()
            content, begun = self._holder.encode(), _clock()
            generation = self._file.replace(content, self._generation)
            if generation is None:
                generation = self._retry(content)
            if generation is None:
                self._lost = f"{self._folder}: another training has taken this folder over, as this one slept"
                raise LeaseLost(self._lost)
            self._generation, self._renewed = generation, begun

    def check_time(self) -> None:
        """Raise LeaseLost if the lease is known to be lost, or was not renewed for too long; ask nobody."""
        silent = _clock() - self._renewed
        if not self._lost and silent > EXPIRY - _MARGIN:
            self._lost = f"{self._folder}: the lease of this folder could not be renewed for {silent:.0f} s"
        if self._lost:
            raise LeaseLost(f"{self._lost}; nothing more is saved. Start again: the newest complete step is there")

    def release(self) -> None:
        """Give the lease back, so that another training need not wait; if the store does not answer, leave it."""
        self._closed.set()
        if not self._guard.acquire(timeout=RENEWAL):
            return  # a renewal hangs
        try:
            content = replace(self._holder, is_held=False).encode()
            with contextlib.suppress(OSError):
                if not self._lost and self._file.replace(content, self._generation) is None:
                    self._retry(content)
        finally:
            self._guard.release()

    def _retry(self, content: bytes) -> bytes | None:
        """Write the lease after a renewal whose answer did not come; return None if the lease is another one."""
        there = self._file.read()
        if there.content is None or _decode(self._file, there.content).id != self._holder.id:
            return None
        return self._file.replace(content, there.generation)

    def _keep(self) -> None:
        while not self._closed.wait(RENEWAL):
            try:
                self.check()
            except LeaseLost:
                return  # the next save or step raises it
            except OSError:
                continue  # as long as it was renewed recently

    def _take(self) -> tuple[Holder, bytes]:
        while True:
            there = self._file.read()
            holder = None if there.content is None else _decode(self._file, there.content)
            if holder is not None and holder.folder not in ("", str(self._folder)):
                holder = None  # copied with its folder
            mine = this_process(
                1 + max(_newest_epoch(self._folder) if holder is None else 0, holder.epoch if holder else 0)
            )
            mine = replace(mine, folder=str(self._folder), id=uuid.uuid4().hex)
            left = holder is not None and (holder.host, holder.process) == (mine.host, mine.process)
            if holder is not None and holder.is_held and not left and not is_dead(holder):
                self._watch(there, holder)
            if (generation := self._file.replace(mine.encode(), there.generation)) is not None:
                return mine, generation

    def _watch(self, there: Stored, holder: Holder) -> None:
        """Return if the lease does not change within `EXPIRY` seconds; raise BlockingIOError once it does."""
        refuse_if_alive_here(self._folder, holder)
        print(
            f"jaxshard: {self._folder}: {holder.name} was training into this folder; watching for {EXPIRY:.0f} s "
            "whether it still does",
            file=sys.stderr,
            flush=True,
        )
        end = time.monotonic() + EXPIRY
        while time.monotonic() < end:
            time.sleep(_POLL)
            now = self._file.read()
            if now.generation != there.generation:
                found = None if now.content is None else _decode(self._file, now.content)
                if found is not None and found.is_held:
                    raise refusal(self._folder, found)
                return  # released meanwhile


def _check_conditions(folder: ObjectPath) -> None:
    """Raise OSError if the store writes objects although the condition of the request does not hold."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    missing = probe.generation()
    try:
        probe.replace(b"1", missing)
        accepted = probe.replace(b"2", missing)
    finally:
        probe.unlink()
    if accepted is not None:
        raise OSError(
            f"{folder}: this object store ignores the conditions of writes (If-None-Match), so two trainings could "
            "write into one folder; save into a mounted file system"
        )


def refuse_if_alive_here(folder: ObjectPath, holder: Holder) -> None:
    """Raise BlockingIOError if the holder is a living process of this host."""
    if holder.host == _this_host() and not is_dead(holder):
        raise refusal(folder, holder)


def refusal(folder: ObjectPath, holder: Holder) -> BlockingIOError:
    """Return the error that names the training that holds a folder."""
    name = "".join(filter(str.isprintable, holder.name[:300]))
    return BlockingIOError(f"{folder}: {name} is training into this folder; wait until it ends, or give another folder")


def _decode(file: ObjectPath, content: bytes) -> Holder:
    try:
        fields = decode_object(content)
        holder = Holder(**fields | {"process": tuple(fields["process"])})
        if not (isinstance(holder.epoch, int) and 0 < holder.epoch < 2**62 and isinstance(holder.name, str)):
            raise ValueError("it has no epoch")
        if not all(isinstance(number, int) for number in (*holder.process, holder.requeued)):
            raise ValueError("it names no process")
    except (ValueError, TypeError, KeyError) as error:
        raise OSError(f"{file}: this is not the lease of a folder of checkpoints: {error}; delete it") from None
    return holder


def _newest_epoch(folder: ObjectPath) -> int:
    """Return the largest epoch in the names of a folder's objects, for a folder whose lease was deleted; else 0."""
    epochs = (re.search(rf"/{ARRAYS}-(\d{{1,18}})/", name) for name in folder.files())
    return max((int(found[1]) for found in epochs if found), default=0)


def _this_host() -> str:
    """Identify the running system: another one after a restart, and in another container."""
    name = socket.gethostname()
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{name} {started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return name


def _start_time(process: int) -> int | None:
    """Return when a process of this system was started, in its clock's ticks; None if it has ended.

    Without /proc, 0 stands for every process that is alive.
    """
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return 0
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie has ended; field 22 of proc(5)


def _clock() -> float:
    """Return seconds that count also while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
