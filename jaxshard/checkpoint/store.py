"""Write named arrays by Orbax and TensorStore, and find the byte ranges of each array in the files.

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

from jaxshard.checkpoint.snapshot import HostBlocks
from jaxshard.storage.failures import raise_unreachable
from jaxshard.storage.paths import AnyPath, kvstore_spec

STATE = "state"
"""The name of the database of the arrays, in the folder with the arrays."""
_FILE_SIZE = 1 << 28
"""The approximate size of a data file in bytes: several files are written at once, each by a single disk write."""


class Extent(NamedTuple):
    """A byte range of a file, `size` bytes from `start`, that belongs to array number `array` of the manifest."""

    start: int
    size: int
    array: int


def save_arrays(folder: Path, arrays: Mapping[str, HostBlocks], name: str) -> None:
    """Write arrays into a folder by Orbax. Every process calls this with its own blocks; all return together.

    Processes wait for each other through the coordinator. No device is used, so training may continue at the same time.

    Args:
      folder: the folder to write, on a disk that all processes see.
      arrays: {name: this process's blocks} of every array.
      name: the name of the barriers at which processes wait; the same in all processes, and different for every save.
    """
    from orbax.checkpoint import args

    with _checkpointer(name, set(range(jax.process_count()))) as checkpointer:
        state = args.PyTreeSave(dict(arrays), ocdbt_target_data_file_size=_FILE_SIZE)
        checkpointer.save(folder, args.Composite(**{STATE: state}))


def array_spec(database: AnyPath, name: str) -> dict[str, Any]:
    """Return the TensorStore spec of an array in a database; a chunk that is missing there is an error, not zeros."""
    kvstore = {"driver": "ocdbt", "base": kvstore_spec(database), "path": f"{name}/"}
    return {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}


def find_arrays(folder: AnyPath) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {name: (shape, dtype)} of the arrays in a folder, as they were written; read only the index.

    Raises:
      ValueError: the index can't be read.
      OSError: an object store can't be reached or refuses.
    """
    from jaxshard.checkpoint.compat import find_shapes

    try:
        return {name: (tuple(shape), str(dtype)) for name, shape, dtype in find_shapes(folder / STATE)}
    except Exception as error:  # of TensorStore, or of metadata that are none: whatever it is, these are no arrays
        raise_unreachable(str(folder), error)
        raise ValueError(f"the index of the arrays can't be read: {' '.join(str(error).split())}") from error


def find_unreadable(folder: AnyPath, name: str) -> str:
    """Read an array, and so compare the checksums of its chunks; return why it can't be read, or ""."""
    import tensorstore

    try:
        tensorstore.open(array_spec(folder / STATE, name), open=True, read=True).result().read().result()
    except (ValueError, OSError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def find_extents(folder: Path, names: Mapping[str, int]) -> dict[str, list[Extent]]:
    """Find the byte ranges of arrays in the files of a step.

    Arrays of less than a kilobyte are not found, since they are stored in the index.

    Args:
      folder: the folder with the arrays.
      names: {name: index} of each array.

    Returns:
      {path of a file relative to the step's folder: the byte ranges of arrays in the file}.
    """
    from jaxshard.checkpoint.compat import find_values

    found: dict[str, list[Extent]] = {}
    for name, file, start, size in find_values(folder / STATE):
        if name in names:
            found.setdefault(f"{folder.name}/{STATE}/{file}", []).append(Extent(start, size, names[name]))
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
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **{STATE: trees})
    return ocp.Checkpointer(handler, multiprocessing_options=together)
