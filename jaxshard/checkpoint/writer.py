"""`js.save`: write all files of a step to disk, or none if anything fails.

A save begins in the calling thread, where the devices are needed, and is finished in any thread:

    begin_save   check the run and make the folder of the step; copy this process's shards to the host
    finish       Orbax writes the arrays; then each process computes the checksums of a share of all files; then the
                 first process writes the manifest, which makes the step complete

The checksums are computed from the files on disk after Orbax has written them. If anything fails, the folder is
deleted. Into an object store TensorStore writes the arrays, in a folder of the lease's epoch, and `_commit_objects`
takes the place of `_commit`: nothing is read back.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxshard.checkpoint import ownership, store
from jaxshard.checkpoint.checksums import checksum_file, find_damage, list_files
from jaxshard.checkpoint.folder import absolute_root, delete_step, has_manifest, step_folders
from jaxshard.checkpoint.lease import LeaseLost
from jaxshard.checkpoint.leaves import Entry, entries
from jaxshard.checkpoint.lock import check_free
from jaxshard.checkpoint.manifest import (
    ARRAYS,
    MANIFEST,
    Manifest,
    Segment,
    decode_manifest,
    encode_manifest,
    write_manifest,
)
from jaxshard.checkpoint.os_errors import first_cause, os_error
from jaxshard.checkpoint.reader import read_run
from jaxshard.checkpoint.residuals import residual_entries
from jaxshard.checkpoint.snapshot import HostBlocks, snapshot
from jaxshard.core.keys import words_of
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.settings import with_own_settings
from jaxshard.core.tree import raise_all
from jaxshard.core.version import __version__
from jaxshard.distributed.agree import Disagreement, Peers, background_peers
from jaxshard.distributed.together import call_in_first_process, failed_processes
from jaxshard.storage.paths import AnyPath, ObjectPath
from jaxshard.training.base import checksum_base, without_base
from jaxshard.training.convert import convert_optimizer
from jaxshard.training.state import TrainState, check_is_run, check_run

_WAIT = 1200.0
"""Seconds that a process waits for the checksums that another process computes."""
_POLL = 0.05
"""Seconds between two checks whether another process's checksums are there."""
_SAVED = 0
"""What `_prepare` returns if the step is there already."""
_locks: dict[AnyPath, threading.Lock] = {}
"""A lock for the folder of every step that this process has saved, or in an object store for the folder of checkpoints.

Held while a step is being written.
"""
_save_numbers = itertools.count()  # every process begins the same saves in the same order


def save(dir: str | os.PathLike[str], run: TrainState, layout: Layout, *, data: Any = None) -> AnyPath:
    """Save a run into the folder dir/<step>. Every process calls this.

    Arrays are saved in model order without padding, so that any other layout can restore them. If the folder has this
    step already, it is replaced if it is damaged, and kept if its arrays equal those of `run`.

    Args:
      dir: the folder of checkpoints, on a disk that all processes see, or in an object store: s3://bucket/run or
        gs://bucket/run.
      run: the run.
      layout: the layout of the run.
      data: the position of the data, for sources whose position is not the step. Any value that JSON preserves;
        `jaxshard.checkpoint.reader.describe` returns it.

    Returns:
      The folder of the step, complete and on disk.

    Raises:
      TypeError: `run` is no TrainState.
      ValueError: the run does not fit the layout; or the folder has this step with other arrays.
      OSError: the step could not be written (a full disk, no permission), with the errno and class of the cause, such
        as PermissionError. No file of the step is left; other steps stay.
      BlockingIOError: the `js.Checkpointer` of another process saves into this folder; the message names the process.
        An object store is watched for up to 60 seconds before that is known.

    Example:
        path = js.save("run", run, layout)      # run/0, if no step was taken
        run = js.restore("run", layout)
    """
    if isinstance(dir, TrainState):
        raise TypeError("dir is a run; write js.save(dir, run, layout), in this order")
    check_is_run(run)
    check_layout("js.save(dir, run, layout)", layout)
    return begin_save(absolute_root(dir), run, layout, data)()


@with_own_settings
def begin_save(root: AnyPath, run: TrainState, layout: Layout, data: Any) -> Callable[[], AnyPath]:
    """Start a save: do everything that needs devices, and return a function that writes the files.

    Waits while the same step is still being saved.

    Args:
      root: the folder of checkpoints.
      run: the run; it may be donated as soon as this returns.
      layout: the layout of the run.
      data: the position of the data, which JSON must preserve.

    Returns:
      The function that writes the step and returns its folder. It issues no collective of devices, and may be called in
      another thread. It must be called, because other saves of this step wait for it.

    Raises:
      ValueError, OSError: as `save`.
    """
    check_is_run(run)
    check_run(layout, run)
    run, layout = convert_optimizer(run, layout, layout.without_owners), layout.without_owners
    wanted = [*entries(layout)[0], *residual_entries(layout, run.residuals)]
    arrays = check_arrays(wanted, without_base(run, layout))
    check_data(data)
    step = int(run.step)
    folder = root / str(step)
    with ExitStack() as stack:
        # In an object store one save of a folder after another: processes agree about it in this order.
        alone = root if isinstance(root, ObjectPath) else folder
        stack.enter_context(_locks.setdefault(alone, threading.Lock()))
        stack.enter_context(_owned(root))
        prepared = call_in_first_process(lambda: _prepare(folder), "js.save")
        if prepared == _SAVED:
            if not _holds_same_run(root, run, layout):
                problem = f"step {step} of another run is there; save into another folder, or delete it"
                raise ValueError(f"{folder}: {problem}")
            return lambda: folder
        epoch = prepared if isinstance(root, ObjectPath) else None
        stack.enter_context(_delete_on_failure(folder))
        base = checksum_base(run.params, layout)
        name, blocks = f"save {next(_save_numbers)} of {step}", snapshot(arrays)
        rest = stack.pop_all()  # `finish` lets other saves in, and deletes the folder if it fails

    def finish() -> AnyPath:
        saved = tuple(entry.saved for entry in wanted)
        manifest = Manifest(step, saved, {}, data, _describe_origin(layout), base or None, epoch)
        with rest:
            if isinstance(folder, ObjectPath):
                _save_objects(folder, blocks, manifest)
            else:
                store.save_arrays(folder / ARRAYS, blocks, name)
                _commit(folder, manifest, jax.process_index(), jax.process_count())
        return folder

    return finish


def delete_interrupted(root: AnyPath) -> None:
    """Delete the incomplete steps in a folder, which interrupted saves or deletions left there.

    Other folders that are named by a number, such as those of other trainings, stay. So do symbolic links, a step that
    this process is saving, and what may not be deleted. In an object store, arrays without a manifest are deleted if
    they are of an epoch before the last.
    """
    for folder in step_folders(root).values():
        being_saved = folder in _locks and _locks[folder].locked()
        if not being_saved and not folder.is_symlink():
            with suppress(OSError):
                if isinstance(folder, ObjectPath):
                    ownership.delete_leftovers(folder)
                elif _is_incomplete_step(folder):
                    shutil.rmtree(folder)


def _is_incomplete_step(folder: Path) -> bool:
    """Return True if a folder has no manifest, and nothing but what a save writes before it."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return False
    return all(path.name.startswith((ARRAYS, f"{MANIFEST}.")) for path in folder.iterdir())


def check_data(data: Any) -> None:
    """Raise unless JSON preserves a position of the data: decoding its JSON must give an equal value.

    Raises:
      TypeError: JSON can't represent a value in it.
      ValueError: the decoded value differs, as for tuples, or it contains NaN or Infinity.
    """
    try:
        same = json.loads(json.dumps(data, allow_nan=False)) == data
    except TypeError as error:
        raise TypeError(f"data: {error}; use Python's own numbers, strings, lists and dicts") from error
    if not same:
        raise ValueError(f"data: {data!r} does not come back from JSON as it was; use lists and string keys")


def check_arrays(wanted: Sequence[Entry], saved: TrainState) -> list[tuple[Entry, jax.Array]]:
    """Return (entry, array) for each leaf of `saved`, a run or a part of it.

    Raises:
      ValueError: arrays have a dtype that can't be saved, are not JAX arrays, or were donated; the message names each.
    """
    arrays: list[tuple[Entry, Any]] = list(zip(wanted, jax.tree.leaves(saved), strict=True))
    raise_all(
        # TensorStore has no unsigned integers of less than a byte.
        (f"{entry.path}: {entry.dtype}" for entry in wanted if entry.words.dtype.name in ("uint2", "uint4")),
        ValueError,
        "arrays of these dtypes can't be saved; keep them in another, such as uint8",
    )
    raise_all(
        (f"{entry.path}: {type(x).__name__}" for entry, x in arrays if not isinstance(x, jax.Array)),
        ValueError,
        "these are no arrays of JAX; save a run that js.init, a step or js.restore has made",
    )
    raise_all(
        (entry.path for entry, x in arrays if x.is_deleted()),
        ValueError,
        "these arrays are gone, for a step was given their memory; save the run that the step returned",
    )
    return arrays


@contextmanager
def _owned(root: AnyPath) -> Iterator[None]:
    """Return a context that holds the lease of a folder in an object store; for a folder on disk it does nothing.

    The first process holds the lease for all.
    """
    if not isinstance(root, ObjectPath):
        yield
        return

    def hold() -> bool:
        ownership.hold(root)
        return True

    call_in_first_process(hold, "js.save")
    try:
        yield
    finally:
        if jax.process_index() == 0:
            ownership.release(root)


@contextmanager
def _delete_on_failure(folder: AnyPath) -> Iterator[None]:
    """Make a context that deletes the folder of a step if saving it fails or is interrupted."""
    try:
        yield
    except LeaseLost:  # the folder is another training's
        raise
    except Exception as error:  # of Orbax, TensorStore or the disk: whatever it is, half a step must not stay
        raise (failure := _save_error(folder, error)) from failure.__cause__
    except BaseException:
        _discard(folder)
        raise


def _prepare(folder: AnyPath) -> int:
    """Make an empty folder for a step, unless it has the step already, complete and undamaged.

    A damaged step is deleted, and so are the files of an interrupted save.

    Returns:
      `_SAVED` if the step is there; otherwise the epoch of an object store's lease, or 1.
    """
    if isinstance(folder, ObjectPath):
        return _prepare_objects(folder)
    check_free(folder.parent)
    try:
        if has_manifest(folder) and not find_damage(folder):
            return _SAVED
        if folder.exists():
            delete_step(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise (failure := _save_error(folder, error)) from failure.__cause__
    return 1


def _prepare_objects(folder: ObjectPath) -> int:
    """Do what `_prepare` does for a step in an object store; if the store does not answer, delete nothing."""
    if has_manifest(folder) and not find_damage(folder) and ownership.adopt(folder):
        return _SAVED
    ownership.delete_objects(folder)
    return ownership.epoch_of(folder.parent)


def _holds_same_run(root: AnyPath, run: TrainState, layout: Layout) -> bool:
    """Return True if the saved step equals this run, bit for bit, in the shards of all processes. Collective."""
    try:
        there = read_run(root, layout, int(run.step), verify=False, base=run.params)
    except ValueError:
        return False
    if bool(jax.tree.leaves(there.residuals)) != bool(jax.tree.leaves(run.residuals)):
        return False
    pairs = zip(jax.tree.leaves(there), jax.tree.leaves(run), strict=True)
    return not failed_processes(any(_shard_bytes(a) != _shard_bytes(b) for a, b in pairs), "js.save, compared")


def _shard_bytes(x: jax.Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in words_of(x).addressable_shards]


def _commit(folder: Path, manifest: Manifest, process: int, processes: int) -> None:
    """Compute the checksums of this process's share of the files on disk; then process 0 writes the manifest.

    The other processes write their checksums to files manifest.json.<process>, which process 0 reads and deletes. No
    collective is used, since a training step may be running at the same time.
    """
    names = {array.path: number for number, array in enumerate(manifest.arrays)}
    places = store.find_extents(folder / ARRAYS, names)
    shares = {f"{MANIFEST}.{other}" for other in range(1, processes)}
    written = [name for name in list_files(folder) if name not in shares and not name.endswith(".draft")]
    files = {name: checksum_file(folder / name, places.get(name, ())) for name in written[process::processes]}
    if process:
        write_manifest(folder / f"{MANIFEST}.{process}", manifest._replace(files=files))
        _wait_for(folder / MANIFEST, folder)
        return
    for other in sorted(shares):
        _wait_for(folder / other, folder)
        files |= decode_manifest((folder / other).read_bytes()).files
        (folder / other).unlink()
    write_manifest(folder / MANIFEST, manifest._replace(files=dict(sorted(files.items()))))


def _save_objects(folder: ObjectPath, blocks: Mapping[str, HostBlocks], manifest: Manifest) -> None:
    """Write the arrays of a step into an object store; then the first process writes the manifest.

    Processes tell each other through the coordinator whether they have written their parts.

    Raises:
      LeaseLost: another training may own the folder of checkpoints.
      OSError, ValueError: this process, or another one, could not write its part.
    """
    from jaxshard.checkpoint import objects

    root, arrays, peers = folder.parent, folder / manifest.folder, background_peers(f"js.save {folder.parent}")
    with _told(peers, "js.save, arrays"):
        ownership.check_owned(root, ask=False)
        objects.write_arrays(arrays, blocks)
    with _told(peers, "js.save, manifest"):
        if jax.process_index() == 0:
            objects.merge_parts(arrays)
            found = {f"{arrays.name}/{name}": what for name, what in objects.find_generations(arrays).items()}
            files: dict[str, tuple[Segment, ...]] = dict.fromkeys(found, ())
            _commit_objects(folder / MANIFEST, manifest._replace(files=files, generations=found))


def _commit_objects(file: ObjectPath, manifest: Manifest) -> None:
    """Write the manifest of a step in an object store, and delete it again if the lease was lost before it was written.

    Raises:
      LeaseLost: another training may own the folder of checkpoints.
      OSError: somebody else has written a manifest, or the store can't be reached.
    """
    root, missing = file.parent.parent, file.generation()
    ownership.check_owned(root)
    written = None if file.is_file() else file.replace(encode_manifest(manifest), missing)
    if written is None:
        ownership.check_owned(root)
        raise OSError(f"{file} was written by another process meanwhile")
    try:
        ownership.check_owned(root)
    except LeaseLost:
        file.replace(None, written)
        raise


@contextmanager
def _told(peers: Peers | None, point: str) -> Iterator[None]:
    """Return a context that all processes leave together; if one fails inside, all raise an error with its reason.

    Raises:
      LeaseLost: the first process lost the lease.
      OSError: another process failed.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind: without a word from this process the others would wait forever
        failure = error
    if peers is not None:
        try:
            peers.agree(point, {"outcome": "done" if failure is None else f"{type(failure).__name__}: {failure}"})
        except Disagreement as error:
            if failure is None:
                raise (LeaseLost if LeaseLost.__name__ in str(error) else OSError)(str(error)) from None
    if failure is not None:
        raise failure


def _wait_for(file: Path, folder: Path) -> None:
    """Wait until another process has written a file into the folder; raise OSError if the folder was deleted."""
    end = time.monotonic() + _WAIT
    while not file.exists():
        if not folder.exists():
            raise OSError("another process could not save its part, and says why")
        if time.monotonic() > end:
            raise OSError(f"{file} did not appear within {_WAIT:.0f} s; do all processes see the same folder?")
        time.sleep(_POLL)


def _discard(folder: AnyPath) -> None:
    """Delete an incomplete step as far as that is possible; in an object store only if it is still this process's."""
    if isinstance(folder, ObjectPath):
        with suppress(OSError):
            if jax.process_index() == 0:
                ownership.delete_objects(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _save_error(folder: AnyPath, error: Exception) -> OSError:
    """Delete an incomplete step, and return the OSError to raise.

    The message has the text of the actual error, the last in the chain of causes of Orbax's exception. If the actual
    error has no errno, the actual error also becomes the `__cause__` of the result.
    """
    _discard(folder)
    cause = first_cause(error)
    reason = " ".join(str(cause).split()) or type(cause).__name__
    message = f"{folder}: this step could not be saved, and the steps before it stay as they are: {reason}"
    failure = os_error(message, cause)
    failure.__cause__ = cause if failure.errno is None else None
    return failure


def _describe_origin(layout: Layout) -> dict[str, Any]:
    """Return the versions, mesh, layout and time of a save, for people to read; a restore does not need them."""
    return {
        "jaxshard": __version__,
        "jax": jax.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processes": jax.process_count(),
        "mesh": dict(layout.mesh.shape),
        "layout": layout.explain(),
    }
