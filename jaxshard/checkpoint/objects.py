"""Write the arrays of a step into an object store, by TensorStore.

The database has the form that Orbax writes on disk: each process writes its own, and the first merges their indices.
Every chunk ends with its CRC-32C, which TensorStore compares when it reads the chunk. So nothing has to be read back
after a save: the manifest has the generation of each object (an ETag), which changes if its bytes do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import tensorstore

from jaxshard.checkpoint.snapshot import HostBlocks
from jaxshard.checkpoint.store import STATE, array_spec
from jaxshard.storage.failures import naming_object
from jaxshard.storage.paths import ObjectPath, kvstore_spec

_OBJECT_SIZE = 1 << 26
"""The approximate size of an object in bytes: each is one request, and stores answer many requests at once."""
_AT_ONCE = 32
"""The number of objects whose generations are asked for at the same time."""


def write_arrays(folder: ObjectPath, arrays: Mapping[str, HostBlocks]) -> None:
    """Write this process's blocks of all arrays, and return when the store has them.

    Args:
      folder: the folder for the arrays.
      arrays: {name: this process's blocks} of every array.

    Raises:
      OSError: the store can't be reached or refuses.
    """
    write = _write_all(_part(folder, jax.process_index()), arrays)
    with (
        naming_object(str(folder)),
        ThreadPoolExecutor(1) as thread,
    ):  # this one may run an event loop, as in a notebook
        thread.submit(asyncio.run, write).result()


def merge_parts(folder: ObjectPath) -> None:
    """Make one index of the parts that all processes have written.

    Raises:
      OSError: the store can't be reached or refuses.
    """
    context = tensorstore.Context()  # parts merge only if they share one
    with naming_object(str(folder)):
        merged, *parts = (
            tensorstore.KvStore.open({"driver": "ocdbt", "base": kvstore_spec(path)}, context=context).result()
            for path in (folder / STATE, *(_part(folder, process) for process in range(jax.process_count())))
        )
        transaction = tensorstore.Transaction(atomic=True)
        copies = [part.experimental_copy_range_to(merged.with_transaction(transaction)) for part in parts]
        for copy in copies:
            copy.result()
        transaction.commit_sync()


def find_generations(folder: ObjectPath) -> dict[str, str]:
    """Return {name: generation, in hexadecimal} of all objects in a folder and the folders in it."""
    names = folder.files()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(zip(names, threads.map(lambda name: (folder / name).generation().hex(), names), strict=True))


def _part(folder: ObjectPath, process: int) -> ObjectPath:
    return folder / STATE / f"ocdbt.process_{process}"


async def _write_all(database: ObjectPath, arrays: Mapping[str, HostBlocks]) -> None:
    context = tensorstore.Context()
    async with tensorstore.Transaction(atomic=True) as transaction:  # one index for all arrays
        shared = {"context": context, "transaction": transaction}
        await asyncio.gather(*(_write(_spec(database, name, x), x, shared) for name, x in arrays.items()))


async def _write(spec: dict[str, Any], x: HostBlocks, shared: dict[str, Any]) -> None:
    """Write this process's blocks of an array; the first process also writes the array's metadata.

    The metadata are not written by `create=True`, which fails if the key is there: if the answer to a commit is lost,
    TensorStore commits again, and finds its own key.
    """
    if jax.process_index() == 0:
        kvstore = await tensorstore.KvStore.open(spec["kvstore"], **shared)
        await kvstore.write("zarr.json", await _metadata(spec))
    array = await tensorstore.open(spec, open=True, assume_metadata=True, **shared)
    writes = (array[where].write(block, can_reference_source_data_indefinitely=True) for where, block in x.blocks())
    await asyncio.gather(*writes)


async def _metadata(spec: dict[str, Any]) -> bytes:
    """Return the content of the file with an array's metadata, as Zarr 3 defines it."""
    context, memory = tensorstore.Context(), {"driver": "memory"}
    await tensorstore.open(spec | {"kvstore": memory}, create=True, context=context)
    return bytes((await (await tensorstore.KvStore.open(memory, context=context)).read("zarr.json")).value)


def _spec(database: ObjectPath, name: str, x: HostBlocks) -> dict[str, Any]:
    spec = array_spec(database, name)
    # The metadata of an array stay in the index, whose nodes have checksums.
    spec["kvstore"] |= {"config": {"max_inline_value_bytes": 1024}, "target_data_file_size": _OBJECT_SIZE}
    grid = {"name": "regular", "configuration": {"chunk_shape": _divide_chunk(x.chunk, x.dtype.itemsize)}}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    metadata = {"shape": list(x.shape), "data_type": x.dtype.name, "chunk_grid": grid, "codecs": codecs}
    return spec | {"metadata": metadata, "store_data_equal_to_fill_value": True}


def _divide_chunk(chunk: Sequence[int], itemsize: int) -> list[int]:
    """Divide a chunk into equal ones of at most `_OBJECT_SIZE` bytes, since stores limit the size of a request.

    Chunks of different processes stay apart, because the boundaries of the given chunks stay.
    """
    sizes = list(chunk)
    for dim, size in enumerate(chunk):
        parts = -(-math.prod(sizes) * itemsize // _OBJECT_SIZE)
        sizes[dim] = size // next(divisor for divisor in range(min(parts, size), size + 1) if size % divisor == 0)
    return sizes
