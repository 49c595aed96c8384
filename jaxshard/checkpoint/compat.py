"""All private or undocumented features of Orbax and TensorStore that this package uses, and their purpose.

Import this module inside functions that save or read arrays, not at the top of a module: importing Orbax takes half a
second. tests/checkpoint/test_compat.py has a test for each entry below.

Features whose change would break every save or restore with an error:

- `ArrayHandler.serialize` is overridden, since Orbax's own takes arrays on devices.
- `create_type_handler_registry` makes Orbax use our handler.
- `get_json_tspec_write`, re-exported from `orbax.checkpoint._src`, says how TensorStore has to write an array so that
  Orbax finds the array again.
- `ParamInfo.ts_context` holds the limits of concurrency and the caches that all arrays of a save share.
- The shape and dtype of an array are in `<name>/zarr.json` of the database, as "shape" and "data_type" of Zarr 3.
  Without these fields every step would count as damaged.

Features whose change only the tests would notice:

- `[os_error_code='28']` in the errors of TensorStore: os_errors.py takes the errno of a failed save from this text.
- `tensorstore.ocdbt.dump`: the fields of its JSON, and the text that locates a value. They tell which bytes of a file
  belong to which array. Without them a damaged file is still found, but the arrays in it are not named.
- Orbax's options (in store.py) select OCDBT, which keeps the arrays of a process in few files, and no compression.
  Otherwise there would be a file for every chunk, or saves would spend their time compressing weights, which do not
  become smaller.
- Orbax names its barriers by `barrier_sync_key_prefix`. Otherwise two saves at the same time would wait at each
  other's barriers. (Tested with two processes, in tests/checkpoint/test_processes.py.)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import tensorstore
from orbax.checkpoint import type_handlers

from jaxshard.checkpoint.snapshot import HostBlocks
from jaxshard.storage.paths import AnyPath, kvstore_spec
from jaxshard.storage.strict_json import decode_object

_KEY = re.compile(r"(.*)/(?:c(?:/\d+)*|zarr\.json)", re.DOTALL)
"""The key of a chunk or of the metadata of an array in Zarr 3: "params%2Fw/c/0/1" or "params%2Fw/zarr.json"."""
_METADATA = b"/zarr.json"
_LOCATION = re.compile(r"\w+:(.*?):(.*):(\d+):(\d+)")
"""The location of a value in the output of OCDBT's `dump`: "file:<base folder>:<file>:<first byte>:<bytes>"."""


class BlocksHandler(type_handlers.ArrayHandler):  # type: ignore[misc]  # Orbax ships no types for this module
    """Orbax's handler of arrays, changed to write blocks that were already copied to the host (`HostBlocks`).

    Orbax's own `serialize` takes arrays on the devices and writes them unchanged. So a run would have to be converted
    to model order on the devices first, which takes more compiled programs and memory for a second copy of the run.
    Reading is not changed.
    """

    async def serialize(self, values: Sequence[HostBlocks], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Write this process's blocks of all arrays in one transaction; return when all blocks are written."""
        async with tensorstore.Transaction(atomic=True) as transaction:  # one index for all arrays
            await asyncio.gather(*(_write(x, info, transaction) for x, info in zip(values, infos, strict=True)))
        return []


def blocks_registry() -> Any:
    """Return an Orbax registry of types that uses a `BlocksHandler` to write `HostBlocks` and to read arrays."""
    return type_handlers.create_type_handler_registry((jax.Array | HostBlocks, BlocksHandler()))


async def _write(x: HostBlocks, info: Any, transaction: Any) -> None:
    """Write this process's blocks of an array; the first process also writes the array's metadata."""
    process = jax.process_index()
    spec = type_handlers.get_json_tspec_write(info, True, x.shape, x.chunk, x.dtype, process_index=process)
    shared = {"open": True, "context": info.ts_context, "transaction": transaction}
    if process == 0:
        await tensorstore.open(tensorstore.Spec(spec), create=True, **shared)
    array = await tensorstore.open(tensorstore.Spec(spec), assume_metadata=True, **shared)
    writes = (array[where].write(block, can_reference_source_data_indefinitely=True) for where, block in x.blocks())
    await asyncio.gather(*writes)


def find_values(database: AnyPath) -> Iterator[tuple[str, str, int, int]]:
    """Find the bytes of each array in the files of an OCDBT database.

    Values of less than a kilobyte are stored in the index itself and are not found.

    Args:
      database: the folder of the database, completely written.

    Yields:
      (name of the array, file relative to `database`, first byte, number of bytes), for each chunk of each array and
      for the metadata of each array.
    """
    base = tensorstore.KvStore.open(kvstore_spec(database)).result()
    root: Mapping[str, Any] = tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]
    if "location" not in root:  # an empty database
        return
    for key, location in _walk(base, root["location"], b""):
        name, place = _KEY.fullmatch(key.decode()), _LOCATION.fullmatch(location)
        if name and place:
            yield name[1], place[1] + place[2], int(place[3]), int(place[4])


def find_shapes(database: AnyPath) -> Iterator[tuple[str, list[int], str]]:
    """Yield (name, shape, dtype) of the arrays in an OCDBT database, read from the metadata of each array.

    Args:
      database: the folder of the database, completely written.

    Raises:
      ValueError: the index of the database, or the metadata of an array, can't be read.
    """
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": kvstore_spec(database)}).result()
    metadata = [key for key in store.list().result() if key.endswith(_METADATA)]
    for key, read in zip(metadata, [store.read(key) for key in metadata], strict=True):
        fields = decode_object(read.result().value)
        yield key.removesuffix(_METADATA).decode(), fields["shape"], fields["data_type"]


def _walk(base: Any, node: str, prefix: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield (key, location) of every value below a node of OCDBT's B-tree, except values stored in the tree itself."""
    for entry in tensorstore.ocdbt.dump(base, node).result()["entries"]:
        if "location" in entry:  # an inner node's: another node
            yield from _walk(base, entry["location"], prefix + entry["subtree_common_prefix"])
        elif "indirect_value" in entry:  # a leaf's: a value that is not inline
            yield prefix + entry["key"], entry["indirect_value"]
