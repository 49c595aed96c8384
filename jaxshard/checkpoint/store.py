"""Write and read named arrays by Orbax and TensorStore, and find which bytes of which file belong to each array.

Orbax writes all arrays into a database (TensorStore's OCDBT), which has few data files per process, and an index:

    arrays/_CHECKPOINT_METADATA      times, written by Orbax
    arrays/state/_METADATA           names and types of the arrays
    arrays/state/manifest.ocdbt      the index over all processes, its nodes in d/
    arrays/state/ocdbt.process_<p>/  what process p wrote: its own index, and data files of about 256 MB in d/

Orbax is imported in the functions that need it, since the import takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshard.checkpoint.snapshot import HostBlocks

ARRAYS = "arrays"
"""The name of Orbax's folder in the folder of a step."""
_STATE = "state"
_FILE_SIZE = 1 << 28
"""The approximate size of a data file in bytes: several files are written at once, each by a single disk write."""


class Extent(NamedTuple):
    """A byte range of a file, `size` bytes from `start`, that belongs to array number `array` of the manifest."""

    start: int
    size: int
    array: int


def save_arrays(folder: Path, arrays: Mapping[str, HostBlocks], name: str) -> None:
    """Write arrays into folder/arrays. Every process calls this with its own blocks; all return together.

    Processes wait for each other through the coordinator. No device is used, so training may continue at the same time.

    Args:
      folder: the folder of the step, on a disk that all processes see.
      arrays: {name: this process's blocks} of every array.
      name: the name of the barriers at which processes wait; the same in all processes, and different for every save.
    """
    from orbax.checkpoint import args

    with _checkpointer(name, set(range(jax.process_count()))) as checkpointer:
        state = args.PyTreeSave(dict(arrays), ocdbt_target_data_file_size=_FILE_SIZE)
        checkpointer.save(folder / ARRAYS, args.Composite(**{_STATE: state}))


def load_arrays(folder: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read arrays from folder/arrays. Every process calls this; processes don't wait for each other.

    Arrays without elements are not read from files, but made here.

    Args:
      folder: the folder of the step.
      arrays: {name: global shape, dtype and sharding} of every array to read.

    Returns:
      {name: array}, with these shardings. A process reads only the chunks that contain shards of its devices.
    """
    from orbax.checkpoint import args, checkpoint_utils

    empty = {path: jnp.zeros(x.shape, x.dtype, device=x.sharding) for path, x in arrays.items() if not x.size}
    saved = {path: x for path, x in arrays.items() if x.size}
    with _checkpointer("load", {jax.process_index()}) as checkpointer:
        # The list of arrays was compared before; some may be left out on purpose.
        restore = args.PyTreeRestore(
            saved, restore_args=checkpoint_utils.construct_restore_args(saved), partial_restore=True
        )
        loaded = checkpointer.restore(folder / ARRAYS, args.Composite(**{_STATE: restore}))
    return empty | dict(loaded[_STATE])


def find_arrays(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {name: (shape, dtype)} of the arrays of a step, as they were written to disk; read only the index.

    Raises:
      ValueError: the index can't be read.
    """
    from jaxshard.checkpoint.compat import find_shapes

    try:
        return {name: (tuple(shape), str(dtype)) for name, shape, dtype in find_shapes(folder / ARRAYS / _STATE)}
    except Exception as error:  # of TensorStore, or of metadata that are none: whatever it is, these are no arrays
        raise ValueError(f"the index of the arrays can't be read: {' '.join(str(error).split())}") from error


def find_extents(folder: Path, names: Mapping[str, int]) -> dict[str, list[Extent]]:
    """Find the byte ranges of arrays in the files of a step.

    Arrays of less than a kilobyte are not found, since they are stored in the index.

    Args:
      folder: the folder of the step.
      names: {name: index} of each array.

    Returns:
      {path of a file relative to `folder`: the byte ranges of arrays in the file}.
    """
    from jaxshard.checkpoint.compat import find_values

    found: dict[str, list[Extent]] = {}
    for name, file, start, size in find_values(folder / ARRAYS / _STATE):
        if name in names:
            found.setdefault(f"{ARRAYS}/{_STATE}/{file}", []).append(Extent(start, size, names[name]))
    return found


def _checkpointer(name: str, processes: set[int]) -> Any:
    """Make an Orbax checkpointer for a tree of arrays.

    The processes with indices in `processes` wait for each other, at barriers whose names begin with `name`.
    """
    import orbax.checkpoint as ocp

    from jaxshard.checkpoint.compat import blocks_registry

    # With the processes given, Orbax's barriers are those of the coordinator, not collectives of the devices.
    together = ocp.options.MultiprocessingOptions(active_processes=processes, barrier_sync_key_prefix=name)
    trees = ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        use_compression=False,  # weights do not compress, and it takes longer than writing
        multiprocessing_options=together,
        type_handler_registry=blocks_registry(),
    )
    ordered = ocp.options.AsyncOptions(create_directories_asynchronously=False)  # first, not in parallel
    options = ocp.CompositeOptions(multiprocessing_options=together, async_options=ordered)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **{_STATE: trees})
    return ocp.Checkpointer(handler, multiprocessing_options=together)
