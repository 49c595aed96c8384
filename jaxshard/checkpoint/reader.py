"""`restore`: a run as a layout stores it, from a checkpoint of whatever layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxshard.checkpoint import store
from jaxshard.checkpoint.checksums import Damaged, compare
from jaxshard.checkpoint.folder import folder_of, root_of
from jaxshard.checkpoint.leaves import Entry, entries
from jaxshard.checkpoint.manifest import Manifest, Saved, read, to_bytes
from jaxshard.core.layout import Layout
from jaxshard.core.tree import raise_all
from jaxshard.distributed.agree import all_peers, peers_of
from jaxshard.distributed.facts import run_facts
from jaxshard.distributed.mismatch import digest_arrays
from jaxshard.training.state import TrainState


def restore(dir: str | os.PathLike[str], layout: Layout, *, step: int | None = None, verify: bool = True) -> TrainState:
    """The run that was saved in a folder of checkpoints, as `layout` stores it; the newest step by default.

    Parameters, optimizer and model state, random key and step come back bit for bit, whatever strategy, mesh, schedule
    and number of processes saved them. No device holds more of an array than its shard and, where the layout pads or
    cuts it, a part of it as large as its dimensions divide. Every process calls this and reads what its shards need.

    `verify` compares every byte of the step with its checksum first, a share of them in each process.

    Raises:
      ValueError: the tree, a shape or a dtype differs from the layout (every such array is named, nothing is cast); a
        file is damaged, missing or was added (it is named with the arrays in it); a newer format; an incomplete step.
      FileNotFoundError: no such folder or step.
      js.distributed.Disagreement: in several processes, one has other versions, flags, mesh or layout, or finds another
        checkpoint.
    """
    folder, manifest = _found(dir, layout, step)
    wanted, structure = entries(layout)
    _check_same(folder, manifest.arrays, wanted)
    if verify:
        check_intact(folder, manifest)
    shapes = {entry.path: entry.shape_saved(layout.mesh) for entry in wanted}
    try:
        found = store.load(folder, {entry.path: shapes[entry.path] for entry in wanted if not entry.is_empty})
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{folder}: its arrays can't be read: {' '.join(str(error).split())}") from error
    if (peers := peers_of(layout.mesh)) is not None:
        peers.meet("js.restore, arrays")  # one disk may be slow, and collectives don't wait long

    def stored(entry: Entry) -> jax.Array:
        shape = shapes[entry.path]
        x = found.pop(entry.path, None)  # so that what was read goes as it is converted
        x = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding) if x is None else x
        return entry.to_stored(x, layout.mesh)

    run: TrainState = jax.tree.unflatten(structure, [stored(entry) for entry in wanted])
    if int(run.step) != manifest.step:
        raise ValueError(f"{folder}: the run in it has taken {int(run.step)} steps, not {manifest.step}")
    return run


def describe(dir: str | os.PathLike[str], *, step: int | None = None) -> Manifest:
    """What a step holds, without its arrays: their names, the data's position, the mesh and versions that made it.

    Raises:
      ValueError, FileNotFoundError: as `restore`.
    """
    return read(folder_of(root_of(dir), step))


def check_intact(folder: Path, manifest: Manifest) -> None:
    """Raises unless every file of a step is as it was saved; each process reads a share of them."""
    processes = jax.process_count()
    problems = compare(folder, manifest, part=jax.process_index(), parts=processes)
    if (peers := all_peers()) is not None:
        peers.meet("js.restore, checksums")  # one disk may be slow
        counts = np.asarray(multihost_utils.process_allgather(np.int32(len(problems)))).ravel()
        elsewhere = [index for index in np.flatnonzero(counts).tolist() if index != jax.process_index()]
        problems += [f"process {index} found damage in its share of the files" for index in elsewhere]
    raise_all(
        problems,
        Damaged,
        f"{folder}: step {manifest.step} is damaged; restore another one (js.latest_step(dir, intact=True) finds the "
        "newest that is not)",
    )


def _found(dir: str | os.PathLike[str], layout: Layout, step: int | None) -> tuple[Path, Manifest]:
    """The step to restore, the same one in all processes."""
    peers = peers_of(layout.mesh)
    try:
        folder = folder_of(root_of(dir), step)
        manifest = read(folder)
    except (ValueError, OSError) as error:
        if peers is not None:
            peers.agree("js.restore", run_facts(layout) | {"checkpoint": f"none: {type(error).__name__}: {error}"})
        raise
    if peers is not None:
        name = digest_arrays(np.frombuffer(to_bytes(manifest), np.uint8))
        peers.agree("js.restore", run_facts(layout) | {"checkpoint": f"step {manifest.step} ({name})"})
    return folder, manifest


def _check_same(folder: Path, saved: Sequence[Saved], wanted: Sequence[Entry]) -> None:
    """Raises unless the layout has the arrays that were saved, shape by shape and dtype by dtype."""
    got, want = {array.path: array for array in saved}, {entry.path: entry.saved for entry in wanted}
    problems = [f"{path}: missing in the checkpoint, expected {_str(want[path])}" for path in want if path not in got]
    problems += [f"{path}: {_str(got[path])} in the checkpoint, not in the layout" for path in got if path not in want]
    problems += [
        f"{path}: {_str(got[path])} in the checkpoint, expected {_str(want[path])}"
        for path in want
        if path in got and got[path] != want[path]
    ]
    raise_all(
        problems,
        ValueError,
        f"{folder}: the checkpoint is not one of this layout's model and optimizer, and nothing is cast or left out; "
        "make the layout from the init_fn and tx that it was saved with",
    )


def _str(array: Saved) -> str:
    return f"{array.dtype}{list(array.shape)}"
