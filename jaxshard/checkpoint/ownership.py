"""Own a folder of checkpoints, so that only one training saves into it: by a lock on disk, or a lease on objects.

The first of several processes owns the folder for all of them.
"""

from __future__ import annotations

import threading

from jaxshard.checkpoint import lock
from jaxshard.checkpoint.lease import Lease
from jaxshard.storage.paths import AnyPath, ObjectPath

_leases: dict[ObjectPath, tuple[Lease, int]] = {}
"""(lease, number of holders in this process) of every folder in an object store that this process owns."""
_guard = threading.Lock()


def hold(root: AnyPath) -> None:
    """Own a folder, created if needed; call `release` once per `hold`. A process may own a folder several times.

    Raises:
      BlockingIOError: another training owns it; the message names the process.
      LeaseLost: this process owned the folder, and lost it.
      OSError: the folder can't be written.
    """
    if not isinstance(root, ObjectPath):
        return lock.hold(root)
    with _guard:
        lease, count = _leases.get(root) or (Lease(root), 0)
        lease.check_time()
        _leases[root] = lease, count + 1


def release(root: AnyPath) -> None:
    """Undo one call of `hold`; after the last, other trainings may own the folder."""
    if not isinstance(root, ObjectPath):
        return lock.release(root)
    with _guard:
        lease, count = _leases.pop(root)
        if count > 1:
            _leases[root] = lease, count - 1
            return
    lease.release()


def check_owned(root: AnyPath, *, ask: bool = True) -> None:
    """Raise LeaseLost unless this process still owns a folder in an object store.

    Args:
      root: the folder of checkpoints; a folder on disk can't be lost.
      ask: ask the store; with False look only whether the lease is known to be lost.
    """
    if isinstance(root, ObjectPath) and root in _leases:
        lease, _ = _leases[root]
        lease.check() if ask else lease.check_time()


def epoch_of(root: AnyPath) -> int | None:
    """Return the number of this process's lease on a folder in an object store; None for a folder on disk."""
    return _leases[root][0].epoch if isinstance(root, ObjectPath) else None
