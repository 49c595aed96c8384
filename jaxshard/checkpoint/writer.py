"""`save`: a step on disk, or nothing. Orbax writes the arrays, then all files are hashed, then the manifest commits."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxshard.checkpoint import store
from jaxshard.checkpoint.checksums import damage, files_of, segments_of
from jaxshard.checkpoint.folder import remove, root_of
from jaxshard.checkpoint.leaves import Entry, entries, unsupported
from jaxshard.checkpoint.manifest import NAME, Manifest, Segment, from_bytes, to_bytes, write, write_file
from jaxshard.checkpoint.reader import restore
from jaxshard.checkpoint.snapshot import snapshot
from jaxshard.core.layout import Layout
from jaxshard.core.tree import raise_all
from jaxshard.distributed.agree import all_peers
from jaxshard.training.state import TrainState, check_run

_WAIT, _LOOK = 1200.0, 0.05
"""Seconds that processes wait for each other's checksums, and between two looks."""
_writing: set[Path] = set()
"""Folders of the steps that this process is writing; `_changed` tells when one of them is done."""
_changed = threading.Condition()
_saves = itertools.count()  # every process begins the same saves in the same order


def save(dir: str | os.PathLike[str], run: TrainState, layout: Layout, *, data: Any = None) -> Path:
    """The folder dir/<step> with the run in it, complete and on disk; every process calls it.

    Arrays are saved in model order without padding, so that any other layout restores them. `data` is where the data
    stands, as JSON, for sources whose position is not the step; `jaxshard.checkpoint.describe` returns it.

    Raises:
      ValueError: the run is not one of this layout; the folder holds this step of another run. A damaged step is
        replaced, and one that is this very run is left as it is.
      OSError: it could not be written: a full disk, no permission. Nothing of it is left, and other steps stay.
    """
    return begin(root_of(dir), run, layout, data)()


def begin(root: Path, run: TrainState, layout: Layout, data: Any) -> Callable[[], Path]:
    """Starts a save; the function that it returns, which may run in another thread, writes the rest.

    What is left to do needs no device: the run may be donated. A save of the same step that is still being written is
    waited for.
    """
    wanted, _ = entries(layout)
    arrays = _checked(run, layout, wanted)
    if json.loads(json.dumps(data, allow_nan=False)) != data:
        raise ValueError(f"data: {data!r} does not come back from JSON as it was; use lists and string keys")
    step = int(run.step)
    folder = root / str(step)
    with ExitStack() as stack:
        stack.enter_context(_alone(folder))
        if _in_first_process(lambda: _prepare(folder)):
            if not _holds(root, run, layout):
                problem = f"step {step} of another run is there; save into another folder, or delete it"
                raise ValueError(f"{folder}: {problem}")
            return lambda: folder
        stack.enter_context(_all_or_nothing(folder))
        name, pieces = f"save {next(_saves)} of {step}", snapshot(arrays)
        rest = stack.pop_all()

    def finish() -> Path:
        with rest:
            store.save(folder, pieces, name)
            manifest = Manifest(step, tuple(entry.saved for entry in wanted), {}, data, _made(layout))
            _commit(folder, manifest, jax.process_index(), jax.process_count())
        return folder

    return finish


def _checked(run: TrainState, layout: Layout, wanted: Sequence[Entry]) -> list[tuple[Entry, jax.Array]]:
    """The arrays of a run; raises unless they are those of the layout and can be saved."""
    check_run(layout, run)
    arrays: list[tuple[Entry, Any]] = list(zip(wanted, jax.tree.leaves(run), strict=True))
    raise_all(
        (f"{entry.path}: {entry.dtype}" for entry in wanted if unsupported(entry)),
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
def _alone(folder: Path) -> Iterator[None]:
    """Waits for a save of this step that is being written, and keeps others waiting."""
    with _changed:
        _changed.wait_for(lambda: folder not in _writing)
        _writing.add(folder)
    try:
        yield
    finally:
        with _changed:
            _writing.discard(folder)
            _changed.notify_all()


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[None]:
    """Leaves nothing of a save that fails or is interrupted."""
    try:
        yield
    except Exception as error:  # of Orbax, TensorStore or the disk: whatever it is, half a step must not stay
        raise _failed(folder, error) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _prepare(folder: Path) -> bool:
    """Whether a step is there and intact; else makes an empty folder for it.

    What an interrupted save left there goes, and so does a damaged step.
    """
    try:
        if (folder / NAME).exists() and not damage(folder):
            return True
        if folder.exists():
            remove(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise _failed(folder, error) from error
    return False


def _holds(root: Path, run: TrainState, layout: Layout) -> bool:
    """Whether the step that is there is this very run, bit for bit."""
    try:
        there = restore(root, layout, step=int(run.step), verify=False)
    except ValueError:
        return False
    pairs = zip(jax.tree.leaves(there), jax.tree.leaves(run), strict=True)
    same = all(_bits(a) == _bits(b) for a, b in pairs)
    if jax.process_count() > 1:
        same = bool(np.all(multihost_utils.process_allgather(np.int32(same))))
    return same


def _bits(x: jax.Array) -> list[bytes]:
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]


def _commit(folder: Path, manifest: Manifest, process: int, processes: int) -> None:
    """Hashes this process's share of the files; the first one collects all shares and writes the manifest."""
    names = {array.path: number for number, array in enumerate(manifest.arrays)}
    places = store.extents(folder, names)
    shares = {f"{NAME}.{other}" for other in range(1, processes)}
    mine = [name for name in files_of(folder) if name not in shares and not name.endswith(".draft")][process::processes]
    files = {name: segments_of(folder / name, places.get(name, ())) for name in mine}
    if process:
        write_file(folder / f"{NAME}.{process}", to_bytes(manifest._replace(files=files)))
        _wait_for(folder / NAME, folder)
        return
    for other in sorted(shares):
        _wait_for(folder / other, folder)
        files |= from_bytes((folder / other).read_bytes()).files
        (folder / other).unlink()
    write(folder, manifest._replace(files=_sorted(files)))


def _sorted(files: dict[str, tuple[Segment, ...]]) -> dict[str, tuple[Segment, ...]]:
    return {name: files[name] for name in sorted(files)}


def _wait_for(file: Path, folder: Path) -> None:
    """Returns once another process has written a file into the folder that all of them see."""
    end = time.monotonic() + _WAIT
    while not file.exists():
        if not folder.exists():
            raise OSError("another process could not save its part, and says why")
        if time.monotonic() > end:
            raise OSError(f"{file} did not appear within {_WAIT:.0f} s; do all processes see the same folder?")
        time.sleep(_LOOK)


def _failed(folder: Path, error: Exception) -> OSError:
    """The error of a save, which leaves nothing behind."""
    shutil.rmtree(folder, ignore_errors=True)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return OSError(f"{folder}: this step could not be saved, and the steps before it stay as they are: {reason}")


def _in_first_process(fn: Callable[[], bool]) -> bool:
    """What a function returns in the first process, where alone it is called; raises in all of them if it fails."""
    peers = all_peers()
    if peers is None:
        return fn()
    failure: Exception | None = None
    answer = False
    if jax.process_index() == 0:
        try:
            answer = fn()
        except (OSError, ValueError) as error:
            failure = error
    peers.meet("js.save")  # the first process may read a step that is there, and collectives don't wait long
    failed, answered = multihost_utils.broadcast_one_to_all(np.array([failure is not None, answer], np.int32)).tolist()
    if failed:
        raise failure or OSError("process 0 could not begin to save, and says why")
    return bool(answered)


def _made(layout: Layout) -> dict[str, Any]:
    """How the run was made, for people: nothing of it is needed to restore."""
    return {
        "jaxshard": metadata.version("jaxshard"),
        "jax": jax.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processes": jax.process_count(),
        "mesh": dict(layout.mesh.shape),
        "layout": layout.explain(),
    }
