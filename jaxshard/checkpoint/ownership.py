"""Own a folder of checkpoints, so that only one training saves into it: by a lock on disk, or a lease on objects.

The first of several processes owns the folder for all of them.
"""

from __future__ import annotations

import re
import threading

from jaxshard.checkpoint import lock
from jaxshard.checkpoint.lease import Lease, LeaseLost
from jaxshard.checkpoint.manifest import ARRAYS, MANIFEST, encode_manifest, try_decode
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


def delete_objects(folder: ObjectPath) -> None:
    """Delete a step of an object store: the manifest first, and nothing that a later holder of the lease has written.

    Raises:
      LeaseLost: another training owns the folder, or has written the step.
      OSError: the store can't be reached or refuses.
    """
    root, file = folder.parent, folder / MANIFEST
    epoch = _leases[root][0].epoch
    there = file.read()
    manifest = None if there.content is None else try_decode(there.content)
    check_owned(root)
    if manifest is not None and (manifest.epoch or 0) > epoch:
        raise LeaseLost(f"{folder}: another training has written this step")
    if there.content is not None and file.replace(None, there.generation) is None:
        raise LeaseLost(f"{folder}: another training has written this step")
    for path in folder.iterdir():
        if path.name == ARRAYS or 0 < _epoch(path.name) <= epoch:
            path.rmtree()


def delete_leftovers(folder: ObjectPath) -> None:
    """Delete arrays of a step that are in no manifest, of holders before the last one.

    The last holder may be asleep, and write a manifest for its arrays when it wakes; then these must be there.

    Raises:
      LeaseLost, OSError: as `delete_objects`.
    """
    there = (folder / MANIFEST).read()
    manifest = None if there.content is None else try_decode(there.content)
    if there.content is not None and manifest is None:
        return  # damaged: it is replaced when the step is saved again
    for path in folder.iterdir():
        is_old = 0 < _epoch(path.name) < _leases[folder.parent][0].epoch - 1
        if is_old and (manifest is None or path.name != manifest.folder):
            check_owned(folder.parent)
            path.rmtree()


def adopt(folder: ObjectPath) -> bool:
    """Write the manifest of a complete step again, so that an earlier holder can't take it back; False if it did.

    Raises:
      LeaseLost, OSError: as `delete_objects`.
    """
    file, epoch = folder / MANIFEST, _leases[folder.parent][0].epoch
    there = file.read()
    manifest = None if there.content is None else try_decode(there.content)
    if manifest is None:
        return False
    if manifest.epoch == epoch:
        return True
    check_owned(folder.parent)
    content = encode_manifest(manifest._replace(made=manifest.made | {"kept_by_epoch": epoch}))
    return file.replace(content, there.generation) is not None


def _epoch(name: str) -> int:
    """Return the epoch in the name of a folder with arrays; 0 of other names."""
    found = re.fullmatch(rf"{ARRAYS}-(\d{{1,18}})", name)
    return 0 if found is None else int(found[1])


def epoch_of(root: ObjectPath) -> int:
    """Return the number of this process's lease on a folder in an object store."""
    return _leases[root][0].epoch
